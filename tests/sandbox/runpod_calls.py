"""A plain client of the sandbox's RunPod. Each answer is also held against the vendor's OpenAPI file, if named."""

from __future__ import annotations

import json
from typing import Any

import requests

from gpu_skills.sandbox import Sandbox
from gpu_skills.sandbox.runpod import RunpodFace
from openapi_check import openapi_of

GPU = "NVIDIA GeForce RTX 4090"


class RunpodCalls:
    def __init__(self, sandbox: Sandbox, key: str | None = None):
        self.sandbox = sandbox
        self.key = key or sandbox.key("runpod")
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.headers.update({"Authorization": f"Bearer {self.key}", "User-Agent": "tests/1"})

    @property
    def face(self) -> RunpodFace:
        face = self.sandbox.world.faces["runpod"]
        assert isinstance(face, RunpodFace)
        return face

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> requests.Response:
        response = self.session.request(method, self.sandbox.url + path, json=body, timeout=20, **options)
        if (api := openapi_of("runpod")) is not None and path.startswith("/v2/") and not options.get("stream"):
            complaint = api.complaint(
                method,
                path.partition("?")[0],
                response.status_code,
                response.headers.get("Content-Type", ""),
                response.content,
            )
            assert complaint is None, f"{method} {path}: {complaint}"
        return response

    def get(self, path: str, expect: int = 200, **options: Any) -> Any:
        return self._document(self.call("GET", path, **options), expect)

    def post(self, path: str, body: Any, expect: int = 200, **options: Any) -> Any:
        return self._document(self.call("POST", path, body, **options), expect)

    def patch(self, path: str, body: Any, expect: int = 200) -> Any:
        return self._document(self.call("PATCH", path, body), expect)

    def patch_any(self, pod_id: str, body: Any) -> None:
        """An edit that may be nonsense."""
        response = self.call("PATCH", f"/v2/pods/{pod_id}", body)
        assert response.status_code in (200, 400, 404, 409, 422), response.text

    def delete(self, path: str, expect: int = 204) -> Any:
        return self._document(self.call("DELETE", path), expect)

    def _document(self, response: requests.Response, expect: int) -> Any:
        assert response.status_code == expect, f"{response.status_code}: {response.text}"
        return response.json() if response.content else None

    # pods ----------------------------------------------------------------------------------------------------------

    def body(self, **changes: Any) -> dict[str, Any]:
        """A create that is accepted. A change to None leaves the field out."""
        body = {
            "name": "p",
            "image": "runpod/pytorch:2.8",
            "gpu": {"id": GPU, "count": 1},
            "disk": 20,
            "ports": ["22/tcp", "8888/http"],
            **changes,
        }
        return {name: value for name, value in body.items() if value is not None}

    def create(self, **changes: Any) -> dict[str, Any]:
        pod: dict[str, Any] = self.post("/v2/pods", self.body(**changes), 201)
        return pod

    def running(self, **changes: Any) -> dict[str, Any]:
        """A pod that runs and has told of its ports (frozen clocks only)."""
        pod = self.create(**changes)
        self.settle()
        return self.pod(pod["id"])

    def settle(self) -> None:
        """Let what was asked for happen, and the pods tell of themselves."""
        self.sandbox.advance(5)
        self.sandbox.advance(1)  # a real start ends with the last advance

    def pod(self, pod_id: str) -> dict[str, Any]:
        pod: dict[str, Any] = self.get(f"/v2/pods/{pod_id}")
        return pod

    def act(self, pod_id: str, action: str, expect: int = 200) -> Any:
        return self.post(f"/v2/pods/{pod_id}/action", {"action": action}, expect)

    def graphql(self, query: str, variables: dict[str, Any] | None = None, expect: int = 200) -> Any:
        body = {"query": query} if variables is None else {"query": query, "variables": variables}
        return self._document(self.call("POST", "/graphql", body), expect)

    def log_frames(
        self, pod_id: str, query: str = "", until: int = 1, **headers: str
    ) -> list[tuple[str, dict[str, Any]]]:
        """The first `until` frames of the stream: id and data."""
        path = f"/v2/pods/{pod_id}/logs{query}"
        frames: list[tuple[str, Any]] = []
        with self.call("GET", path, stream=True, headers=headers) as response:
            assert response.status_code == 200, response.text
            assert response.headers["Content-Type"] == "text/event-stream"
            id = ""
            for line in response.iter_lines(chunk_size=1, decode_unicode=True):
                if line.startswith("id: "):
                    id = line[4:]
                elif line.startswith("data: "):
                    frames.append((id, json.loads(line[6:])))
                    if len(frames) >= until:
                        break
        return frames
