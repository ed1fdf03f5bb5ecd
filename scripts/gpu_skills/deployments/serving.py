"""The service of a deployment on its machine: started under the runner's supervisor, waited for, reached, ended."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpu_skills.deployments import records
from gpu_skills.deployments.model_dir import ModelDir
from gpu_skills.deployments.records import Deployment, DeploymentFailed
from gpu_skills.errors import JobNotFound, RemoteError, StateError, UsageError, one_line
from gpu_skills.jobs import follow, pack
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.remote.environment import job_environment
from gpu_skills.remote.transfer import upload
from gpu_skills.remote.tree import Tree
from gpu_skills.remote.tunnel import open_tunnel
from gpu_skills.runtimes.base import Endpoint, Runtime, Served, Service
from gpu_skills.state import files

# Below the kernel's range for outgoing connections, which may hold any port of it at any time.
PORTS = range(20_000, 32_000)
PORTS_TRIED = 40
STALL_S = 600.0
FAILED_FOR_S = 10.0
RESTARTS_ALLOWED = 2
SILENT_FOR_S = 120.0
PAUSE_S = (0.2, 5.0)
LOG_TAIL_BYTES = 16 << 10
LINES_SHOWN = 3
ENDED = ("succeeded", "failed", "timeout", "cancelled", "lost")

_FREE_PORT = """
import json, socket, sys
found = None
for port in json.loads(sys.argv[1])["ports"]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            continue
        found = port
        break
print("GPU-SKILLS-ANSWER " + json.dumps({"port": found}))
"""


def workspace(op: Operator, link: Link) -> str:
    """GPU_WORKSPACE of the project's jobs and services there."""
    return f"{link.session.greeting.root.rstrip('/')}/projects/{op.project.project_id}/workspace"


def service_of(op: Operator, link: Link, runtime: Runtime, model: ModelDir, port: int) -> Service:
    """How it is started there. UsageError for a runtime that serves nothing."""
    served = Served(model.manifest, port, workspace(op, link), gpu_count=max(1, link.machine.gpu_count))
    service = runtime.service(served)
    if service is None:
        raise UsageError(
            f"{model.id}: runtime {model.manifest.runtime} serves nothing that could be registered",
            next_step="run it as a job: gpu job run",
        )
    return service


# starting -------------------------------------------------------------------------------------------------------------


def start(op: Operator, link: Link, runtime: Runtime, model: ModelDir, deployment: Deployment) -> Deployment:
    """Make sure its service runs there; the deployment with its port. Given again it starts nothing twice.

    One that ended, or whose deployment is in error, is started anew. Raises the errors of sending and starting.
    """
    if deployment.status == "error" or status(op, link, deployment)["state"] in ENDED:
        stop(op, link, deployment)
        deployment = records.change(op, deployment.id, lambda d: replace(d, port=None))
    if deployment.port is None:
        port = _free_port(op, link, deployment)
        deployment = records.change(op, deployment.id, lambda d: replace(d, port=d.port or port))
    assert deployment.port is not None
    service = service_of(op, link, runtime, model, deployment.port)
    tree = _send(op, link, model)
    env = job_environment(
        link.session.greeting.root,
        op.project.project_id,
        deployment.id,
        model_id=model.id,
        user_env={**service.env, **_key_env(op, deployment, service)},
        file=f"model {model.id}: serve.env",
    )
    spec = {
        "id": deployment.id,
        "nonce": deployment.nonce,
        "tree": tree,
        "run": _command(service),
        "label": f"serve:{model.id}"[:100],
        "service": {"port": deployment.port},
    }
    link.session.call("start", {"project": op.project.project_id, "job": spec, "env": env})
    return deployment


def _command(service: Service) -> str:
    command = service.command if isinstance(service.command, str) else "exec " + shlex.join(service.command)
    return f"cd {shlex.quote(service.cwd)} && {command}" if service.cwd else command


def _send(op: Operator, link: Link, model: ModelDir) -> str:
    """The model's directory is the service's own copy, as a job has one; nothing where only a record is known."""
    if model.path is None:
        tree = Tree(op.project.root, [])
    else:
        tree = pack.pack(model.path, cache_path=pack.cache_path(op.project.state, model.path)).tree
    return upload(link.session, link.bulk, op.project.project_id, tree).tree


def _free_port(op: Operator, link: Link, deployment: Deployment) -> int:
    """One that nothing on the machine listens on and no other deployment there has: the same each time, if free."""
    taken = {d.port for d in records.all_deployments(op.project) if d.machine_id == deployment.machine_id}
    first = int.from_bytes(hashlib.sha256(deployment.id.encode()).digest()[:4], "big")
    wanted = [PORTS[(first + n) % len(PORTS)] for n in range(PORTS_TRIED)]
    answer = link.session.run_program(_FREE_PORT, {"ports": [p for p in wanted if p not in taken]}, timeout_s=30)
    port = answer.get("port")
    if type(port) is not int or port not in wanted:
        raise RemoteError(f"{link.host}: none of {PORTS_TRIED} ports is free", next_step="gpu doctor")
    return port


# its key --------------------------------------------------------------------------------------------------------------


def key_of(op: Operator, deployment_id: str) -> str | None:
    """What requests to it carry; None when it takes them without."""
    raw = files.read_bytes(op.project.path("deployments") / deployment_id / "key", max_bytes=4096)
    if raw is None:
        return None
    key = raw.decode("ascii", "replace").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise StateError(file=f"deployments/{deployment_id}/key", at="", problem="found no key in it")
    return key


def _key_env(op: Operator, deployment: Deployment, service: Service) -> dict[str, str]:
    """Made once and kept here with mode 0600. On the machine it is in the service's environment, never in argv."""
    if service.key_variable is None:
        return {}
    key = key_of(op, deployment.id)
    if key is None:
        key = secrets.token_urlsafe(32)
        folder = op.project.path("deployments") / deployment.id
        files.make_directory(folder)
        files.commit(folder / "key", key.encode())
    return {service.key_variable: key}


# watching and reaching ------------------------------------------------------------------------------------------------


def status(op: Operator, link: Link, deployment: Deployment) -> dict[str, Any]:
    """What the machine says of the service; `state` is `unknown` where it never was."""
    answer = link.session.call("status", {"project": op.project.project_id, "jobs": [deployment.id]})
    found = [s for s in answer["jobs"] if s["job"] == deployment.id]
    return found[0] if found else {"job": deployment.id, "state": "unknown", "log_bytes": 0, "service": None}


@contextlib.contextmanager
def endpoint(op: Operator, link: Link | None, deployment: Deployment) -> Iterator[Endpoint]:
    """Where to send requests, while the block lasts. link: None for one that is reached by its address."""
    if deployment.port is None:
        if not deployment.endpoint:
            raise UsageError(
                f"{deployment.id}: neither a port nor an endpoint is on record",
                next_step=f"gpu deployment register {deployment.model or 'MODEL'}",
            )
        yield Endpoint(deployment.endpoint, key_of(op, deployment.id))
        return
    if link is None:
        raise UsageError(f"{deployment.id} is reached through its machine", next_step="gpu machine ls")
    with open_tunnel(link.session, deployment.port) as base_url:
        yield Endpoint(base_url, key_of(op, deployment.id))


def wait_healthy(
    op: Operator,
    link: Link,
    runtime: Runtime,
    deployment: Deployment,
    at: Endpoint,
    *,
    ready_within_s: float,
    stall_s: float = STALL_S,
) -> str:
    """Wait until it takes requests; what it said then. DeploymentFailed with the cause when it will not:

    its command ends again and again, it reports a failure, nothing moves for stall_s, or ready_within_s are over.
    """
    began = moved_at = op.clock.monotonic()
    failed_since: float | None = None
    silent_since: float | None = None
    seen: Any = None
    pause_s, longest_s = PAUSE_S
    while True:
        now = op.clock.monotonic()
        try:
            there = status(op, link, deployment)
            silent_since = None
        except RemoteError as exc:
            silent_since = now if silent_since is None else silent_since
            if not exc.retryable or now - silent_since > SILENT_FOR_S:
                raise
            op.clock.sleep(pause_s)
            continue
        _require_alive(op, link, deployment, there)
        health = runtime.health(at)
        if health.state == "ready" and there.get("phase") == "run":
            return health.detail
        failed_since = (failed_since or now) if health.state == "failed" else None
        if failed_since is not None and now - failed_since >= FAILED_FOR_S:
            raise _failed(op, link, deployment, health.detail)
        moves = (there.get("log_bytes"), health.state, health.detail, (there.get("service") or {}).get("restarts"))
        if moves != seen:
            seen, moved_at = moves, now
        if now - moved_at >= stall_s:
            raise _failed(op, link, deployment, f"nothing has moved for {now - moved_at:.0f} s: {health.detail}")
        if now - began >= ready_within_s:
            raise _failed(op, link, deployment, f"not ready within {ready_within_s:g} s: {health.detail}")
        op.clock.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)


def _require_alive(op: Operator, link: Link, deployment: Deployment, there: dict[str, Any]) -> None:
    state, service = there["state"], there.get("service") or {}
    if state == "suspended":
        raise DeploymentFailed(
            deployment=deployment.id, reason=f"the session on {link.host} has ended", next_step="gpu setup"
        )
    if state != "running":
        why = there.get("message") or there.get("reason") or "nobody started it"
        raise _failed(op, link, deployment, f"its service is {state}: {one_line(str(why), limit=300)}")
    restarts, code = service.get("restarts"), service.get("last_exit_code")
    if isinstance(restarts, int) and restarts > RESTARTS_ALLOWED and code is not None:
        raise _failed(op, link, deployment, f"its command ended {restarts} times, the last time with code {code}")


def _failed(op: Operator, link: Link, deployment: Deployment, reason: str) -> DeploymentFailed:
    """With the last lines of its log, which say more than any code."""
    with contextlib.suppress(RemoteError, JobNotFound):
        piece = follow.read_log(link, op.project.project_id, deployment.id, tail_bytes=LOG_TAIL_BYTES)
        said = [one_line(line, limit=300) for line in follow.last_lines(piece.data, 40)]
        said = [line for line in said if line.strip() and not line.startswith("gpu: ")][-LINES_SHOWN:]
        if said:
            reason = f"{reason}; its log ends: {' | '.join(said)}"
    return DeploymentFailed(deployment=deployment.id, reason=reason)


def stop(op: Operator, link: Link, deployment: Deployment) -> None:
    """End its service and take its folder on the machine away. One that is not there is stopped already."""
    asked = {"project": op.project.project_id, "job": deployment.id}
    for _ in range(6):
        if status(op, link, deployment)["state"] == "unknown":
            return
        with contextlib.suppress(JobNotFound):
            if link.session.call("cancel", {**asked, "wait_s": 10, "why": "user"})["state"] in ENDED:
                link.session.call("forget", asked)
                return
    raise DeploymentFailed(
        deployment=deployment.id,
        reason=f"its service on {link.host} does not end",
        next_step=f"gpu deployment destroy {deployment.id}",
    )
