"""What serves a model on a machine, behind one interface: started how, healthy when, proven by what, run and stopped.

A runtime reaches its service over HTTP at an `Endpoint` and starts nothing itself: `service` describes what the
machine's supervisor starts, and `job` what is run there instead where nothing is served. All that a service answers is
foreign: bounded in size and depth, its names never paths, its addresses never followed off its own origin.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gpu_skills.clock import Clock, SystemClock
from gpu_skills.errors import UsageError
from gpu_skills.wire import Wire

if TYPE_CHECKING:
    from gpu_skills.runtimes.manifest import ModelManifest
    from gpu_skills.runtimes.workflow import WorkflowManifest

RUN_TIMEOUT_S = 3600.0


# where and how it is served -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """Where a service takes requests: the loopback end of a tunnel, or a plain address. The key is in no repr."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Served:
    """What a service is started with. root: the folder on the machine that survives a stop.

    gpu_memory_fraction: what one service may take of each GPU; None leaves it to the engine.
    """

    model: ModelManifest
    port: int
    root: str
    gpu_memory_fraction: float | None = None
    gpu_count: int = 1


@dataclass(frozen=True)
class Service:
    """How the machine's supervisor starts it. A command in one text is for the machine's shell.

    key_variable: the variable in which the service expects its key. The key itself is never in here, nor in argv.
    """

    name: str
    command: tuple[str, ...] | str
    env: Mapping[str, str]
    port: int
    health_path: str
    ready_within_s: float
    serves_llm: bool = False
    cwd: str | None = None
    key_variable: str | None = None


@dataclass(frozen=True)
class MachineJob:
    """A run that is a job on the machine: these files in its directory, and this command for its shell."""

    files: Mapping[str, bytes]
    command: str
    env: Mapping[str, str] = field(default_factory=dict)


# what is asked and what comes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One run. id: ours and the same each time it is given again, so that a service is not asked twice for one thing.

    A run that ended keeps its end: to try again is a new id. is_new: it was certainly never given before, which spares
    a look through all that the service has done. inputs: by name; a `Path` is a file to be sent. operation: for
    `openai` chat, completion, image or embedding.
    """

    id: str
    model: ModelManifest
    inputs: Mapping[str, Any] = field(default_factory=dict)
    workflow: Mapping[str, Any] | None = None
    manifest: WorkflowManifest | None = None
    operation: str | None = None
    timeout_s: float = RUN_TIMEOUT_S
    is_new: bool = False


@dataclass(frozen=True)
class Event:
    """Something that happened on the way: queued, started, cached, executing, progress, executed, text, note."""

    name: str
    data: Mapping[str, Any] = field(default_factory=dict)


OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class Output:
    """A file of a run, where it lies here. mime: by what it contains, not by what it is called."""

    name: str
    path: Path
    bytes: int
    sha256: str
    mime: str


@dataclass(frozen=True)
class Result:
    """What a run left. facts: tokens, seconds, node counts, the service's own id of the run; never a guess."""

    outputs: tuple[Output, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Health:
    """loading: not yet, and nothing is wrong so far. failed: waiting longer does not help; detail says why."""

    state: Literal["ready", "loading", "failed"]
    detail: str


@dataclass(frozen=True)
class Proof:
    """What a test generation showed. evidence: {bytes, sha256, kind} of the result that was looked at."""

    succeeded: bool
    detail: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


class Taker(Protocol):
    """One output on its way in. `done` makes it whole; without it nothing of it stays."""

    def write(self, data: bytes) -> None: ...
    def done(self) -> Output: ...
    def discard(self) -> None: ...


class Sink(Protocol):
    """Where the outputs of a run go. The name is the service's word for it; the sink makes a safe one of it."""

    def take(self, name: str) -> Taker: ...


def ignore(event: Event) -> None:
    """For a caller that wants no events."""


# the interface --------------------------------------------------------------------------------------------------------


class Runtime(Protocol):
    """One engine. What starts, waits and books stands above.

    run: sends a request once. GenerationUnknown when it may have been taken in and cannot be found; giving the same
    request again is then safe where the service can be asked for it.
    """

    name: str

    def service(self, served: Served) -> Service | None:
        """What to start on the machine; None where nothing is served. Pure."""
        ...

    def job(self, request: Request) -> MachineJob | None:
        """The run as a job on the machine; None where a service does it. Pure."""
        ...

    def health(self, endpoint: Endpoint) -> Health: ...

    def test_generation(self, endpoint: Endpoint, model: ModelManifest, sink: Sink) -> Proof:
        """A real request whose result is looked at. Never raises for what the service does wrong: that is the proof."""
        ...

    def run(self, endpoint: Endpoint, request: Request, sink: Sink, on_event: OnEvent = ignore) -> Result: ...

    def interrupt(self, endpoint: Endpoint, run_id: str) -> str:
        """End the run of that request: `interrupted`, `deleted` (it was waiting), `not_found`, `not_supported`."""
        ...

    def facts(self, endpoint: Endpoint) -> dict[str, Any]:
        """What the service says of itself: queue, system, import errors, models. Raises when it does not answer."""
        ...


@dataclass
class Surroundings:
    """What every runtime gets: time, the wire (None: the real one) and the user's environment (for a proxy)."""

    clock: Clock = field(default_factory=SystemClock)
    wire: Wire | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


ENGINES = {
    "comfyui": "ComfyUI",
    "openai": "OpenAI",
    "vllm": "Vllm",
    "http": "DescribedHttp",
    "native": "Native",
    "none": "Nothing",
}


def runtime_of(name: str, surroundings: Surroundings | None = None) -> Runtime:
    """The runtime that `runtime.engine` or a manifest names; UsageError for one that there is not."""
    if name not in ENGINES:
        raise UsageError(f"no runtime {name!r}; there are {', '.join(ENGINES)}", next_step="correct `runtime`")
    engine = getattr(import_module(f"gpu_skills.runtimes.{name}"), ENGINES[name])
    made: Runtime = engine(surroundings or Surroundings())
    return made
