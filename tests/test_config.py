from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpu_skills import config, resources, strict_yaml, userdirs
from gpu_skills.config import DEFAULTS, GpuConfig, load_gpu_yaml, load_hosts, read_dotenv
from gpu_skills.errors import ConfigError, GpuError, UsageError


def load(tmp_path: Path, text: str | bytes | None = None, **options: Any) -> GpuConfig:
    if text is not None:
        (tmp_path / "gpu.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return load_gpu_yaml(tmp_path, **options)


def refused(tmp_path: Path, text: str | bytes | None = None, **options: Any) -> GpuError:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, **options)
    error = caught.value
    assert error.exit_code == 2
    assert "\n" not in error.message and error.next_step
    return error


# the values -----------------------------------------------------------------------------------------------------------


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    found = load(tmp_path)
    assert (found.provider, found.host, found.runtime.engine) == ("local", None, "none")
    assert found.compute.image == "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"
    assert (found.compute.gpu, found.compute.candidates, found.compute.min_vram_gb) == (None, (), None)
    assert (found.lifecycle.idle_timeout_s, found.lifecycle.max_lifetime_s) == (900, 21600)
    assert (found.lifecycle.hold_for_s, found.lifecycle.storage_grace_s) == (1800, 86400)
    assert found.budget.session_usd == Decimal(10)
    assert (found.compute.capacity.mode, found.compute.capacity.interval_s) == ("immediate", 60)


def test_the_template_says_what_the_defaults_are(tmp_path: Path) -> None:
    found = load(tmp_path, resources.template("gpu.yaml").read_bytes())
    assert found == load_gpu_yaml(tmp_path / "empty")
    assert {o.source for key, o in found.origins.items() if key != "host"} == {"project"}


def test_every_value_arrives_with_its_unit(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        """
provider: ssh
host: gpubox
compute:
  gpu: RTX 4090
  candidates: [A100, "H100 SXM"]
  gpu_count: 2
  min_vram_gb: 24
  disk_gb: 80
  max_rate_usd_hr: 0.1
  capacity: {mode: wait, attempts: 3, interval: 2m}
runtime: {engine: vllm}
lifecycle: {idle_timeout: off, max_lifetime: 1h30m, hold_for: 0, storage_grace: 2d}
budget: {session_usd: 2.50}
""",
    )
    assert (found.provider, found.host) == ("ssh", "gpubox")
    assert (found.compute.gpu, found.compute.candidates, found.compute.gpu_count) == (
        "RTX 4090",
        ("A100", "H100 SXM"),
        2,
    )
    assert found.compute.max_rate_usd_hr == Decimal("0.1")  # not the nearest binary fraction
    assert (found.compute.capacity.attempts, found.compute.capacity.interval_s) == (3, 120)
    assert found.lifecycle == config.Lifecycle(None, 5400, 0, 172800)
    assert found.budget.session_usd == Decimal("2.50")


@pytest.mark.parametrize(
    "lifecycle",
    [
        "idle_timeout: off",
        'idle_timeout: "off"',
        "{idle_timeout: off, max_lifetime: off}",
        "{idle_timeout: off, hold_for: 1m}",
    ],
)
def test_idle_timeout_off_needs_a_max_lifetime_that_somebody_wrote(tmp_path: Path, lifecycle: str) -> None:
    error = refused(tmp_path, f"lifecycle:\n  {lifecycle}\n")
    assert error.message.startswith("gpu.yaml:2: ") and "max_lifetime" in error.message


@pytest.mark.parametrize("zero", ["0", "0s", "0h0m", "0.0", "1ms"])
@pytest.mark.parametrize("key", ["idle_timeout", "max_lifetime"])
def test_zero_does_not_mean_off_and_the_error_says_what_does(tmp_path: Path, key: str, zero: str) -> None:
    error = refused(tmp_path, f"lifecycle:\n  {key}: {zero}\n")
    assert error.message == f"gpu.yaml:2: lifecycle.{key} is {zero}: to switch it off write off"


def test_a_host_beside_another_provider_is_a_contradiction_in_one_file_only(tmp_path: Path) -> None:
    assert (
        refused(tmp_path, "provider: local\nhost: box\n").message
        == "gpu.yaml:2: host is only for provider ssh, not local"
    )
    found = load(tmp_path, "provider: ssh\nhost: box\n", flags={"provider": "local"})
    assert (found.provider, found.host) == ("local", None)


# wrong files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("provider: local\nprovider: ssh\n", "gpu.yaml:2: the key provider is there twice"),
        ("compute:\n  gpu_count: 1\n  'gpu_count': 2\n", "gpu.yaml:3: the key gpu_count is there twice"),
        ("compute:\n\tgpu_count: 1\n", "gpu.yaml:2: is indented with a tab: use spaces"),
        ("compute: &a\n  gpu: *a\n", "gpu.yaml:2: the alias *a is not allowed here: write the value out"),
        ("compute: {gpu: &x [1, *x]}\n", "gpu.yaml:1: the alias *x is not allowed here: write the value out"),
        (
            "provider: !!python/object/apply:os.system ['id']\n",
            "gpu.yaml:1: a tag (!) is not allowed here: write the plain value",
        ),
        ("provider: !!str local\n", "gpu.yaml:1: a tag (!) is not allowed here: write the plain value"),
        (
            "provider: local\n---\nprovider: ssh\n",
            "gpu.yaml:2: a second document starts here (---): one per file is allowed",
        ),
        ("1: x\n", "gpu.yaml:1: the key 1 is not a word: write it in quotes"),
        ("? [a]\n: x\n", "gpu.yaml:1: a key must be a word, found a list or mapping"),
        ("compute: {disk_gb: .inf}\n", "gpu.yaml:1: .inf is not a number that can be used here"),
        ("compute: {disk_gb: .nan}\n", "gpu.yaml:1: .nan is not a number that can be used here"),
        ("compute: {disk_gb: 1e999}\n", "gpu.yaml:1: 1e999 is too large for a number"),
        (
            "compute: {disk_gb: 050}\n",
            "gpu.yaml:1: 050 starts with 0, which some readers take as octal: write it in quotes",
        ),
        ("provider: a\0b\n", "gpu.yaml:1: control character U+0000: delete it"),
        ("\nprovider: \x1b[31m\n", "gpu.yaml:2: control character U+001B: delete it"),
        (b"provider: local\n# \xff\n", "gpu.yaml:2: byte 0xff is not UTF-8: save the file as UTF-8"),
        ("- provider\n", "gpu.yaml:1: found a list, allowed: a mapping"),
        ("local\n", 'gpu.yaml:1: found "local", allowed: a mapping'),
        ("compute:\n  disk_bg: 5\n", "gpu.yaml:2: /compute/disk_bg is not a known key, nearest is disk_gb"),
        (
            "lifecycle:\n  idle_timeout: 1:30\n",
            'gpu.yaml:2: /lifecycle/idle_timeout is "1:30", allowed: text like "15m", "6h" or "off"',
        ),
        ("lifecycle: {max_lifetime: 99999d}\n", "gpu.yaml:1: '99999d' is longer than a year"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_with_its_place(tmp_path: Path, text: str | bytes, message: str) -> None:
    error = refused(tmp_path, text)
    assert error.message == message
    assert error.next_step == "edit gpu.yaml"


@pytest.mark.parametrize(
    "text", ["provider: 'x", "a: [1\n", "a: b: c\n", "%YAML 9.9\n---\n", "@", "a: \u2028\ufffe", "{a, b: }}"]
)
def test_what_is_not_yaml_at_all_is_one_line_too(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, text).message.startswith("gpu.yaml")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_bottomless_nesting_ends_at_fifty_levels(tmp_path: Path, opening: str) -> None:
    assert "nest" in refused(tmp_path, opening * 100_000).message  # by the parser's own limit or by ours
    assert "nested deeper than 50 levels" in refused(tmp_path, opening * 51).message


def test_a_file_of_a_megabyte_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    assert load(tmp_path, "#" * (1024 * 1024 - 1) + "\n").provider == "local"
    assert "larger than" in refused(tmp_path, "#" * (1024 * 1024 + 1)).message


def test_a_directory_a_pipe_and_an_unreadable_path_are_told(tmp_path: Path) -> None:
    (tmp_path / "gpu.yaml").mkdir()
    assert refused(tmp_path).message == "gpu.yaml: is a directory, a file is expected"
    (tmp_path / "gpu.yaml").rmdir()
    os.mkfifo(tmp_path / "gpu.yaml")  # would block for ever
    assert refused(tmp_path).message == "gpu.yaml: is not a regular file"
    (tmp_path / "gpu.yaml").unlink()
    (tmp_path / "gpu.yaml").symlink_to("gpu.yaml")
    assert "cannot be read" in refused(tmp_path).message


def test_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbfprovider: vast\r\ncompute:\r\n  disk_gb: 70\r\n").compute.disk_gb == 70


@pytest.mark.parametrize("word", ["off", "no", "yes", "on", "y", "n"])
def test_words_that_old_yaml_made_booleans_stay_words(word: str) -> None:
    assert strict_yaml.parse(f"a: {word}", shown="f").data == {"a": word}


def test_plain_values_mean_what_yaml_1_2_says() -> None:
    text = "[1, -2, 3.5, .5, 1e3, true, False, null, ~, 2001-01-01, 0x10, 1_000, '1', 12:30:00]"
    assert strict_yaml.parse(text, shown="f").data == [
        1, -2, 3.5, 0.5, 1000.0, True, False, None, None, "2001-01-01", "0x10", "1_000", "1", "12:30:00",
    ]  # fmt: skip


def test_the_slow_yaml_reader_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    text = resources.template("gpu.yaml").read_text() + "x: [off, '1', {a: 2}]\n"
    fast = strict_yaml.parse(text, shown="f")
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert strict_yaml.parse(text, shown="f") == fast
    for wrong in ("a:\n\tb: 1\n", "a: [1\n", 'a: "\\ud800"\n', "[" * 1000):
        with pytest.raises(ConfigError):
            strict_yaml.parse(wrong, shown="f")


def test_a_file_with_the_near_miss_name_yml_is_not_overlooked(tmp_path: Path) -> None:
    (tmp_path / "gpu.yml").write_text("provider: ssh\n")
    assert refused(tmp_path).next_step == "mv gpu.yml gpu.yaml"


# who said it ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def user_file(home: Path) -> Path:
    folder = home / ".config/gpu"
    folder.mkdir()
    return folder / "config.yaml"


def test_flag_beats_environment_beats_project_beats_user_beats_default(tmp_path: Path, user_file: Path) -> None:
    layers = [
        ("default", lambda: None, 50),
        ("user", lambda: user_file.write_text("compute: {disk_gb: 60}\n"), 60),
        ("project", lambda: (tmp_path / "gpu.yaml").write_text("compute:\n  disk_gb: 70\n"), 70),
    ]
    for source, write, disk_gb in layers:
        write()
        found = load_gpu_yaml(tmp_path)
        assert (found.compute.disk_gb, found.origin_of("compute.disk_gb").source) == (disk_gb, source)
    environ = {**os.environ, "GPU_COMPUTE_DISK_GB": "80"}
    assert load(tmp_path, environ=environ).compute.disk_gb == 80
    found = load(tmp_path, environ=environ, flags={"compute.disk_gb": "90"})
    origin = found.origin_of("compute.disk_gb")
    assert (found.compute.disk_gb, origin.source, origin.where) == (90, "flag", "--disk-gb")
    assert origin.overruled == ("GPU_COMPUTE_DISK_GB = 80", "gpu.yaml:2 = 70", "~/.config/gpu/config.yaml:1 = 60")


@pytest.mark.parametrize(
    ("key", "loose", "strict", "read"),
    [
        ("lifecycle.max_lifetime", "12h", "2h", lambda c: c.lifecycle.max_lifetime_s == 7200),
        ("lifecycle.max_lifetime", "off", "2h", lambda c: c.lifecycle.max_lifetime_s == 7200),
        ("budget.session_usd", "20", "5.5", lambda c: c.budget.session_usd == Decimal("5.5")),
        ("budget.session_usd", "null", "5.5", lambda c: c.budget.session_usd == Decimal("5.5")),
        ("compute.max_rate_usd_hr", "3", "0.7", lambda c: c.compute.max_rate_usd_hr == Decimal("0.7")),
    ],
)
def test_of_ceilings_the_strictest_wins_whoever_wrote_it(
    tmp_path: Path, key: str, loose: str, strict: str, read: Any
) -> None:
    section, name = key.split(".")
    variable = "GPU_" + key.upper().replace(".", "_")
    for in_file, in_environment in ((loose, strict), (strict, loose)):
        found = load(tmp_path, f"{section}: {{{name}: {in_file}}}\n", environ={**os.environ, variable: in_environment})
        assert read(found)
        assert len(found.origin_of(key).overruled) == 1


def test_a_ceiling_that_was_written_may_exceed_the_default(tmp_path: Path) -> None:
    found = load(tmp_path, "lifecycle: {max_lifetime: 2d}\nbudget: {session_usd: null}\n")
    assert (found.lifecycle.max_lifetime_s, found.budget.session_usd) == (172800, None)


def test_the_environment_speaks_for_every_key(tmp_path: Path) -> None:
    values = {
        "provider": "ssh", "host": "4090", "compute.image": "img:1", "compute.image_gb": "8.5", "compute.gpu": "4090",
        "compute.candidates": "A100, L4", "compute.gpu_count": "2", "compute.min_vram_gb": "24",
        "compute.disk_gb": "1.5", "compute.max_rate_usd_hr": "0.30",
        "compute.capacity.mode": "wait", "compute.capacity.attempts": "7", "compute.capacity.interval": "5",
        "runtime.engine": "http", "lifecycle.idle_timeout": "off", "lifecycle.max_lifetime": "1h",
        "lifecycle.hold_for": "1m", "lifecycle.storage_grace": "1d", "budget.session_usd": "1.10",
    }  # fmt: skip
    assert set(values) == set(DEFAULTS)
    environ = {"GPU_" + key.upper().replace(".", "_"): text for key, text in values.items()}
    found = load(tmp_path, environ={**os.environ, **environ})
    assert {o.source for o in found.origins.values()} == {"environment"}
    assert (found.host, found.compute.gpu, found.compute.candidates) == ("4090", "4090", ("A100", "L4"))
    assert (found.budget.session_usd, found.compute.capacity.interval_s) == (Decimal("1.10"), 5)


def test_a_wrong_variable_or_flag_is_named_and_an_empty_variable_is_none(tmp_path: Path) -> None:
    error = refused(tmp_path, environ={"GPU_PROVIDER": "vsat"})
    assert error.message.startswith("GPU_PROVIDER: ") and "nearest is vast" in error.message
    assert error.next_step == "set GPU_PROVIDER to an allowed value or unset it"
    assert refused(tmp_path, flags={"lifecycle.idle_timeout": "soon"}).message.startswith("--idle-timeout: ")
    assert load(tmp_path, environ={"GPU_PROVIDER": ""}, flags={"provider": None}).provider == "local"


def test_every_key_has_an_origin_and_can_be_described(tmp_path: Path) -> None:
    found = load(tmp_path, "provider: local\nlifecycle:\n  idle_timeout: 5m\n")
    rows = {row["key"]: row for row in found.describe()}
    assert set(rows) == set(DEFAULTS)
    assert rows["lifecycle.idle_timeout"] == {
        "key": "lifecycle.idle_timeout", "value": "5m", "source": "project", "where": "gpu.yaml:3", "overruled": [],
    }  # fmt: skip
    assert rows["compute.disk_gb"]["source"] == "default"


def test_a_wrong_user_file_is_named_by_where_it_is(tmp_path: Path, user_file: Path) -> None:
    user_file.write_text("provider: 3\n")
    error = refused(tmp_path)
    assert error.message.startswith("~/.config/gpu/config.yaml:1: /provider is 3")
    assert error.next_step == "edit ~/.config/gpu/config.yaml"


def test_xdg_config_home_moves_the_users_settings_and_a_relative_one_is_ignored(tmp_path: Path, home: Path) -> None:
    (tmp_path / "xdg/gpu").mkdir(parents=True)
    (tmp_path / "xdg/gpu/config.yaml").write_text("provider: vast\n")
    assert load(tmp_path, environ={"XDG_CONFIG_HOME": str(tmp_path / "xdg")}).provider == "vast"
    assert userdirs.config_dir({"XDG_CONFIG_HOME": "xdg", "HOME": str(home)}) == home / ".config/gpu"


def test_without_home_the_password_database_is_asked_and_without_that_there_are_no_user_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pwd

    assert userdirs.config_dir({}) == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".config/gpu"

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(userdirs.NoHome):
        userdirs.config_dir({})
    assert load(tmp_path, environ={}).provider == "local"
    (tmp_path / "hosts.yaml").write_text("hosts: {box: {identity_file: ~/.ssh/key}}\n")
    with pytest.raises(ConfigError, match=r"hosts.yaml:1: identity_file starts with ~"):
        load_hosts(tmp_path, environ={})


# hosts ----------------------------------------------------------------------------------------------------------------


def test_hosts_come_from_the_project_first_and_then_from_the_user(tmp_path: Path, home: Path) -> None:
    (home / ".config/gpu").mkdir()
    (home / ".config/gpu/hosts.yaml").write_text("hosts: {a: {user: other, port: 1}, b: {identity_file: key}}\n")
    (tmp_path / "hosts.yaml").write_text("hosts:\n  a: {user: me, rate_usd_hr: 0.10, identity_file: keys/id}\n  c:\n")
    hosts = load_hosts(tmp_path)
    assert list(hosts) == ["a", "c", "b"]
    assert hosts["a"] == config.HostConfig(
        "a", "a", user="me", identity_file=str(tmp_path / "keys/id"), rate_usd_hr=Decimal("0.10")
    )
    assert hosts["c"] == config.HostConfig("c", "c")
    assert hosts["b"].identity_file == str(home / ".config/gpu/key")


def test_the_template_of_hosts_is_valid(tmp_path: Path, home: Path) -> None:
    (tmp_path / "hosts.yaml").write_bytes(resources.template("hosts.yaml").read_bytes())
    assert load_hosts(tmp_path)["gpubox"].identity_file == f"{home}/.ssh/id_ed25519"


def test_a_host_that_ssh_would_take_for_an_option_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text("hosts:\n  box:\n    address: -oProxyCommand=id\n")
    with pytest.raises(ConfigError, match=r"hosts.yaml:3: /hosts/box/address"):
        load_hosts(tmp_path)


def test_without_hosts_there_are_none(tmp_path: Path) -> None:
    assert load_hosts(tmp_path) == {}


# .env -----------------------------------------------------------------------------------------------------------------


def test_only_the_named_variables_are_read_and_nothing_is_evaluated(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(
        b"\xef\xbb\xbfHF_TOKEN=hf_abc # mine\r\n"
        b"export VAST_API_KEY='a b$(touch x)`id`'\n"
        b'QUOTED="l1\\nl2 \\"q\\" $HOME"\n'
        b"VAST_URL=http://evil.example\n"
        b"EMPTY=\n"
        b"# HASH=no\n"
        b"SPACED = x#y \n"
        b"UNENDED='abc\n"
    )
    names = ["HF_TOKEN", "VAST_API_KEY", "EMPTY", "HASH", "SPACED", "MISSING"]
    assert read_dotenv(tmp_path, names) == {"HF_TOKEN": "hf_abc", "VAST_API_KEY": "a b$(touch x)`id`", "SPACED": "x#y"}
    with pytest.raises(ConfigError, match="control character"):
        read_dotenv(tmp_path, ["QUOTED"])
    with pytest.raises(ConfigError) as caught:
        read_dotenv(tmp_path, ["UNENDED"])
    assert caught.value.message.startswith(".env:8: ") and "abc" not in str(caught.value.to_dict())


def test_a_missing_dotenv_or_a_virtual_environment_of_that_name_gives_nothing(tmp_path: Path) -> None:
    assert read_dotenv(tmp_path, ["A"]) == {}
    (tmp_path / ".env").mkdir()
    assert read_dotenv(tmp_path, ["A"]) == {}


def test_a_wait_of_more_than_a_day_is_refused_whoever_wrote_its_parts(tmp_path: Path) -> None:
    text = "compute: {capacity: {mode: wait, attempts: 25, interval: 1h}}\n"
    assert "more than 24h" in refused(tmp_path, text).message
    assert load(tmp_path, text.replace("25", "24")).compute.capacity.attempts == 24
    assert load(tmp_path, text.replace("wait", "immediate")).compute.capacity.attempts == 25
    assert (
        "more than 24h"
        in refused(tmp_path, text.replace("25", "2"), environ={"GPU_COMPUTE_CAPACITY_INTERVAL": "13h"}).message
    )
    assert (
        "more than 24h"
        in refused(tmp_path, text.replace("wait", "immediate"), flags={"compute.capacity.mode": "wait"}).message
    )
