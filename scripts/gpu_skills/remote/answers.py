"""What a runner's answers look like, and the judgement of answers that do not.

Everything a machine says is checked here once, so that no caller meets a missing field or a wrong type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from gpu_skills import errors

MAX_HEADER_BYTES = 64 << 10
MAX_PAYLOAD_BYTES = 4 << 20
MAX_COUNT = 1 << 53
MAX_DURATION_S = 10 * 366 * 86400  # a job that claims more would be booked at it
PROTOCOL = 1
JOB_STATES = frozenset({"running", "succeeded", "failed", "timeout", "cancelled", "lost", "unknown", "suspended"})

Check = Callable[[Any], bool]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(digits)
    return value


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite).decode


def parse_header(line: bytes) -> dict[str, Any]:
    """One line of ASCII JSON that must be an object. ValueError says what is wrong with it."""
    try:
        value = _decode(line.decode("ascii"))
        if b"\\ud" in line.lower():  # a lone half of a pair is no text, and no record of ours could hold it
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as exc:
        raise ValueError("JSON nested too deeply") from exc
    except ValueError as exc:
        raise ValueError(f"not JSON: {errors.one_line(line.decode('utf-8', 'replace'), limit=200)!r}") from exc
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} in place of an object")
    return value


def payload_size(header: Mapping[str, Any]) -> int | None:
    """The bytes that follow a header, None when it is not a data frame. ValueError for a size that cannot be."""
    if "n" not in header:
        return None
    n = header["n"]
    if type(n) is not int or not 0 <= n <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {errors.one_line(str(n), limit=80)} bytes")
    return n


def check_result(verb: str, result: Any) -> dict[str, Any]:
    """The result of a verb with every promised field of the promised type. ValueError names the first that is not."""
    if not isinstance(result, dict):
        raise ValueError(f"the result of {verb} is no object")
    for name, check in _RESULTS.get(verb, {}).items():
        if name not in result:
            raise ValueError(f"the result of {verb} has no {name}")
        if not check(result[name]):
            raise ValueError(f"{name} of {verb} is {errors.one_line(repr(result[name]), limit=120)}")
    return result


def raise_machine_error(host: str, verb: str, args: Mapping[str, Any], error: Any) -> NoReturn:
    """Turn `{"code", "message", "details"}` of a machine into one of our errors."""
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        raise errors.ProtocolError(host=host, reason=f"{verb} failed without saying how")
    code, message = error["code"], error.get("message")
    details = error.get("details")
    details = details if isinstance(details, dict) else {}
    reason = errors.one_line(message if isinstance(message, str) else code, limit=300)
    job = args.get("job") if isinstance(args.get("job"), str) else ""
    if isinstance(args.get("job"), dict):
        job = str(args["job"].get("id", ""))
    match code:
        case "job_unknown":
            raise errors.JobNotFound(f"{host} does not know job {job}", job=job, host=host)
        case "job_exists":
            raise JobExists(host=host, job=job)
        case "session_expired":
            raise SessionExpired(host=host, reason=reason)
        case "tree_unknown" | "blobs_missing":
            raise errors.TransferIncomplete(reason=f"{host} misses content: {reason}", host=host, machine_code=code)
        case "hash_mismatch":
            found = _text(details.get("found"))
            expected = _text(details.get("expected") or details.get("sha256"))
            raise errors.HashMismatch(path=_text(details.get("path") or expected), found=found, expected=expected)
        case "disk_full":
            raise errors.MachineDiskFull(host=host, reason=reason)
        case "not_writable":
            raise errors.NotWritable(path=f"{host}:{_text(details.get('path'))}", reason=reason)
        case "busy":
            raise MachineBusy(host=host, reason=reason)
        case "bad_request":
            raise errors.ProtocolError(host=host, reason=f"it does not understand {verb}: {reason}")
        case _:
            raise errors.CommandFailed(what=verb, host=host, reason=reason)


class JobExists(errors.JobError):
    code = "job_exists"
    template = "{host} already has another job {job}"
    next_step = "gpu job status {job}"


class SessionExpired(errors.Refused):
    code = "session_expired"
    template = "the session on {host} has ended: {reason}"
    next_step = "gpu setup"


class MachineBusy(errors.RemoteError):
    code, retryable = "machine_busy", True
    template = "{host} is busy: {reason}"
    next_step = "run the same command again in a moment"


def _text(value: Any) -> str:
    return errors.one_line(value, limit=200) if isinstance(value, str) else "unknown"


# the fields of each verb's result -----------------------------------------------------------------------------------


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


def _str(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_COUNT


def _duration(value: Any) -> bool:
    return _number(value) and 0 <= value <= MAX_DURATION_S


def _list(value: Any) -> bool:
    return isinstance(value, list)


def _dict(value: Any) -> bool:
    return isinstance(value, dict)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _object(**fields: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(name in value and check(value[name]) for name, check in fields.items())
    )


_PROGRESS = _object(unit=_str, value=_number, rate_per_s=_or_none(_number), stalled_s=_number)
_STATUS_FIELDS: dict[str, Check] = {
    "job": _str,
    "nonce": _or_none(_str),
    "state": lambda value: isinstance(value, str) and value in JOB_STATES,
    "phase": _or_none(_str),
    "exit_code": lambda value: value is None or (type(value) is int and -(1 << 31) <= value < 1 << 31),
    "reason": _or_none(_str),
    "message": _or_none(_str),
    "started_at": _or_none(_str),
    "started_epoch_s": _or_none(_number),
    "ended_at": _or_none(_str),
    "duration_s": _or_none(_duration),
    "log_bytes": _or_none(_count),
    "progress": _or_none(_PROGRESS),
    "outputs": _or_none(_object(files=_count, bytes=_count)),
}
_status = _object(**_STATUS_FIELDS)
_GPU = _object(index=_number, name=_str, vram_mib=_or_none(_number))
_SESSION = _object(id=_str)

_RESULTS: dict[str, dict[str, Check]] = {
    "probe": {"python": _str, "bash": _bool, "rsync": _or_none(_str), "gpus": _list_of(_GPU)},
    "session": {"session": _or_none(_SESSION), "watcher": _bool, "events": _list_of(_dict)},
    "fuse": {"receipt": _or_none(_dict), "alive": _bool, "acknowledged": _bool},
    "have": {"known": _bool},
    "offer": {"missing": _count},
    "put": {"blobs": _count, "bytes": _count},
    "incoming": {"path": _str},
    "admit": {"admitted": _count, "failed": _list_of(_object(sha256=_str))},
    "seal": {"known": lambda value: value is True},
    "start": _STATUS_FIELDS,
    "status": {"jobs": _list_of(_status)},
    "jobs": {"jobs": _list_of(_status), "left_out": _count},
    "log": {"offset": _count, "next": _count, "gap_bytes": _count, "total": _count, "status": _status},
    "events": {"next": _count},
    "manifest": {"files": _count, "bytes": _count, "final": _bool, "skipped": _list},
    "stage": {"path": _str},
    "export": {"sent": _count},
    "home": {"slots": _count},
    "cancel": _STATUS_FIELDS,
}
