"""Vast.ai: a market of machines of many hosts. `client` speaks the wire; the rest is in domain terms."""

from gpu_skills.providers.vast.reader import VastReader
from gpu_skills.providers.vast.setup import connect_vast
from gpu_skills.providers.vast.writer import VastWriter

__all__ = ["VastReader", "VastWriter", "connect_vast"]
