"""Vast's instances as it shows them, and what can be done to one that exists."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any

from gpu_skills.sandbox.face import Reply, Request
from gpu_skills.sandbox.meter import per_hour
from gpu_skills.sandbox.vast_create import MAX_BID_USD_HR, MIN_BID_USD_HR
from gpu_skills.sandbox.vast_offers import machine_fields
from gpu_skills.sandbox.vast_wire import (
    body_of,
    decimal,
    error,
    instance_id,
    json_parameter,
    pairs,
    passes,
    place_of,
    rounded,
    token_for,
)
from gpu_skills.sandbox.world import Instance, World

PAGE = 25
MAX_LABEL = 1024
STOPPED_STORAGE_FACTOR = Decimal("1.2")  # storage may cost more while stopped
# Computed when shown, so the vendor cannot filter or sort by them.
NOT_FILTERABLE = {
    "dph_total", "dph_base", "num_gpus", "search", "instance", "ports", "duration", "storage_total_cost", "extra_env",
    "dlperf_per_dphtotal", "flops_per_dphtotal", "score", "time_remaining", "uptime_mins", "client_run_time",
}  # fmt: skip


# how it is shown ----------------------------------------------------------------------------------------------------


def gpu_usd_hr(instance: Instance) -> Decimal:
    return instance.rate_usd_hr


def disk_usd_hr(instance: Instance) -> Decimal:
    rate = per_hour(instance.host.storage_usd_gb_month, instance.disk_gb)
    return rate * STOPPED_STORAGE_FACTOR if instance.phase == "stopped" else rate


def bills_gpu(instance: Instance) -> bool:
    return instance.phase == "running" or (instance.phase == "stopping" and instance.intended == "stopped")


def actual_status(instance: Instance) -> str | None:
    faults = instance.faults
    if "null_status" in faults:
        return None
    if "status_error" in faults:
        return "created"
    if instance.is_offline or "offline" in faults:
        return "offline"
    if "unknown" in faults:
        return "unknown"
    if instance.phase == "created":
        return "created" if instance.boots or instance.reason else None
    if instance.phase == "stopping":
        return "running" if instance.intended == "stopped" else "rebooting"
    return instance.phase


def status_msg(instance: Instance) -> str | None:
    if (fault := instance.faults.get("status_error")) is not None:
        return str(fault.get("message", "Error response from daemon: failed to create task: OCI runtime create failed"))
    if "offline" in instance.faults:
        return "host is offline\n"
    if instance.phase == "loading":
        return f"{instance.image.split('/')[-1]}: Pulling from {instance.image.split(':')[0]}\n"
    if instance.phase == "running":
        return f"success, running {instance.image.replace(':', '_')}\n"
    return f"{instance.reason}\n" if instance.reason else None


def show(world: World, instance: Instance) -> dict[str, Any]:
    """The whole object, the same for one and for lists."""
    now, host, extra = world.now(), instance.host, instance.extra
    is_up = instance.phase == "running"
    gpu_hour, disk_hour = gpu_usd_hr(instance), per_hour(host.storage_usd_gb_month, instance.disk_gb)
    dlperf = host.gpu.tflops * instance.gpu_count * 1.35
    burn = world.faces["vast"].tariff(instance) if not instance.is_offline else {}
    state = "running" if instance.phase in ("created", "loading", "running", "stopping", "exited") else "stopped"
    shown: dict[str, Any] = {
        "id": instance.id,
        "actual_status": actual_status(instance),
        "intended_status": instance.intended,
        "cur_state": state,
        "next_state": instance.intended,
        "status_msg": status_msg(instance),
        "label": instance.label,
        "template_id": None,
        "template_hash_id": (extra["template"] or {}).get("hash_id"),
        "template_name": (extra["template"] or {}).get("name"),
        "image_uuid": instance.image,
        "image_args": extra["args"],
        "image_runtype": extra["runtype"],
        "extra_env": pairs(instance.env),
        "onstart": extra["onstart"],
        "jupyter_token": f"{instance.id:064x}",
        "ssh_host": "127.0.0.1",
        "ssh_port": proxy_port(instance),
        "ssh_idx": "5",
        "machine_dir_ssh_port": 20000,
        **machine_fields(host, instance.gpu_count),
        "public_ipaddr": "127.0.0.1\n",
        "local_ipaddrs": "127.0.0.1 172.17.0.1 \n",
        "direct_port_start": -1,
        "direct_port_end": -1,
        "bundle_id": host.machine_id * 8 + instance.gpu_count,
        "start_date": instance.created_at,
        "end_date": extra["ends_at"],
        "duration": extra["ends_at"] - now,
        "uptime_mins": (now - instance.started_at) / 60 if is_up and instance.started_at is not None else None,
        "time_remaining": "",
        "time_remaining_isbid": "",
        "client_run_time": (now - instance.created_at) / 3600,
        "host_run_time": host.available_s / 3600,
        "gpu_totalram": host.gpu.vram_mib * instance.gpu_count,
        "gpu_util": 0.0 if is_up else None,
        "gpu_temp": 34.0 if is_up else None,
        "cpu_util": 0.0,
        "mem_limit": round(host.ram_mb * instance.gpu_count / host.gpu_count / 1000, 3) if is_up else None,
        "mem_usage": 0.4 if is_up else None,
        "vmem_usage": 0.0 if is_up else None,
        "disk_space": float(instance.disk_gb),
        "disk_usage": 0.1 if is_up else -1,
        "disk_util": round(0.1 / float(instance.disk_gb), 6) if is_up else -1,
        "is_bid": extra["is_bid"],
        "min_bid": rounded(extra["min_bid_usd_hr"]),
        "dph_base": rounded(gpu_hour),
        "dph_total": rounded(gpu_hour + disk_hour),
        "storage_cost": float(host.storage_usd_gb_month),
        "storage_total_cost": rounded(disk_hour),
        "search": _costs(gpu_hour, disk_hour),
        "instance": _costs(burn.get("gpu", Decimal(0)), burn.get("disk", Decimal(0))),
        "vram_costperhour": rounded(gpu_hour / (host.gpu.vram_mib * instance.gpu_count)),
        "dlperf": round(dlperf, 6),
        "dlperf_per_dphtotal": round(dlperf / float(gpu_hour + disk_hour), 6),
        "total_flops": host.gpu.tflops * instance.gpu_count,
        "flops_per_dphtotal": round(host.gpu.tflops * instance.gpu_count / float(gpu_hour + disk_hour), 6),
        "score": round(dlperf / float(gpu_hour + disk_hour) * host.reliability, 6),
        "rentable": False,
        "external": False,
        "volume_info": [
            {"id": volume.id, "avail_space": float(volume.size_gb), "total_space": float(volume.size_gb)}
            for volume_id in extra["volumes"]
            if (volume := world.volumes.get(volume_id)) is not None
        ],
        "credit_balance": float(extra["deposit_usd"]) if extra["deposit_usd"] else None,
        "credit_discount": None,
        "credit_discount_max": 0.4,
    }
    if is_up:
        shown["ports"] = ports(world, instance)
    if world.ssh_user != "root":
        shown["ssh_user"] = world.ssh_user  # the one thing no vendor says: without root the sandbox logs in as itself
    return shown


def _costs(gpu_hour: Decimal, disk_hour: Decimal) -> dict[str, float]:
    total = rounded(gpu_hour + disk_hour)
    return {
        "gpuCostPerHour": rounded(gpu_hour),
        "diskHour": rounded(disk_hour),
        "totalHour": total,
        "discountTotalHour": 0.0,
        "discountedTotalPerHour": total,
    }


def has_direct_port(instance: Instance) -> bool:
    return "ssh_direc" in instance.extra["runtype"].split() and instance.host.port_count >= 1


def proxy_port(instance: Instance) -> int:
    container = instance.container
    return container.proxy_port if container is not None and container.proxy_port else instance.port


def ports(world: World, instance: Instance) -> dict[str, Any]:
    """Container ports and where they are reached. Loopback is shared, so an exposed port keeps its number."""
    mapped: dict[str, Any] = {}
    for name in instance.env:
        if name.startswith("-p ") and instance.host.port_count:
            inside = name[3:].split(":")[-1].split("/")[0].strip()
            if inside.isdecimal():
                mapped[f"{inside}/{'udp' if name.endswith('/udp') else 'tcp'}"] = [_binding(inside)]
    if has_direct_port(instance):
        mapped["22/tcp"] = [_binding(world.shown_port(instance))]
    return mapped


def _binding(port: Any) -> dict[str, str]:
    return {"HostIp": "0.0.0.0", "HostPort": str(port)}


# reading ------------------------------------------------------------------------------------------------------------


def list_v1(world: World, request: Request) -> Reply:
    """A page of at most 25; a client that reads one page misses the rest."""
    conditions = json_parameter(request, "select_filters", {}, dict)
    order = json_parameter(request, "order_by", [], list)
    columns = json_parameter(request, "select_cols", ["*"], list)
    found = [] if "list_empty" in request.faults else world.listed(request.account)
    rows = [row for row in (show(world, i) for i in found) if _is_wanted(row, conditions)]
    _check_names(conditions, rows)
    _sort(rows, order)
    start = 0
    if token := request.query.get("after_token"):
        start = place_of(token)
    page = rows[start : start + _limit(request)] if start >= 0 else []
    more = start + len(page) < len(rows) and page
    return Reply(
        200,
        {
            "success": True,
            "instances_found": len(page),
            "total_instances": len(rows),
            "label_counts": dict(Counter(row["label"] or "" for row in rows)),
            "next_token": token_for(start + len(page)) if more else None,
            "instances": [_select(row, columns) for row in page],
        },
    )


def _limit(request: Request) -> int:
    text = request.query.get("limit", str(PAGE))
    try:
        limit = int(text[:12])
    except ValueError:
        raise error(400, "invalid_request", "Error in query parameters: limit is not a number") from None
    return 5 if limit <= 0 else min(limit, PAGE)


def _is_wanted(row: dict[str, Any], conditions: dict[str, Any]) -> bool:
    for name, condition in conditions.items():
        if name not in row or name in NOT_FILTERABLE or not isinstance(condition, dict):
            raise _bad_key(name)
        if not passes(row[name], condition, unknown=_bad_key):
            return False
    return True


def _check_names(conditions: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The same refusals when there is no row to try the filters on."""
    for name, condition in conditions.items():
        if name in NOT_FILTERABLE or not isinstance(condition, dict):
            raise _bad_key(name)


def _bad_key(name: str) -> Exception:
    return error(400, "invalid_request", f"Error in query parameters: {name} is not a valid search key")


def _sort(rows: list[dict[str, Any]], order: list[Any]) -> None:
    rows.sort(key=lambda row: row["id"])
    for entry in reversed(order):
        name = entry.get("col") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name in NOT_FILTERABLE or (rows and name not in rows[0]):
            raise _bad_key(str(name))
        rows.sort(key=lambda row: _sort_key(row[name]), reverse=entry.get("dir") == "desc")


def _sort_key(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return (1, float(value), "")
    return (0, 0.0, "" if value is None else str(value))


def _select(row: dict[str, Any], columns: list[Any]) -> dict[str, Any]:
    if "*" in columns or not columns:
        return row
    return {name: row.get(name) for name in columns if isinstance(name, str)}


def list_v0(world: World, request: Request) -> Reply:
    raise error(410, "deprecated_endpoint", "This endpoint is deprecated; use GET /api/v1/instances/ in its place.")


def show_one(world: World, request: Request) -> Reply:
    wanted = instance_id(request.params["id"])
    if wanted is None:
        raise error(400, "invalid_args", "Invalid instance id.")
    instance = world.find(request.account, wanted)
    return Reply(200, {"instances": None if instance is None else show(world, instance)})


def filters(world: World, request: Request) -> Reply:
    rows = [show(world, instance) for instance in world.listed(request.account)]
    names = ("actual_status", "verification", "gpu_name")
    return Reply(200, {"success": True, "filters": [{name: row[name] for name in names} for row in rows]})


# writing ------------------------------------------------------------------------------------------------------------


def require(world: World, request: Request, wanted: Any = None) -> Instance:
    """The instance a request is about. Raises WireError 404 no_such_instance."""
    found = instance_id(request.params["id"] if wanted is None else wanted)
    if found is None:
        raise error(400, "invalid_args", "Invalid instance id.")
    instance = world.find(request.account, found)
    if instance is None:
        raise error(404, "no_such_instance", f"Instance {found} not found.")
    return instance


def manage(world: World, request: Request) -> Reply:
    """State or label of one."""
    body = body_of(request)
    instance = require(world, request)
    return Reply(200, _manage(world, instance, body, only_state=request.key.instance_id is not None))  # type: ignore[union-attr]


def _manage(world: World, instance: Instance, body: dict[str, Any], *, only_state: bool = False) -> dict[str, Any]:
    state, label = body.get("state"), body.get("label")
    if state is None and "label" not in body:
        raise error(400, "invalid_args", "Nothing to change: give state or label.")
    if state is not None and state not in ("running", "stopped"):
        raise error(400, "invalid_args", f"Invalid state {state!r}.")
    if "label" in body:
        if only_state:
            raise error(403, "not_authorized", "This key may not change labels.")
        if label is not None and not isinstance(label, str):
            raise error(400, "invalid_args", "label must be a string.")
        if label and len(label) > MAX_LABEL:
            raise error(400, "label_too_long", f"label is longer than {MAX_LABEL} characters.")
        instance.label = label or None
    if state == "stopped":
        world.stop(instance, reason="stopped by its owner")
    elif state == "running":
        return _start(world, instance)
    return {"success": True}


def _start(world: World, instance: Instance) -> dict[str, Any]:
    if instance.extra["ends_at"] <= world.now():
        return {"success": False, "error": "invalid_args", "msg": "The contract of this instance has ended."}
    if instance.account.is_broke:
        return {"success": False, "error": "missing_billing", "msg": "Your account lacks credit."}
    if not world.start(instance):
        return {"success": True, "msg": "Required resources are currently unavailable, state change queued."}
    return {"success": True}


def manage_several(world: World, request: Request) -> Reply:
    body = body_of(request)
    done = [_manage(world, require(world, request, wanted), body) for wanted in _ids(body, "ids")]
    return Reply(200, {"success": all(result["success"] for result in done), "results": done})


def _ids(body: dict[str, Any], name: str) -> list[Any]:
    ids = body.get(name)
    if not isinstance(ids, list) or not 0 < len(ids) <= 64 or any(instance_id(wanted) is None for wanted in ids):
        raise error(400, "invalid_args", f"{name} must be a list of 1 to 64 instance ids")
    return ids


def destroy(world: World, request: Request) -> Reply:
    instance = require(world, request)
    if "destroy_again" not in request.faults:
        world.destroy(instance)
    return Reply(200, {"success": True, "msg": "Instance destroyed successfully"})


def destroy_several(world: World, request: Request) -> Reply:
    instances = [require(world, request, wanted) for wanted in _ids(body_of(request), "instance_ids")]
    for instance in instances:
        world.destroy(instance)
    return Reply(200, {"success": True, "msg": f"{len(instances)} instances destroyed"})


def reboot(world: World, request: Request) -> Reply:
    """A container stop and start that keeps its GPUs."""
    return _restart(world, request, wipe=False)


def recycle(world: World, request: Request) -> Reply:
    """The container anew from its image, on the same GPUs; another port, and the account's keys of now."""
    instance = require(world, request)
    instance.extra["account_keys"] = dict(request.account.ssh_keys)
    return _restart(world, request, wipe=True)


def _restart(world: World, request: Request, *, wipe: bool) -> Reply:
    instance = require(world, request)
    if instance.phase != "running":
        return Reply(200, {"success": False, "error": "invalid_args", "msg": "The instance is not running."})
    world.reboot(instance, wipe=wipe)
    return Reply(200, {"success": True})


def change_bid(world: World, request: Request) -> Reply:
    """A new price; null means one that wins. Above a rival's it starts again, below the minimum it stops."""
    body = body_of(request)
    instance = require(world, request)
    extra = instance.extra
    floor = max(extra["min_bid_usd_hr"], extra.get("rival_usd_hr", Decimal(0)))
    if not extra["is_bid"]:
        raise error(400, "invalid_args", "This instance is not interruptible.")
    wanted = body.get("price")
    price = floor + Decimal("0.001") if wanted is None else decimal(wanted) if not isinstance(wanted, bool) else None
    if price is None or not MIN_BID_USD_HR <= price <= MAX_BID_USD_HR:
        raise error(400, "invalid_args", "Please set a bid price >= 0.001.")
    instance.rate_usd_hr = price
    world.rebill(instance)
    if price < floor:
        if instance.phase in ("created", "loading", "running"):
            world.stop(instance, reason="outbid")
    elif instance.phase == "stopped" and instance.reason == "outbid":
        world.start(instance)
    return Reply(200, {"success": True})


def update_template(world: World, request: Request) -> Reply:
    """Change image, environment or start command; in force with the next recycle."""
    body = body_of(request)
    instance = require(world, request)
    if isinstance(image := body.get("image"), str) and image:
        instance.image = image
    if isinstance(env := body.get("env"), dict):
        instance.env = {str(name): str(value) for name, value in env.items()}
    if isinstance(onstart := body.get("onstart"), str):
        instance.extra["onstart"] = onstart
    return Reply(200, {"success": True, "updated_instance": show(world, instance)})
