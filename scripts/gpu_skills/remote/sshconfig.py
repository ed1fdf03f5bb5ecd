"""What the user's SSH configuration says of a host, asked of `ssh -G` itself and never written.

Both stacks start from these settings, so that `ssh HOST` and we reach the same machine as the same user.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gpu_skills.errors import ConfigError, Unreachable, one_line

DEFAULT_CONNECT_TIMEOUT_S = 10.0
_ASK_SSH_TIMEOUT_S = 15  # `Match exec` in the user's file may run a program
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


class Endpoint(Protocol):
    """How a machine is reached. `host` is what one types after `ssh`; None leaves it to the user's configuration."""

    @property
    def host(self) -> str: ...
    @property
    def user(self) -> str | None: ...
    @property
    def port(self) -> int | None: ...
    @property
    def identity_file(self) -> str | None: ...


@dataclass(frozen=True)
class SshEndpoint:
    host: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class SshSettings:
    """alias: what was typed. hostname, port, user: where that leads. proxy_command: a line for the shell, expanded."""

    alias: str
    hostname: str
    user: str
    port: int = 22
    identity_files: tuple[Path, ...] = ()
    certificate_files: tuple[Path, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    proxy_command: str | None = None
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    known_hosts_files: tuple[Path, ...] = ()
    host_key_alias: str | None = None
    bind_address: str | None = None
    address_family: socket.AddressFamily = socket.AF_UNSPEC
    options: tuple[str, ...] = field(default=(), repr=False)

    @property
    def known_names(self) -> list[str]:
        """The names under which known_hosts files may have this host."""
        name = self.host_key_alias or self.hostname
        return [name if self.port == 22 or self.host_key_alias else f"[{name}]:{self.port}"]


def resolve(
    endpoint: Endpoint, *, config_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> SshSettings:
    """The settings for one endpoint; what the endpoint itself says comes before the configuration.

    Without the `ssh` program: OpenSSH's plain defaults. ConfigError quotes what `ssh` finds wrong with the file.
    """
    environ = os.environ if environ is None else environ
    check_host(endpoint)
    options = command_options(endpoint, config_file)
    if shutil.which("ssh", path=environ.get("PATH")) is None:
        return _plain_defaults(endpoint, environ)
    said = _ask_ssh(["ssh", "-G", *options, endpoint.host], endpoint.host, environ)
    return _settings(endpoint, said, options, environ)


def check_host(endpoint: Endpoint) -> None:
    """A host or user that a program would read as an option, or that no line of a configuration can hold."""
    for name, value in (("host", endpoint.host), ("user", endpoint.user)):
        if value is None:
            continue
        if not value or value.startswith("-") or not value.isprintable() or re.search(r"[\s'\"`$\\;&<>|(){}*?]", value):
            raise ConfigError(file="hosts.yaml", problem=f"{one_line(value)!r} cannot be a {name}")


def command_options(endpoint: Endpoint, config_file: Path | None) -> tuple[str, ...]:
    """The endpoint's own values as options of `ssh`."""
    options: list[str] = []
    if config_file is not None:
        options += ["-F", str(config_file)]
    if endpoint.user is not None:
        options += ["-l", endpoint.user]
    if endpoint.port is not None:
        options += ["-p", str(endpoint.port)]
    if endpoint.identity_file is not None:
        # That key and no other: a server hangs up after a few keys, and an agent may hold many.
        options += ["-i", os.path.expanduser(endpoint.identity_file), "-o", "IdentitiesOnly=yes"]
    return tuple(options)


def home_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where `ssh` looks for `~`: the account's home, whatever HOME says."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path((os.environ if environ is None else environ).get("HOME", "/"))


def _ask_ssh(argv: list[str], host: str, environ: Mapping[str, str]) -> dict[str, list[str]]:
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=_ASK_SSH_TIMEOUT_S, stdin=subprocess.DEVNULL, env=dict(environ)
        )
    except subprocess.TimeoutExpired as exc:
        raise Unreachable(host=host, reason=f"`ssh -G` took more than {_ASK_SSH_TIMEOUT_S} s") from exc
    except OSError as exc:
        raise Unreachable(host=host, reason=f"ssh cannot be started: {exc.strerror}") from exc
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip() or f"ssh -G exited with {done.returncode}"
        raise ConfigError(file="~/.ssh/config", problem=one_line(words, limit=300), next_step=f"ssh -G {host}")
    said: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
        name, _, value = line.partition(" ")
        said.setdefault(name.lower(), []).append(value.strip())
    return said


def _settings(
    endpoint: Endpoint, said: dict[str, list[str]], options: tuple[str, ...], environ: Mapping[str, str]
) -> SshSettings:
    home = home_directory(environ)

    def first(name: str, default: str = "") -> str:
        return said.get(name, [default])[0]

    hostname, user, port = first("hostname", endpoint.host), first("user") or _local_user(), int(first("port", "22"))
    tokens = _Tokens(endpoint.host, hostname, user, port, str(home), _none(first("hostkeyalias")), environ)
    jump, command = _none(first("proxyjump")), _none(first("proxycommand"))
    if jump is not None:
        command = _jump_command(jump, options)
    # `-i` names a file even when it is missing; `ssh -G` then leaves it out, and its message is ours to give.
    own = [os.path.expanduser(endpoint.identity_file)] if endpoint.identity_file else []
    files = [tokens.path(value) for value in dict.fromkeys([*own, *said.get("identityfile", [])]) if _none(value)]
    timeout = first("connecttimeout")
    return SshSettings(
        alias=endpoint.host,
        hostname=hostname,
        user=user,
        port=port,
        identity_files=tuple(dict.fromkeys(files)),
        certificate_files=tuple(tokens.path(value) for value in said.get("certificatefile", []) if _none(value)),
        identities_only=first("identitiesonly") == "yes",
        identity_agent=_agent(first("identityagent"), tokens),
        proxy_command=tokens.expand(command) if command else None,
        connect_timeout_s=float(timeout) if timeout.isdigit() and int(timeout) else DEFAULT_CONNECT_TIMEOUT_S,
        known_hosts_files=tuple(
            tokens.path(value)
            for name in ("userknownhostsfile", "globalknownhostsfile")
            for value in shlex.split(first(name))
            if _none(value)
        ),
        host_key_alias=_none(first("hostkeyalias")),
        bind_address=_none(first("bindaddress")),
        address_family={"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(first("addressfamily"), socket.AF_UNSPEC),
        options=options,
    )


def _plain_defaults(endpoint: Endpoint, environ: Mapping[str, str]) -> SshSettings:
    folder = home_directory(environ) / ".ssh"
    own = (Path(os.path.expanduser(endpoint.identity_file)),) if endpoint.identity_file else ()
    return SshSettings(
        alias=endpoint.host,
        hostname=endpoint.host,
        user=endpoint.user or _local_user(),
        port=endpoint.port or 22,
        identity_files=own + tuple(folder / name for name in _DEFAULT_KEYS),
        identities_only=bool(own),
        identity_agent=environ.get("SSH_AUTH_SOCK") or None,
        known_hosts_files=(folder / "known_hosts", Path("/etc/ssh/ssh_known_hosts")),
    )


def _jump_command(jump: str, options: tuple[str, ...]) -> str:
    """ProxyJump as `ssh` itself carries it out: the last hop forwards, the hops before it are its own jumps.

    The hops are the user's hosts with the user's known_hosts; UpdateHostKeys would write there, so it is off.
    """
    *before, last = jump.split(",")
    argv = ["ssh", "-oBatchMode=yes", "-oUpdateHostKeys=no", "-oControlPath=none"]
    if "-F" in options:
        argv += ["-F", options[options.index("-F") + 1]]
    if before:
        argv += ["-J", ",".join(before)]
    user_host, port = _split_port(last.removeprefix("ssh://").rstrip("/"))
    if port:
        argv += ["-p", port]
    quoted = " ".join(shlex.quote(part).replace("%", "%%") for part in argv)
    return f"{quoted} -W '[%h]:%p' -- {shlex.quote(user_host).replace('%', '%%')}"


def _split_port(hop: str) -> tuple[str, str]:
    match = re.fullmatch(r"((?:[^@]*@)?(?:\[[^\]]*\]|[^:\[\]]*))(?::(\d+))?", hop)
    if match is None:  # a bare IPv6 address
        return hop, ""
    user, at, host = match[1].rpartition("@")
    return user + at + host.strip("[]"), match[2] or ""


def _agent(said: str, tokens: _Tokens) -> str | None:
    """The agent's socket: `none` forbids one, `SSH_AUTH_SOCK` and `$NAME` name a variable, else a path."""
    value = said.strip('"')
    if value.lower() == "none":
        return None
    if not value or value == "SSH_AUTH_SOCK":
        return tokens.environ.get("SSH_AUTH_SOCK") or None
    if value.startswith("$") and not value.startswith("${"):
        return tokens.environ.get(value[1:]) or None
    return str(tokens.path(value))


def _none(value: str) -> str | None:
    return None if value.lower() in ("", "none") else value


def _local_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return getpass.getuser()


@dataclass(frozen=True)
class _Tokens:
    """`%h` and its like: `ssh -G` prints them as they were written (ssh_config(5), TOKENS)."""

    alias: str
    hostname: str
    user: str
    port: int
    home: str
    host_key_alias: str | None
    environ: Mapping[str, str]

    def expand(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            return match[0] if match[1] not in known else known[match[1]]

        local = socket.gethostname()
        digest = hashlib.sha1(f"{local}{self.hostname}{self.port}{self.user}".encode(), usedforsecurity=False)
        known = {
            "%": "%",
            "C": digest.hexdigest(),
            "d": self.home,
            "h": self.hostname,
            "i": str(os.getuid()),
            "j": "",
            "k": self.host_key_alias or self.hostname,
            "L": local.split(".")[0],
            "l": local,
            "n": self.alias,
            "p": str(self.port),
            "r": self.user,
            "u": _local_user(),
        }
        return re.sub(r"%(.)", value, text)

    def path(self, text: str) -> Path:
        text = re.sub(r"\$\{(\w+)\}", lambda m: self.environ.get(m[1], ""), text.strip('"'))
        if text.startswith("~/"):
            text = self.home + text[1:]
        return Path(self.expand(text))
