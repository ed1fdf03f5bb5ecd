"""Vast on loopback: its paths, who may call them, and its rules of money and life.

Instances belong to `vast_instances`, offers to `vast_offers`, creates to `vast_create`, the account to `vast_account`,
logs and commands to `vast_results`.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from gpu_skills.sandbox import vast_account as account
from gpu_skills.sandbox import vast_create as creating
from gpu_skills.sandbox import vast_instances as instances
from gpu_skills.sandbox import vast_results as results
from gpu_skills.sandbox.containers import Boot
from gpu_skills.sandbox.face import Face, Handler, Reply, Request, Route, route
from gpu_skills.sandbox.http import is_sandbox_key
from gpu_skills.sandbox.vast_offers import OfferBook, search
from gpu_skills.sandbox.vast_wire import body_of, error
from gpu_skills.sandbox.world import Account, Instance, Key, World

BANNER = "Welcome to vast.ai. If authentication fails, try again after a few seconds, and double check your ssh key.\n"
IMAGE_GB = Decimal(4)  # what a pull moves, at the host's price for traffic
DELETED_AFTER_END_S = 48 * 3600
# What a machine's own key may do, and only to that machine.
MACHINE_KEY_CALLS = {"state", "destroy"}
RIVAL_FACTOR = Decimal("1.25")


class VastFace(Face):
    vendor = "vast"
    prefixes = ("/api/v0/", "/api/v1/")

    def __init__(self, world: World):
        super().__init__(world)
        self.book = OfferBook(world)
        self.results = results.Results(world)
        self.routes = self._routes()
        self.book.let_others_rent()

    def _routes(self) -> list[Route]:
        world = self.world
        v0, one = "/api/v0", "/api/v0/instances/{id}"

        def on(handler: Callable[..., Reply]) -> Handler:
            return functools.partial(handler, world)

        def with_results(handler: Callable[..., Reply]) -> Handler:
            return functools.partial(handler, world, self.results)

        def write(method: str, path: str, call: str, handler: Handler, **options: Any) -> Route:
            about = "id" if path.startswith(f"{v0}/instances/") and "{id}" in path else None
            return route(method, path, call, handler, mutates=True, about=about, **options)

        return [
            # Fixed words before `{id}`, which would take them for one.
            route("GET", "/api/v1/instances", "list", on(instances.list_v1), interval_s=1.0),
            route("GET", f"{v0}/instances", "list_v0", on(instances.list_v0)),
            route("GET", f"{v0}/instances/filters", "filters", on(instances.filters)),
            write("PUT", f"{v0}/instances", "state_several", on(instances.manage_several), interval_s=2.0),
            write("DELETE", f"{v0}/instances", "destroy_several", on(instances.destroy_several), interval_s=3.0),
            route("GET", one, "show", on(instances.show_one), interval_s=2.0, about="id"),
            write("PUT", one, "state", on(instances.manage), interval_s=1.0),
            write("DELETE", one, "destroy", on(instances.destroy), interval_s=3.0),
            write("PUT", f"{v0}/instances/reboot/{{id}}", "reboot", on(instances.reboot), interval_s=1.0),
            write("PUT", f"{v0}/instances/recycle/{{id}}", "recycle", on(instances.recycle), interval_s=1.0),
            write("PUT", f"{v0}/instances/bid_price/{{id}}", "bid", on(instances.change_bid), interval_s=5.5),
            write("PUT", f"{v0}/instances/update_template/{{id}}", "update", on(instances.update_template)),
            write("PUT", f"{v0}/instances/prepay/{{id}}", "prepay", on(account.prepay), interval_s=2.0),
            route("GET", f"{v0}/instances/balance/{{id}}", "deposit", on(account.deposit), interval_s=3.0, about="id"),
            route("PUT", f"{v0}/instances/request_logs/{{id}}", "logs", with_results(results.request_logs), about="id"),
            write("PUT", f"{v0}/instances/command/{{id}}", "execute", with_results(results.execute), interval_s=1.5),
            write("POST", f"{one}/ssh", "attach_ssh", on(account.attach_key)),
            route("GET", f"{one}/ssh", "instance_ssh", on(account.instance_keys), about="id"),
            write("DELETE", f"{one}/ssh/{{key_id}}", "detach_ssh", on(account.detach_key), interval_s=2.0),
            route("GET", results.PATH, "result", self.results.fetch, needs_key=False),
            write("PUT", f"{v0}/commands/copy_direct", "copy", on(results.copy_direct), interval_s=3.5),
            write("DELETE", f"{v0}/commands/copy_direct", "cancel_copy", on(results.cancel_copy)),
            write("PUT", f"{v0}/commands/rsync", "copy", on(results.copy_direct), interval_s=3.5),
            # offers
            route("POST", f"{v0}/bundles", "search", self._search, needs_key=False, per_minute=10),
            route("PUT", f"{v0}/search/asks", "search", self._search_new, needs_key=False, per_minute=10),
            write("POST", f"{v0}/asks/bulk", "create", self._create_several, interval_s=4.5, penalty_s=12.0),
            write("PUT", f"{v0}/asks/{{offer}}", "create", self._create, interval_s=4.5, penalty_s=12.0),
            write("PUT", f"{v0}/launch_instance", "create", self._launch, interval_s=5.0),
            route("GET", f"{v0}/gpu_names/unique", "gpu_names", self._gpu_names, needs_key=False),
            # account
            route("GET", f"{v0}/users/current", "user", on(account.current_user)),
            route("GET", f"{v0}/users/me/invoices", "old_invoices", on(account.old_invoices)),
            route("GET", f"{v0}/charges", "charges", on(account.charges), interval_s=1.0),
            route("GET", "/api/v1/invoices", "invoices", on(account.invoices), interval_s=3.0),
            write("POST", f"{v0}/ssh", "create_ssh", on(account.create_key), interval_s=1.0),
            route("GET", f"{v0}/ssh", "list_ssh", on(account.list_keys)),
            write("PUT", f"{v0}/ssh/{{id}}", "update_ssh", on(account.update_key)),
            write("DELETE", f"{v0}/ssh/{{id}}", "delete_ssh", on(account.delete_key)),
            route("GET", f"{v0}/volumes", "list_volumes", on(account.list_volumes)),
            write("PUT", f"{v0}/volumes", "create_volume", on(account.rent_volume), interval_s=5.5),
            write("DELETE", f"{v0}/volumes", "delete_volume", on(account.delete_volume), interval_s=5.5),
            write("POST", f"{v0}/template", "create_template", on(account.create_template)),
            route("GET", f"{v0}/template", "list_templates", on(account.list_templates)),
        ]

    # the wire ------------------------------------------------------------------------------------------------------

    def authenticate(self, request: Request) -> Key:
        """No header: 403. Not a key of the sandbox: 401. One that is not known (any more): 404, of all things."""
        shown = request.bearer or request.query.get("api_key")
        if shown is None:
            raise error(403, "auth_error", "This action requires login.")
        if not is_sandbox_key(shown):
            raise error(401, "auth_error", "Invalid user key")
        key = self.world.keys.get(shown)
        if key is None or key.account.vendor != self.vendor:
            raise error(404, "auth_error", "Invalid user key")
        return key

    def authorize(self, route: Route, request: Request) -> None:
        key = request.key
        if key is None or key.instance_id is None:
            return
        instance = self.world.instances.get(key.instance_id)
        is_its_own = request.params.get("id") == str(key.instance_id)
        is_denied = instance is not None and "key_denied" in instance.faults
        if route.call not in MACHINE_KEY_CALLS or not is_its_own or is_denied:
            raise error(403, "not_authorized", "This key is not allowed to do that.")

    def failure(self, status: int, code: str, message: str) -> Reply:
        return Reply(status, {"success": False, "error": code, "msg": message})

    def too_frequent(self, route: Route, args: dict[str, Any]) -> Reply:
        text = "API requests too frequent"
        if route.interval_s:
            text += f": endpoint threshold={route.interval_s}"
        headers = {"Retry-After": str(args["retry_after"])} if "retry_after" in args else {}
        if args.get("style") == "quota":
            return Reply(429, {"success": False, "error": "search_quota_exceeded", "msg": text}, headers)
        if args.get("style") == "json":
            return Reply(429, {"detail": text}, headers)
        return Reply(429, text.encode(), headers, content_type="text/plain")

    # offers and creates --------------------------------------------------------------------------------------------

    def _search(self, request: Request) -> Reply:
        return Reply(200, {"success": True, "offers": search(self.book, body_of(request), self._searcher(request))})

    def _search_new(self, request: Request) -> Reply:
        body = body_of(request)
        query, columns = body.get("q", {}), body.get("select_cols", ["*"])
        if not isinstance(query, dict) or not isinstance(columns, list):
            raise error(400, "invalid_request", "q is an object, select_cols a list")
        offers = search(self.book, query, self._searcher(request))
        if "*" not in columns:
            offers = [{name: offer.get(name) for name in columns if isinstance(name, str)} for offer in offers]
        return Reply(200, {"success": True, "offers": offers})

    def _searcher(self, request: Request) -> Account | None:
        """A search needs no key, but one that is shown has to be right."""
        if request.bearer is None and "api_key" not in request.query:
            return None
        key = self.authenticate(request)
        if key.instance_id is not None:
            raise error(403, "not_authorized", "This key is not allowed to do that.")
        return key.account

    def _create(self, request: Request) -> Reply:
        return creating.create(self.world, self.book, request, request.params["offer"], body_of(request))

    def _create_several(self, request: Request) -> Reply:
        return creating.create_several(self.world, self.book, request, body_of(request))

    def _launch(self, request: Request) -> Reply:
        return creating.launch(self.world, self.book, request, body_of(request))

    def _gpu_names(self, request: Request) -> Reply:
        return Reply(200, {"gpu_names": sorted({host.gpu.name for host in self.book.hosts})})

    # the rules -----------------------------------------------------------------------------------------------------

    def tariff(self, instance: Instance) -> dict[str, Decimal]:
        """GPU while running, not while loading; disk from creation to destroy."""
        rates = {"disk": instances.disk_usd_hr(instance)}
        if instances.bills_gpu(instance):
            rates["gpu"] = instances.gpu_usd_hr(instance)
        return rates

    def boot(self, instance: Instance) -> Boot:
        extra, own = instance.extra, {name: value for name, value in instance.env.items() if name.isidentifier()}
        assert instance.key is not None
        environment = {
            "CONTAINER_ID": str(instance.id),
            "CONTAINER_API_KEY": instance.key.value,
            "VAST_CONTAINERLABEL": f"C.{instance.id}",
            "PUBLIC_IPADDR": "127.0.0.1",
            "VAST_URL": self.world.url,
            **own,
        }
        for name in instance.env:
            if name.startswith("-p "):
                inside = name[3:].split(":")[-1].split("/")[0].strip()
                environment[f"VAST_TCP_PORT_{inside}"] = inside
        has_shell = extra["runtype"] != "args"
        mounts = {
            path: volume.directory
            for volume_id, path in extra["volumes"].items()
            if (volume := self.world.volumes.get(volume_id)) is not None
        }
        return Boot(
            environment=environment,
            session_environment={},  # sessions see what the start command left in /etc/environment, nothing else
            command=extra["onstart"] if has_shell else shlex.join(extra["args"]) or None,
            authorized_keys=account.authorized_keys(instance),
            mounts=dict(mounts),
            sshd=has_shell,
            banner=BANNER,
            has_proxy=has_shell,
        )

    def came_up(self, instance: Instance) -> None:
        """A pull is paid by the gigabyte, once per container image on the host."""
        if not instance.extra.get("is_pulled"):
            instance.extra["is_pulled"] = True
            self.world.transfer(instance, down_gb=IMAGE_GB)

    def rented(self, instance: Instance) -> None:
        self.world.clock.call_at(instance.extra["ends_at"], self.world.guarded(lambda: self._lease_ended(instance)))

    def _lease_ended(self, instance: Instance) -> None:
        if instance.is_destroyed:
            return
        self.world.stop(instance, reason="the contract has ended")
        self.world.clock.call_in(DELETED_AFTER_END_S, self.world.guarded(lambda: self._delete(instance)))

    def _delete(self, instance: Instance) -> None:
        if not instance.is_destroyed:
            self.world.destroy(instance)

    def outbid(self, instance: Instance) -> None:
        instance.extra["rival_usd_hr"] = instance.rate_usd_hr * RIVAL_FACTOR

    def command_ended(self, instance: Instance, code: int) -> None:
        """With `args` the command is the container; a start script may end as it likes."""
        if instance.extra["runtype"] == "args":
            self.world.container_exited(instance, code)
