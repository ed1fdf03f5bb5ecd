"""What can be asked of Vast without changing anything."""

from __future__ import annotations

import math
from datetime import datetime
from decimal import Decimal
from typing import Literal

from gpu_skills.clock import Clock
from gpu_skills.errors import InstanceAbsent
from gpu_skills.providers import fields
from gpu_skills.providers.base import Balance, Charge, Machine, Offer, Requirements, Search, Traits
from gpu_skills.providers.selection import select
from gpu_skills.providers.vast.client import NAME, VastClient
from gpu_skills.providers.vast.machines import read_machine
from gpu_skills.providers.vast.offers import MAX_OFFERS, question, read_offers

TRAITS = Traits(
    name=NAME,
    has_interruptible=True,
    relabel_is_safe=True,
    stop_keeps="disk",
    key_reaches_instance="attach",
    shows_host_log=True,
    shows_balance=True,
    states_reliability=True,
    max_label_chars=256,
    whose_machine="somebody's machine in Vast's market, whose owner could read what is on it",
    mounts_volumes=False,
    bills_traffic=True,
    stops_what_is_lost=True,
    stopped_storage_times=Decimal("1.25"),  # an offer has the rate of a running one; a fifth more was seen
)
# With fewer than this the whole market of the shape is asked once, to say what removed the others.
SHORT = 3
_KINDS = {"gpu": "gpu", "disk": "disk", "bwd": "download", "bwu": "upload"}
_LOG_ATTEMPTS = 30
_LOG_PAUSE_S = 0.5
_MAX_LOG_BYTES = 1_000_000


class VastReader:
    name = NAME
    traits = TRAITS

    def __init__(self, client: VastClient, *, clock: Clock):
        self.client = client
        self._clock = clock

    @property
    def base_url(self) -> str:
        return self.client.http.origin

    def search(self, need: Requirements) -> Search:
        """At most two requests: a narrow one, and when it brings little a wide one that explains why."""
        rows = self.client.offers(question(need, is_narrow=True))
        is_cut = len(rows) >= MAX_OFFERS
        offers, unreadable = read_offers(rows, need)
        found = select(offers, need, is_cut=is_cut, unreadable=unreadable)
        if len(found.offers) < SHORT:
            wide = self.client.offers(question(need, is_narrow=False))
            offers, unreadable = read_offers([*wide, *rows], need)
            found = select(offers, need, is_cut=len(wide) >= MAX_OFFERS, unreadable=unreadable)
            rows = wide
        if rows and not offers:
            raise self.client.http.unexpected("search", f"{len(rows)} offers of which none can be read")
        return found

    def offers(self, need: Requirements) -> list[Offer]:
        return self.search(need).offers

    def check_key(self) -> str | None:
        return fields.identity(self.client.user(), "id")

    def machines(self) -> list[Machine]:
        return [read_machine(row) for row in self.client.instances()]

    def machine(self, instance_id: str) -> Machine | None:
        row = self.client.instance(instance_id)
        return None if row is None else read_machine(row)

    def charges(self, since: datetime, until: datetime) -> list[Charge]:
        """Bandwidth too, which shows up here only. A row whose parts are not listed is one charge of kind `other`."""
        rows = self.client.charges(math.floor(since.timestamp()), math.ceil(until.timestamp()))
        found: list[Charge] = []
        for row in rows:
            source = fields.text(row, "source", limit=80) or ""
            instance_id = source.removeprefix("instance-")
            whole = fields.number(row, "amount")
            if not source.startswith("instance-") or whole is None:
                raise self.client.http.unexpected("charges", "a charge without instance or amount")
            begun, ended = fields.moment(row, "start"), fields.moment(row, "end")
            known = [
                Charge(
                    NAME,
                    instance_id,
                    _KINDS.get(fields.text(item, "type") or "", "other"),
                    amount,
                    # A GPU that was stopped ends before its disk does.
                    fields.moment(item, "start") or begun,
                    fields.moment(item, "end") or ended,
                )
                for item in fields.objects(row.get("items"))
                if (amount := fields.number(item, "amount")) is not None
            ]
            listed = sum((charge.amount_usd for charge in known), Decimal(0))
            # The sum is rounded to a tenth of a cent; a larger gap is money whose kind is not told.
            if not known or abs(whole - listed) > Decimal("0.001") * (len(known) + 1):
                known.append(Charge(NAME, instance_id, "other", whole - listed, begun, ended))
            found += known
        return found

    def balance(self) -> Balance:
        user = self.client.user()
        return Balance(fields.number(user, "credit", "balance"))

    def log_lines(
        self, instance_id: str, *, source: Literal["container", "system"] = "container", lines: int = 100
    ) -> list[str]:
        """The log is put somewhere for us to fetch; until it is there the place answers something else."""
        address = self.client.log_address(instance_id, lines=lines, of_host=source == "system")
        for _ in range(_LOG_ATTEMPTS):
            answer = self.client.http.fetch("log body", address, max_bytes=_MAX_LOG_BYTES)
            if answer.status == 200:
                return answer.body.decode("utf-8", "replace").splitlines()[-lines:]
            self._clock.sleep(_LOG_PAUSE_S)
        if self.client.instance(instance_id) is None:
            raise InstanceAbsent(provider=NAME, instance_id=instance_id)
        raise self.client.http.unexpected("logs", f"no log within {_LOG_ATTEMPTS * _LOG_PAUSE_S:.0f} s")
