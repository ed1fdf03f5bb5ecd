"""Vast's answers by detour: logs, commands and copies run at the host, and the result is fetched from a URL.

The URL needs no key, answers 404 at first, and is the same until the sandbox ends.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from gpu_skills.sandbox.containers import SYSTEM_PATH
from gpu_skills.sandbox.face import Reply, Request
from gpu_skills.sandbox.vast_instances import require
from gpu_skills.sandbox.vast_wire import body_of, error, instance_id, number
from gpu_skills.sandbox.world import Instance, World

PATH = "/api/v0/sandbox-results/{token}"
ALLOWED_COMMANDS = ("ls", "rm", "du")
MAX_COMMAND = 512
COMMAND_TIMEOUT_S = 20


class Results:
    """Texts to be fetched. The first fetch comes too early, as it does at the vendor's object storage."""

    def __init__(self, world: World):
        self.world = world
        self._texts: dict[str, str | None] = {}
        self._asked: set[str] = set()

    def new(self, text: str | None = None) -> tuple[str, str]:
        """token and absolute URL of a result; its text may come later through `put`."""
        token = secrets.token_hex(16)
        self._texts[token] = text
        return token, self.world.url + PATH.format(token=token)

    def put(self, token: str, text: str) -> None:
        self._texts[token] = text

    def fetch(self, request: Request) -> Reply:
        token = request.params["token"]
        text = self._texts.get(token)
        if text is None or token not in self._asked:
            self._asked.add(token)
            return Reply(404, b"<Error><Code>NoSuchKey</Code></Error>", content_type="application/xml")
        return Reply(200, text.encode(), content_type="binary/octet-stream")


def request_logs(world: World, results: Results, request: Request) -> Reply:
    body = body_of(request)
    instance = require(world, request)
    if str(body.get("daemon_logs")).lower() == "true":
        text = f"instance {instance.id} on machine {instance.host.machine_id}: {instance.phase}\n"
    elif instance.container is None:
        return Reply(200, {"success": False, "msg": "No logs yet: the container has not been created."})
    else:
        text = instance.container.read_log()
    if isinstance(pattern := body.get("filter"), str) and pattern:
        text = "".join(line for line in text.splitlines(keepends=True) if pattern in line)
    tail = number(body.get("tail"))
    if tail is not None and tail >= 0:
        lines = text.splitlines(keepends=True)
        text = "".join(lines[len(lines) - min(int(tail), len(lines)) :])
    _, url = results.new(text)
    return Reply(200, {"success": True, "result_url": url, "msg": "Logs are being uploaded"})


def execute(world: World, results: Results, request: Request) -> Reply:
    """ls, rm and du, really run in the container's disk and nowhere else."""
    body = body_of(request, status=483, code="invalid_args")
    instance = require(world, request)
    words = _command(body.get("command"))
    if instance.container is None:
        raise error(400, "invalid_container", "The container is not there.")
    token, url = results.new()
    root, home = instance.container.root, instance.container.home
    world.room.submit(instance.id, lambda: results.put(token, _run(words, root, home)))
    return Reply(
        200,
        {
            "success": True,
            "writeable_path": str(root),
            "result_url": url,
            "msg": "Command is executing, wait a few seconds and then view the result_url",
        },
    )


def _command(text: Any) -> list[str]:
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_COMMAND or "\0" in text:
        raise error(400, "invalid_args", "Invalid command given.")
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words or words[0] not in ALLOWED_COMMANDS:
        raise error(400, "invalid_args", "Invalid command given.")
    return words


def _run(words: list[str], root: Path, home: Path) -> str:
    program, *rest = words
    arguments = []
    for word in rest:
        if word.startswith("--"):
            return f"{program}: option {word} is not allowed\n"
        arguments.append(word if word.startswith("-") else _inside(word, root, home))
    if None in arguments or not home.is_dir():
        return f"{program}: no such file or directory\n"
    if all(argument.startswith("-") for argument in arguments if argument):
        arguments.append(".")
    if program == "rm" and any(Path(home, str(argument)).resolve() in (root, home) for argument in arguments):
        return "rm: refusing to remove this directory\n"
    try:
        done = subprocess.run(
            [program, *[str(argument) for argument in arguments]],
            cwd=home,
            env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{program}: timed out\n"
    return done.stdout.decode("utf-8", "replace")


def _inside(word: str, root: Path, home: Path) -> str | None:
    """An absolute path means one below the container's root; None for one that leads out of it."""
    path = root / word.lstrip("/") if word.startswith("/") else home / word
    resolved, top = path.resolve(), root.resolve()
    return str(path) if resolved == top or top in resolved.parents else None


# copies -------------------------------------------------------------------------------------------------------------


def copy_direct(world: World, request: Request) -> Reply:
    """Between two instances, really; from or to the caller's machine there is no rsync module to talk to here."""
    body = body_of(request)
    ends = [_end(world, request, body, side) for side in ("src", "dst")]
    if None in ends:
        return Reply(200, {"success": False, "msg": "The sandbox has no rsync module; use rsync or scp over ssh."})
    source, target = ends
    assert source is not None and target is not None
    if source[1] is None or target[1] is None:
        raise error(400, "invalid_args", "Invalid path.")
    world.room.submit(target[0].id, lambda: _copy(Path(str(source[1])), Path(str(target[1]))))
    return Reply(200, {"success": True, "msg": "Remote to Remote copy initiated - check instance status bar"})


def _end(world: World, request: Request, body: dict[str, Any], side: str) -> tuple[Instance, str | None] | None:
    name = str(body.get(f"{side}_id") or "").removeprefix("C.")
    if instance_id(name) is None:
        return None
    instance = require(world, request, name)
    if instance.container is None:
        raise error(400, "invalid_container", "The container is not there.")
    root, home = instance.container.root, instance.container.home
    path = str(body.get(f"{side}_path") or "")
    return instance, _inside(path, root, home) if "\0" not in path else None


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def cancel_copy(world: World, request: Request) -> Reply:
    body_of(request)
    return Reply(200, {"success": True})
