"""The command of a service, from the engine's own or the manifest's, with its places filled in. Pure."""

from __future__ import annotations

import re
import shlex

from gpu_skills.errors import ConfigError
from gpu_skills.runtimes.base import Served

_PLACE = re.compile(r"\{(\w+)\}")


def command_of(served: Served, default: tuple[str, ...] | None) -> tuple[str, ...] | str:
    """The manifest's command or the default, then the manifest's args. ConfigError when there is none, or a place in
    it that nothing fills."""
    serve = served.model.serve
    command = serve.command or default
    if command is None:
        raise ConfigError(
            file=f"model {served.model.id}", problem="`serve.command` is missing: nothing says how to start it"
        )
    places = {
        "port": str(served.port),
        "root": served.root,
        "model": served.model.source or served.model.id,
        "name": served.model.name_at_service,
        "gpu_count": str(served.gpu_count),
        "gpu_memory_fraction": "" if served.gpu_memory_fraction is None else f"{served.gpu_memory_fraction:g}",
    }

    def filled(text: str, *, quoted: bool = False) -> str:
        def value(match: re.Match[str]) -> str:
            if match[1] not in places:
                allowed = ", ".join(f"{{{name}}}" for name in places)
                raise ConfigError(
                    file=f"model {served.model.id}", problem=f"`serve.command` has {match[0]}; there are {allowed}"
                )
            return shlex.quote(places[match[1]]) if quoted else places[match[1]]

        return _PLACE.sub(value, text)

    if isinstance(command, str):
        return " ".join([filled(command, quoted=True), *(shlex.quote(filled(part)) for part in serve.args)])
    return tuple(filled(part) for part in (*command, *serve.args))
