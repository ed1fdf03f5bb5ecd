"""Checks answers of the sandbox against a vendor's own OpenAPI file, when an environment variable names one.

    SANDBOX_OPENAPI_RUNPOD=…/openapi.json scripts/test tests/sandbox

Where the file itself is at odds with the live service, KNOWN says so; everything else that does not fit fails the test.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

# Status, method and path → why an answer that the file does not describe is right all the same.
KNOWN: dict[tuple[int, str, str], str] = {
    (402, "POST", "/v2/pods"): "the prose of the operation names 402, its list of responses does not",
    (402, "POST", "/v2/pods/{id}/action"): "a start without money; the file lists no 402 anywhere",
    (402, "POST", "/v2/network-volumes"): "the same for a volume",
    (400, "DELETE", "/v2/network-volumes/{id}"): "a volume in use is refused, as observed; not listed",
    (400, "GET", "*"): "parameters that contradict each other: said where they are described, listed nowhere",
    (422, "GET", "*"): "malformed parameters: the same",
}


class OpenApi:
    def __init__(self, file: Path):
        from referencing import Registry, Resource
        from referencing.jsonschema import DRAFT202012

        self.document = json.loads(file.read_text(encoding="utf-8"))
        resource = Resource.from_contents(self.document, default_specification=DRAFT202012)
        self.registry = Registry().with_resource("urn:api", resource)

    def complaint(self, method: str, path: str, status: int, content_type: str, body: bytes) -> str | None:
        """What is wrong with this answer, or None."""
        template = self._template(path)
        operation = self.document["paths"].get(template or "", {}).get(method.lower())
        if operation is None:
            return None if status in (404, 405) else f"{method} {path} is not in the file and answered {status}"
        listed = str(status) in operation["responses"]
        is_known = (status, method, template) in KNOWN or (status, method, "*") in KNOWN
        if not listed and not is_known and status != 405 and status < 500:
            return f"{method} {template} does not list {status}"
        response = operation["responses"].get(str(status), operation["responses"]["default"])
        pointer = self._pointer(template or "", method, str(status) if listed else "default")
        if "$ref" in response:
            pointer = response["$ref"].removeprefix("#")
            response = self._at(pointer)
        return self._misfit(response, pointer, content_type, body)

    def _misfit(self, response: dict[str, Any], pointer: str, content_type: str, body: bytes) -> str | None:
        from jsonschema import Draft202012Validator

        content = response.get("content")
        if content is None:
            return None if not body else "a body where the file has none"
        kind = content_type.partition(";")[0]
        if kind not in content:
            return f"content type {kind}, listed are {', '.join(content)}"
        if kind == "text/event-stream":
            return None
        reference = f"urn:api#{pointer}/content/{kind.replace('/', '~1')}/schema"
        errors = Draft202012Validator({"$ref": reference}, registry=self.registry).iter_errors(json.loads(body))
        found = [f"{error.json_path}: {error.message[:200]}" for error in errors]
        return "; ".join(found[:5]) or None

    def _template(self, path: str) -> str | None:
        for template in sorted(self.document["paths"], key=lambda t: t.count("{")):
            if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path):
                return template
        return None

    def _pointer(self, template: str, method: str, status: str) -> str:
        escaped = template.replace("/", "~1").replace("{", "%7B").replace("}", "%7D")
        return f"/paths/{escaped}/{method.lower()}/responses/{status}"

    def _at(self, pointer: str) -> Any:
        found = self.document
        for part in pointer.strip("/").split("/"):
            found = found[part.replace("~1", "/")]
        return found


@functools.cache
def openapi_of(vendor: str) -> OpenApi | None:
    named = os.environ.get(f"SANDBOX_OPENAPI_{vendor.upper()}")
    return OpenApi(Path(named)) if named else None
