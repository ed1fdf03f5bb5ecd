"""What can be asked of RunPod without changing anything."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

from gpu_skills.clock import timestamp
from gpu_skills.errors import UsageError
from gpu_skills.providers import fields
from gpu_skills.providers.base import (
    Balance,
    Charge,
    FilterCount,
    Machine,
    Offer,
    Requirements,
    Search,
    Traits,
    Volume,
)
from gpu_skills.providers.runpod.client import NAME, RunpodClient
from gpu_skills.providers.runpod.machines import read_machine
from gpu_skills.providers.runpod.offers import check_locations, question, read_offers
from gpu_skills.providers.runpod.pricing import network_usd_hr
from gpu_skills.providers.selection import select

TRAITS = Traits(
    name=NAME,
    has_interruptible=False,
    relabel_is_safe=False,
    stop_keeps="workspace",
    key_reaches_instance="at_create",
    shows_host_log=True,
    shows_balance=True,
    states_reliability=False,
    max_label_chars=191,
    whose_machine="a machine in RunPod's secure cloud",
    mounts_volumes=True,
    bills_traffic=False,
    stops_what_is_lost=False,
    default_candidates=("NVIDIA RTX A5000", "NVIDIA A40"),
)
_LOG_STREAM_S = 5.0
_MAX_HOURLY_RECORDS = timedelta(days=31)


class RunpodReader:
    name = NAME
    traits = TRAITS

    def __init__(self, client: RunpodClient):
        self.client = client

    @property
    def base_url(self) -> str:
        return self.client.http.origin

    def search(self, need: Requirements) -> Search:
        """One request, more with locations or a volume. A place that RunPod does not have is a UsageError."""
        if need.interruptible:
            return Search([], 0, [FilterCount("kind", "interruptible, which runpod does not have", 0, 0)])
        need = self._located(need)
        rows = self.client.gpu_types(question(need))
        offers, unreadable = read_offers(rows, need)
        if rows and not offers and unreadable:
            raise self.client.http.unexpected("catalog", f"{len(rows)} GPU types of which none can be read")
        return select(offers, need, unreadable=unreadable)

    def offers(self, need: Requirements) -> list[Offer]:
        return self.search(need).offers

    def check_key(self) -> str | None:
        """The list of pods is what every key of use may read; it does not say whose account it is."""
        self.client.pods()
        return None

    def machines(self) -> list[Machine]:
        return [read_machine(row) for row in self.client.pods()]

    def machine(self, instance_id: str) -> Machine | None:
        row = self.client.pod(checked_id(instance_id))
        return None if row is None else read_machine(row)

    def charges(self, since: datetime, until: datetime) -> list[Charge]:
        """Per pod and hour. The window snaps outward to whole hours at RunPod, so a little more may come."""
        if until - since > _MAX_HOURLY_RECORDS:
            raise UsageError("charges of runpod are asked for a month at most")
        query = {
            "startTime": timestamp(since.astimezone(UTC)),
            "endTime": timestamp(until.astimezone(UTC)),
            "bucketSize": "hour",
        }
        found: list[Charge] = []
        for row in self.client.pod_charges(query):
            pod_id, whole = fields.identity(row, "podId"), fields.number(row, "totalAmount")
            if pod_id is None or whole is None:
                raise self.client.http.unexpected("charges", "a charge without pod or amount")
            begun, ended = fields.moment(row, "startTime"), fields.moment(row, "endTime")
            parts = [(kind, fields.number(row, f"{kind}Amount")) for kind in ("gpu", "cpu", "disk")]
            known = [(kind, amount) for kind, amount in parts if amount]
            rest = whole - sum(amount for _, amount in known)
            if abs(rest) > 0:
                known.append(("other", rest))
            found += [Charge(NAME, pod_id, kind, amount, begun, ended) for kind, amount in known]
        return found

    def balance(self) -> Balance:
        account = self.client.account()
        if account is None:
            return Balance(None)
        return Balance(fields.number(account, "clientBalance"), fields.amount(account, "currentSpendPerHr"))

    def volumes(self) -> list[Volume]:
        found: list[Volume] = []
        for row in self.client.volumes():
            volume_id, size = fields.identity(row, "id"), fields.real(row, "size")
            place = fields.text(row, "dataCenter", limit=32)
            if volume_id is None or size is None or place is None:
                raise self.client.http.unexpected("volumes", "a volume without id, size or data centre")
            name = fields.text(row, "name", limit=200) or ""
            found.append(Volume(volume_id, name, size, place, network_usd_hr(size)))
        return found

    def data_centers(self) -> list[str]:
        """All codes, such as EU-RO-1."""
        codes = [fields.text(row, "id", limit=32) for row in self.client.data_centers()]
        return sorted(code for code in codes if code)

    def log_lines(
        self, instance_id: str, *, source: Literal["container", "system"] = "container", lines: int = 100
    ) -> list[str]:
        return self.client.log_lines(
            checked_id(instance_id), source=source, lines=min(lines, 5000), stop_after_s=_LOG_STREAM_S
        )

    def _located(self, need: Requirements) -> Requirements:
        """Locations checked, and narrowed to the one data centre in which a network volume stands."""
        from dataclasses import replace

        if need.locations:
            check_locations(need.locations, self.data_centers())
        if need.volume_id is None:
            return need
        volumes = {volume.volume_id: volume for volume in self.volumes()}
        volume = volumes.get(need.volume_id)
        if volume is None:
            known = ", ".join(f"{v.volume_id} ({v.name}, {v.location})" for v in volumes.values()) or "none"
            raise UsageError(
                f"runpod has no network volume {need.volume_id[:40]!r}; there are {known}", next_step="name one of them"
            )
        return replace(need, locations=(volume.location,))


def checked_id(instance_id: str) -> str:
    """An id that becomes part of a path."""
    if fields.identity({"id": instance_id}, "id") is None:
        raise UsageError(f"{instance_id[:40]!r} is no id of a {NAME} pod")
    return instance_id
