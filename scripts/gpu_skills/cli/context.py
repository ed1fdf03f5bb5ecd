"""The only place that builds the real parts: project, configuration, ledger, providers, connections."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_skills.cli.output import in_sandbox, say
from gpu_skills.clock import Clock, SystemClock
from gpu_skills.providers.known import RENTED_PROVIDERS

if TYPE_CHECKING:
    from gpu_skills.config import GpuConfig
    from gpu_skills.credentials import Credential
    from gpu_skills.lifecycle.ahead import Ahead
    from gpu_skills.lifecycle.connect import Link
    from gpu_skills.lifecycle.machines import Machine
    from gpu_skills.lifecycle.notify import Notifier
    from gpu_skills.lifecycle.operator import Operator
    from gpu_skills.providers.base import Offer, RentedReader, RentedWriter
    from gpu_skills.state.ledger import Ledger
    from gpu_skills.state.policy import Policy
    from gpu_skills.state.project import Project

OWN_PROVIDERS = ("local", "ssh")


class Context:
    """One command's world. Tests build it with another clock, directory, environment or connector."""

    def __init__(
        self,
        *,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        connect: Callable[[Machine], Link] | None = None,
        system_policy: Path | None = None,
        wire: Callable[..., Any] | None = None,
        account_home: Path | None = None,
    ):
        self.cwd = cwd or Path.cwd()
        self.environ = os.environ if environ is None else environ
        self.clock = clock or SystemClock()
        self._connect = connect
        self._system_policy = system_policy
        self._wire = wire
        self._account_home = account_home
        self._clients: dict[Credential, Any] = {}
        self._accounts: dict[str, str] = {}
        self._open: list[Link] = []
        self._ahead: dict[str, Ahead[Link]] = {}
        self._policy: tuple[Any, Policy] | None = None
        self.json = False
        self.mode_flag: str | None = None
        self.mode = "operate"
        self.sandbox = False

    def enter_sandbox(self) -> None:
        """From here on: the sandbox's records, URLs and keys, and no key of the user's. Raises NoSandbox.

        What a user's projects share of real accounts (money reserved, rights proven, approvals used) is kept apart too:
        the sandbox has a user of its own, who goes with it.
        """
        from gpu_skills.cli.sandbox import directory_of
        from gpu_skills.sandbox import client

        running = client.require(directory_of(self.cwd))
        own = {n: v for n, v in self.environ.items() if not n.startswith(("VAST_", "VASTAI_", "RUNPOD_"))}
        self.environ = {
            **own,
            "XDG_STATE_HOME": str(running.user_home / ".local/state"),
            "VAST_URL": running.url,
            "RUNPOD_API_BASE_URL": running.url,
            **{f"{name.upper()}_API_KEY": key for name, key in running.keys.items()},
        }
        self._account_home = running.user_home
        self.sandbox = True

    # the project and its records --------------------------------------------------------------------------------

    @cached_property
    def project(self) -> Project:
        from gpu_skills.state import project

        return project.find(self.cwd, name=self.state_name)

    @property
    def state_name(self) -> str:
        from gpu_skills.state import project

        return project.SANDBOX_NAME if self.sandbox else project.STATE_NAME

    @cached_property
    def config(self) -> GpuConfig:
        from gpu_skills.config import load_gpu_yaml

        return load_gpu_yaml(self.project.root, environ=self.environ)

    @cached_property
    def ledger(self) -> Ledger:
        from gpu_skills.state import policy
        from gpu_skills.state.ledger import Ledger

        inputs = policy.ledger_inputs(self.project, self.environ, **self._where_policies_are())
        return Ledger(self.project, self.clock, inputs=inputs, keeps_caches=self.may_write)

    @property
    def policy(self) -> Policy:
        """What may be spent. Raises PolicyMissing: every path to money asks here first, reading does not.

        As the files say it now: a command may wait for hours, and somebody who makes them stricter means it as well.
        """
        from gpu_skills.state import policy

        where = self._where_policies_are()
        mark = policy.signature(self.project, self.environ, **where)  # before the files are read: a change shows later
        if self._policy is None or self._policy[0] != mark:
            self._policy = mark, policy.load(self.project, self.environ, **where)
        return self._policy[1]

    def _where_policies_are(self) -> dict[str, Path]:
        return {} if self._system_policy is None else {"system": self._system_policy}

    # machines ---------------------------------------------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """What the project's provider has, cheapest first."""
        from gpu_skills.providers.base import Requirements

        compute = self.config.compute
        need = Requirements(
            compute.gpu, compute.gpu_count, compute.min_vram_gb, compute.disk_gb, compute.max_rate_usd_hr
        )
        return self.provider(self.config.provider).offers(need)

    def provider(self, name: str) -> Any:
        """What reads from a provider. Of a rented one: MissingCredential without a key."""
        if name == "local":
            from gpu_skills.providers.local import LocalProvider

            return LocalProvider()
        if name == "ssh":
            from gpu_skills.config import load_hosts
            from gpu_skills.providers.ssh import SshProvider

            return SshProvider(load_hosts(self.project.root, environ=self.environ), self.config.host)
        return self.provider_with(self.provider_key(name))

    def provider_key(self, name: str) -> Credential:
        """The key of a rented provider, or MissingCredential."""
        from gpu_skills import credentials
        from gpu_skills.errors import ConfigError, MissingCredential

        if name not in RENTED_PROVIDERS:
            known = ", ".join((*OWN_PROVIDERS, *RENTED_PROVIDERS))
            raise ConfigError(file="gpu.yaml", problem=f"unknown provider {name!r}; known: {known}")
        key = credentials.provider_key(name, self._root_if_any, self.environ)
        if key is None:
            raise MissingCredential(provider=name)
        return key

    @property
    def _root_if_any(self) -> Path | None:
        """A key does not need a project: a sentinel on another host has none."""
        from gpu_skills.errors import NoProject

        try:
            return self.project.root
        except NoProject:
            return None

    def provider_with(self, key: Credential) -> RentedReader:
        """What reads from a rented provider with this key."""
        if key.provider == "vast":
            from gpu_skills.providers.vast import VastReader

            return VastReader(self._client(key), clock=self.clock)
        from gpu_skills.providers.runpod import RunpodReader

        return RunpodReader(self._client(key))

    def provider_writer(self, name: str) -> RentedWriter:
        """What changes something at a rented provider. ModeForbids in Audit, where no such object comes to be."""
        from gpu_skills.errors import ModeForbids

        if self.mode == "audit":
            raise ModeForbids(command=f"changing something at {name}", mode=self.mode, needed="operate")
        client = self._client(self.provider_key(name))
        if name == "vast":
            from gpu_skills.providers.vast import VastWriter

            return VastWriter(client)
        from gpu_skills.providers.runpod import RunpodWriter

        return RunpodWriter(client)

    def _client(self, key: Credential) -> Any:
        """One client for each key: its connections and its counts belong to the whole command."""
        if key not in self._clients:
            from gpu_skills import userdirs

            if key.provider == "vast":
                from gpu_skills.providers.vast import connect_vast as connect
            else:
                from gpu_skills.providers.runpod import connect_runpod as connect
            try:  # in Audit this command keeps the provider's pace by itself, without a file
                state_dir = userdirs.state_dir(self.environ) if self.may_write else None
            except userdirs.NoHome:
                state_dir = None
            self._clients[key] = connect(
                key, environ=self.environ, clock=self.clock, state_dir=state_dir, wire=self._wire
            )
        return self._clients[key]

    def account(self, name: str) -> str:
        """What names the account behind the key of a rented provider: its own word, else the key's fingerprint."""
        if name not in self._accounts:
            key = self.provider_key(name)
            self._accounts[name] = self.provider(name).check_key() or key.account
        return self._accounts[name]

    @cached_property
    def operator(self) -> Operator:
        """What the lifecycle works with."""
        from gpu_skills.jobs import gone, readback
        from gpu_skills.lifecycle.operator import Operator

        return Operator(
            project=self.project,
            ledger=self.ledger,
            clock=self.clock,
            policy=lambda: self.policy,
            environ=self.environ,
            reader=self.provider,
            writer=self.provider_writer,
            account=self.account,
            connect=self.connect,
            running_jobs=lambda machine: gone.running_on(self.ledger, machine),
            unverified=lambda machine: gone.unverified_on(self.project, self.ledger, machine, now=self.clock.now()),
            settle_jobs=lambda machine, why, at=None: gone.end_jobs(
                self.project, self.ledger, self.clock, machine, why, at=at, notify=self.notifier.send
            ),
            jobs_there=lambda link, *, write: readback.jobs_there(
                self.project, self.ledger, self.clock, link, write=write, notify=self.notifier.send
            ),
            say=self.say,
            notify=self.notifier.send,
            account_home=self._account_home,
        )

    @cached_property
    def notifier(self) -> Notifier:
        """Who is told what happens, as the policy says. Its `send` never raises; in Audit nobody is told."""
        from gpu_skills import userdirs
        from gpu_skills.lifecycle.notify import Notifier

        return Notifier(
            project=self.project,
            policy=lambda: self.policy,
            environ=self.environ,
            user_state=lambda: userdirs.state_dir(self.environ),
            clock=self.clock,
            say=say,
            is_silent=not self.may_write,
        )

    def tell_what_is_due(self, *, job: str | None = None) -> None:
        """Deadlines and ceilings that are used up to 80 %, to whom the policy names. Raises nothing."""
        from gpu_skills.errors import GpuError

        try:
            if not self.may_write or not self.policy.notify:
                return
        except GpuError:  # named by whoever needs the policy
            return
        from gpu_skills.lifecycle import notify

        notify.tell_due(self.operator, job=job)

    def note_provider(self, name: str) -> None:
        """Keep on record that a provider's key was accepted, and where it came from; never the key."""
        from gpu_skills import credentials
        from gpu_skills.clock import timestamp
        from gpu_skills.state import registry

        key = credentials.provider_key(name, self.project.root, self.environ)
        if not self.may_write or key is None:
            return
        known = {"id": name, "installed": True, "authenticated": True, "credential_source": key.source}
        records = [r for r in registry.load(self.project, "providers") if r["id"] == name]
        if records and all(records[0].get(field) == value for field, value in known.items()):
            return
        before = records[0] if records else {}
        registry.put(self.project, "providers", {**before, **known, "checked_at": timestamp(self.clock.now())})

    @property
    def has_hosts(self) -> bool:
        """Whether some hosts.yaml names hosts of the user's own."""
        from gpu_skills.config import load_hosts

        return bool(load_hosts(self.project.root, environ=self.environ))

    def connect(self, machine: Machine) -> Link:
        ahead = self._ahead.pop(machine.id, None)
        link = self._link_to(machine) if ahead is None else ahead.take()
        self._open.append(link)
        return link

    def connect_ahead(self) -> None:
        """Begin to connect to the project's machine while something else is prepared; `connect` takes it up.

        Only to a host of the user's own: no machine is rented or started for this.
        """
        from gpu_skills.lifecycle.ahead import Ahead
        from gpu_skills.lifecycle.machines import machine_of

        if self.config.provider not in OWN_PROVIDERS:
            return
        for offer in self.offers()[:1]:
            machine = machine_of(offer)
            self._ahead[machine.id] = Ahead(functools.partial(self._link_to, machine))

    def _link_to(self, machine: Machine) -> Link:
        if self._connect is not None:
            return self._connect(machine)
        from gpu_skills.lifecycle.connect import connect

        return connect(
            machine, known_hosts=self.project.state / "known_hosts", environ=self.environ, may_write=self.may_write
        )

    def ready_machine(self, *, progress: Callable[[str], None] = say, yes: bool = False) -> Link:
        """A link to the project's machine with an open session; sets it up when none is ready.

        Where that bills it needs an approval: `yes` is one, else a person is asked, or ApprovalNeeded ends it.
        """
        from gpu_skills.lifecycle import machines

        if self.config.provider in RENTED_PROVIDERS:
            from gpu_skills.cli.approve import agree
            from gpu_skills.lifecycle import project_machine

            op = dataclasses.replace(self.operator, say=progress)
            return project_machine.ready(op, self.config, agree=lambda ask: agree(self, ask, yes=yes))
        return machines.set_up(
            self.project, self.config, self.offers(), connect=self.connect, clock=self.clock, say=progress
        )

    def machine_link(self, machine_id: str) -> Link:
        """A link to a machine that is on record, as it is."""
        from gpu_skills.errors import StateError
        from gpu_skills.lifecycle import machines

        machine = machines.find(self.project, machine_id)
        if machine is None:
            # The id of a machine of one's own is made of its name: a new set-up brings the same one back.
            raise StateError(file="machines.json", at="", problem=f"no machine {machine_id}", next_step="gpu setup")
        return self.connect(machine)

    def say(self, line: str) -> None:
        """As `say`, with the commands in it leading where this one works."""
        say(in_sandbox(line) if self.sandbox else line)

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
        while self._ahead:
            self._ahead.popitem()[1].drop()

    # people -----------------------------------------------------------------------------------------------------

    @property
    def is_interactive(self) -> bool:
        """Whether somebody could answer a question."""
        return not self.json and sys.stdin.isatty() and sys.stderr.isatty()

    @property
    def is_watched(self) -> bool:
        """Whether bars and a status line reach somebody's eyes: on a terminal that can move its cursor."""
        return self.is_interactive and self.environ.get("TERM", "dumb") != "dumb"

    @property
    def dim(self) -> str:
        """The style of a line beside the matter, unless NO_COLOR asks for none."""
        return "" if self.environ.get("NO_COLOR") else "2"

    @property
    def may_write(self) -> bool:
        """In Audit nothing is written, not even what a reading command noticed."""
        return self.mode == "operate"
