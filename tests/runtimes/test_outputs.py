"""Names, limits and kinds of what a run leaves here."""

from __future__ import annotations

import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_skills.errors import NotWritable, OutputTooLarge
from gpu_skills.runtimes.outputs import FolderSink, look, mime_of, safe_name
from runtimes.comfy_server import png


@given(st.text())
def test_a_safe_name_is_one_plain_name_of_no_other_folder(said):
    name = safe_name(said)
    assert name and len(name) <= 120 and name.isascii() and name.isprintable()
    assert (
        not set(name) & set("/\\\0:*?\"<>|$`;&'\n")
        and not name.startswith((".", " "))
        and not name.endswith((".", " "))
    )


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("../../x.png", "x.png"),
        ("C:\\a\\x.png", "x.png"),
        ("a b (1).png", "a b (1).png"),
        (".bashrc", "bashrc"),
        ("..", "output"),
    ],
)
def test_what_is_harmless_in_a_name_is_kept(said, name):
    assert safe_name(said) == name


def put(sink: FolderSink, name: str, data: bytes):
    taker = sink.take(name)
    taker.write(data)
    return taker.done()


def test_the_same_name_and_content_is_one_file_and_another_content_gets_a_number(tmp_path):
    sink = FolderSink(tmp_path / "o")
    names = [put(sink, "a.png", data).name for data in (b"1", b"1", b"2", b"2", b"3")]
    assert names == ["a.png", "a.png", "a-2.png", "a-2.png", "a-3.png"]
    assert sorted(path.name for path in sink.folder.iterdir()) == ["a-2.png", "a-3.png", "a.png"]


def test_a_link_that_stands_there_is_never_taken_for_the_file_itself(tmp_path):
    sink = FolderSink(tmp_path / "o")
    sink.folder.mkdir()
    (tmp_path / "same").write_bytes(b"1")
    (sink.folder / "a.png").symlink_to(tmp_path / "same")
    assert put(sink, "a.png", b"1").name == "a-2.png"


def test_what_is_not_done_leaves_nothing(tmp_path):
    sink = FolderSink(tmp_path / "o")
    taker = sink.take("a")
    taker.write(b"x" * 10)
    taker.discard()
    assert list(sink.folder.iterdir()) == []


def test_the_limit_is_for_all_outputs_together_and_for_their_number(tmp_path):
    sink = FolderSink(tmp_path / "o", max_bytes=100)
    put(sink, "a", b"x" * 60)
    with pytest.raises(OutputTooLarge):
        sink.take("b").write(b"x" * 41)
    few = FolderSink(tmp_path / "p", max_outputs=1)
    put(few, "a", b"x")
    with pytest.raises(OutputTooLarge):
        few.take("b")


def test_a_folder_that_cannot_be_is_one_line_and_no_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable):
        FolderSink(tmp_path / "file" / "o").take("a")


def test_bytes_and_hash_are_those_of_the_file(tmp_path):
    data = bytes(range(256)) * 1000
    sink = FolderSink(tmp_path / "o")
    taker = sink.take("x.bin")
    for start in range(0, len(data), 777):
        taker.write(data[start : start + 777])
    output = taker.done()
    assert (output.bytes, output.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert output.path.read_bytes() == data


@pytest.mark.parametrize(
    ("head", "mime"),
    [
        (png(2, 2, 1)[:64], "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"RIFF\0\0\0\0WAVEfmt ", "audio/wav"),
        (b"\0\0\0\x20ftypisom", "video/mp4"),
        (b"\x1aE\xdf\xa3", "video/webm"),
        (b"<!DOCTYPE html>", "text/html"),
        (b"  <html>", "text/html"),
        (b'{"error": 1}', "application/json"),
        (b"version https://git-lfs", "text/plain"),
        ("läuft".encode() * 9, "text/plain"),
        (("x" * 63 + "ä").encode()[:64], "text/plain"),
        (b"\0\1\2", "application/octet-stream"),
        (b"\xff\xfe\xfd" * 20, "application/octet-stream"),
        (b"", "application/octet-stream"),
    ],
)
def test_what_a_file_is_is_read_from_its_beginning(head, mime):
    assert mime_of(head) == mime


def packed(pixels: bytes, width: int, height: int, *, depth: int = 8, colour: int = 2, interlaced: int = 0) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([depth, colour, 0, 0, interlaced])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (png(9, 7, 3), None),
        (png(9, 7, 3, flat=True), "same colour"),
        (packed(b"\1\5\6\7" + b"\0" * 6 + b"\2" + b"\0" * 9, 3, 2), "same colour"),  # filters Sub and Up
        (packed(b"\0" + b"\5\6\7" * 2 + b"\5\6\1" + b"\2" + b"\0" * 9, 3, 2), None),
        (packed(b"\0" * 11, 10, 1, colour=0), "same colour"),
        (packed(b"\0" * 5, 3, 2), "fewer pixels"),
        (packed(b"\0" * 5, 3, 2, interlaced=1), None),
        (png(9, 7, 3)[:-30], "cut off"),
        (png(9, 7, 3)[:-12], "cut off"),
        (png(9, 7, 3).replace(b"IDAT", b"IDAX"), "damaged"),
        (b"", "empty"),
        (b"plain text", "not image"),
        (b"\xff\xd8\xff\xe0" + b"\0" * 50, "cut off"),
    ],
)
def test_a_picture_is_decoded_before_it_is_believed(tmp_path, data, problem):
    path = tmp_path / "x"
    path.write_bytes(data)
    found = look(path, "image").problem
    assert (problem in found) if problem else found is None
