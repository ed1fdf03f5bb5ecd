"""RunPod's face: REST v2 and the old GraphQL on one origin; v1 answers that it is gone.

Who may call what, quotas, and what every answer carries stand here. Pods: runpod_pods, over REST v2: runpod_rest.
Catalogue, billing, logs, and an account's other things have modules of their own. `settings` holds what may be changed.
"""

from __future__ import annotations

from decimal import Decimal
from http import HTTPStatus
from typing import Any

from gpu_skills.sandbox.containers import Boot
from gpu_skills.sandbox.face import Face, Reply, Request, Route, WireError
from gpu_skills.sandbox.runpod_account import AccountParts
from gpu_skills.sandbox.runpod_billing import Billing
from gpu_skills.sandbox.runpod_catalog import Catalog
from gpu_skills.sandbox.runpod_graphql import GraphQl
from gpu_skills.sandbox.runpod_logs import Logs
from gpu_skills.sandbox.runpod_pods import Pods, pod_of
from gpu_skills.sandbox.runpod_rest import PodRoutes
from gpu_skills.sandbox.runpod_wire import Problem, Quotas, Settings, problem, request_id
from gpu_skills.sandbox.world import Account, Instance, Key, World

_EDGE_REFUSAL = b"""<!DOCTYPE html>
<html lang="en-US"><head><title>Access denied</title></head><body>
<h1>Error 1010</h1><p>The owner of this website has banned your access based on your browser's signature.</p>
</body></html>
"""


class RunpodFace(Face):
    vendor = "runpod"
    prefixes = ("/v2/", "/v1/", "/graphql")

    def __init__(self, world: World):
        super().__init__(world)
        self.settings = Settings()
        self.quotas = Quotas(world, self.settings)
        self.logs = Logs(world)
        self.pods = Pods(world, self.settings, self.logs)
        parts = AccountParts(world, self.pods)
        for part in (
            PodRoutes(world, self.settings, self.pods, self.logs, parts),
            Catalog(world),
            parts,
            Billing(world, self.settings),
            GraphQl(world, self.settings, self.pods, parts),
        ):
            self.routes += part.routes()

    # the wire ------------------------------------------------------------------------------------------------------

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]] | set[str]:
        if path.startswith("/v1/"):
            raise WireError(problem(410, "REST API v1 was retired on 2026-11-15; use /v2"))
        return super().find(method, path)

    def authenticate(self, request: Request) -> Key:
        agent = request.headers.get("user-agent", "")
        if self.settings.refuses_urllib and (not agent or agent.startswith("Python-urllib")):
            raise WireError(Reply(403, _EDGE_REFUSAL, content_type="text/html; charset=UTF-8"))
        shown = request.bearer
        if shown is None and request.path == "/graphql":
            shown = request.query.get("api_key")
        if shown is None:
            raise WireError(self._unauthorized(request, "missing bearer token"))
        key = self.world.keys.get(shown)
        if key is None or key.account.vendor != self.vendor:
            raise WireError(self._unauthorized(request, "invalid token"))
        request.key = key
        if (exceeded := self.quotas.spend(key.account.id)) is not None:
            raise WireError(self._too_many(*exceeded))
        if key.instance_id is not None:
            self._check_machine_key(request, key)
        return key

    def _unauthorized(self, request: Request, detail: str) -> Reply:
        if request.path == "/graphql":
            return Reply(401, {"errors": [{"message": "Unauthorized", "extensions": {"code": "UNAUTHENTICATED"}}]})
        return problem(401, detail)

    def _check_machine_key(self, request: Request, key: Key) -> None:
        """A pod's own key acts on that pod only, and there as far as the settings say."""
        found = self.find(request.method, request.path)
        assert not isinstance(found, set)
        instance = self.world.instances.get(key.instance_id)
        call, about = found[0].call, request.params.get("id")
        is_denied = instance is None or "key_denied" in instance.faults or call not in self.settings.pod_key_may
        if is_denied or (call != "graphql" and about != key.instance_id):
            raise Problem(403, "access denied")

    def failure(self, status: int, code: str, message: str) -> Reply:
        return problem(status, message)

    def too_frequent(self, route: Route, args: dict[str, Any]) -> Reply:
        return self._too_many(str(args.get("window", "minute")), int(args.get("retry_after", 12)))

    def _too_many(self, window: str, seconds: int) -> Reply:
        reply = problem(429, f"rate limit exceeded for the {window} window")
        reply.headers["Retry-After"] = str(max(seconds, 1))
        return reply

    def failure_inside_200(self) -> Reply:
        return Reply(200, {"errors": [{"message": "Something went wrong", "extensions": {"code": "RUNPOD"}}]})

    def decorate(self, request: Request, reply: Reply) -> None:
        reply.headers["x-request-id"] = request_id()
        if request.key is not None and self.world.limit_mode != "off":
            reply.headers.update(self.quotas.headers(request.key.account.id))
        if reply.status >= HTTPStatus.BAD_REQUEST and request.path == "/graphql" and isinstance(reply.body, dict):
            if "detail" in reply.body:  # the shape of v2 does not belong here
                code = {"code": "INTERNAL_SERVER_ERROR" if reply.status >= 500 else "RUNPOD"}
                reply.body = {"errors": [{"message": reply.body["detail"], "extensions": code}]}
                reply.content_type = "application/json"

    # the rules -----------------------------------------------------------------------------------------------------

    def tariff(self, instance: Instance) -> dict[str, Decimal]:
        self.logs.note_phase(instance)  # each change of phase comes by here
        return self.pods.tariff(instance)

    def boot(self, instance: Instance) -> Boot:
        return self.pods.boot(instance)

    def command_ended(self, instance: Instance, code: int) -> None:
        self.pods.command_ended(instance, code)

    def balance_is_zero(self, account: Account) -> None:
        """Every pod is stopped; those that keep their data on a volume disk are gone with it."""
        for instance in list(self.world.living(account)):
            if pod_of(instance).network is None:
                self.world.destroy(instance)
            elif self.pods.status(instance) != "EXITED":
                self.pods.stop(instance, who="Runpod")
