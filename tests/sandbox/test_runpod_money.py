"""RunPod's meter and its billing history, counted by hand to the last digit."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sandbox.runpod_calls import GPU, RunpodCalls

HOUR = 3600


@pytest.fixture
def api(make_sandbox):
    """Its clock stands at a midnight."""
    sandbox = make_sandbox(delays={"provisioning_s": 0, "loading_s": 0, "stopping_s": 0, "reboot_s": 0})
    sandbox.advance(-sandbox.world.now() % 86400)
    return RunpodCalls(sandbox)


def midnight(api, days=0):
    at = api.sandbox.world.now() // 86400 * 86400 + days * 86400
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_compute_and_disks_bill_while_it_is_not_stopped_and_the_volume_doubles_after(api):
    pod = api.create(disk=72, mounts={"persistent": {"size": 36, "path": "/workspace"}})
    api.sandbox.advance(HOUR)
    api.act(pod["id"], "stop")
    api.sandbox.advance(HOUR)
    api.delete(f"/v2/pods/{pod['id']}")
    api.sandbox.advance(10 * HOUR)
    (record,) = api.get(f"/v2/billing/pods?podId={pod['id']}")["records"]
    # 72 GB and 36 GB at 0.10 a month are 0.01 and 0.005 an hour; stopped, the 36 GB cost 0.01.
    assert record == {
        "startTime": midnight(api),
        "endTime": midnight(api, 1),
        "podId": pod["id"],
        "totalAmount": 0.715,
        "gpuAmount": 0.69,
        "cpuAmount": 0,
        "diskAmount": 0.025,
    }
    assert api.sandbox.world.burning() == []


def test_hours_are_half_open_and_windows_snap_outward(api):
    pod = api.create(disk=72)
    api.sandbox.advance(3 * HOUR)
    start = midnight(api)
    query = f"?bucketSize=hour&podId={pod['id']}&startTime={start[:11]}00:30:00Z&endTime={start[:11]}02:00:00Z"
    answer = api.get(f"/v2/billing/pods{query}")
    assert [record["startTime"][11:] for record in answer["records"]] == ["00:00:00Z", "01:00:00Z"]
    assert [record["gpuAmount"] for record in answer["records"]] == [0.69, 0.69]
    metadata = answer["metadata"]
    assert metadata["query"] == {
        "startTime": f"{start[:11]}00:00:00Z",
        "endTime": f"{start[:11]}02:00:00Z",
        "bucketSize": "hour",
        "podId": pod["id"],
    }
    assert (metadata["recordCount"], metadata["uniquePodCount"], metadata["totals"]["gpuAmount"]) == (2, 1, 1.38)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("?lastN=2&startTime=2026-01-01T00:00:00Z", 400),
        ("?lastN=0", 422),
        ("?lastN=100000&bucketSize=year", 200),
        ("?bucketSize=minute", 422),
        ("?startTime=yesterday", 422),
        ("?startTime=2026-02-30T00:00:00Z", 422),
        ("?startTime=0001-01-01T00:00:00Z", 422),
        ("?startTime=2026-02-01T00:00:00Z&endTime=2026-01-01T00:00:00Z", 400),
        ("?startTime=2026-01-01T00:00:00%2B02:00&endTime=2026-02-01T00:00:00.123456789Z", 200),
    ],
)
def test_windows_are_checked(api, query, status):
    api.get(f"/v2/billing{query}", status)
    api.get(f"/v2/billing/pods{query}", status)


@pytest.mark.parametrize("bucket", ["hour", "day", "week", "month", "year"])
def test_buckets_of_every_size_add_up_to_the_bill(api, bucket):
    api.create(disk=72)
    api.sandbox.advance(50 * HOUR)
    answer = api.get(f"/v2/billing?bucketSize={bucket}&lastN=60")
    total = float(api.sandbox.world.account("runpod").bill.total_usd(api.sandbox.world.now()))
    assert answer["metadata"]["totals"]["totalAmount"] == pytest.approx(total)
    assert sum(record["totalAmount"] for record in answer["records"]) == pytest.approx(total)


def test_records_come_from_a_job_that_runs_every_five_minutes(api):
    api.create(disk=72)
    api.sandbox.advance(299)
    assert api.get("/v2/billing/pods")["records"] == []
    api.sandbox.advance(1)
    first = api.get("/v2/billing/pods")["metadata"]["totals"]["gpuAmount"]
    api.sandbox.advance(299)
    assert api.get("/v2/billing/pods")["metadata"]["totals"]["gpuAmount"] == first > 0


def test_network_volumes_bill_by_tier_after_their_deletion_too(api):
    small = api.post("/v2/network-volumes", {"name": "s", "size": 720, "dataCenter": "EU-RO-1"}, 201)
    large = api.post("/v2/network-volumes", {"name": "l", "size": 1720, "dataCenter": "EU-RO-1"}, 201)
    fast = {"name": "f", "size": 720, "dataCenter": "EU-RO-1", "type": "HIGH_PERFORMANCE"}
    fast = api.post("/v2/network-volumes", fast, 201)
    api.sandbox.advance(HOUR)
    for volume in (small, large, fast):
        api.delete(f"/v2/network-volumes/{volume['id']}")
    api.sandbox.advance(HOUR)
    answer = api.get("/v2/billing/network-volumes")
    amounts = {
        row["networkVolumeId"]: (row["standardAmount"], row["highPerformanceAmount"]) for row in answer["records"]
    }
    assert amounts == {
        small["id"]: (0.07, 0),
        large["id"]: (pytest.approx(0.147222222222), 0),  # 1,000 GB at 0.07, 720 GB at 0.05
        fast["id"]: (0, 0.14),
    }
    assert answer["metadata"]["uniqueNetworkVolumeCount"] == 3
    aggregate = api.get("/v2/billing")["metadata"]["totals"]
    assert aggregate["storageHighPerformanceAmount"] == 0.14
    assert aggregate["totalAmount"] == pytest.approx(0.357222222222)


def test_at_zero_balance_pods_on_network_volumes_are_stopped_and_others_are_gone(api):
    stock = api.get("/v2/catalog/gpus?include=AVAILABILITY&product=POD")["gpus"]
    able = {c["id"] for c in api.get("/v2/catalog/datacenters?networkVolumeTypes=STANDARD")["dataCenters"]}
    gpu, where = next((g["id"], c["id"]) for g in stock for c in g.get("dataCenters", []) if c["id"] in able)
    volume = api.post("/v2/network-volumes", {"name": "v", "size": 10, "dataCenter": where}, 201)
    kept = api.create(
        gpu={"id": gpu, "count": 1},
        dataCenterIds=[where],
        mounts={"network": [{"volumeId": volume["id"], "path": "/w"}]},
    )
    lost = api.create(mounts={"persistent": {"size": 10, "path": "/w"}})
    api.sandbox.advance(5)
    api.sandbox.world.apply_faults([{"match": {"provider": "runpod"}, "fault": "zero_balance"}])
    api.sandbox.advance(5)
    assert api.pod(kept["id"])["status"] == "EXITED"
    api.get(f"/v2/pods/{lost['id']}", 404)
    api.act(kept["id"], "start", 402)
    assert {entry["resource"] for entry in api.sandbox.world.burning()} == {f"volume-{volume['id']}"}


def test_a_price_that_changed_shows_in_cost_and_on_the_bill(api):
    api.sandbox.world.apply_faults(
        [{"match": {"provider": "runpod", "call": "create"}, "fault": "price_changed", "args": {"factor": 2}}]
    )
    pod = api.create(gpu={"id": GPU, "count": 1})
    assert pod["cost"] == 1.38
    api.sandbox.advance(HOUR)
    assert api.get("/v2/billing/pods")["metadata"]["totals"]["gpuAmount"] == 1.38
