"""jq programs over our records, in a child that has nothing else: no environment, no files, little memory and time.

In the caller's own process the library would give a program the caller's environment (`env`), and through it secrets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from gpu_skills.errors import MissingProgram, UsageError

MEMORY_BYTES = 1 << 30
MAX_RESULT_BYTES = 16 << 20
MAX_INPUT_BYTES = 64 << 20  # more would neither be read in 5 s nor fit into the child's memory

_CHILD = """
import json, os, resource, sys
os.environ.clear()  # Python itself sets LC_CTYPE
sys.path.append(sys.argv[1])
import jq
request = json.loads(sys.stdin.buffer.readline())
text = sys.stdin.buffer.read().decode()
for what, limit in ((resource.RLIMIT_AS, request["memory"]), (resource.RLIMIT_CPU, request["cpu"]),
                    (resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_CORE, 0)):
    try:
        resource.setrlimit(what, (limit, limit))
    except (ValueError, OSError):
        pass
try:
    for result in jq.compile(request["program"]).input_text(text):
        line = json.dumps(result).encode() + b"\\n"
        request["left"] -= len(line)
        if request["left"] < 0:
            sys.exit(4)
        sys.stdout.buffer.write(line)
except ValueError as exc:
    sys.stderr.write(str(exc)[:2000])
    sys.exit(2)
except MemoryError:
    sys.exit(3)
"""


def run(program: str, value: Any, *, timeout_s: float = 5.0) -> list[Any]:
    """All results of a jq program on one value. UsageError says what is wrong with it or which limit it met."""
    found = importlib.util.find_spec("jq")
    if found is None or not found.origin:
        raise MissingProgram(program="the Python package jq", next_step="install gpu-skills again")
    request = {"program": program, "memory": MEMORY_BYTES, "cpu": int(timeout_s) + 1, "left": MAX_RESULT_BYTES}
    text = json.dumps(request) + "\n" + json.dumps(value)
    command = [sys.executable, "-I", "-c", _CHILD, os.path.dirname(found.origin)]
    try:
        # -I: no PYTHON* variable, no user site, no current directory on the path.
        done = subprocess.run(command, input=text.encode(), capture_output=True, env={}, cwd="/", timeout=timeout_s)
    except subprocess.TimeoutExpired as exc:
        raise _stopped(f"took longer than {timeout_s:g} s") from exc
    if done.returncode == 2:
        raise UsageError(f"jq: {done.stderr.decode('utf-8', 'replace').strip()}", next_step="correct the program")
    if done.returncode == 4:
        raise _stopped("gave more than 16 MB of results")
    if done.returncode != 0:
        raise _stopped("took too much memory or time")
    # A result is what the program made, not a record: 1e300 comes as its 301 digits.
    return [json.loads(line, parse_int=_number) for line in done.stdout.splitlines()]


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < 30 else float(digits)


def _stopped(reason: str) -> UsageError:
    return UsageError(f"the jq program {reason} and was stopped", next_step="ask for less: select first, then limit")
