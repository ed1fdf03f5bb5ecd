"""From a model on a machine to a deployment that is proven, and back. Each step is found again after a death."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import timestamp
from gpu_skills.deployments import records, serving, weights
from gpu_skills.deployments.model_dir import ModelDir, put_on_record
from gpu_skills.deployments.records import Deployment, DeploymentFailed
from gpu_skills.errors import RemoteError, UsageError, one_line
from gpu_skills.jobs import release
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.runtimes.base import Proof, Runtime, Surroundings, runtime_of
from gpu_skills.runtimes.outputs import FolderSink
from gpu_skills.state import files

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval, Ask

    Agree = Callable[[Ask], Approval]


def register(op: Operator, model: ModelDir, link: Link, *, stall_s: float = serving.STALL_S) -> Deployment:
    """Start the model's service on the machine unless it runs, wait for it, prove it with a test generation: `ready`.

    The same call again goes on with the same record and the same service. Whatever the service itself does wrong ends
    as `error` on record with the reason, and is raised as DeploymentFailed; a machine that does not answer changes
    nothing. UsageError while another version of the model is deployed there, StateBusy while another command works on
    that machine's deployments.
    """
    model = put_on_record(op.project, model, op.clock)
    runtime = runtime_of(model.manifest.runtime, Surroundings(clock=op.clock, environ=op.environ))
    serving.service_of(op, link, runtime, model, serving.PORTS[0])  # what cannot be served leaves no record
    with _working_on(op, link.machine):
        deployment = _taken_up(op, model, link.machine) or records.begun(op, model, link.machine)
        op.say(f"{deployment.id}: {model.id} on {link.host}")
        try:
            return _proven(op, link, runtime, model, deployment, stall_s)
        except DeploymentFailed as exc:
            records.mark_error(op, deployment.id, exc.details.get("reason") or exc.message)
            raise


def register_error(op: Operator, model: ModelDir, machine: Machine, reason: str) -> Deployment:
    """Put on record that a model does not work on a machine, without asking it."""
    model = put_on_record(op.project, model, op.clock)
    with _working_on(op, machine):
        found = records.of_model(op.project, model.id, machine.id) or records.begun(op, model, machine)
        return records.mark_error(op, found.id, reason)


def _proven(
    op: Operator, link: Link, runtime: Runtime, model: ModelDir, deployment: Deployment, stall_s: float
) -> Deployment:
    try:
        weights.require(op, link, model, with_hashes=False)
    except weights.WeightsWrong as exc:
        raise DeploymentFailed(deployment=deployment.id, reason=exc.message, next_step=exc.next_step) from exc
    deployment = serving.start(op, link, runtime, model, deployment)
    assert deployment.port is not None
    service = serving.service_of(op, link, runtime, model, deployment.port)
    url = f"http://127.0.0.1:{deployment.port}"
    records.change(op, deployment.id, lambda d: replace(d, endpoint=url, status=_at_least_verifying(d.status)))
    with serving.endpoint(op, link, deployment) as at:
        healthy = serving.wait_healthy(
            op, link, runtime, deployment, at, ready_within_s=service.ready_within_s, stall_s=stall_s
        )
        op.say(f"{deployment.id}: {one_line(healthy, limit=200)}; one test generation")
        sink = FolderSink(op.project.path("deployments") / deployment.id / "test")
        proof = runtime.test_generation(at, model.manifest, sink)
    if not proof.succeeded:
        raise DeploymentFailed(deployment=deployment.id, reason=f"the test generation failed: {proof.detail}")
    return records.mark_ready(op, deployment.id, _proof_record(op, proof))


def _at_least_verifying(status: str) -> str:
    return status if status == "ready" else "verifying"


def _proof_record(op: Operator, proof: Proof) -> dict[str, Any]:
    made: dict[str, Any] = {"succeeded": True, "at": timestamp(op.clock.now())}
    return made | {"detail": one_line(proof.detail, limit=500), "evidence": dict(proof.evidence)}


def _taken_up(op: Operator, model: ModelDir, machine: Machine) -> Deployment | None:
    found = records.of_model(op.project, model.id, machine.id)
    if found is None or found.model_version == model.manifest.version:
        return found
    if found.port is None:  # nothing of it was started
        return records.change(op, found.id, lambda d: replace(d, model_version=model.manifest.version))
    raise UsageError(
        f"{found.id} serves version {found.model_version} of {model.id} there, this is {model.manifest.version}",
        next_step=f"gpu deployment destroy {found.id} --keep-machine",
    )


@contextlib.contextmanager
def _working_on(op: Operator, machine: Machine) -> Iterator[None]:
    """One command at a time works on the deployments of a machine; a second is told at once."""
    folder = op.project.path("deployments")
    files.make_directory(folder)
    with files.lock(folder / f"{machine.id}.serving", timeout_s=0):
        yield


# giving back ----------------------------------------------------------------------------------------------------------


def destroy(
    op: Operator,
    id: str,
    *,
    keeps_machine: bool = False,
    abandon: Collection[str] = (),
    wait_s: float | None = None,
    agree: Agree | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Deployment:
    """End its service, then a rented machine that serves nothing else, through the gate of every release.

    What stands against the machine's end is raised before the service is touched. `stopped` in the answer: the machine
    is not proven gone yet, and the same call goes on. Hosts of the user's own stay. abandon, agree, tell: as for a
    machine.
    """
    deployment = records.find(op.project, id)
    machine = records.machine_of(op.project, deployment)
    if deployment.is_over:
        return deployment
    if machine is None or records.is_machine_gone(machine):
        return _given_back(op, id)
    with _working_on(op, machine):
        others = [d for d in records.on_machine(op.project, machine) if d.id != id]
        releases = machine.is_rented and not keeps_machine and not others
        if releases:
            for obstacle in release.gate(op, machine, abandon):
                raise obstacle
        if deployment.port is not None:
            _end_service(op, machine, deployment, goes_with_machine=releases)
        if not releases:
            return _given_back(op, id)
        records.change(op, id, lambda d: replace(d, status="stopped"))
        why = f"deployment {id} was destroyed"
        end = release.destroy(op, machine, why=why, abandon=abandon, wait_s=wait_s, agree=agree, tell=tell)
        return _given_back(op, id) if end == "destroyed" else records.find(op.project, id)


def _end_service(op: Operator, machine: Machine, deployment: Deployment, *, goes_with_machine: bool) -> None:
    try:
        with contextlib.closing(op.connect(machine)) as link:
            serving.stop(op, link, deployment)
    except (RemoteError, DeploymentFailed):
        if not goes_with_machine:
            raise


def _given_back(op: Operator, id: str) -> Deployment:
    now = timestamp(op.clock.now())
    return records.change(op, id, lambda d: replace(d, status="destroyed", destroyed_at=d.destroyed_at or now))
