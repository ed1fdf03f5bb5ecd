"""Vast's account side: user, SSH keys, charges, invoices, deposits, volumes, templates."""

from __future__ import annotations

import hashlib
import json
import time
from decimal import Decimal
from typing import Any

from gpu_skills.sandbox.face import Reply, Request, WireError
from gpu_skills.sandbox.meter import Entry, by_kind, per_hour
from gpu_skills.sandbox.vast_create import new_volume
from gpu_skills.sandbox.vast_instances import require
from gpu_skills.sandbox.vast_offers import machine_fields
from gpu_skills.sandbox.vast_wire import (
    body_of,
    decimal,
    error,
    instance_id,
    json_parameter,
    number,
    place_of,
    token_for,
)
from gpu_skills.sandbox.world import Account, Instance, World

MAX_CHARGES = 500
MAX_KEY = 16_384
DEPOSIT_DISCOUNT = 0.2
VOLUME_MACHINE_FIELDS = (
    "host_id", "public_ipaddr", "geolocation", "verification", "reliability2", "static_ip", "cpu_arch", "cpu_name",
    "mobo_name", "os_version", "driver_version", "cuda_max_good", "disk_name", "inet_up", "inet_down",
)  # fmt: skip


def current_user(world: World, request: Request) -> Reply:
    account = request.account
    balance = float(account.balance_usd(world.now()).quantize(Decimal("0.000001")))
    return Reply(
        200,
        {
            "id": account.id,
            "key_id": account.id + 1,
            "username": account.name,
            "email": f"account-{account.id}@sandbox.invalid",
            "email_verified": True,
            "balance": balance,
            "credit": balance,
            "balance_threshold": 0.0,
            "autobill_threshold": None,
            "has_billing": False,
            "billaddress_country": None,
            "host_agreement_accepted": False,
            "is_host": False,
            "ssh_key": next(iter(account.ssh_keys.values()), ""),
            "sid": f"{account.id:x}",
            "rights": {},
        },
    )


# SSH keys -----------------------------------------------------------------------------------------------------------


def create_key(world: World, request: Request) -> Reply:
    """Whatever text comes is stored, a path too: the official client sends one, and sshd can do nothing with it."""
    text = _key_text(body_of(request))
    key_id = world.new_id()
    request.account.ssh_keys[key_id] = text
    _keys_made_at(request.account)[key_id] = world.now()
    return Reply(200, {"success": True, "key": _key(world, request.account, key_id, text)})


def list_keys(world: World, request: Request) -> Reply:
    """A bare array."""
    return Reply(200, [_key(world, request.account, *entry) for entry in request.account.ssh_keys.items()])


def update_key(world: World, request: Request) -> Reply:
    key_id = _own_key(request)
    request.account.ssh_keys[key_id] = text = _key_text(body_of(request))
    return Reply(200, {"success": True, "key": _key(world, request.account, key_id, text)})


def delete_key(world: World, request: Request) -> Reply:
    """It leaves running instances as they are."""
    del request.account.ssh_keys[_own_key(request)]
    return Reply(200, {"success": True})


def attach_key(world: World, request: Request) -> Reply:
    """To a live container, at once; and to those that come after it in this instance."""
    instance = require(world, request)
    instance.ssh_keys[world.new_id()] = _key_text(body_of(request))
    world.authorize(instance, authorized_keys(instance))
    return Reply(200, {"success": True, "msg": "SSH key added to instance."})


def detach_key(world: World, request: Request) -> Reply:
    instance = require(world, request)
    key_id = instance_id(request.params["key_id"])
    if key_id not in instance.ssh_keys and key_id not in instance.extra["account_keys"]:
        raise error(404, "no_such_ssh_key", "SSH key not found.")
    instance.ssh_keys.pop(key_id, None)
    instance.extra["account_keys"].pop(key_id, None)
    world.authorize(instance, authorized_keys(instance))
    return Reply(200, {"success": True, "msg": "SSH key removed from instance."})


def instance_keys(world: World, request: Request) -> Reply:
    """The list comes as text that holds JSON."""
    instance = require(world, request)
    keys = {**instance.extra["account_keys"], **instance.ssh_keys}
    rows = [{"id": key_id, "user_id": instance.account.id, "public_key": text} for key_id, text in keys.items()]
    return Reply(200, {"success": True, "ssh_keys": json.dumps(rows)})


def authorized_keys(instance: Instance) -> list[str]:
    """Keys the account had when the container was created, and those attached to this instance."""
    return [*instance.extra["account_keys"].values(), *instance.ssh_keys.values()]


def _key_text(body: dict[str, Any]) -> str:
    text = body.get("ssh_key")
    if not isinstance(text, str) or not text.strip():
        raise error(400, "no_ssh_key", "No ssh key provided")
    if len(text) > MAX_KEY or "\n" in text.strip() or "\0" in text:
        raise error(400, "invalid_args", "That is not one public key.")
    return text.strip()


def _own_key(request: Request) -> int:
    key_id = instance_id(request.params["id"])
    if key_id is None or key_id not in request.account.ssh_keys:
        raise error(404, "no_such_ssh_key", "SSH key not found.")
    return key_id


def _keys_made_at(account: Account) -> dict[int, float]:
    return account.extra.setdefault("keys_made_at", {})


def _key(world: World, account: Account, key_id: int, text: str) -> dict[str, Any]:
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(_keys_made_at(account).get(key_id, world.now())))
    return {
        "id": key_id,
        "user_id": account.id,
        "key": text,
        "public_key": text,
        "created_at": made,
        "deleted_at": None,
    }


# what was charged ---------------------------------------------------------------------------------------------------


def charges(world: World, request: Request) -> Reply:
    """One row per contract, its kinds below it. Amounts of rows have three decimals, as the vendor's."""
    conditions = json_parameter(request, "select_filters", {}, dict)
    since, until = _range(conditions.get("day"))
    if since is None or until is None:
        msg = "Must provide both 'day' gte and lte filters for instance charges"
        raise WireError(Reply(400, {"success": False, "msg": msg}))
    kinds = conditions.get("type")
    wanted = set(map(str, kinds["in"])) if isinstance(kinds, dict) and isinstance(kinds.get("in"), list) else None
    rows = []
    for resource in request.account.bill.resources():
        row = _charge_row(world, request.account, resource, since, min(until, world.now()))
        if row is not None and (wanted is None or row["type"] in wanted):
            rows.append(row)
    if request.query.get("latest_first", "true").lower() != "false":
        rows.sort(key=lambda row: -row["start"])
    return _page(request, rows, default=100)


def _charge_row(world: World, account: Account, resource: str, since: float, until: float) -> dict[str, Any] | None:
    entries = [e for e in account.bill.of(resource) if e.start <= until and (e.end is None or e.end >= since)]
    sums = by_kind(entries, since, until)
    if not any(sums.values()):
        return None
    kind, _, number_text = resource.partition("-")
    start, end = min(e.start for e in entries), max(int(until) if e.end is None else e.end for e in entries)
    label = getattr(world.instances.get(int(number_text)), "label", None)
    return {
        "start": start,
        "end": end,
        "type": kind,
        "source": resource,
        "description": f"{kind.capitalize()} {number_text} Charges - {max(1, (end - start) // 86400)} days",
        "amount": round(float(sum(sums.values(), Decimal(0))), 3),
        "metadata": {"label": label} if label is not None else {},
        "items": [_charge_item(name, amount, entries, until) for name, amount in sums.items()],
    }


def _charge_item(kind: str, amount: Decimal, entries: list[Entry], until: float) -> dict[str, Any]:
    own = [entry for entry in entries if entry.kind == kind]
    seconds = sum(entry.seconds(until) for entry in own)
    gigabytes = sum((entry.quantity_gb for entry in own), Decimal(0))
    measured = f"{gigabytes:.3f} GB" if kind in ("bwu", "bwd") else f"{seconds / 3600:.3f} hours"
    price = float(own[-1].rate_usd_hr)
    return {
        "start": min(entry.start for entry in own),
        "end": max(int(until) if entry.end is None else entry.end for entry in own),
        "type": "disk" if kind == "volume" else kind,
        "source": None,
        "description": measured if kind in ("bwu", "bwd") else f"{measured} at ${price:.6g}/hour",
        "amount": round(float(amount), 6),
        "metadata": {},
        "items": [],
    }


def invoices(world: World, request: Request) -> Reply:
    """Payments, not usage. Without a range: 200 with a failure inside."""
    since, until = _range(json_parameter(request, "select_filters", {}, dict).get("when"))
    if since is None or until is None:
        return Reply(200, {"success": False, "error": "Invalid date range"})
    account = request.account
    paid = _paid_at(account)
    rows = []
    if since <= paid <= until:
        rows.append(
            {
                "start": paid,
                "end": paid,
                "type": "credit",
                "source": "stripe",
                "description": "Sandbox credit",
                "amount": -float(account.deposited_usd),
                "metadata": {"invoice_id": account.id, "service": "stripe_payments"},
                "items": [],
            }
        )
    return _page(request, rows, default=100)


def old_invoices(world: World, request: Request) -> Reply:
    """What the deprecated command still reads: payments and charges in one list."""
    account, now = request.account, world.now()
    rows: list[dict[str, Any]] = [
        {"type": "payment", "timestamp": _paid_at(account), "amount": float(account.deposited_usd), "description": ""}
    ]
    if request.query.get("inc_charges", "").lower() not in ("", "false", "0"):
        for entry in account.bill.entries:
            amount = round(float(entry.amount(entry.start, now + 1)), 6)
            rows.append({"type": "charge", "timestamp": entry.start, "amount": amount, "description": entry.resource})
    since, until = number(request.query.get("sdate")) or 0, number(request.query.get("edate")) or now
    rows = [row for row in rows if since <= row["timestamp"] <= until]
    balance = float(account.balance_usd(now))
    return Reply(200, {"invoices": rows, "current": {"charges": 0.0, "credit": balance, "total": balance}})


def _paid_at(account: Account) -> int:
    return int(account.opened_at)


def _range(conditions: Any) -> tuple[float | None, float | None]:
    if not isinstance(conditions, dict):
        return None, None
    return number(conditions.get("gte")), number(conditions.get("lte"))


def _page(request: Request, rows: list[dict[str, Any]], *, default: int) -> Reply:
    try:
        limit = int(request.query.get("limit", str(default))[:12])
    except ValueError:
        raise error(400, "invalid_request", "limit is not a number") from None
    start = place_of(token) if (token := request.query.get("after_token")) else 0
    page = rows[max(start, 0) : max(start, 0) + min(max(limit, 1), MAX_CHARGES)]
    end = start + len(page)
    next_token = token_for(end) if page and end < len(rows) else None
    envelope = {"success": True, "count": len(page), "total": len(rows), "next_token": next_token, "results": page}
    return Reply(200, envelope)


# reserved instances -------------------------------------------------------------------------------------------------


def prepay(world: World, request: Request) -> Reply:
    body = body_of(request)
    instance = world.find(request.account, instance_id(request.params["id"]))
    if instance is None:
        raise WireError(Reply(400, {"success": False, "msg": "No such instance"}))
    amount = decimal(body.get("amount"))
    if amount is None or amount <= 0:
        raise error(400, "invalid_args", "amount must be positive")
    if amount > request.account.balance_usd(world.now()):
        raise WireError(Reply(411, {"success": False, "msg": "Insufficient credit"}))
    instance.extra["deposit_usd"] += amount
    months = float(instance.extra["deposit_usd"] / (instance.rate_usd_hr * 720))
    return Reply(200, {"success": True, "timescale": round(months, 3), "discount_rate": DEPOSIT_DISCOUNT})


def deposit(world: World, request: Request) -> Reply:
    instance = require(world, request)
    held = float(instance.extra["deposit_usd"])
    return Reply(
        200, {"success": True, "refundable_deposit": held, "total_discount": 0.0, "discount_months": int(held > 0)}
    )


# volumes and templates ----------------------------------------------------------------------------------------------


def list_volumes(world: World, request: Request) -> Reply:
    rows = [
        {
            **{name: machine_fields(volume.extra["host"], 1)[name] for name in VOLUME_MACHINE_FIELDS},
            "id": volume.id,
            "label": volume.name,
            "disk_space": float(volume.size_gb),
            "machine_id": int(volume.location),
            "start_date": volume.created_at,
            "status": "attached" if _holders(world, volume.id) else "unattached",
            "instances": [{"id": holder} for holder in _holders(world, volume.id)],
            "storage_total_cost": float(per_hour(volume.extra["host"].storage_usd_gb_month, volume.size_gb)),
        }
        for volume in world.volumes.values()
        if volume.account is request.account
    ]
    return Reply(200, {"success": True, "volumes": rows})


def rent_volume(world: World, request: Request) -> Reply:
    body = body_of(request)
    wanted, size = instance_id(body.get("id")), decimal(body.get("size", 15))
    hosts = {host.machine_id + 4_000_000: host for host in world.catalogue.hosts if host.vendor == "vast"}
    if wanted not in hosts or size is None or not 1 <= size <= 100_000:
        raise error(400, "invalid_args", "Please provide a valid volume ID and size.")
    volume = new_volume(world, request.account, hosts[wanted], size, str(body.get("name") or ""))
    return Reply(200, {"success": True, "volume_name": f"V.{volume.id}", "id": volume.id})


def delete_volume(world: World, request: Request) -> Reply:
    wanted = instance_id(body_of(request).get("id", request.query.get("id")))
    if wanted is None:
        raise error(400, "invalid_args", "Please provide a valid volume ID.")
    volume = world.volumes.get(wanted)
    if volume is None or volume.account is not request.account:
        raise error(404, "no_such_volume", "Volume with that ID does not exist.")
    if _holders(world, wanted):
        raise error(400, "invalid_args", "The volume is in use by an instance.")
    world.delete_volume(volume)
    return Reply(200, {"success": True})


def _holders(world: World, volume_id: int) -> list[int]:
    return [i.id for i in world.instances.values() if not i.is_destroyed and volume_id in i.extra.get("volumes", {})]


def create_template(world: World, request: Request) -> Reply:
    """Keeps the fields for later creates; its hash is of their content."""
    body = body_of(request)
    if not isinstance(body.get("image"), str):
        raise error(400, "invalid_args", "image is required")
    hash_id = hashlib.md5(json.dumps(body, sort_keys=True).encode(), usedforsecurity=False).hexdigest()
    template = {**body, "hash_id": hash_id, "id": world.new_id(), "env": body["env"] if _is_env(body) else {}}
    request.account.extra.setdefault("templates", {})[hash_id] = template
    return Reply(200, {"success": True, "template": template})


def list_templates(world: World, request: Request) -> Reply:
    found = list(request.account.extra.get("templates", {}).values())
    return Reply(200, {"success": True, "templates_found": len(found), "templates": found})


def _is_env(body: dict[str, Any]) -> bool:
    return isinstance(body.get("env"), dict)
