"""A process of the user's own that reads a job file: each run is a job on the machine, and nothing is served.

The process reads the file that `REQUEST_FILE` names in its environment, and leaves what it makes in `GPU_OUTPUT_DIR`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from gpu_skills.errors import ConfigError, NotServed
from gpu_skills.runtimes.base import (
    Endpoint,
    Health,
    MachineJob,
    OnEvent,
    Proof,
    Request,
    Result,
    Sink,
    ignore,
)
from gpu_skills.runtimes.inputs import check
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.runtimes.none import Nothing
from gpu_skills.runtimes.outputs import safe_name

REQUEST_FILE = "gpu-request.json"
INPUTS_FOLDER = "gpu-inputs"
MAX_FILE_BYTES = 200 * 1000**2  # a run's input; what all runs need lies on the machine


class Native(Nothing):
    name = "native"

    def job(self, request: Request) -> MachineJob:
        """The job file, the inputs beside it, and the command. InputInvalid, ConfigError.

        The file: {"id", "model", "version", "inputs"}; a file among the inputs is a path below the job's directory.
        """
        model = request.model
        command = model.serve.command
        if command is None:
            raise ConfigError(file=f"model {model.id}", problem="`serve.command` is missing: nothing says what to run")
        values = check(model.inputs, request.inputs, what=model.id)
        files: dict[str, bytes] = {}
        for name, value in values.items():
            if isinstance(value, Path):
                if value.stat().st_size > MAX_FILE_BYTES:
                    raise ConfigError(
                        file=f"input {name}", problem=f"{value.name} is larger than {MAX_FILE_BYTES} bytes"
                    )
                path = f"{INPUTS_FOLDER}/{safe_name(name)}-{safe_name(value.name)}"
                files[path] = value.read_bytes()
                values[name] = path
        document = {"id": request.id, "model": model.id, "version": model.version, "inputs": values}
        files[REQUEST_FILE] = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1).encode()
        line = command if isinstance(command, str) else shlex.join(command)
        line = " ".join([line, *(shlex.quote(part) for part in model.serve.args)])
        return MachineJob(files, line, {**model.serve.env, "REQUEST_FILE": REQUEST_FILE})

    def health(self, endpoint: Endpoint) -> Health:
        return Health("ready", "nothing is served: each run is a job")

    def test_generation(self, endpoint: Endpoint, model: ModelManifest, sink: Sink) -> Proof:
        raise NotServed(runtime=self.name, reason="is proven by a job: run its `test.inputs` as one")

    def run(self, endpoint: Endpoint, request: Request, sink: Sink, on_event: OnEvent = ignore) -> Result:
        raise NotServed(runtime=self.name, reason="serves nothing: its runs are jobs on the machine")
