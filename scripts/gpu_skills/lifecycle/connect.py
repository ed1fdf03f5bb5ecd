"""A link to a machine: the conversation with its runner and the way for bulk data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_skills.errors import Unreachable

if TYPE_CHECKING:
    from gpu_skills.lifecycle.machines import Machine
    from gpu_skills.remote.session import Session
    from gpu_skills.remote.transport import Transport

# Where a disk that survives a stop is mounted, on machines that have one beside the container's own.
WORKSPACE = "/workspace"
LOOK_S = 30.0
# In the record of a rented machine: the fingerprint of its host key, as the provider's log printed it.
VOUCHED = "host_key_sha256"


class Link:
    """An open conversation with one machine. bulk: None where the control connection is as good as any."""

    def __init__(self, machine: Machine, session: Session, bulk: Any = None):
        self.machine = machine
        self.session = session
        self.bulk = bulk

    @property
    def host(self) -> str:
        return self.machine.host

    def reopen(self) -> None:
        """Connect again after the connection broke."""
        self.session.reopen()

    def close(self) -> None:
        self.session.close()


def connect(machine: Machine, *, known_hosts: Path, environ: Mapping[str, str], may_write: bool = True) -> Link:
    """Open a link. Raises RemoteError kinds: unreachable, wrong host key, no login, no python3 or bash.

    may_write: False in Audit: no runner is installed there and no host key pinned here.
    """
    from gpu_skills.remote.session import Session

    if machine.endpoint is None and machine.provider != "local":
        # Never the other way in: without this a rented machine that has no address yet would be this computer.
        raise Unreachable(host=machine.host, reason=f"{machine.provider} shows no address of it")
    if machine.endpoint is None:
        from gpu_skills.remote.transport import LocalTransport

        root = machine.root or local_root(environ)
        return Link(machine, Session.open(LocalTransport(), root=root, may_install=may_write))

    from gpu_skills.remote.bulk import Bulk
    from gpu_skills.remote.ssh import SshTransport

    transport = SshTransport(
        machine.endpoint,
        machine_id=machine.id,
        known_hosts=known_hosts,
        environ=environ,
        vouched=machine.extra.get(VOUCHED),
        may_pin=may_write,
    )
    root = machine.root or _beside_its_fuse(transport, machine)
    return Link(machine, Session.open(transport, root=root, may_install=may_write), Bulk(transport))


def ssh_command(machine: Machine, *, known_hosts: Path) -> str | None:
    """What a person types to get in, with the key and the pinned host key that `gpu` uses; None without an address."""
    from gpu_skills.remote.bulk import config_value

    where = machine.endpoint
    if where is None:
        return None
    options = {"HostKeyAlias": machine.id, "UserKnownHostsFile": config_value(known_hosts)}
    words = ["ssh", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    if where.identity_file:
        words += ["-o", "IdentitiesOnly=yes", "-i", where.identity_file]
    if where.port:
        words += ["-p", str(where.port)]
    return shlex.join([*words, f"{where.user}@{where.host}" if where.user else where.host])


def _beside_its_fuse(transport: Transport, machine: Machine) -> str | None:
    """The runner's folder of a machine whose record does not say it; None: the usual one, in the home.

    A fuse lives where the disk survives a stop, from the machine's first moment on, and its folder has the intent in
    its name: on a volume there may be those of other machines too.
    """
    if not machine.is_rented or machine.intent is None:
        return None
    from gpu_skills.lifecycle.guard.fuse import runner_root

    folder = shlex.quote(f"{WORKSPACE}/.gpu-fuse/{machine.intent}")
    channel = transport.start(f"exec sh -c {shlex.quote(f'test -d {folder}')}")
    try:
        return runner_root(WORKSPACE) if channel.wait(LOOK_S) == 0 else None
    finally:
        channel.close()


def local_root(environ: Mapping[str, str]) -> str:
    """Where jobs of this machine live: the user's data directory, outside every project."""
    from gpu_skills.userdirs import data_dir

    return str(data_dir(environ) / "machine")
