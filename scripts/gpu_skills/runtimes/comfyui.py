"""ComfyUI: a workflow is queued once, followed to its end, and everything it left is fetched.

The websocket tells what happens; what is true is the history. A socket that breaks, or none at all, only makes it
slower to notice. Each prompt carries our id of the run, by which it is found before it is ever sent again.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpu_skills.errors import (
    Failed,
    GenerationFailed,
    GenerationInterrupted,
    GenerationLost,
    GenerationTimeout,
    GenerationUnknown,
    GpuError,
    RequestRejected,
    ServiceReply,
    ServiceUnreachable,
    UsageError,
    one_line,
)
from gpu_skills.runtimes import comfy_replies as replies
from gpu_skills.runtimes.base import (
    Endpoint,
    Event,
    Health,
    MachineJob,
    OnEvent,
    Output,
    Proof,
    Request,
    Result,
    Served,
    Service,
    Sink,
    Surroundings,
    ignore,
)
from gpu_skills.runtimes.calls import Calls
from gpu_skills.runtimes.comfy_files import fetch, on_server
from gpu_skills.runtimes.comfy_socket import Socket
from gpu_skills.runtimes.inputs import check
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.runtimes.outputs import look
from gpu_skills.runtimes.serving import command_of
from gpu_skills.runtimes.workflow import fill, propose
from gpu_skills.wire import Unanswered, parse_json

SERVICE = "ComfyUI"
LOOKED_FOR_S = 6.0  # how long an unanswered prompt is looked for in queue and history
POLL_S = 2.0
POLL_OVER_S = 0.1  # the server says that a prompt is over before it writes it into the history
MISSING_FOR_S = 10.0  # how long a prompt may be neither queued nor in the history: the server writes it late
SILENT_FOR_S = 180.0  # how long a server may not answer in the middle of a run: it may be started again
HISTORY_ITEMS = 1000
MAX_HISTORY_BYTES = 96 * 1024 * 1024


@dataclass
class ComfyUI:
    around: Surroundings

    name = "comfyui"

    def service(self, served: Served) -> Service:
        """`python3 main.py` in ROOT/ComfyUI, on loopback, unless the manifest says how."""
        default = ("python3", "main.py", "--listen", "127.0.0.1", "--port", "{port}", "--disable-auto-launch")
        serve = served.model.serve
        return Service(
            name=f"comfyui-{served.port}",
            command=command_of(served, default),
            env=dict(serve.env),
            port=served.port,
            health_path=serve.health_path or "/system_stats",
            ready_within_s=serve.ready_within_s or 600.0,
            cwd=serve.cwd or f"{served.root.rstrip('/')}/ComfyUI",
            key_variable=serve.key_variable,
        )

    def job(self, request: Request) -> MachineJob | None:
        return None

    def health(self, endpoint: Endpoint) -> Health:
        calls = self._calls(endpoint)
        try:
            answer = calls.read("system_stats", "/system_stats", attempts=1, timeout_s=15)
        except ServiceUnreachable as exc:
            return Health("loading", exc.message)
        except GpuError as exc:
            return Health("failed", exc.message)
        try:
            document = calls.mapping("system_stats", answer)
        except GpuError as exc:
            return Health("failed", exc.message)
        if not isinstance(document.get("system"), Mapping):
            return Health("failed", "something answers there that is not ComfyUI")
        return Health("ready", f"ComfyUI {_text(document['system'].get('comfyui_version'))} answers")

    def test_generation(self, endpoint: Endpoint, model: ModelManifest, sink: Sink) -> Proof:
        """The manifest's own workflow, with its outputs looked at. Nodes that are not there are quoted, and those that
        could not be loaded, with the module they lack. Without a seed of its own it draws a new one, past any cache.
        """
        if model.test is None or model.test.workflow is None:
            return Proof(False, "the manifest has no `test.workflow`: nothing can be proven")
        try:
            manifest = propose(model.test.workflow)
            inputs = dict(model.test.inputs)
            if "seed" in manifest.inputs:
                inputs.setdefault("seed", secrets.randbelow(2**32))
            request = Request(
                f"test-{model.id}-{secrets.token_hex(6)}",
                model,
                inputs,
                model.test.workflow,
                manifest,
                timeout_s=model.test.timeout_s,
                is_new=True,
            )
            result = self.run(endpoint, request, sink)
        except GpuError as exc:
            return self._unproven(endpoint, exc, model.test.workflow)
        files = [output for output in result.outputs if not output.mime.startswith("text/")] or list(result.outputs)
        if not files:
            return Proof(False, "it ended well and left nothing")
        wanted = next(iter(manifest.outputs.values())).kind
        for output in files:
            kind = wanted if wanted in ("image", "audio", "video") and len(manifest.outputs) == 1 else ""
            looked = look(output.path, "" if kind == "video" else kind)
            if looked.problem:
                return Proof(False, f"{output.name}: {looked.problem}", _evidence(output))
        return Proof(
            True, f"{len(files)} outputs; {files[0].name}: {files[0].mime}, {files[0].bytes} bytes", _evidence(files[0])
        )

    def run(self, endpoint: Endpoint, request: Request, sink: Sink, on_event: OnEvent = ignore) -> Result:
        """Inputs are checked and uploaded, the prompt is found or queued, followed, and its outputs fetched.

        Raises InputInvalid, RequestRejected, GenerationFailed, GenerationInterrupted, GenerationLost,
        GenerationTimeout, GenerationUnknown, ServiceUnreachable, ServiceReply, OutputTooLarge.
        """
        if request.workflow is None:
            raise UsageError("a run on ComfyUI needs a workflow", next_step="name one that workflows.json has")
        manifest = request.manifest or propose(request.workflow)
        check(manifest.inputs, request.inputs, what=manifest.id or "the workflow")
        calls = self._calls(endpoint)
        began = self.around.clock.monotonic()
        prompt_id = self._find(calls, request.id, is_new=request.is_new)
        with Socket(calls, client_id_of(request.id), self.around.clock) as socket:
            if prompt_id is None:
                inputs = {name: on_server(calls, value) for name, value in request.inputs.items()}
                prompt_id = self._queue(calls, request.id, fill(request.workflow, manifest, inputs))
                on_event(Event("queued", {"prompt_id": prompt_id}))
            else:
                on_event(Event("found", {"prompt_id": prompt_id}))
            end = self._follow(calls, socket, prompt_id, request, on_event)
        if end.state == "interrupted":
            raise GenerationInterrupted(service=SERVICE, what=f"run {request.id}", prompt_id=prompt_id)
        if end.state == "failed":
            raise _failed(end)
        outputs = fetch(calls, end.outputs, sink, on_event, self.around.clock)
        seconds = round(self.around.clock.monotonic() - began, 3)
        return Result(tuple(outputs), {"prompt_id": prompt_id, "duration_s": seconds, **_counts(end)})

    def interrupt(self, endpoint: Endpoint, run_id: str) -> str:
        """Takes it out of the queue while it waits; interrupts only while it is the one that runs."""
        calls = self._calls(endpoint)
        running, pending = self._queues(calls)
        if waiting := replies.prompt_with_mark(pending, run_id):
            self._order(calls, "queue delete", "/queue", {"delete": [waiting]})
            if not replies.prompt_with_mark(self._queues(calls)[0], run_id):
                return "deleted"
            running = self._queues(calls)[0]
        if prompt_id := replies.prompt_with_mark(running, run_id):
            # Newer servers interrupt this prompt only; older ones what runs now, which it was a moment ago.
            self._order(calls, "interrupt", "/interrupt", {"prompt_id": prompt_id})
            return "interrupted"
        return "not_found"

    def facts(self, endpoint: Endpoint) -> dict[str, Any]:
        calls = self._calls(endpoint)
        stats = calls.mapping("system_stats", calls.read("system_stats", "/system_stats"))
        running, pending = self._queues(calls)
        system = stats.get("system") if isinstance(stats.get("system"), Mapping) else {}
        devices = stats.get("devices") if isinstance(stats.get("devices"), list) else []
        return {
            "queue_running": len(running),
            "queue_pending": len(pending),
            "version": _text(system.get("comfyui_version")),
            "pytorch": _text(system.get("pytorch_version")),
            "devices": [
                {"name": _text(device.get("name")), "type": _text(device.get("type"))}
                | {key: device[key] for key in ("vram_total", "vram_free") if isinstance(device.get(key), int)}
                for device in devices[:64]
                if isinstance(device, Mapping)
            ],
            "import_failures": [vars(failure) for failure in self._import_failures(endpoint)],
        }

    def missing_nodes(self, endpoint: Endpoint, workflow: Mapping[str, Any]) -> list[str]:
        """The kinds of nodes of a workflow that this server does not have, all of them and before anything is sent."""
        calls = self._calls(endpoint)
        known = calls.mapping("object_info", calls.read("object_info", "/object_info"))
        return [kind for kind in propose(workflow).class_types if kind not in known]

    def _unproven(self, endpoint: Endpoint, exc: GpuError, workflow: Mapping[str, Any]) -> Proof:
        """A failed test generation, with what the server itself says about nodes that it does not have."""
        failures = self._import_failures(endpoint)
        try:
            missing = self.missing_nodes(endpoint, workflow)
        except GpuError:
            missing = []
        said = [f"custom nodes not loaded: {'; '.join(str(failure) for failure in failures[:5])}"] if failures else []
        said += [f"nodes that are not there: {', '.join(missing[:10])}"] if missing else []
        found = {"import_failures": [vars(failure) for failure in failures], "missing_nodes": missing}
        return Proof(
            False, one_line("; ".join([*said, exc.message]), limit=1200), {k: v for k, v in found.items() if v}
        )

    # one prompt -------------------------------------------------------------------------------------------------------

    def _find(self, calls: Calls, run_id: str, *, is_new: bool = False) -> str | None:
        """The prompt of this run, wherever it stands: running, waiting or done.

        Servers since 2025 take the id of a prompt from us, older ones make their own: those are searched for the mark.
        """
        running, pending = self._queues(calls)
        if found := replies.prompt_with_mark([*running, *pending], run_id):
            return found
        ours = prompt_id_of(run_id)
        if replies.history_with_mark(calls.mapping("history", calls.read("history", f"/history/{ours}")), run_id):
            return ours
        return None if is_new else self._in_history(calls, run_id)

    def _in_history(self, calls: Calls, run_id: str) -> str | None:
        """Histories hold whole workflows: fewer of the newest are asked for when all are too much to read."""
        items = HISTORY_ITEMS
        while True:
            try:
                answer = calls.read("history", "/history", query={"max_items": str(items)}, max_bytes=MAX_HISTORY_BYTES)
                return replies.history_with_mark(calls.mapping("history", answer), run_id)
            except ServiceReply as exc:
                if items < 10 or not exc.details.get("too_large"):
                    raise
            items //= 4

    def _queues(self, calls: Calls) -> tuple[list[Any], list[Any]]:
        document = calls.mapping("queue", calls.read("queue", "/queue"))
        try:
            return replies.queued(document)
        except ValueError as exc:
            raise calls.unexpected("queue", str(exc)) from exc

    def _queue(self, calls: Calls, run_id: str, workflow: dict[str, Any]) -> str:
        """Send the prompt, once. Without an answer it is looked for; what cannot be found is not sent again."""
        body = {
            "prompt": workflow,
            "prompt_id": prompt_id_of(run_id),
            "client_id": client_id_of(run_id),
            "extra_data": {replies.RUN_MARK: run_id},
        }
        try:
            answer = calls.write("prompt", "/prompt", body)
        except Unanswered as exc:
            looks = int(LOOKED_FOR_S / POLL_S)
            for _ in range(looks):
                self.around.clock.sleep(POLL_S)
                try:
                    if found := self._find(calls, run_id):
                        return found
                except ServiceUnreachable:
                    continue
            raise GenerationUnknown(what=f"run {run_id}", service=SERVICE, reason=exc.reason) from exc
        if answer.status == 400:
            raise self._rejected(answer.body)
        document = calls.mapping("prompt", answer)
        prompt_id = document.get("prompt_id")
        if not isinstance(prompt_id, str) or not prompt_id.isprintable() or not 0 < len(prompt_id) <= 200:
            raise calls.unexpected("prompt", "no prompt_id")
        return prompt_id

    def _rejected(self, body: bytes) -> RequestRejected:
        try:
            problems = replies.problems_of(parse_json(body))
        except ValueError:
            problems = []
        said = [replies.problem_text(problem) for problem in problems]
        more = f"; and {len(said) - 3} more" if len(said) > 3 else ""
        reason = "; ".join(said[:3]) + more or "HTTP 400 without a reason"
        return RequestRejected(service=SERVICE, what="the workflow", reason=reason, problems=problems)

    def _follow(
        self, calls: Calls, socket: Socket, prompt_id: str, request: Request, on_event: OnEvent
    ) -> replies.Ended:
        """Until its entry is in the history. The queue is asked first: what ends between the two questions is then in
        the history, so that a prompt which is in neither is really gone."""
        clock = self.around.clock
        began = seen = answered = clock.monotonic()
        is_over, ahead = True, 0  # it may have ended before anybody looked
        while True:
            is_over = socket.wait(prompt_id, POLL_OVER_S if is_over else POLL_S, on_event)
            try:
                running, pending = self._queues(calls)
                end = self._history(calls, prompt_id)
                answered = clock.monotonic()
                if end is not None:
                    return end
                if replies.has_prompt([*running, *pending], prompt_id):
                    seen = answered
                if replies.has_prompt(pending, prompt_id) and ahead != len(running) + len(pending) - 1:
                    ahead = len(running) + len(pending) - 1
                    on_event(Event("waiting", {"ahead": ahead}))
            except ServiceUnreachable:
                if clock.monotonic() - answered > SILENT_FOR_S:
                    raise
                seen = clock.monotonic()
            if clock.monotonic() - seen > MISSING_FOR_S:
                raise GenerationLost(
                    service=SERVICE,
                    what=f"run {request.id}",
                    reason="neither queued nor in its history",
                    prompt_id=prompt_id,
                )
            if clock.monotonic() - began > request.timeout_s:
                raise GenerationTimeout(
                    service=SERVICE, what=f"run {request.id}", timeout_s=round(request.timeout_s), prompt_id=prompt_id
                )

    def _history(self, calls: Calls, prompt_id: str) -> replies.Ended | None:
        answer = calls.read("history", f"/history/{quote(prompt_id, safe='')}")
        return replies.ended(calls.mapping("history", answer).get(prompt_id))

    # beside -----------------------------------------------------------------------------------------------------------

    def _calls(self, endpoint: Endpoint) -> Calls:
        return Calls(SERVICE, endpoint, self.around)

    def _order(self, calls: Calls, what: str, path: str, body: Any) -> None:
        try:
            answer = calls.write(what, path, body)
        except Unanswered as exc:
            raise ServiceUnreachable(service=SERVICE, reason=f"no answer to {what}: {exc.reason}") from exc
        if answer.status != 200:
            raise calls.unexpected(what, f"HTTP {answer.status}: {answer.text}")

    def _import_failures(self, endpoint: Endpoint) -> list[replies.ImportFailure]:
        """From the server's own log, where it shows one; older servers do not, and their log is on the machine."""
        for path in ("/internal/logs/raw", "/internal/logs"):
            try:
                answer = self._calls(endpoint).read("logs", path, attempts=1, timeout_s=15)
                if answer.status == 200:
                    return replies.import_failures(replies.log_text(parse_json(answer.body)))
            except (GpuError, ValueError):
                continue
        return []


def client_id_of(run_id: str) -> str:
    return hashlib.sha256(f"gpu-skills run\0{run_id}".encode()).hexdigest()[:32]


def prompt_id_of(run_id: str) -> str:
    return str(uuid.UUID(hex=hashlib.sha256(f"gpu-skills prompt\0{run_id}".encode()).hexdigest()[:32]))


def _failed(end: replies.Ended) -> Failed:
    error = end.error
    node, class_type = _text(error.get("node_id")), _text(error.get("node_type"))
    said = f"{_text(error.get('exception_type'))}: {_text(error.get('exception_message'))}"
    traceback = error.get("traceback")
    lines = [one_line(str(line), limit=500) for line in traceback[-20:]] if isinstance(traceback, list) else []
    return GenerationFailed(
        service=SERVICE,
        what=f"node {node} ({class_type})" if error else "the workflow",
        reason=one_line(said.strip(": "), limit=400) if error else "no reason is in its history",
        node=node,
        node_class=class_type,
        traceback=lines,
    )


def _counts(end: replies.Ended) -> dict[str, Any]:
    cached = next((data.get("nodes") for name, data in end.messages if name == "execution_cached"), None)
    return {"nodes_cached": len(cached)} if isinstance(cached, list) else {}


def _evidence(output: Output) -> dict[str, Any]:
    return {"bytes": output.bytes, "sha256": output.sha256, "kind": output.mime}


def _text(value: Any) -> str:
    return one_line(str(value), limit=400) if isinstance(value, str | int) else "?"
