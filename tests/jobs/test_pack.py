from __future__ import annotations

import hashlib
import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_skills.errors import (
    ChangedMeanwhile,
    ConfigError,
    GpuError,
    InputMissing,
    InputUnreadable,
    SecretShaped,
    UnsafeLink,
    UploadTooLarge,
    UsageError,
)
from gpu_skills.jobs import hashing, pack
from gpu_skills.jobs.pack import Packed

LATER_NS = 60_000_000_000


def later() -> int:
    """A minute from now: long after everything this test wrote."""
    return time.time_ns() + LATER_NS


def write(root: Path, *names: str, content: bytes = b"x") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def paths(packed: Packed) -> set[str]:
    return {os.fsdecode(entry.path) for entry in packed.tree.entries}


def left_out(packed: Packed) -> dict[str, str]:
    return {o.path: o.why for o in packed.left_out}


def refusal(error: type[GpuError], call: Callable[[], object]) -> GpuError:
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in caught.value.message
    return caught.value


# what is taken --------------------------------------------------------------------------------------------------------


def test_every_file_has_its_size_mode_digest_and_content(tmp_path: Path) -> None:
    write(tmp_path, "a/run.sh", content=b"echo hi\n")
    (tmp_path / "a/run.sh").chmod(0o750)
    (entry,) = pack.pack(tmp_path).tree.entries
    assert (entry.path, entry.size, entry.mode, entry.data) == (b"a/run.sh", 8, 0o750, b"echo hi\n")
    assert entry.sha256 == hashlib.sha256(b"echo hi\n").hexdigest()


def test_large_files_are_hashed_whole_and_not_kept_in_memory(tmp_path: Path) -> None:
    contents = {f"big{i}": os.urandom(3_000_001 + i) for i in range(5)}
    for name, content in contents.items():
        write(tmp_path, name, content=content)
    told: list[tuple[int, int]] = []
    packed = pack.pack(tmp_path, progress=lambda done, total: told.append((done, total)))
    for entry in packed.tree.entries:
        assert entry.sha256 == hashlib.sha256(contents[entry.path.decode()]).hexdigest()
        assert entry.data is None
    assert told[-1] == (packed.total_bytes, packed.total_bytes) == (15_000_015, 15_000_015)
    assert all(before[0] <= after[0] for before, after in itertools.pairwise(told))


def test_names_with_newline_quote_dollar_and_no_utf8_are_taken_as_they_are(tmp_path: Path) -> None:
    names = [b"new\nline", b"quo'te\"", b"$(touch x)", b"semi;colon", b"\xff\xfe", b" lead", b"-rf"]
    for name in names:
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as stream:
            stream.write(name)
    packed = pack.pack(tmp_path, exclude=["new"])
    assert {e.path for e in packed.tree.entries} == set(names)
    assert all(e.sha256 == hashlib.sha256(e.path).hexdigest() for e in packed.tree.entries)


def test_a_pattern_does_not_match_a_name_that_only_starts_like_it_before_a_newline(tmp_path: Path) -> None:
    write(tmp_path, "foo", "foo\n", "foo\nbar", "d\n1/foo")
    assert paths(pack.pack(tmp_path, exclude=["foo"])) == {"foo\n", "foo\nbar", "d\n1"}


def test_empty_folders_are_kept_also_those_whose_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "out/deep").mkdir(parents=True)
    write(tmp_path, "data/a.csv", "src/a.py")
    packed = pack.pack(tmp_path, exclude=["*.csv"])
    assert {e.path: e.is_dir for e in packed.tree.entries} == {b"data": True, b"out/deep": True, b"src/a.py": False}


def test_an_empty_directory_packs_to_nothing(tmp_path: Path) -> None:
    packed = pack.pack(tmp_path)
    assert (packed.tree.entries, packed.left_out, packed.warnings, packed.total_bytes) == ([], [], [], 0)


@pytest.mark.parametrize("wrong", ["missing", "file", "nul\0name"])
def test_a_directory_that_is_none_is_a_usage_error(tmp_path: Path, wrong: str) -> None:
    write(tmp_path, "file")
    assert refusal(UsageError, lambda: pack.pack(tmp_path / wrong)).exit_code == 2


def test_a_deep_tree_is_walked_without_running_out_of_stack_or_descriptors(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    (entry,) = pack.pack(tmp_path).tree.entries
    assert entry.path == b"d/" * 300 + b"leaf"


# what stays -----------------------------------------------------------------------------------------------------------


def test_what_is_never_uploaded_stays_at_any_depth_even_when_a_pattern_wants_it(tmp_path: Path) -> None:
    never = [".git", "__pycache__", "node_modules", ".gpu", ".pi", "gpu-outputs", ".venv", "venv"]
    for name in never:
        write(tmp_path, f"{name}/x", f"sub/{name}/x")
    write(tmp_path, ".env", ".env.local", "sub/.env", "sub/.env.production", "wt/.git", "kept.py", ".envrc", "gpu.yaml")
    packed = pack.pack(tmp_path, exclude=["!.env", "!.git/", "!*"])
    assert paths(packed) == {"kept.py", ".envrc", "gpu.yaml", "sub", "wt"}
    assert left_out(packed)[".env.local"] == left_out(packed)["sub/node_modules/"] == "never uploaded"
    assert left_out(packed)["venv/"] == "virtual environment"


def test_what_was_signed_for_one_plan_is_no_input_of_another(tmp_path: Path) -> None:
    signed = "approval-3f2a9c81d004.txt"
    write(tmp_path, signed, f"{signed}.sig", f"sub/{signed}", "approval-notes.txt", f"{signed}.bak", "approval.txt")
    packed = pack.pack(tmp_path, exclude=["!approval-*"])
    assert paths(packed) == {"sub", "approval-notes.txt", f"{signed}.bak", "approval.txt"}
    assert left_out(packed)[signed] == left_out(packed)[f"{signed}.sig"] == "never uploaded"


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta/history"])
def test_a_virtual_environment_is_known_by_what_is_in_it(tmp_path: Path, mark: str) -> None:
    write(tmp_path, f"tools/py311/{mark}", "tools/py311/lib/big.so", "tools/a.py", content=b"12345")
    packed = pack.pack(tmp_path)
    assert paths(packed) == {"tools/a.py"}
    (env,) = packed.left_out
    assert (env.path, env.bytes, env.files, env.why) == ("tools/py311/", 10, 2, "virtual environment")


def test_a_module_named_venv_is_not_a_virtual_environment(tmp_path: Path) -> None:
    write(tmp_path, "pkg/venv")
    assert paths(pack.pack(tmp_path)) == {"pkg/venv"}


def test_everything_left_out_is_listed_with_its_size_the_largest_first(tmp_path: Path) -> None:
    write(tmp_path, "a.ckpt", content=b"x" * 500)
    write(tmp_path, "data/raw/one", "data/raw/two/three", content=b"x" * 1000)
    write(tmp_path, "train.py")
    packed = pack.pack(tmp_path, exclude=["*.ckpt", "data/raw"])
    assert [(o.path, o.bytes, o.files, o.why) for o in packed.left_out] == [
        ("data/raw/", 2000, 2, "exclude: data/raw"),
        ("a.ckpt", 500, 1, "exclude: *.ckpt"),
    ]
    assert all(o.complete for o in packed.left_out)
    assert packed.total_bytes == 1


def test_a_huge_left_out_folder_is_not_counted_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_skills.jobs.select.MAX_SUMMED", 30)
    write(tmp_path, *[f"node_modules/m{i}/index.js" for i in range(40)])
    (modules,) = pack.pack(tmp_path).left_out
    assert not modules.complete
    assert modules.files <= 30


def test_the_projects_gitignore_is_not_consulted(tmp_path: Path) -> None:
    write(tmp_path, ".gitignore", content=b"data/\n*.csv\n")
    write(tmp_path, "data/a.csv")
    assert "data/a.csv" in paths(pack.pack(tmp_path))


def test_sockets_and_pipes_are_named_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket may be 107 bytes at most
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("sock")
        packed = pack.pack(tmp_path)
    assert paths(packed) == set()
    assert left_out(packed) == {"pipe": "named pipe", "sock": "socket"}


def test_a_pattern_that_matches_nothing_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path, "data/a", "b")
    packed = pack.pack(tmp_path, exclude=["./data", "b", "# comment"])
    assert packed.warnings == ["exclude './data' matches nothing"]
    assert paths(packed) == {"data/a"}


def test_an_impossible_pattern_is_a_config_error_that_quotes_it(tmp_path: Path) -> None:
    assert "'!'" in refusal(ConfigError, lambda: pack.pack(tmp_path, exclude=["!"])).message


def test_more_than_ten_thousand_files_are_a_warning(tmp_path: Path) -> None:
    for folder in range(11):
        (tmp_path / str(folder)).mkdir()
        for number in range(910):
            os.close(os.open(f"{tmp_path}/{folder}/{number}", os.O_CREAT | os.O_WRONLY))
    (warning,) = pack.pack(tmp_path).warnings
    assert warning.startswith("10010 files")


# credentials ----------------------------------------------------------------------------------------------------------

SECRET_NAMES = [
    "id_rsa", "keys/id_ed25519", "server.pem", "tls/Server.KEY", "cert.p12", "service_account.json",
    "service_account_prod.json", "my/service-account-1.json", "credentials.json", ".aws/credentials", ".aws/config",
    ".netrc", ".docker/config.json", ".kube/config", "kaggle.json", "home/.ssh/config",
]  # fmt: skip


def test_all_files_that_look_like_credentials_by_name_stop_the_upload_at_once(tmp_path: Path) -> None:
    write(tmp_path, *SECRET_NAMES, "train.py")
    error = refusal(SecretShaped, lambda: pack.pack(tmp_path))
    assert error.details["files"] == sorted(SECRET_NAMES)
    assert error.exit_code == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deploy", b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc"),
        ("a.txt", b"-----BEGIN RSA PRIVATE KEY-----\n"),
        ("b.txt", b"\xef\xbb\xbf\n-----BEGIN PRIVATE KEY-----\n"),
        ("c.asc", b"-----BEGIN PGP PRIVATE KEY BLOCK-----\n"),
        ("gcp.json", b'{\n  "type": "service_account",\n  "private_key": "-----BEGIN'),
        (".npmrc", b"registry=x\n//registry.example/:_authToken=abc\n"),
        (".pypirc", b"[pypi]\nusername = __token__\npassword = pypi-abc\n"),
        ("big.bin", b"-----BEGIN EC PRIVATE KEY-----\n" + b"0" * 2_000_000),
    ],
)
def test_a_file_that_begins_like_a_credential_stops_the_upload(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, name, content=content)
    assert refusal(SecretShaped, lambda: pack.pack(tmp_path)).details["files"] == [name]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("id_rsa.pub", b"ssh-rsa AAAA"),
        ("test_keys.py", b'KEY = """-----BEGIN RSA PRIVATE KEY-----'),
        ("public.crt", b"-----BEGIN CERTIFICATE-----\n"),
        ("config.json", b'{"lr": 1}'),
        (".npmrc", b"//registry.example/:_authToken=${NPM_TOKEN}\n"),
        (".pypirc", b"[pypi]\nusername = me\n"),
        ("tokenizer.json", b'{"vocab": {"private": 1, "key": 2}}'),
        ("keys.py", b""),
        ("monkey.jsonl", b""),
    ],
)
def test_a_file_that_only_resembles_a_credential_is_uploaded(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, name, content=content)
    assert paths(pack.pack(tmp_path)) == {name}


def test_a_credential_is_allowed_by_its_own_path_only(tmp_path: Path) -> None:
    write(tmp_path, "certs/ca.pem", "certs/other.pem")
    error = refusal(SecretShaped, lambda: pack.pack(tmp_path, allow_secret_files=["./certs/ca.pem", "certs"]))
    assert error.details["files"] == ["certs/other.pem"]
    packed = pack.pack(tmp_path, allow_secret_files=["certs/ca.pem"], exclude=["other.pem"])
    assert paths(packed) == {"certs/ca.pem"}


def test_a_credential_known_by_content_is_still_known_from_the_cache(tmp_path: Path) -> None:
    write(tmp_path / "src", "deploy", content=b"-----BEGIN PRIVATE KEY-----\n")
    cache = tmp_path / "cache"
    pack.pack(tmp_path / "src", allow_secret_files=["deploy"], cache_path=cache, now_ns=later)
    assert cache.exists()
    refusal(SecretShaped, lambda: pack.pack(tmp_path / "src", cache_path=cache, now_ns=later))


# links ----------------------------------------------------------------------------------------------------------------


def test_links_that_stay_inside_are_kept_as_links(tmp_path: Path) -> None:
    write(tmp_path, "a/b.py", "top.py")
    for name, target in {"a/c.py": "b.py", "a/up.py": "../top.py", "dir": "a", "via": "dir/b.py", "self": "."}.items():
        (tmp_path / name).symlink_to(target)
    packed = pack.pack(tmp_path)
    links = {e.path.decode(): (e.link or b"").decode() for e in packed.tree.entries if e.link is not None}
    assert links == {"a/c.py": "b.py", "a/up.py": "../top.py", "dir": "a", "via": "dir/b.py", "self": "."}
    assert packed.left_out == []


def test_all_links_that_leave_the_directory_are_refused_in_one_error(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(root, "d/e/file")
    write(tmp_path, "outside")
    links = {
        "absolute": str(root / "d"),  # inside, but only on this computer
        "etc": "/etc/passwd",
        "up": "../outside",
        "back": "../project/d",  # inside only as long as the folder has this name
        "deep": "d/e/../../../outside",
        "through": "hop/../../outside",
        "hop": "d/e",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    (root / "step").symlink_to("hop/../..")  # from d/e two up is the directory itself
    error = refusal(UnsafeLink, lambda: pack.pack(root))
    assert {link["path"] for link in error.details["links"]} == {"absolute", "etc", "up", "back", "deep"}
    assert error.exit_code == 3


def test_where_a_step_up_leads_depends_on_the_link_before_it(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(root, "d/e/file", "d/x")
    (root / "hop").symlink_to("d/e")
    (root / "fine").symlink_to("hop/../x")  # d/x, although text alone would say x
    (root / "leaves").symlink_to("hop/../../../x")
    error = refusal(UnsafeLink, lambda: pack.pack(root))
    assert [link["path"] for link in error.details["links"]] == ["leaves"]
    (root / "leaves").unlink()
    assert {"hop", "fine"} <= paths(pack.pack(root))


def test_links_to_nothing_rings_and_links_to_what_is_left_out_are_named_and_skipped(tmp_path: Path) -> None:
    write(tmp_path, "data/raw/a", "kept", ".env")
    targets = {
        "gone": "nowhere",
        "ring1": "ring2",
        "ring2": "ring1",
        "raw": "data/raw",
        "secret": ".env",
        "tail": "kept/x",
    }
    for name, target in targets.items():
        (tmp_path / name).symlink_to(target)
    packed = pack.pack(tmp_path, exclude=["data/raw"])
    assert paths(packed) == {"kept", "data"}
    whys = left_out(packed)
    assert whys["raw"] == whys["secret"] == "link: its target is left out"
    assert whys["gone"] == whys["ring1"] == whys["tail"] == "link: its target does not exist"


def test_an_excluded_link_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("/mnt/data")
    assert left_out(pack.pack(tmp_path, exclude=["data"])) == {"data": "exclude: data"}


# required inputs and size ---------------------------------------------------------------------------------------------


def test_required_inputs_that_would_be_missing_are_all_told_with_their_reason(tmp_path: Path) -> None:
    write(tmp_path, "data/raw/a", "images/x.png", "w.ckpt", ".env", "ok.py", "dir/f")
    (tmp_path / "empty").mkdir()
    required = [
        "data/raw/a",
        "data/",
        "images/",
        "w.ckpt",
        ".env",
        "nope.txt",
        "../x",
        "ok.py",
        "dir/",
        "empty",
        "./dir/f",
    ]
    error = refusal(
        InputMissing,
        lambda: pack.pack(tmp_path, exclude=["data/raw", "*.ckpt", "images/*"], require_inputs=required),
    )
    assert {i["path"]: i["why"] for i in error.details["inputs"]} == {
        "data/raw/a": "left out, exclude: data/raw",
        "data/": "all of it is left out, exclude: data/raw",
        "images/": "all of it is left out, exclude: images/*",
        "w.ckpt": "left out, exclude: *.ckpt",
        ".env": "left out, never uploaded",
        "nope.txt": "is not there",
        "../x": "is outside of the directory",
    }


def test_required_inputs_may_be_absolute_or_reached_through_a_link(tmp_path: Path) -> None:
    write(tmp_path, "v1/weights")
    (tmp_path / "current").symlink_to("v1")
    packed = pack.pack(tmp_path, require_inputs=[str(tmp_path / "v1"), "current/weights", "."])
    assert {entry.path for entry in packed.tree.entries} == {b"current", b"v1/weights"}


def test_too_much_to_upload_tells_bytes_and_the_five_largest_entries_without_reading_them(tmp_path: Path) -> None:
    for number, name in enumerate(["a.bin", "b.bin", "c.bin", "d.bin", "e.bin"]):
        write(tmp_path, name, content=b"x" * (10 + number))
    write(tmp_path, "data/one", "data/two/three", content=b"x" * 40)
    huge = tmp_path / "huge.ckpt"
    with open(huge, "wb") as stream:
        stream.truncate(3_000_000_000)  # sparse: hashing it would take seconds
    error = refusal(UploadTooLarge, lambda: pack.pack(tmp_path))
    assert error.details["bytes"] == 3_000_000_140
    assert [e["path"] for e in error.details["entries"]] == ["huge.ckpt", "data/", "e.bin", "d.bin", "c.bin"]
    assert error.details["entries"][1]["bytes"] == 80
    assert "3000000140" in error.message and "huge.ckpt (3.0 GB)" in error.message
    assert pack.pack(tmp_path, exclude=["*.ckpt"], limit_bytes=140).total_bytes == 140


# trouble while reading ------------------------------------------------------------------------------------------------


def test_everything_that_cannot_be_read_is_told_in_one_error(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(root, "secret.txt", "dir/file", "fine")
    write(root, "big.bin", content=b"0" * 1_500_000)
    for name in ("secret.txt", "dir", "big.bin"):
        (root / name).chmod(0)
    try:
        error = refusal(InputUnreadable, lambda: as_nobody(root, lambda fd: pack.pack(Path(f"/proc/self/fd/{fd}"))))
    finally:
        (root / "dir").chmod(0o755)
    assert [f["path"] for f in error.details["files"]] == ["big.bin", "dir/", "secret.txt"]
    assert error.exit_code == 3


def as_nobody(root: Path, call: Callable[[int], object]) -> None:
    """Call with a descriptor of the directory as a user whom permissions bind. Root is asked to step down first."""
    descriptor = os.open(root, os.O_RDONLY)
    root.chmod(0o755)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        call(descriptor)
    finally:
        if is_root:
            os.seteuid(0)
        os.close(descriptor)


def test_a_file_that_grows_while_it_is_packed_is_packed_in_its_new_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "log", content=b"one\n")
    select = pack.select

    def grow_after_the_walk(*args: object) -> object:
        selection = select(*args)  # type: ignore[arg-type]
        with open(tmp_path / "log", "ab") as stream:
            stream.write(b"two\n")
        return selection

    monkeypatch.setattr(pack, "select", grow_after_the_walk)
    packed = pack.pack(tmp_path)
    (entry,) = packed.tree.entries
    assert (entry.size, entry.sha256) == (8, hashlib.sha256(b"one\ntwo\n").hexdigest())
    assert packed.total_bytes == 8


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_a_file_that_changes_whenever_it_is_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    write(tmp_path, "busy.log", content=b"x" * size)
    real_open = os.open

    def open_and_append(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if path == "busy.log":
            with open(tmp_path / "busy.log", "ab") as stream:
                stream.write(b"more")
        return real_open(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    def change_after_open(descriptor: int, tell: Callable[[int], None]) -> tuple[str, bytes, int]:
        found = real_hash(descriptor, tell)
        with open(tmp_path / "busy.log", "ab") as stream:
            stream.write(b"more")
        return found

    real_hash = hashing._hash
    monkeypatch.setattr(hashing, "_hash", change_after_open)
    monkeypatch.setattr(os, "open", open_and_append)
    error = refusal(ChangedMeanwhile, lambda: pack.pack(tmp_path))
    assert "busy.log" in error.message
    assert error.retryable


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_a_file_that_vanishes_while_it_is_packed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    write(tmp_path, "tmp123", content=b"x" * size)
    write(tmp_path, "kept")
    select = pack.select

    def remove_after_the_walk(*args: object) -> object:
        selection = select(*args)  # type: ignore[arg-type]
        (tmp_path / "tmp123").unlink()
        return selection

    monkeypatch.setattr(pack, "select", remove_after_the_walk)
    packed = pack.pack(tmp_path)
    assert paths(packed) == {"kept"}
    assert packed.warnings == ["tmp123 vanished while it was packed"]


def test_a_folder_swapped_for_a_link_while_it_is_packed_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "project"
    write(root, "dir/file")
    write(tmp_path, "elsewhere/file", content=b"not yours")
    select = pack.select

    def swap_after_the_walk(*args: object) -> object:
        selection = select(*args)  # type: ignore[arg-type]
        (root / "dir").rename(tmp_path / "moved")
        (root / "dir").symlink_to(tmp_path / "elsewhere")
        return selection

    monkeypatch.setattr(pack, "select", swap_after_the_walk)
    assert "dir/" in refusal(InputUnreadable, lambda: pack.pack(root)).message


# the cache ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def count_hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The contents that were hashed since the list was cleared."""
    hashed: list[bytes] = []
    real = hashlib.sha256

    def counting(data: bytes = b"") -> object:
        if data:
            hashed.append(bytes(data))
        return real(data)

    monkeypatch.setattr(hashing, "sha256", counting)
    return hashed


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_is(tmp_path: Path, count_hashed: list[bytes]) -> None:
    root, cache = tmp_path / "p", tmp_path / "cache/file"
    write(root, "a", content=b"a")
    write(root, "b", "\udcff", content=b"b")
    first = pack.pack(root, cache_path=cache, now_ns=later)
    assert sorted(count_hashed) == [b"a", b"b", b"b"]
    count_hashed.clear()
    second = pack.pack(root, cache_path=cache, now_ns=later)
    assert count_hashed == []
    assert second.tree.digest == first.tree.digest
    write(root, "b", content=b"c")
    third = pack.pack(root, cache_path=cache, now_ns=later)
    assert count_hashed == [b"c"]
    assert third.tree.digest != first.tree.digest


def test_a_file_written_a_moment_ago_is_read_again_though_it_looks_the_same(
    tmp_path: Path, count_hashed: list[bytes]
) -> None:
    root, cache = tmp_path / "p", tmp_path / "cache"
    write(root, "a", content=b"one")
    stamp = (root / "a").stat()
    written_ns = max(stamp.st_mtime_ns, stamp.st_ctime_ns)
    pack.pack(root, cache_path=cache, now_ns=lambda: written_ns + 1_900_000_000)
    count_hashed.clear()
    pack.pack(root, cache_path=cache, now_ns=lambda: written_ns + 2_100_000_000)
    assert count_hashed == [b"one"]  # the first pass was too close to the write to remember it
    count_hashed.clear()
    pack.pack(root, cache_path=cache, now_ns=lambda: written_ns + 1_000_000_000)
    assert count_hashed == [b"one"]  # a clock that went back: not believed either


def test_same_size_and_same_mtime_do_not_hide_a_change(tmp_path: Path) -> None:
    root, cache = tmp_path / "p", tmp_path / "cache"
    write(root, "a", content=b"one")
    before = (root / "a").stat()
    pack.pack(root, cache_path=cache, now_ns=later)
    write(root, "a", content=b"two")
    os.utime(root / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    (entry,) = pack.pack(root, cache_path=cache, now_ns=later).tree.entries
    assert entry.sha256 == hashlib.sha256(b"two").hexdigest()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-20],
        lambda raw: raw.replace(b'"a"', b'"b"'),
        lambda raw: b"\xff" + raw,
        lambda raw: b"[" * 100_000,
        lambda raw: hashlib.sha256(b"[]").hexdigest().encode() + b"\n[]",
    ],
)
def test_a_damaged_cache_is_forgotten(
    tmp_path: Path, damage: Callable[[bytes], bytes], count_hashed: list[bytes]
) -> None:
    root, cache = tmp_path / "p", tmp_path / "cache"
    write(root, "a", content=b"a")
    pack.pack(root, cache_path=cache, now_ns=later)
    cache.write_bytes(damage(cache.read_bytes()))
    count_hashed.clear()
    pack.pack(root, cache_path=cache, now_ns=later)
    assert count_hashed == [b"a"]


def test_the_cache_of_another_directory_at_the_same_place_is_not_believed(
    tmp_path: Path, count_hashed: list[bytes]
) -> None:
    root, cache = tmp_path / "p", tmp_path / "cache"
    write(root, "a", content=b"a")
    pack.pack(root, cache_path=cache, now_ns=later)
    root.rename(tmp_path / "old")
    root.mkdir()
    (tmp_path / "old/a").rename(root / "a")
    count_hashed.clear()
    pack.pack(root, cache_path=cache, now_ns=later)
    assert count_hashed == [b"a"]


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    write(tmp_path, "p/a", "blocker")
    packed = pack.pack(tmp_path / "p", cache_path=tmp_path / "blocker/cache", now_ns=later)
    assert paths(packed) == {"a"}


def test_each_directory_has_a_cache_of_its_own(tmp_path: Path) -> None:
    state = tmp_path / ".pi/gpu"
    one, two = (pack.cache_path(state, tmp_path / name) for name in ("a", "b"))
    assert one != two and one.is_relative_to(state)
