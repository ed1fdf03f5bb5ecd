"""Trees as content, and manifests that came from a machine."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_skills.errors import UnsafeManifest
from gpu_skills.remote.tree import Entry, Tree, parse_manifest

A = hashlib.sha256(b"a").hexdigest()


def line(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def file_line(path: str, **changes: object) -> bytes:
    return line(**({"path": path, "size": 1, "mode": 420, "sha256": A} | changes))


def test_a_manifest_is_sorted_canonical_ascii_json_and_its_hash_is_the_digest():
    tree = Tree(
        Path("/t"),
        [
            Entry(b"z", 3, 0o755, A),
            Entry("é.py".encode(), 1, 0o644, A),
            Entry(b"bad\xff", 2, 0o644, A),
            Entry(b"cache", is_dir=True),
            Entry(b"a/link", link=b"../z"),
        ],
    )
    assert tree.manifest == (
        b'{"link":"../z","path":"a/link"}\n'
        b'{"mode":420,"path":"bad\\ufffd","path_b64":"YmFk/w==","sha256":"' + A.encode() + b'","size":2}\n'
        b'{"dir":true,"path":"cache"}\n'
        b'{"mode":493,"path":"z","sha256":"' + A.encode() + b'","size":3}\n'
        b'{"mode":420,"path":"\\u00e9.py","sha256":"' + A.encode() + b'","size":1}\n'
    )
    assert tree.digest == hashlib.sha256(tree.manifest).hexdigest()
    assert tree.total_bytes == 6


names = st.binary(min_size=1, max_size=12).filter(lambda b: not set(b) & {0, 47} and b not in (b".", b".."))


@settings(max_examples=60, deadline=None)
@given(st.sets(names, max_size=8), st.integers(1, 50))
def test_every_name_a_file_system_allows_comes_back_from_its_manifest(found, piece):
    entries = [Entry(name, 1, 0o600, A) for name in found]
    manifest = Tree(Path("/"), entries).manifest
    chunks = [manifest[at : at + piece] for at in range(0, len(manifest), piece)]
    assert parse_manifest(chunks) == sorted(entries, key=lambda entry: entry.path)


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (file_line("../x"), "'..'"),
        (file_line("a/../../x"), "'..'"),
        (file_line("/etc/passwd"), "absolute"),
        (file_line(""), "empty"),
        (file_line("a//b"), "''"),
        (file_line("a/"), "''"),
        (file_line("./a"), "'.'"),
        (file_line("a\0b"), "NUL"),
        (file_line("a" * 256), "longer than 255"),
        (file_line("a/" * 2100 + "a"), "longer than 4096"),
        (file_line("a") + file_line("a"), "twice"),
        (file_line("a") + file_line("a/b"), "also a folder"),
        (file_line("a/b/c") + file_line("a/b"), "also a folder"),
        (line(path="a", link="b") + file_line("a/b"), "also a folder"),
        (file_line("a", size=-1), "size is -1"),
        (file_line("a", size=1 << 60), "size is"),
        (file_line("a", size=1.5), "size is 1.5"),
        (file_line("a", size=True), "size is True"),
        (file_line("a", mode=-1), "mode"),
        (file_line("a", sha256="A" * 64), "hex"),
        (file_line("a", sha256="../../x"), "hex"),
        (file_line("a", sha256=None), "hex"),
        (line(path=None, size=1, mode=420, sha256=A), "no path"),
        (file_line("a", path_b64="!!"), "base64"),
        (file_line("a", path_b64="Li4vLi4veA=="), "'..'"),
        (file_line("\ud800"), "surrogate"),
        (b'{"path":"a","path":"b"}\n', "not a JSON object"),
        (b"[" * 100_000 + b"\n", "longer than 64 KiB"),
        (b"[" * 60_000 + b"\n", "not a JSON object"),
        (b'{"size":NaN}\n', "no path"),
        (b"5\n", "not a JSON object"),
        (b"\n", "not a JSON object"),
        (b"\xff\xfe\n", "not a JSON object"),
        (file_line("a")[:-1], "middle of a line"),
        (line(path="a", link="../x"), "outside"),
        (line(path="a", link="/x"), "outside"),
        (line(path="a", link=""), "outside"),
        (line(path="d/up", link="..") + line(path="d/a", link="up/../x"), "outside"),
        (line(path="a", dir=1), "dir is not true"),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused_saying_why(manifest, reason):
    with pytest.raises(UnsafeManifest) as refusal:
        parse_manifest([manifest], host="far", job="J-000001")
    assert reason in refusal.value.message
    assert "far" in refusal.value.message
    assert refusal.value.next_step == "gpu job logs J-000001"
    assert refusal.value.message.isprintable()


def test_links_that_stay_inside_and_rings_of_links_are_accepted():
    manifest = line(path="d/a", link="../b") + line(path="x", link="y") + line(path="y", link="x")
    assert [entry.link for entry in parse_manifest([manifest])] == [b"../b", b"y", b"x"]


def test_a_manifest_without_end_is_refused_at_its_limit_of_entries():
    def endless():
        number = 0
        while True:
            number += 1
            yield file_line(f"f{number}")

    with pytest.raises(UnsafeManifest, match="more than 1000 entries"):
        parse_manifest(endless(), max_entries=1000)


def test_a_manifest_without_end_is_refused_at_its_limit_of_bytes():
    def endless():
        while True:
            yield b"x" * 1000

    with pytest.raises(UnsafeManifest, match="larger than 1 MiB"):
        parse_manifest(endless(), max_bytes=1 << 20)


def test_rings_of_long_links_do_not_keep_us_busy():
    ring = [line(path=f"l{n}", link="./" * 2000 + f"l{(n + 1) % 500}") for n in range(500)]
    began = time.monotonic()
    with pytest.raises(UnsafeManifest, match="outside"):
        parse_manifest(ring)
    assert time.monotonic() - began < 20
