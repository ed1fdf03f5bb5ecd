"""Holds what the sandbox answers against a vendor's own OpenAPI file, when an environment variable names one.

    SANDBOX_OPENAPI_VAST=…/openapi.yaml SANDBOX_OPENAPI_RUNPOD=…/openapi.json scripts/test tests/sandbox

Every answer of every sandbox that a test made is checked (see `watch`). Where the file contradicts itself, the live
service or the vendor's own client, KNOWN says so, and why; everything else that does not fit fails the test.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gpu_skills.sandbox import Sandbox

ANY = "*"


class Known(NamedTuple):
    """One contradiction. status 0: the operation is not in the file at all.

    where: the JSON path of a field, with [] for any index; `content_type`; empty when it is the status that is missing.
    """

    status: int
    method: str
    path: str
    why: str
    where: str = ""


KNOWN: dict[str, list[Known]] = {
    "vast": [
        Known(0, "GET", "/api/v0/gpu_names/unique", "what the official client asks first"),
        Known(0, "PUT", "/api/v0/search/asks", "search with --new"),
        Known(0, "POST", "/api/v0/asks/bulk", "create of several"),
        Known(0, "PUT", "/api/v0/launch_instance", "search and create in one"),
        Known(0, "GET", "/api/v0/instances", "retired: 410 deprecated_endpoint"),
        Known(0, "PUT", "/api/v0/instances", "stop and start of several"),
        Known(0, "DELETE", "/api/v0/instances", "destroy of several"),
        Known(0, "GET", "/api/v0/instances/filters", "before the table of instances"),
        Known(0, "PUT", "/api/v0/instances/update_template/{id}", "update instance"),
        Known(0, "PUT", "/api/v0/commands/rsync", "copies from and to the caller's machine"),
        Known(0, "GET", "/api/v0/users/me/invoices", "the deprecated show invoices"),
        Known(0, "GET", "/api/v0/sandbox-results/{token}", "stands for the vendor's object storage"),
        Known(403, ANY, ANY, "auth_error without a key; not_authorized for a machine's own key"),
        Known(404, ANY, ANY, "auth_error for a key that is not known; no such instance"),
        Known(400, ANY, ANY, "a body or parameter that is not what it should be"),
        Known(429, "POST", "/api/v0/bundles", "ten searches a minute, by the prose on limits"),
        Known(429, ANY, ANY, "plain text, not JSON", "content_type"),
        Known(400, "PUT", "/api/v0/asks/{id}", "label_too_long, missing_billing and others are seen too", "$.error"),
        Known(200, "GET", "/api/v0/instances/{id}", "null once there is no such instance", "$.instances"),
        Known(200, "GET", "/api/v0/instances/{id}", "pairs of name and value", "$.instances.extra_env[]"),
        Known(200, "GET", "/api/v0/instances/{id}", "an object of bindings, not numbers", "$.instances.ports"),
        Known(200, "GET", "/api/v1/instances", "null where there is none", "$.instances[].onstart"),
    ],
    "runpod": [
        Known(402, "POST", "/v2/pods", "the prose of the operation names 402, its list of responses does not"),
        Known(402, "POST", "/v2/pods/{id}/action", "a start without money; the file lists no 402 anywhere"),
        Known(402, "POST", "/v2/network-volumes", "the same for a volume"),
        Known(400, "DELETE", "/v2/network-volumes/{id}", "a volume in use is refused, as observed; not listed"),
        Known(400, "GET", ANY, "parameters that contradict each other: said where they are described, listed nowhere"),
        Known(422, "GET", ANY, "malformed parameters: the same"),
        Known(403, ANY, ANY, "a page of the edge, which refuses before the API sees the request", "content_type"),
    ],
}  # fmt: skip
# Paths that an OpenAPI file describes; what a vendor serves elsewhere (GraphQL, a retired version) is not its matter.
DESCRIBED = {"vast": ("/api/v0/", "/api/v1/"), "runpod": ("/v2/",)}
# Faults that spoil an answer on its way: nobody describes those.
SPOILING = {"401", "403", "429", "500", "502", "503", "504", "html", "failure_200", "garbage", "not_found"}


@dataclass
class OpenApi:
    """One vendor's file."""

    document: dict[str, Any]
    known: list[Known] = field(default_factory=list)
    met: set[Known] = field(default_factory=set)  # the contradictions that were seen so far

    def complaint(self, method: str, path: str, status: int, content_type: str, body: bytes) -> str | None:
        """What is wrong with this answer, or None."""
        template = self._template(method, path)
        found = [
            f"{where}: {problem}".removeprefix(": ")
            for where, problem in self._misfits(method, template, status, content_type, body)
            if not self._is_known(status, method, template, where)
        ]
        return f"{method} {template} {status}: " + "; ".join(found[:5]) if found else None

    def _misfits(
        self, method: str, template: str, status: int, content_type: str, body: bytes
    ) -> Iterator[tuple[str, str]]:
        """Where and what; where is empty for the answer as a whole."""
        operation = self.document["paths"].get(template, {}).get(method.lower())
        if operation is None:
            if status not in (404, 405) and not self._is_known(0, method, template, ""):
                yield "", "is not in the file"
            return
        responses = operation["responses"]
        if str(status) not in responses and status != 405 and status < 500:
            yield "", "this status is not listed"
        listed = str(status) if str(status) in responses else "default"
        if listed not in responses:
            return
        response, pointer = responses[listed], self._pointer(template, method, listed)
        while "$ref" in response:
            pointer = response["$ref"].removeprefix("#")
            response = self._at(pointer)
        kind = content_type.partition(";")[0]
        content = response.get("content", {})
        if kind not in content:
            if body:
                yield "content_type", f"{kind}, described are {', '.join(content) or 'none'}"
        elif kind.endswith("json") and "schema" in content[kind]:
            yield from self._schema_errors(f"{pointer}/content/{kind.replace('/', '~1')}/schema", body)

    def _schema_errors(self, pointer: str, body: bytes) -> Iterator[tuple[str, str]]:
        from jsonschema import Draft202012Validator

        try:
            value = json.loads(body)
        except ValueError:
            yield "", "is not JSON"
            return
        for error in Draft202012Validator({"$ref": f"urn:api#{pointer}"}, registry=self._registry).iter_errors(value):
            yield re.sub(r"\[\d+\]", "[]", error.json_path), error.message[-200:]

    def _is_known(self, status: int, method: str, template: str, where: str) -> bool:
        for known in self.known:
            if (known.status, known.where) == (status, where):
                if known.method in (ANY, method) and known.path in (ANY, template):
                    self.met.add(known)
                    return True
        return False

    def _template(self, method: str, path: str) -> str:
        """The path as the file writes it; that of a known contradiction; else the path itself."""
        bare = path.rstrip("/")
        described = sorted(self.document["paths"], key=lambda template: template.count("{"))
        for template in [known.path for known in self.known if known.status == 0] + described:
            if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template.rstrip("/")), bare):
                if method.lower() in self.document["paths"].get(template, {}) or template not in described:
                    return template
        return bare

    def _pointer(self, template: str, method: str, status: str) -> str:
        escaped = template.replace("/", "~1").replace("{", "%7B").replace("}", "%7D")
        return f"/paths/{escaped}/{method.lower()}/responses/{status}"

    def _at(self, pointer: str) -> Any:
        found = self.document
        for part in pointer.strip("/").split("/"):
            found = found[part.replace("~1", "/")]
        return found

    @functools.cached_property
    def _registry(self) -> Any:
        from referencing import Registry, Resource
        from referencing.jsonschema import DRAFT202012

        resource = Resource.from_contents(self.document, default_specification=DRAFT202012)
        return Registry().with_resource("urn:api", resource)


def variable_of(vendor: str) -> str:
    return f"SANDBOX_OPENAPI_{vendor.upper()}"


@functools.cache
def openapi_of(vendor: str) -> OpenApi | None:
    """The vendor's file; None when nobody named one."""
    named = os.environ.get(variable_of(vendor))
    if not named:
        return None
    text = Path(named).read_text(encoding="utf-8")
    if named.endswith((".yaml", ".yml")):
        import yaml

        # Dates in examples become text again.
        document = json.loads(json.dumps(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), default=str))
    else:
        document = json.loads(text)
    return OpenApi(document, KNOWN[vendor])


def watch(sandbox: Sandbox, complaints: list[str]) -> None:
    """Check every answer of this sandbox from now on, and add what is wrong to `complaints`."""
    files = {vendor: api for vendor in KNOWN if (api := openapi_of(vendor)) is not None}
    if not files:
        return
    answer = sandbox.service.answer

    def checked(request: Any) -> Any:
        reply = answer(request)
        vendor = next((name for name, face in sandbox.world.faces.items() if face.owns(request.path)), "")
        is_described = vendor in files and request.path.startswith(DESCRIBED[vendor])
        if is_described and not isinstance(reply.body, Iterator) and not SPOILING & set(request.faults):
            complaint = files[vendor].complaint(
                request.method, request.path, reply.status, reply.content_type, reply.encoded()
            )
            if complaint is not None:
                complaints.append(complaint)
        return reply

    sandbox.service.answer = checked  # type: ignore[method-assign]
