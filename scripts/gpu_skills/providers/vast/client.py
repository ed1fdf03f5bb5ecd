"""The wire of Vast's REST API: paths, envelopes, pages, and which failure means what. Rows leave here unread.

Its failures come in many dresses: an HTTP status, `success: false` under a 200, a code in `error` or only in the text.
A 404 may mean a bad key, so a missing instance is one that an answer names as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from gpu_skills.errors import (
    AuthRejected,
    GpuError,
    InstanceAbsent,
    InsufficientBalance,
    NoCapacity,
    ProviderSchema,
    ProviderSilent,
    RateLimited,
    Unavailable,
    UnexpectedReply,
)
from gpu_skills.providers import fields
from gpu_skills.providers.http import Http
from gpu_skills.providers.limits import Limit
from gpu_skills.wire import Answer, Unanswered

NAME = "vast"
VENDOR = "https://console.vast.ai"
URL_VARIABLE = "VAST_URL"

# Documented minimum seconds between calls of one kind, with some room for requests that travel unevenly.
_ROOM_S = 0.2
LIMITS: dict[str, Limit] = {
    "search": Limit(10, 60 + _ROOM_S),
    **{
        endpoint: Limit(1, seconds + _ROOM_S)
        for endpoint, seconds in {
            "list": 1.0,
            "show": 2.0,
            "state": 1.0,
            "reboot": 1.0,
            "destroy": 3.0,
            "charges": 1.0,
            "ssh": 1.0,
            "logs": 1.0,
            "user": 1.0,
        }.items()
    },
    "create": Limit(1, 4.5 + _ROOM_S, penalty_s=12.0),
}
PAGE_SIZE = 25
_MAX_PAGES = 400
_LIST_ATTEMPTS = 3
# Statuses with which a create certainly made nothing. Everything else that is no clear yes stays unknown.
CLEAR_REFUSALS = frozenset({400, 401, 402, 403, 404, 405, 410, 411, 413, 422, 429, 483})
_KNOWN_REFUSALS = frozenset(
    {
        "invalid_args",
        "invalid_price",
        "invalid_request",
        "no_ssh_key_for_vm",
        "no_such_ask",
        "missing_billing",
        "auth_error",
        "not_authorized",
        "spend_rate_limit",
        "insufficient_credit",
    }
)
_ABSENT = frozenset({"no_such_instance", "not_found"})


class VastClient:
    def __init__(self, http: Http):
        self.http = http

    # reading ----------------------------------------------------------------------------------------------------------

    def offers(self, query: Mapping[str, Any]) -> list[Any]:
        """Raw offers. Raises for everything that is not a list of them."""
        answer = self.http.read("search", "/api/v0/bundles/", method="POST", body=query, is_final=_is_quota)
        offers = self.document(answer, "search").get("offers")
        if not isinstance(offers, list):
            raise self.http.unexpected("search", "no list of offers")
        return offers

    def instances(self) -> list[Mapping[str, Any]]:
        """Every instance of the account. A list that changes while its pages are read is read again."""
        for _ in range(_LIST_ATTEMPTS):
            rows, total = self._all_pages()
            if total is None or len(rows) >= total:
                return rows
        raise self.http.unexpected("list", f"{len(rows)} instances on its pages, {total} announced")

    def _all_pages(self) -> tuple[list[Mapping[str, Any]], int | None]:
        rows: dict[str, Mapping[str, Any]] = {}
        total: int | None = None
        token: str | None = None
        seen: set[str] = set()
        for _ in range(_MAX_PAGES):
            query: dict[str, Any] = {"limit": str(PAGE_SIZE), "order_by": [{"col": "id", "dir": "asc"}]}
            if token is not None:
                query["after_token"] = token
            page = self.document(self.http.read("list", "/api/v1/instances/", query=query), "list")
            found = page.get("instances")
            if not isinstance(found, list):
                raise self.http.unexpected("list", "no list of instances")
            for row in found:
                id = fields.identity(row, "id") if isinstance(row, dict) else None
                if id is None:
                    raise self.http.unexpected("list", "an instance without an id")
                rows[id] = row
            total = fields.integer(page, "total_instances")
            token = page.get("next_token") or None
            if token is None:
                return list(rows.values()), total
            if not isinstance(token, str) or token in seen:
                raise self.http.unexpected("list", "a token for the next page that leads nowhere new")
            seen.add(token)
        raise self.http.unexpected("list", f"more than {_MAX_PAGES} pages")

    def instance(self, instance_id: str) -> Mapping[str, Any] | None:
        """One row, or None when a clear answer says it is not there."""
        answer = self.http.read("show", f"/api/v0/instances/{instance_id}/", query={"owner": "me"})
        if self.says_absent(answer):
            return None
        document = self.document(answer, "show")
        row = document.get("instances", "missing")
        if row is None:
            return None
        if isinstance(row, list) and len(row) == 1:
            row = row[0]
        if not isinstance(row, dict) or fields.identity(row, "id") != instance_id:
            raise self.http.unexpected("show", f"something else than instance {instance_id}")
        return row

    def charges(self, since_epoch: int, until_epoch: int) -> list[Mapping[str, Any]]:
        query: dict[str, Any] = {
            "select_filters": {"day": {"gte": since_epoch, "lte": until_epoch}, "type": {"in": ["instance"]}},
            "latest_first": "false",
            "limit": "500",
            "format": "tree",
        }
        rows: list[Mapping[str, Any]] = []
        seen: set[str] = set()
        for _ in range(_MAX_PAGES):
            page = self.document(self.http.read("charges", "/api/v0/charges/", query=query), "charges")
            found = page.get("results")
            if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
                raise self.http.unexpected("charges", "no list of charges")
            rows += found
            token = page.get("next_token") or None
            if token is None:
                return rows
            if not isinstance(token, str) or token in seen:
                raise self.http.unexpected("charges", "a token for the next page that leads nowhere new")
            seen.add(token)
            query = {**query, "after_token": token}
        raise self.http.unexpected("charges", f"more than {_MAX_PAGES} pages")

    def user(self) -> Mapping[str, Any]:
        return self.document(self.http.read("user", "/api/v0/users/current"), "user")

    def log_address(self, instance_id: str, *, lines: int, of_host: bool) -> str:
        """Where the log will stand shortly. The request changes nothing, though it is a PUT."""
        body = {"tail": str(lines), **({"daemon_logs": "true"} if of_host else {})}
        answer = self.http.read("logs", f"/api/v0/instances/request_logs/{instance_id}/", method="PUT", body=body)
        if self.says_absent(answer):
            raise InstanceAbsent(provider=NAME, instance_id=instance_id)
        address = self.document(answer, "logs").get("result_url")
        if not isinstance(address, str):
            raise self.http.unexpected("logs", "no place where the log would be")
        return address

    # writing ----------------------------------------------------------------------------------------------------------

    def change(self, endpoint: str, method: str, path: str, instance_id: str, body: Mapping[str, Any]) -> None:
        """One write to an instance that must be said to have worked."""
        answer = self._write(endpoint, method, path, body)
        if self.says_absent(answer):
            raise InstanceAbsent(provider=NAME, instance_id=instance_id)
        self._must_be_done(endpoint, answer)

    def destroy(self, instance_id: str) -> Literal["accepted", "absent"]:
        answer = self._write("destroy", "DELETE", f"/api/v0/instances/{instance_id}/", {})
        if self.says_absent(answer):
            return "absent"
        self._must_be_done("destroy", answer)
        return "accepted"

    def _write(self, endpoint: str, method: str, path: str, body: Mapping[str, Any]) -> Answer:
        try:
            return self.http.write(endpoint, method, path, body=body)
        except Unanswered as exc:
            raise ProviderSilent(provider=NAME, what=endpoint, reason=exc.reason) from exc

    def _must_be_done(self, endpoint: str, answer: Answer) -> None:
        if answer.status >= 500:
            raise ProviderSilent(provider=NAME, what=endpoint, reason=f"HTTP {answer.status}: {answer.text}")
        document = self.document(answer, endpoint, is_write=True)
        if document.get("success") is not True:
            raise ProviderSilent(provider=NAME, what=endpoint, reason=f"it does not say that it worked: {answer.text}")

    # answers ----------------------------------------------------------------------------------------------------------

    def document(self, answer: Answer, what: str, *, is_write: bool = False) -> Mapping[str, Any]:
        """The object of an answer that says it worked. Raises what else it says."""
        try:
            document = answer.json()
        except ValueError as exc:
            if answer.status == 200 and is_write:
                raise ProviderSilent(provider=NAME, what=what, reason=f"no JSON: {answer.text}") from exc
            if answer.status == 200:
                raise self.http.unexpected(what, f"no JSON ({exc}): {answer.text}") from exc
            document = {}
        if answer.status != 200:
            raise self.problem(answer, document if isinstance(document, dict) else {}, what)
        if not isinstance(document, dict):
            if is_write:
                raise ProviderSilent(provider=NAME, what=what, reason=f"no object: {answer.text}")
            raise self.http.unexpected(what, f"no object: {answer.text}")
        if document.get("success") is False:
            raise self.problem(answer, document, what)
        return document

    def says_absent(self, answer: Answer) -> bool:
        """Whether it says of the instance that it is not there. A 404 alone says nothing: a bad key gets one too."""
        if answer.status not in (200, 404, 410):
            return False
        document = _object(answer)
        failed = answer.status != 200 or document.get("success") is False
        return failed and document.get("error") in _ABSENT

    def problem(self, answer: Answer, document: Mapping[str, Any], what: str) -> GpuError:
        """The error class for an answer that says no."""
        code = fields.text(document, "error", limit=64) or ""
        said = fields.text(document, "msg", "message", "detail", limit=300) or code or answer.text
        reason = f"HTTP {answer.status}, {said}" if answer.status != 200 else said
        lower = f"{code} {said}".lower()
        if code in ("auth_error", "not_authorized") or answer.status in (401, 403):
            return AuthRejected(provider=NAME, source=self.http.key.source, reason=reason)
        if answer.status == 429 or code in ("spend_rate_limit", "search_quota_exceeded"):
            return (
                self.http.rate_limited(what, answer)
                if answer.status == 429
                else RateLimited(provider=NAME, what=what, reason=reason, retry_after_s=3600)
            )
        if answer.status >= 500:
            return Unavailable(f"{NAME} failed at {what}: {reason}", provider=NAME)
        if "no_such_ask" in lower:
            return NoCapacity(f"{NAME}: the offer is gone ({said})", next_step="gpu offers", provider=NAME)
        if answer.status == 402 or code in ("missing_billing", "insufficient_credit") or "insufficient" in lower:
            return InsufficientBalance(provider=NAME, reason=reason)
        if answer.status in (400, 405, 411, 413, 422, 483) or code in _KNOWN_REFUSALS:
            return ProviderSchema(provider=NAME, what=what, reason=reason)
        return UnexpectedReply(provider=NAME, what=what, reason=reason)

    def is_clear_refusal(self, answer: Answer, document: Mapping[str, Any] | None) -> bool:
        """Whether a create that got this answer certainly made nothing, if it names no contract that can be read."""
        if document is not None and document.get("new_contract"):
            return False
        if answer.status == 200:
            return (
                document is not None and document.get("success") is False and document.get("error") in _KNOWN_REFUSALS
            )
        return answer.status in CLEAR_REFUSALS


def _object(answer: Answer) -> Mapping[str, Any]:
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _is_quota(answer: Answer) -> bool:
    """A daily quota: asking again within the minute cannot help."""
    return answer.status == 429 and _object(answer).get("error") == "search_quota_exceeded"
