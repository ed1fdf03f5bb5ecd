"""Where a provider's key is found, in which order, and that it is nowhere it can be seen."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from gpu_skills import credentials
from gpu_skills.errors import ConfigError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def place_all(home: Path, project: Path) -> dict[str, str]:
    """A key of its own in every place; returns the environment."""
    write(project / ".env", "VAST_API_KEY=from-dotenv\nVAST_URL=https://evil.example\nRUNPOD_API_KEY='from-dotenv-r'\n")
    write(home / ".config/gpu/credentials.json", '{"vast": "from-gpu-login", "runpod": "from-gpu-login-r"}')
    write(home / ".config/vastai/vast_api_key", "from-vast-config\n")
    write(home / ".vast_api_key", "from-vast-legacy\n")
    write(home / ".runpod/config.toml", 'apiUrl = "https://evil.example"\n[default]\napi_key = "from-runpod-config"\n')
    return {"HOME": str(home), "VAST_API_KEY": "from-environ", "RUNPOD_API_KEY": "from-environ-r"}


def test_the_places_come_in_their_order(home, project):
    environ = place_all(home, project)
    steps = [
        ("from-environ", "VAST_API_KEY", lambda: environ.pop("VAST_API_KEY")),
        ("from-dotenv", "VAST_API_KEY in .env", lambda: (project / ".env").unlink()),
        ("from-gpu-login", "gpu login", lambda: (home / ".config/gpu/credentials.json").unlink()),
        ("from-vast-config", str(home / ".config/vastai/vast_api_key"), (home / ".config/vastai/vast_api_key").unlink),
        ("from-vast-legacy", str(home / ".vast_api_key"), (home / ".vast_api_key").unlink),
    ]
    for value, source, remove in steps:
        found = credentials.provider_key("vast", project, environ)
        assert (found.value, found.source) == (value, source)
        remove()
    assert credentials.provider_key("vast", project, environ) is None


def test_runpods_own_file_is_read_for_its_key_only(home, project):
    environ = place_all(home, project)
    environ.pop("RUNPOD_API_KEY")
    (project / ".env").unlink()
    (home / ".config/gpu/credentials.json").unlink()
    found = credentials.provider_key("runpod", project, environ)
    assert (found.value, found.source) == ("from-runpod-config", str(home / ".runpod/config.toml"))
    write(home / ".runpod/config.toml", 'apikey = "from-runpodctl"\n')
    assert credentials.provider_key("runpod", project, environ).value == "from-runpodctl"


@pytest.mark.parametrize(
    "text", ["", "[default", "[default]\napi_key = 7\n", "\x00", "default = 3\n", "a = " + "[" * 9999]
)
def test_a_broken_file_of_another_program_counts_as_none(home, project, text):
    write(home / ".runpod/config.toml", text)
    assert credentials.provider_key("runpod", project, {"HOME": str(home)}) is None


def test_a_directory_and_a_large_file_count_as_none(home, project):
    (home / ".vast_api_key").mkdir()
    write(home / ".config/vastai/vast_api_key", "x" * 100_000)
    assert credentials.provider_key("vast", project, {"HOME": str(home)}) is None


def test_the_vendors_folder_follows_the_environment(home, project, tmp_path):
    write(tmp_path / "elsewhere/vastai/vast_api_key", "from-elsewhere")
    environ = {"HOME": str(home), "XDG_CONFIG_HOME": str(tmp_path / "elsewhere")}
    assert credentials.provider_key("vast", project, environ).value == "from-elsewhere"


@pytest.mark.parametrize(
    "value", ["two words here", "short", "tab\tinside-the-key", "new\nline-in-the-key", "ключ-не-ascii", "x" * 5000]
)
def test_what_can_be_no_key_is_named_by_its_place_and_not_shown(home, project, value):
    with pytest.raises(ConfigError) as caught:
        credentials.provider_key("vast", project, {"HOME": str(home), "VAST_API_KEY": value})
    assert "VAST_API_KEY" in str(caught.value) and value not in str(caught.value) + json.dumps(caught.value.to_dict())


def test_a_key_shows_itself_in_no_repr_and_its_account_tells_nothing_of_it():
    key = credentials.Credential("vast", "made-up-key-value", "test")
    other = credentials.Credential("runpod", "made-up-key-value", "test")
    assert "made-up-key-value" not in repr(key) + str(key) + key.account
    assert key.account.startswith("vast-") and key.account != other.account
    assert key.account == credentials.Credential("vast", "made-up-key-value", "elsewhere").account


class Keyring(types.ModuleType):
    """A keyring in memory. priority 0 or less is what its package calls a backend not to be relied on."""

    def __init__(self, priority: float = 5, *, fails: bool = False):
        super().__init__("keyring")
        self.kept: dict[tuple[str, str], str] = {}
        self.opened = 0
        self.priority, self.fails = priority, fails

    def get_keyring(self):
        self.opened += 1
        return self

    def set_password(self, service, name, value):
        if self.fails:
            raise RuntimeError("locked")
        self.kept[service, name] = value

    def get_password(self, service, name):
        return self.kept.get((service, name))


def test_a_keyring_keeps_what_the_file_only_names(home, project, monkeypatch):
    ring = Keyring()
    monkeypatch.setitem(sys.modules, "keyring", ring)
    environ = {"HOME": str(home)}
    assert credentials.store_in_keyring("vast", "kept-in-the-ring")
    assert ring.kept == {("gpu-skills", "vast"): "kept-in-the-ring"}
    opened = ring.opened
    assert credentials.provider_key("vast", project, environ) is None
    assert ring.opened == opened  # nothing says that it holds something: it is not even asked
    write(home / ".config/gpu/credentials.json", '{"vast": {"in": "keyring"}}')
    assert credentials.provider_key("vast", project, environ).value == "kept-in-the-ring"
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert credentials.provider_key("vast", project, environ) is None


@pytest.mark.parametrize(
    "ring", [None, Keyring(priority=0), Keyring(fails=True)], ids=["absent", "unreliable", "locked"]
)
def test_a_keyring_that_cannot_be_relied_on_keeps_nothing(ring, monkeypatch):
    monkeypatch.setitem(sys.modules, "keyring", ring)
    assert credentials.store_in_keyring("vast", "some-value") is False
