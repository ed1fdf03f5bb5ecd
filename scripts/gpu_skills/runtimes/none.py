"""No runtime: jobs only. The machine serves nothing and has nothing to prove."""

from __future__ import annotations

from gpu_skills.errors import NotServed
from gpu_skills.runtimes.base import (
    Endpoint,
    Health,
    MachineJob,
    OnEvent,
    Proof,
    Request,
    Result,
    Served,
    Service,
    Sink,
    Surroundings,
    ignore,
)
from gpu_skills.runtimes.manifest import ModelManifest


class Nothing:
    name = "none"

    def __init__(self, around: Surroundings):
        self.around = around

    def service(self, served: Served) -> Service | None:
        return None

    def job(self, request: Request) -> MachineJob | None:
        return None

    def health(self, endpoint: Endpoint) -> Health:
        return Health("ready", "nothing is served")

    def test_generation(self, endpoint: Endpoint, model: ModelManifest, sink: Sink) -> Proof:
        raise NotServed(runtime=self.name, reason="has nothing to prove")

    def run(self, endpoint: Endpoint, request: Request, sink: Sink, on_event: OnEvent = ignore) -> Result:
        raise NotServed(runtime=self.name, reason="serves nothing: use gpu job run")

    def interrupt(self, endpoint: Endpoint, run_id: str) -> str:
        return "not_supported"

    def facts(self, endpoint: Endpoint) -> dict[str, object]:
        return {}
