"""vLLM: the OpenAI API, and how it is started. It takes most of the GPU's memory at its start and keeps it."""

from __future__ import annotations

from gpu_skills.errors import ConfigError
from gpu_skills.runtimes.base import Served, Service
from gpu_skills.runtimes.openai import OpenAI
from gpu_skills.runtimes.serving import command_of

GPU_MEMORY_FRACTION = 0.9  # vLLM's own default: what a job on the same GPU gets is the rest
READY_WITHIN_S = 2400.0  # weights are downloaded, loaded, and graphs captured


class Vllm(OpenAI):
    name = "vllm"

    def service(self, served: Served) -> Service:
        """`vllm serve` on loopback. The key is read from VLLM_API_KEY: an argument would show in the process list."""
        model = served.model
        if model.source is None and model.serve.command is None:
            raise ConfigError(file=f"model {model.id}", problem="`source` is missing: vLLM needs to know what to load")
        fraction = GPU_MEMORY_FRACTION if served.gpu_memory_fraction is None else served.gpu_memory_fraction
        if not 0 < fraction <= 1:
            raise ConfigError(
                file=f"model {model.id}", problem=f"a GPU memory fraction of {fraction}; 0 to 1 is possible"
            )
        command = ["vllm", "serve", (model.source or "").removeprefix("hf:"), "--host", "127.0.0.1", "--port", "{port}"]
        command += ["--served-model-name", "{name}", "--gpu-memory-utilization", f"{fraction:g}"]
        command += ["--revision", model.revision] if model.revision else []
        command += ["--tensor-parallel-size", "{gpu_count}"] if served.gpu_count > 1 else []
        cache = f"{served.root.rstrip('/')}/cache/huggingface"
        serve = model.serve
        return Service(
            name=f"vllm-{served.port}",
            command=command_of(served, tuple(command)),
            env={"HF_HOME": cache, "HF_HUB_CACHE": f"{cache}/hub", "VLLM_NO_USAGE_STATS": "1", **serve.env},
            port=served.port,
            health_path=serve.health_path or "/health",
            ready_within_s=serve.ready_within_s or READY_WITHIN_S,
            serves_llm=True,
            cwd=serve.cwd,
            key_variable=serve.key_variable or "VLLM_API_KEY",
        )
