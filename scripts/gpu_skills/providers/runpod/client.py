"""The wire of RunPod's REST API v2: paths, envelopes, and which failure means what. Rows leave here unread.

No capacity and a broken request are both a 400, told apart by prose only. A 5xx on a create may have made the pod.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import quote

from gpu_skills.errors import (
    AuthRejected,
    ConflictingState,
    DiskUnspecified,
    GpuError,
    HostFull,
    InstanceAbsent,
    InsufficientBalance,
    NoCapacity,
    ProviderSchema,
    ProviderSilent,
    Unavailable,
    UnexpectedReply,
)
from gpu_skills.providers import fields
from gpu_skills.providers.http import Http
from gpu_skills.providers.limits import Limit
from gpu_skills.wire import Answer, Unanswered

NAME = "runpod"
VENDOR = "https://api.runpod.io"
URL_VARIABLE = "RUNPOD_API_BASE_URL"

# Quotas come in the RateLimit headers of each answer; this keeps a loop of ours from eating a minute's in a second.
LIMITS: dict[str, Limit] = {"list": Limit(4, 4.0), "show": Limit(4, 4.0), "catalog": Limit(4, 4.0)}
_MAX_PAGES = 400
CLEAR_REFUSALS = frozenset({400, 401, 402, 403, 404, 405, 409, 410, 413, 415, 422, 429})

_NO_CAPACITY = re.compile(
    r"(?i)no longer any instances available|no instances available|no instances with the request|not enough free gpu"
    r"|out of (stock|capacity)|no (available )?capacity|insufficient capacity"
)
_NO_DISK = re.compile(r"(?i)(enough|free|available|insufficient)\b.{0,20}\bdisk|disk space")
_HOST_FULL = re.compile(r"(?i)not enough free gpus?|no free gpu")
_BALANCE = re.compile(r"(?i)insufficient (balance|funds|credit)|balance is too low|not enough (balance|credit)")


class RunpodClient:
    def __init__(self, http: Http):
        self.http = http

    # reading ----------------------------------------------------------------------------------------------------------

    def pods(self) -> list[Mapping[str, Any]]:
        """Every pod of the account. Cursors are followed where they appear; a list that cannot be finished raises."""
        rows: dict[str, Mapping[str, Any]] = {}
        query: dict[str, Any] | None = None
        for _ in range(_MAX_PAGES):
            page = self.document(self.http.read("list", "/v2/pods", query=query), "list")
            found = self._rows(page, "pods", "list")
            before = len(rows)
            for row in found:
                id = fields.identity(row, "id")
                if id is None:
                    raise self.http.unexpected("list", "a pod without an id")
                rows[id] = row
            cursor = page.get("nextCursor") or page.get("next_cursor")
            if not cursor:
                return list(rows.values())
            if not isinstance(cursor, str) or len(rows) == before:
                raise self.http.unexpected("list", "a cursor that leads nowhere new")
            query = {"cursor": cursor}
        raise self.http.unexpected("list", f"more than {_MAX_PAGES} pages")

    def pod(self, pod_id: str) -> Mapping[str, Any] | None:
        """One row, or None when a clear answer says it is not there."""
        answer = self.http.read("show", f"/v2/pods/{pod_id}")
        if self.says_absent(answer):
            return None
        row = self.document(answer, "show")
        if fields.identity(row, "id") != pod_id:
            raise self.http.unexpected("show", f"something else than pod {pod_id}")
        return row

    def gpu_types(self, query: Mapping[str, str]) -> list[Mapping[str, Any]]:
        return self._list("catalog", "/v2/catalog/gpus", "gpus", query)

    def data_centers(self) -> list[Mapping[str, Any]]:
        return self._list("catalog", "/v2/catalog/datacenters", "dataCenters")

    def volumes(self) -> list[Mapping[str, Any]]:
        return self._list("volumes", "/v2/network-volumes", "networkVolumes")

    def registries(self) -> list[Mapping[str, Any]]:
        return self._list("registries", "/v2/registries", "registries")

    def pod_charges(self, query: Mapping[str, str]) -> list[Mapping[str, Any]]:
        return self._list("charges", "/v2/billing/pods", "records", query)

    def account(self) -> Mapping[str, Any] | None:
        """Balance and spending: only the old GraphQL tells. None when it does not (any more)."""
        document = {"query": "query { myself { id clientBalance currentSpendPerHr } }"}
        answer = self.http.read("account", "/graphql", method="POST", body=document)
        if answer.status in (401, 403):
            raise self.problem(answer, "account")
        try:
            value = answer.json()
        except ValueError:
            return None
        data = value.get("data") if isinstance(value, dict) else None
        myself = data.get("myself") if isinstance(data, dict) else None
        return myself if answer.status == 200 and isinstance(myself, dict) else None

    def log_lines(self, pod_id: str, *, source: str, lines: int, stop_after_s: float) -> list[str]:
        """The stream stays open: what comes within the time is taken."""
        answer = self.http.read(
            "logs",
            f"/v2/pods/{pod_id}/logs",
            query={"source": source, "tail": str(lines)},
            stop_after_s=stop_after_s,
            max_bytes=256 * 1024,
        )
        if self.says_absent(answer):
            raise InstanceAbsent(provider=NAME, instance_id=pod_id)
        if answer.status != 200:
            raise self.problem(answer, "logs")
        frames = answer.body.decode("utf-8", "replace").splitlines()
        if any(frames) and not any(line.startswith(("data:", "id:", ":", "event:", "retry:")) for line in frames):
            raise self.http.unexpected("logs", f"no stream of lines: {answer.text}")
        found: list[str] = []
        for line in frames:
            if not line.startswith("data:"):
                continue
            try:
                event = json.loads(line[5:])
            except (ValueError, RecursionError):  # the last frame may be cut
                continue
            if isinstance(event, dict) and isinstance(event.get("line"), str):
                found.append(event["line"].rstrip("\r\n"))
        return found[-lines:]

    def _list(
        self, endpoint: str, path: str, name: str, query: Mapping[str, str] | None = None
    ) -> list[Mapping[str, Any]]:
        return self._rows(self.document(self.http.read(endpoint, path, query=query), endpoint), name, endpoint)

    def _rows(self, page: Mapping[str, Any], name: str, endpoint: str) -> list[Mapping[str, Any]]:
        found = page.get(name)
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise self.http.unexpected(endpoint, f"no list of {name}")
        return found

    # writing ----------------------------------------------------------------------------------------------------------

    def act(self, pod_id: str, action: Literal["start", "stop", "restart"]) -> None:
        answer = self._write(action, "POST", f"/v2/pods/{pod_id}/action", {"action": action})
        self._must_be_done(action, pod_id, answer)

    def patch(self, pod_id: str, changes: Mapping[str, Any]) -> None:
        self._must_be_done("patch", pod_id, self._write("patch", "PATCH", f"/v2/pods/{pod_id}", changes))

    def destroy(self, pod_id: str) -> Literal["accepted", "absent"]:
        answer = self._write("destroy", "DELETE", f"/v2/pods/{pod_id}", None)
        if self.says_absent(answer):
            return "absent"
        self._must_be_done("destroy", pod_id, answer)
        return "accepted"

    def create_volume(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = self._write("create volume", "POST", "/v2/network-volumes", body)
        self._must_be_done("create volume", str(body.get("name")), answer)
        document = _object(answer)
        if fields.identity(document, "id") is None:
            raise ProviderSilent(provider=NAME, what="create volume", reason=f"no id: {answer.text}")
        return document

    def delete_volume(self, volume_id: str) -> Literal["accepted", "absent"]:
        answer = self._write("delete volume", "DELETE", f"/v2/network-volumes/{quote(volume_id, safe='')}", None)
        if self.says_absent(answer):
            return "absent"
        self._must_be_done("delete volume", volume_id, answer)
        return "accepted"

    def _write(self, endpoint: str, method: str, path: str, body: Mapping[str, Any] | None) -> Answer:
        try:
            return self.http.write(endpoint, method, path, body=body)
        except Unanswered as exc:
            raise ProviderSilent(provider=NAME, what=endpoint, reason=exc.reason) from exc

    def _must_be_done(self, endpoint: str, instance_id: str, answer: Answer) -> None:
        """A 2xx without a body, or with the object it was done to: a failure or a page may come under a 200 too."""
        if 200 <= answer.status < 300:
            if answer.body.strip() and fields.identity(_object(answer), "id") is None:
                raise ProviderSilent(
                    provider=NAME, what=endpoint, reason=f"it does not say that it worked: {answer.text}"
                )
            return
        if answer.status >= 500 and not _HOST_FULL.search(answer.text):
            raise ProviderSilent(provider=NAME, what=endpoint, reason=f"HTTP {answer.status}: {answer.text}")
        if self.says_absent(answer):
            raise InstanceAbsent(provider=NAME, instance_id=instance_id)
        raise self.problem(answer, endpoint, instance_id=instance_id)

    # answers ----------------------------------------------------------------------------------------------------------

    def document(self, answer: Answer, what: str) -> Mapping[str, Any]:
        if answer.status != 200:
            raise self.problem(answer, what)
        try:
            document = answer.json()
        except ValueError as exc:
            raise self.http.unexpected(what, f"no JSON ({exc}): {answer.text}") from exc
        if not isinstance(document, dict):
            raise self.http.unexpected(what, f"no object: {answer.text}")
        return document

    def says_absent(self, answer: Answer) -> bool:
        """A 404 of the API itself, not of something in front of it. Even this is one observation and no proof."""
        return answer.status == 404 and bool(_object(answer))

    def problem(self, answer: Answer, what: str, *, instance_id: str = "", disk_gb: int | None = None) -> GpuError:
        """The error class for an answer that says no. Whatever a 400 to a create means, nothing was placed."""
        document = _object(answer)
        said = fields.text(document, "detail", "message", "error", "title", limit=300) or answer.text
        errors = document.get("errors")
        if isinstance(errors, list) and errors:
            said += " (" + "; ".join(_shown(error) for error in errors[:4]) + ")"
        reason = f"HTTP {answer.status}, {said}"
        status = answer.status
        if status == 401 or (status == 403 and document):
            return AuthRejected(provider=NAME, source=self.http.key.source, reason=reason)
        if status == 403:
            return UnexpectedReply(provider=NAME, what=what, reason=f"{reason}: refused in front of the API")
        if status == 402 or _BALANCE.search(said):
            return InsufficientBalance(provider=NAME, reason=reason)
        if status == 429:
            return self.http.rate_limited(what, answer)
        if what in ("start", "restart") and _HOST_FULL.search(said):
            return HostFull(machine=f"{NAME} {instance_id}", reason=said)
        if status >= 500:
            return Unavailable(f"{NAME} failed at {what}: {reason}", provider=NAME)
        if status == 409:
            return ConflictingState(provider=NAME, what=what, instance_id=instance_id, reason=said)
        if what == "create" and status == 400 and not errors:
            if _NO_DISK.search(said):
                return DiskUnspecified(
                    provider=NAME, disk_gb="that many" if disk_gb is None else disk_gb, reason=reason
                )
            return NoCapacity(
                f"{NAME} did not place it: {said}",
                next_step="gpu offers",
                provider=NAME,
                # Only prose tells a full data centre from a broken rule. Refused everywhere: suspect the request.
                is_clear=bool(_NO_CAPACITY.search(said)),
            )
        if document and (status in (400, 405, 413, 415, 422) or (status == 404 and what == "create")):
            return ProviderSchema(provider=NAME, what=what, reason=reason)
        return UnexpectedReply(provider=NAME, what=what, reason=reason)


def _object(answer: Answer) -> Mapping[str, Any]:
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _shown(error: Any) -> str:
    if isinstance(error, dict):
        return " ".join(str(error[name])[:80] for name in ("location", "field", "path", "message") if name in error)
    return str(error)[:120]
