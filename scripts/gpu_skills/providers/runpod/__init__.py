"""RunPod's pods over its REST API v2. `client` speaks the wire; the rest is in domain terms."""

from gpu_skills.providers.runpod.reader import RunpodReader
from gpu_skills.providers.runpod.setup import connect_runpod
from gpu_skills.providers.runpod.writer import RunpodWriter

__all__ = ["RunpodReader", "RunpodWriter", "connect_runpod"]
