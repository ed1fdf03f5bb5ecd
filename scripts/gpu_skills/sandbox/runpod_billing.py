"""Billing history: what the meter counted, in buckets of UTC time, as far as the vendor's own job has come.

Windows are half-open and snap outward to whole buckets. Records outlive what they bill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.sandbox.face import Reply, Request, Route, route
from gpu_skills.sandbox.meter import by_kind
from gpu_skills.sandbox.runpod_wire import Problem, Settings, invalid, listed, moment, stamp, whole
from gpu_skills.sandbox.world import Account, World

POD, VOLUME = "instance-", "volume-"  # how the meter names what it bills
BUCKETS = ("hour", "day", "week", "month", "year")
DEFAULT_DAYS = 30
FIRST_YEAR = 1970
ZERO = Decimal(0)
# Amounts of the aggregate that no pod and no volume can have.
_OTHER = ("serverlessGpuAmount", "serverlessCpuAmount", "serverlessDiskAmount", "serverlessFeeAmount", "endpointAmount",
          "clusterGpuAmount", "clusterDiskAmount", "clusterNetworkingAmount")  # fmt: skip

Amounts = dict[str, Decimal]


class Billing:
    def __init__(self, world: World, settings: Settings):
        self.world = world
        self.settings = settings

    def routes(self) -> Iterator[Route]:
        yield route("GET", "/v2/billing", "billing", self.everything)
        yield route("GET", "/v2/billing/pods", "charges", self.pods)
        yield route("GET", "/v2/billing/network-volumes", "volume_charges", self.volumes)

    def everything(self, request: Request) -> Reply:
        account = request.account

        def amounts(since: float, until: float) -> Amounts:
            resources = list(account.bill.resources())
            pods = _pod_amounts(account, [r for r in resources if r.startswith(POD)], since, until)
            volumes = _volume_amounts(account, [r for r in resources if r.startswith(VOLUME)], since, until)
            return _aggregate(pods, volumes)

        return self._reply(request, lambda since, until: iter([amounts(since, until)]), amounts(0, 0))

    def pods(self, request: Request) -> Reply:
        return self._each(request, POD, "podId", "uniquePodCount", _pod_amounts)

    def volumes(self, request: Request) -> Reply:
        return self._each(request, VOLUME, "networkVolumeId", "uniqueNetworkVolumeCount", _volume_amounts)

    def _each(self, request: Request, prefix: str, id: str, counter: str, amounts: Callable[..., Amounts]) -> Reply:
        """One record per resource and bucket."""
        account, only = request.account, request.query.get(id)
        names = [name for name in account.bill.resources() if name.startswith(prefix)]
        names = [name for name in names if only in (None, name.removeprefix(prefix))]

        def of_bucket(since: float, until: float) -> Iterator[dict[str, Any]]:
            for name in names:
                yield {id: name.removeprefix(prefix), **amounts(account, [name], since, until)}

        reply = self._reply(request, of_bucket, amounts(account, [], 0, 0))
        if only is not None:
            reply.body["metadata"]["query"][id] = only
        reply.body["metadata"][counter] = len({record[id] for record in reply.body["records"]})
        return reply

    def _reply(
        self, request: Request, of_bucket: Callable[[float, float], Iterator[dict[str, Any]]], nothing: Amounts
    ) -> Reply:
        """of_bucket: the rows of one bucket. nothing: the amounts of a row, all zero."""
        bucket, start, end = self._window(request)
        period = self.settings.billing_period_s
        horizon = self.world.now() // period * period  # what the vendor's job has written so far
        first = min((entry.start for entry in request.account.bill.entries), default=horizon)
        records: list[dict[str, Any]] = []
        at = _floor(max(start, datetime.fromtimestamp(first, UTC)), bucket)
        while at < end and at.timestamp() < horizon:
            following = _next(at, bucket)
            for row in of_bucket(at.timestamp(), min(following.timestamp(), horizon)):
                if row["totalAmount"]:
                    records.append({"startTime": _text(at), "endTime": _text(following), **row})
            at = following
        query = {"startTime": _text(start), "endTime": _text(end), "bucketSize": bucket}
        totals = {name: sum((record[name] for record in records), ZERO) for name in nothing}
        metadata = {"query": query, "recordCount": len(records), "totals": totals}
        return Reply(200, {"records": records, "metadata": metadata})

    def _window(self, request: Request) -> tuple[str, datetime, datetime]:
        query, now = request.query, datetime.fromtimestamp(int(self.world.now()), UTC)
        bucket = (listed(request, "bucketSize", BUCKETS) or ["day"])[0]
        last = whole(request, "lastN", 1, 100_000)
        if last is not None and ("startTime" in query or "endTime" in query):
            raise Problem(400, "lastN and startTime/endTime are mutually exclusive")
        end = self._time(query, "endTime", now)
        if last is not None:
            start = _floor(now, bucket)
            for _ in range(last - 1):
                if start.year <= FIRST_YEAR:
                    break
                start = _floor(start - timedelta(seconds=1), bucket)
            return bucket, start, _next(_floor(now, bucket), bucket)
        start = self._time(query, "startTime", now - timedelta(days=DEFAULT_DAYS))
        if start >= end:
            raise Problem(400, "startTime must be before endTime")
        snapped = _floor(end, bucket)
        return bucket, _floor(start, bucket), end if snapped == end else _next(snapped, bucket)

    def _time(self, query: dict[str, str], name: str, default: datetime) -> datetime:
        if name not in query:
            return default
        found = datetime.fromtimestamp(moment(query[name], f"query parameter {name!r}"), UTC)
        if not FIRST_YEAR < found.year < 9000:
            raise invalid(f"query parameter {name!r}", query[name])
        return found


def _floor(at: datetime, bucket: str) -> datetime:
    at = at.replace(minute=0, second=0, microsecond=0)
    if bucket == "hour":
        return at
    at = at.replace(hour=0)
    if bucket == "week":
        return at - timedelta(days=at.weekday())
    if bucket == "month":
        return at.replace(day=1)
    return at.replace(month=1, day=1) if bucket == "year" else at


def _next(at: datetime, bucket: str) -> datetime:
    steps = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(days=7)}
    if bucket in steps:
        return at + steps[bucket]
    return _floor(at + timedelta(days=32 if bucket == "month" else 367), bucket)


def _text(at: datetime) -> str:
    return stamp(at.timestamp()) or ""


def _pod_amounts(account: Account, resources: list[str], since: float, until: float) -> Amounts:
    kinds = by_kind((entry for entry in account.bill.entries if entry.resource in resources), since, until)
    amounts = {
        "gpuAmount": kinds.get("gpu", ZERO),
        "cpuAmount": kinds.get("cpu", ZERO),
        "diskAmount": kinds.get("disk", ZERO) + kinds.get("volume", ZERO),
    }
    return {"totalAmount": sum(amounts.values(), ZERO), **amounts}


def _volume_amounts(account: Account, resources: list[str], since: float, until: float) -> Amounts:
    amounts = {"standardAmount": ZERO, "highPerformanceAmount": ZERO}
    for entry in account.bill.entries:
        if entry.resource in resources:
            kind = account.extra.get("volume_kinds", {}).get(entry.resource.removeprefix(VOLUME))
            name = "highPerformanceAmount" if kind == "HIGH_PERFORMANCE" else "standardAmount"
            amounts[name] += entry.amount(since, until)
    return {"totalAmount": sum(amounts.values(), ZERO), **amounts}


def _aggregate(pods: Amounts, volumes: Amounts) -> dict[str, Decimal]:
    return {
        "totalAmount": pods["totalAmount"] + volumes["totalAmount"],
        "podGpuAmount": pods["gpuAmount"],
        "podCpuAmount": pods["cpuAmount"],
        "podDiskAmount": pods["diskAmount"],
        "storageStandardAmount": volumes["standardAmount"],
        "storageHighPerformanceAmount": volumes["highPerformanceAmount"],
        **dict.fromkeys(_OTHER, ZERO),
    }
