"""Machines as `gpu machine …` shows them: documents for programs, tables and lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_skills.cli.output import table
from gpu_skills.cli.project import machine_document
from gpu_skills.units import format_usd, json_number

if TYPE_CHECKING:
    from gpu_skills.lifecycle.machines import Machine


def document_of(one: Machine) -> dict[str, Any]:
    """A machine for `--json`. burn_usd_hr: what it costs now, as its state on record says."""
    return {
        **machine_document(one),
        "instance_id": one.instance_id,
        "label": one.label,
        "class": one.machine_class,
        "storage_usd_hr": None if one.storage_usd_hr is None else json_number(one.storage_usd_hr),
        "burn_usd_hr": json_number(one.burn_usd_hr),
        "deadline_at": one.deadline_at,
        "held_until": one.extra.get("held_until"),
        "conditions": list(one.conditions),
        "created_at": one.created_at,
        "ready_at": one.ready_at,
        "last_seen_at": one.last_seen_at,
        "destroyed_at": one.destroyed_at,
    }


def machine_table(documents: list[dict[str, Any]]) -> str:
    rows = [
        [
            d["id"],
            d["provider"],
            d["host"],
            d["status"] + (f" ({', '.join(d['conditions'])})" if d["conditions"] else ""),
            f"{d['gpu_count']} × {d['gpu']}" if d["gpu_count"] else "-",
            f"{d['vram_gb']:g}" if d["vram_gb"] else "-",
            format_usd(d["rate_usd_hr"]),
            format_usd(d["burn_usd_hr"]),
            d["deadline_at"] or "-",
        ]
        for d in documents
    ]
    return table(rows, ["MACHINE", "PROVIDER", "HOST", "STATUS", "GPU", "VRAM_GB", "USD/H", "BURN/H", "DEADLINE"])


def shown_text(document: dict[str, Any]) -> str:
    one, seen, leaving = document["machine"], document["seen"], document["leaving"]
    lines = [machine_table([one])]
    if seen is not None:
        burn = "unknown" if seen["burn_usd_hr"] is None else f"{format_usd(seen['burn_usd_hr'])}/h"
        lines.append(f"shown now: {seen['status']} ({seen['said']}), burns {burn}, deadline {seen['deadline_at']}")
        if not seen["is_ours"]:
            lines.append(f"it does not carry our label but {seen['label']}: nothing here touches it")
    elif document["not_seen_because"]:
        lines.append(f"not seen now: {document['not_seen_because']}")
    if (fuse := document["fuse"]) is not None:
        ends = fuse["deadline_at"] or "never"
        lines.append(
            f"fuse of {fuse['intent']}: armed {fuse['armed_at']}, {fuse['on_expiry']}s it {ends}, "
            f"its key to do so is {fuse['key']}"
        )
    elif one["instance_id"] is not None:
        lines.append("fuse: no receipt on record")
    if one["held_until"]:
        lines.append(f"held until {one['held_until']}")
    if leaving is not None:
        taken = leaving["taken_at"] or f"not yet ({leaving['refused'] or 'not answered'})"
        lines.append(
            f"leaving since {leaving['began_at']}: delete taken {taken}, seen absent {leaving['absences']} times"
        )
    lines += [f"under way: {i['action']} since {i['began_at']}" for i in document["open_intents"]]
    return "\n".join(lines)
