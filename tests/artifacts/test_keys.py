"""Names of objects come from whoever can write to a bucket: none becomes a path that leaves its folder."""

from __future__ import annotations

import pytest

from gpu_skills.artifacts.base import below, join, open_store
from gpu_skills.artifacts.volume import located, parse
from gpu_skills.errors import Refused, UnsafeKey, UsageError

HOSTILE = [
    "../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/.", "..", "", "a\nb", "a\x1b[2Jb", "a\x00b", 
    "x" * 1025, "\udcff", "a/‮b", "a/",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_neither_written_nor_used_as_a_path(name):
    with pytest.raises(UnsafeKey) as caught:
        join("runs", name)
    assert caught.value.message.isprintable()
    with pytest.raises(UnsafeKey):
        below(f"runs/{name}", "runs")


def test_a_listed_object_outside_the_prefix_is_no_path_below_it():
    assert below("runs/J-1/a.bin", "runs/J-1") == "a.bin" and below("a.bin", "") == "a.bin"
    for key in ("other/a.bin", "runs/J-10/a.bin", "runs/J-1"):
        with pytest.raises(UnsafeKey):
            below(key, "runs/J-1")


def test_a_hostile_name_in_a_bucket_is_listed_and_not_followed(s3):
    for key in ("runs/../../etc/cron.d/x", "runs//etc/x", "runs/ok.txt"):
        s3.client.put_object(Bucket=s3.bucket, Key=key, Body=b"x")
    store, prefix = open_store(f"{s3.uri}/runs")
    safe, refused = [], []
    for found in store.list(prefix):
        try:
            safe.append(below(found.key, prefix))
        except UnsafeKey:
            refused.append(found.key)
    assert safe == ["ok.txt"] and len(refused) == 2


def test_what_a_machine_wrote_on_its_volume_has_an_address_there():
    found = located("vol_1", "/workspace/gpu-skills/jobs/J-1", "/workspace/")
    assert found.uri == "volume://vol_1/gpu-skills/jobs/J-1" and found == parse(found.uri)
    assert found.on_machine("/mnt") == "/mnt/gpu-skills/jobs/J-1"
    assert located("vol_1", "/root/x", "/workspace") is None


def test_a_volume_is_opened_by_a_machine_only():
    with pytest.raises(Refused, match="vol_1"):
        open_store("volume://vol_1/runs")
    for uri in ("volume://", "volume:///x", "volume://vol_1", "volume://vol_1/../x"):
        with pytest.raises((UsageError, UnsafeKey)):
            open_store(uri)
