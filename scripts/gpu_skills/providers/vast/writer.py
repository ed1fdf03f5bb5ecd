"""What changes something at Vast. Each method is one request."""

from __future__ import annotations

from typing import Any, Literal

from gpu_skills.errors import GpuError, ProviderSilent, UnexpectedReply, UsageError
from gpu_skills.providers import fields, spec_check
from gpu_skills.providers.base import CreateOutcome, MachineSpec
from gpu_skills.providers.vast.client import NAME, VastClient
from gpu_skills.providers.vast.offers import MIN_DISK_GB
from gpu_skills.providers.vast.reader import TRAITS
from gpu_skills.wire import Unanswered


class VastWriter:
    name = NAME

    def __init__(self, client: VastClient):
        self.client = client

    def create(self, spec: MachineSpec) -> CreateOutcome:
        """One PUT. An error that names a contract made a machine all the same: `created` with its problem."""
        body = create_body(spec)
        spec_check.check(spec, TRAITS, self.client.http.key)
        secrets = [
            value for value in (spec.registry.password if spec.registry else None, body.get("image_login")) if value
        ]
        try:
            answer = self.client.http.write(
                "create", "PUT", f"/api/v0/asks/{spec.offer.offer_id}/", body=body, sensitive=secrets
            )
        except Unanswered as exc:
            return _unknown(exc.reason)
        except UnexpectedReply as exc:
            return CreateOutcome("unknown", problem=exc)
        except GpuError as exc:  # nothing left this computer
            return CreateOutcome("refused", problem=exc)
        try:
            parsed = answer.json()
        except ValueError:
            parsed = None
        document = parsed if isinstance(parsed, dict) else None
        contract = fields.identity(document, "new_contract") if document is not None else None
        succeeded = answer.status == 200 and document is not None and document.get("success") is not False
        if contract is not None:
            key = fields.text(document or {}, "instance_api_key")
            problem = None if succeeded else self.client.problem(answer, document or {}, "create")
            return CreateOutcome("created", contract, key, problem)
        if self.client.is_clear_refusal(answer, document):
            return CreateOutcome("refused", problem=self.client.problem(answer, document or {}, "create"))
        return _unknown(f"HTTP {answer.status}: {answer.text}")

    def destroy(self, instance_id: str) -> Literal["accepted", "absent"]:
        return self.client.destroy(_checked(instance_id))

    def stop(self, instance_id: str) -> None:
        self._put(instance_id, {"state": "stopped"})

    def start(self, instance_id: str) -> None:
        """The same GPUs are waited for, without end: bound the wait, and stop again to give it up."""
        self._put(instance_id, {"state": "running"})

    def restart(self, instance_id: str) -> None:
        path = f"/api/v0/instances/reboot/{_checked(instance_id)}/"
        self.client.change("reboot", "PUT", path, instance_id, {})

    def set_label(self, instance_id: str, label: str) -> None:
        if not label or len(label) > TRAITS.max_label_chars:
            raise UsageError(f"a label of {len(label)} characters; allowed are 1 to {TRAITS.max_label_chars}")
        self._put(instance_id, {"label": label})

    def attach_key(self, instance_id: str, public_key: str) -> None:
        """The account's own keys are left alone: they reach only machines made later, and are the user's."""
        path = f"/api/v0/instances/{_checked(instance_id)}/ssh/"
        self.client.change("ssh", "POST", path, instance_id, {"ssh_key": public_key.strip()})

    def _put(self, instance_id: str, body: dict[str, Any]) -> None:
        self.client.change("state", "PUT", f"/api/v0/instances/{_checked(instance_id)}/", instance_id, body)


def create_body(spec: MachineSpec) -> dict[str, Any]:
    """The request. What is not set is absent: a null is not the same to every server.

    `cancel_unavail` is always true: without it a machine that cannot start is created stopped, and its disk bills. The
    disk is always named. `price` makes it interruptible by merely being there.
    """
    body: dict[str, Any] = {
        "client_id": "me",
        "image": spec.image,
        "disk": max(spec.disk_gb, MIN_DISK_GB),
        "label": spec.label,
        "runtype": "ssh_direc ssh_proxy",  # spelt so by the vendor's own client
        "cancel_unavail": True,
        "target_state": "running",
    }
    env: dict[str, str] = dict(spec.env)
    env.update({f"-p {port}:{port}": "1" for port in spec.ports if port != 22})
    if env:
        body["env"] = env
    if spec.bootstrap:
        body["onstart"] = spec.bootstrap
    if spec.bid_usd_hr is not None:
        body["price"] = spec.bid_usd_hr
    login = spec.registry
    if login is not None:
        if not login.username or not login.password:
            raise UsageError(f"{NAME} takes user and password of a private registry with each create")
        parts = (login.username, login.password, login.server)
        if any(not part.isprintable() or any(c in part for c in " '\"\\") for part in parts):
            raise UsageError(f"{NAME} takes the registry login as one line: no spaces, quotes or backslashes in it")
        body["image_login"] = f"-u {login.username} -p {login.password} {login.server}"
    if spec.volume_id is not None:
        raise UsageError(f"{NAME} has no network volumes")
    return body


def _unknown(reason: str) -> CreateOutcome:
    return CreateOutcome("unknown", problem=ProviderSilent(provider=NAME, what="create", reason=reason))


def _checked(instance_id: str) -> str:
    """An id that becomes part of a path."""
    if not instance_id.isascii() or not instance_id.isdigit():
        raise UsageError(f"{instance_id[:40]!r} is no id of a {NAME} instance")
    return instance_id
