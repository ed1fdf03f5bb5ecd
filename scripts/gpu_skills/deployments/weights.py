"""The files that a manifest names, as they lie on the machine: there, whole, and what they should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpu_skills.deployments.model_dir import ModelDir
from gpu_skills.deployments.serving import workspace
from gpu_skills.errors import JobError, ProtocolError, one_line
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.units import format_bytes

FILES_AT_ONCE = 100
LOOK_S = 60.0
SLOWEST_HASH_BYTES_S = 50_000_000
_SHOWN = 20

# Sizes come from the descriptor that is hashed. A hash of many GB takes minutes: a line every few seconds keeps the
# connection from looking dead.
_LOOK = r"""
import hashlib, json, os, stat, sys, time
asked = json.loads(sys.argv[1])
found = []
for path, with_hash in asked["files"]:
    try:
        with open(os.path.join(asked["root"], path), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                found.append([None, None])
                continue
            digest = hashlib.sha256() if with_hash else None
            told = time.monotonic()
            while digest is not None:
                data = file.read(1 << 22)
                if not data:
                    break
                digest.update(data)
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    print(".", flush=True)
            found.append([state.st_size, digest.hexdigest() if digest is not None else None])
    except (OSError, ValueError):
        found.append([None, None])
print("GPU-SKILLS-ANSWER " + json.dumps({"files": found}))
"""


class WeightsWrong(JobError):
    code = "weights_wrong"
    template = "{model} on {host}: {problems}"
    next_step = "gpu model setup {model}"


@dataclass(frozen=True)
class Weight:
    """bytes None: there is no such file there. sha256: only where it was asked for. problem None: as it should be."""

    path: str
    bytes: int | None
    sha256: str | None
    problem: str | None


def require(op: Operator, link: Link, model: ModelDir, *, with_hashes: bool = True) -> list[Weight]:
    """The manifest's files as they are there. WeightsWrong names each that is missing, empty, cut or another."""
    found = look(op, link, model, with_hashes=with_hashes)
    if wrong := [f"{weight.path} {weight.problem}" for weight in found if weight.problem]:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightsWrong(model=model.id, host=link.host, problems="; ".join(wrong[:_SHOWN]) + more, files=wrong)
    return found


def look(op: Operator, link: Link, model: ModelDir, *, with_hashes: bool = True) -> list[Weight]:
    """Reads only. with_hashes: also the content of those files whose SHA-256 is known."""
    wanted = [f for f in model.record.get("files") or [] if isinstance(f, dict)]
    root = f"{workspace(op, link)}/{model.record.get('files_root') or f'models/{model.id}'}"
    found: list[Weight] = []
    for batch in _batches(wanted):
        asked = [[file["path"], bool(with_hashes and file.get("sha256"))] for file in batch]
        size = sum(file.get("size_bytes") or 0 for file, (_, hashed) in zip(batch, asked, strict=True) if hashed)
        timeout_s = LOOK_S + size / SLOWEST_HASH_BYTES_S
        answer = link.session.run_program(_LOOK, {"root": root, "files": asked}, timeout_s=timeout_s)
        told = answer.get("files")
        if not isinstance(told, list) or len(told) != len(batch) or not all(_is_answer(entry) for entry in told):
            raise ProtocolError(host=link.host, reason="a look at the weights that is none")
        found += [_judged(file, *entry) for file, entry in zip(batch, told, strict=True)]
    return found


def _batches(wanted: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """So many that their names fit into one argument; a file that is hashed for long goes alone."""
    batch: list[dict[str, Any]] = []
    length = 0
    for file in wanted:
        is_large = (file.get("size_bytes") or 0) > 1 << 30
        if batch and (len(batch) >= FILES_AT_ONCE or length + len(file["path"]) > 20_000 or is_large):
            yield batch
            batch, length = [], 0
        batch.append(file)
        length += len(file["path"])
    if batch:
        yield batch


def _is_answer(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    size, digest = entry
    return (size is None or (type(size) is int and size >= 0)) and (digest is None or isinstance(digest, str))


def _judged(file: dict[str, Any], size: int | None, digest: str | None) -> Weight:
    wanted, sha256 = file.get("size_bytes"), file.get("sha256")
    problem = None
    if size is None:
        problem = "is not there"
    elif size == 0 and wanted != 0:
        problem = "is empty"
    elif wanted is not None and size != wanted:
        problem = f"has {size} bytes ({format_bytes(size)}), {wanted} are wanted"
    elif digest is not None and digest != sha256:
        problem = f"has another SHA-256: {one_line(digest, limit=64)}, wanted {sha256}"
    return Weight(one_line(file["path"], limit=300), size, digest, problem)
