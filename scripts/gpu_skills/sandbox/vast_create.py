"""Vast's create: what a request may hold, what the vendor makes of it, and how it can go wrong with money running."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from gpu_skills.sandbox.face import Reply, Request, WireError
from gpu_skills.sandbox.faults import of_instances
from gpu_skills.sandbox.meter import per_hour
from gpu_skills.sandbox.vast_offers import Ask, OfferBook, search
from gpu_skills.sandbox.vast_wire import decimal, error, instance_id
from gpu_skills.sandbox.world import Account, Instance, Volume, World

MIN_DISK_GB = 8
MAX_LABEL = 256
MAX_IMAGE = 1024
MAX_ONSTART = 4048
MAX_ENV_VALUE = 256
MAX_ENV_TOTAL = 32768
MIN_BID_USD_HR, MAX_BID_USD_HR = Decimal("0.001"), Decimal(128)
# The documented words, and the tokens that the official client sends in their place ("direc" is theirs).
RUNTYPES = {
    "ssh": "ssh", "jupyter": "jupyter", "args": "args",
    "ssh_proxy": "ssh_proxy", "ssh_direct": "ssh_direc ssh_proxy", "ssh_direc": "ssh_direc",
    "jupyter_proxy": "jupyter_proxy ssh_proxy", "jupyter_direct": "jupyter_direc ssh_direc ssh_proxy",
    "jupyter_direc": "jupyter_direc",
}  # fmt: skip


@dataclass
class Order:
    """A create request that was understood."""

    image: str
    disk_gb: Decimal
    label: str | None
    runtype: str
    env: dict[str, str]
    onstart: str | None
    args: list[str]
    price: Decimal | None
    target_state: str
    cancel_unavail: bool
    template: dict[str, Any] | None = None
    volume_info: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def create(world: World, book: OfferBook, request: Request, offer_id: Any, body: dict[str, Any]) -> Reply:
    """Accept an offer. Everything the vendor may do to it by fault happens here too."""
    ask_id = instance_id(offer_id)
    if ask_id is None:
        raise error(400, "invalid_args", "error 400/3467: Invalid args: 'id' is required and must be a valid offer ID")
    order = understand(body, request.account, ask_id)
    ask = book.find(ask_id)
    if ask is None or "no_capacity" in request.faults:
        raise _gone(404, ask_id)
    if "offer_gone" in request.faults:
        raise _gone(int(request.faults["offer_gone"].get("status", 404)), ask_id)
    if "insufficient_balance" in request.faults or request.account.balance_usd(world.now()) <= 0:
        raise error(400, "missing_billing", "Your account lacks credit; see the billing page.", ask_id=ask_id)
    has_room = ask.host.free_gpus >= ask.gpu_count
    if ask.is_expired:
        raise _gone(404, ask_id)
    if not has_room and order.cancel_unavail:
        raise _gone(410, ask_id)
    struck = of_instances(request.faults)
    if order.price is None and "created_on_demand" in struck:
        del struck["created_on_demand"]
    too_low = order.price is not None and order.price < ask.min_bid_usd_hr
    runs = order.target_state == "running" and has_room and not too_low and "error_with_contract" not in request.faults
    instance = world.rent(_instance(world, request.account, ask, order, struck), run=runs)
    if order.volume_info:
        _attach_volume(world, instance, order.volume_info)
    if order.target_state == "running" and not has_room:
        world.start(instance)  # waits for its GPUs, stopped and paying for its disk
    if too_low or "error_with_contract" in request.faults:
        code, reason = ("invalid_price", "bid is below the minimum") if too_low else ("invalid_args", "cannot schedule")
        msg = f"error 400/3712: {reason}: instance {instance.id} was created but could not start."
        raise error(400, code, msg, ask_id=ask_id, new_contract=instance.id)
    assert instance.key is not None
    wrong = request.faults.get("wrong_id")
    named = instance.id if wrong is None else wrong.get("instance", instance.id + 900_000_000)
    return Reply(200, {"success": True, "new_contract": named, "instance_api_key": instance.key.value})


def create_several(world: World, book: OfferBook, request: Request, body: dict[str, Any]) -> Reply:
    """One request, several offers: each succeeds or fails by itself."""
    ids = body.get("ids")
    if not isinstance(ids, list) or not 0 < len(ids) <= 64:
        raise error(400, "invalid_args", "ids must be a list of offer ids")
    results = []
    for offer_id in ids:
        try:
            results.append({"ask_id": offer_id, **create(world, book, request, offer_id, body).body})
        except WireError as exc:
            results.append({"ask_id": offer_id, **exc.reply.body})
    return Reply(200, {"success": any(result["success"] for result in results), "results": results})


def launch(world: World, book: OfferBook, request: Request, body: dict[str, Any]) -> Reply:
    """Search and rent the best match in one call."""
    query = body.get("q")
    if not isinstance(query, dict):
        raise error(400, "invalid_args", "q must be a search query")
    found = search(book, {**query, "limit": 1}, request.account)
    if not found:
        raise error(404, "no_such_ask", "error 404/3603: no_such_ask No offer matches the query.")
    return create(world, book, request, found[0]["id"], {name: value for name, value in body.items() if name != "q"})


def understand(body: dict[str, Any], account: Account, ask_id: int) -> Order:
    """Check a request as the vendor does. Raises WireError."""

    def wrong(msg: str, code: str = "invalid_args") -> WireError:
        return error(400, code, f"error 400/3467: Invalid args: {msg}", ask_id=ask_id)

    template = _template(body, account, wrong)
    merged = {**(template or {}), **{name: value for name, value in body.items() if value is not None}}
    image = merged.get("image")
    if not isinstance(image, str) or not 0 < len(image) <= MAX_IMAGE:
        raise wrong("'image' is required and must be a string")
    disk_gb = decimal(merged.get("disk", MIN_DISK_GB))
    if disk_gb is None or not MIN_DISK_GB <= disk_gb <= 1_000_000:
        raise wrong(f"'disk' must be at least {MIN_DISK_GB}")
    label = merged.get("label")
    if label is not None and (not isinstance(label, str) or len(label) > MAX_LABEL):
        raise wrong(f"'label' must be a string of at most {MAX_LABEL} characters", "label_too_long")
    target_state = merged.get("target_state", "running")
    if target_state not in ("running", "stopped"):
        raise wrong("'target_state' must be running or stopped")
    price = _price(merged.get("price"), ask_id)
    cancel = merged.get("cancel_unavail", price is None and target_state == "running")
    if not isinstance(cancel, bool):
        raise wrong("'cancel_unavail' must be a boolean")
    args = _args(merged, wrong)
    if merged.get("vm") and not account.ssh_keys:
        raise error(400, "no_ssh_key_for_vm", "A VM needs an ssh key in your account.", ask_id=ask_id)
    onstart = merged.get("onstart")
    if onstart is not None and (not isinstance(onstart, str) or len(onstart) > MAX_ONSTART):
        raise wrong(f"'onstart' must be a string of at most {MAX_ONSTART} characters")
    volume_info = merged.get("volume_info")
    if volume_info is not None and not isinstance(volume_info, dict):
        raise wrong("'volume_info' must be an object")
    return Order(
        image=image,
        disk_gb=disk_gb,
        label=label or None,
        runtype=_runtype(merged.get("runtype"), bool(args), wrong),
        env=_env((template or {}).get("env"), wrong) | _env(body.get("env"), wrong),
        onstart=onstart,
        args=args,
        price=price,
        target_state=target_state,
        cancel_unavail=cancel,
        template=template,
        volume_info=volume_info,
    )


def _template(body: dict[str, Any], account: Account, wrong: Any) -> dict[str, Any] | None:
    wanted = body.get("template_hash_id")
    if wanted is None:
        return None
    template = account.extra.get("templates", {}).get(wanted) if isinstance(wanted, str) else None
    if template is None:
        raise wrong("no such template")
    return template


def _price(value: Any, ask_id: int) -> Decimal | None:
    """Present and not null means interruptible."""
    if value is None:
        return None
    price = decimal(value) if not isinstance(value, bool) else None
    if price is None or not MIN_BID_USD_HR <= price <= MAX_BID_USD_HR:
        raise error(400, "invalid_price", "Please set a bid price between 0.001 and 128.", ask_id=ask_id)
    return price


def _args(merged: dict[str, Any], wrong: Any) -> list[str]:
    args, text = merged.get("args"), merged.get("args_str")
    if args is not None and not (isinstance(args, list) and all(isinstance(arg, str) for arg in args)):
        raise wrong("'args' must be a list of strings")
    if text is not None and not isinstance(text, str):
        raise wrong("'args_str' must be a string")
    import shlex

    try:
        return list(args or shlex.split(text or ""))
    except ValueError:
        raise wrong("'args_str' has an open quotation") from None


def _runtype(value: Any, has_args: bool, wrong: Any) -> str:
    """The vendor's tokens, space-joined, for whichever spelling came."""
    if value is None:
        return "args" if has_args else "ssh"
    tokens = value.split() if isinstance(value, str) else []
    if not tokens or any(token not in RUNTYPES for token in tokens):
        raise wrong("'runtype' is not one of ssh, jupyter, args, ssh_proxy, ssh_direct, jupyter_proxy, jupyter_direct")
    return " ".join(dict.fromkeys(" ".join(RUNTYPES[token] for token in tokens).split()))


def _env(value: Any, wrong: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("'env' must be an object")
    env = {}
    for name, entry in value.items():
        if not isinstance(entry, str | int | float) or "\0" in f"{name}{entry}":
            raise wrong(f"env {name!r} must be a string")
        env[name] = str(entry)
        if len(env[name]) > MAX_ENV_VALUE:
            raise wrong(f"env {name!r} is longer than {MAX_ENV_VALUE} characters")
    if sum(len(name) + len(entry) for name, entry in env.items()) > MAX_ENV_TOTAL:
        raise wrong("env is too long")
    return env


def _gone(status: int, ask_id: int) -> WireError:
    if status == 410:
        msg = f"error 410/3907: no_such_ask Instance type {ask_id} is no longer available."
        return error(410, "no_such_ask", msg, ask_id=ask_id)
    msg = f"error 404/3603: no_such_ask Instance type by id {ask_id} is not available."
    return error(404, "invalid_args", msg, ask_id=ask_id)


def _instance(world: World, account: Account, ask: Ask, order: Order, struck: dict[str, dict[str, Any]]) -> Instance:
    is_bid = order.price is not None and "created_on_demand" not in struck
    return Instance(
        id=world.new_id(),
        vendor="vast",
        account=account,
        host=ask.host,
        gpu_count=ask.gpu_count,
        disk_gb=min(order.disk_gb, ask.disk_gb),  # silently, as the vendor does
        label=order.label,
        image=order.image,
        created_at=world.now(),
        rate_usd_hr=order.price if is_bid and order.price is not None else ask.rate_usd_hr,
        env=order.env,
        faults=struck,
        extra={
            "ask_id": ask.id,
            "is_bid": is_bid,
            "min_bid_usd_hr": ask.min_bid_usd_hr,
            "runtype": order.runtype,
            "onstart": order.onstart,
            "args": order.args,
            "template": order.template,
            "ends_at": world.now() + ask.host.available_s,
            "account_keys": dict(account.ssh_keys),  # those that are there at creation
            "volumes": {},
            "deposit_usd": Decimal(0),
        },
    )


def _attach_volume(world: World, instance: Instance, info: dict[str, Any]) -> None:
    """A volume bills by itself and outlives the instance."""
    path = str(info.get("mount_path") or "/data")
    if info.get("create_new"):
        size = decimal(info.get("size", 15)) or Decimal(15)
        volume = new_volume(world, instance.account, instance.host, size, str(info.get("name") or ""))
    else:
        found = world.volumes.get(instance_id(info.get("volume_id")))
        if found is None or found.account is not instance.account:
            return
        volume = found
    instance.extra["volumes"][volume.id] = path


def new_volume(world: World, account: Account, host: Any, size_gb: Decimal, name: str) -> Volume:
    volume_id = world.new_id()
    volume = Volume(
        id=volume_id,
        vendor="vast",
        account=account,
        name=name or f"V.{volume_id}",
        size_gb=size_gb,
        location=str(host.machine_id),
        directory=world.directory / f"volume-{volume_id}",
        created_at=world.now(),
        extra={"host": host},
    )
    return world.add_volume(volume, per_hour(host.storage_usd_gb_month, size_gb))
