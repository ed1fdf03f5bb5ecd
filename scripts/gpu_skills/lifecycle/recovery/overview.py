"""What reconcile would look at, only looked at: an account and our records beside each other. Nothing is written.

view()      one provider: key, credit, machines, what differs, what nobody knows the end of, what guards new ones
leaving()   everything that still bills or may, each with the command that ends it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from gpu_skills.errors import GpuError
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.guard import keyproof, receipts
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.recovery import adoption, returned, vanished
from gpu_skills.lifecycle.recovery.findings import Listing
from gpu_skills.lifecycle.renting import specs
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.state import budget
from gpu_skills.units import counted, format_duration, format_usd

# Less credit than lasts this long is worth a word.
SHORT_RUNWAY_S = 24 * 3600.0
# What a provider shows, as our records may call it.
_AGREE = {
    "booting": ("requested", "booting", "ready", "busy"),
    "running": ("booting", "ready", "busy", "stopping"),
    "stopping": ("stopping", "ready", "busy"),
    "stopped": ("stopped",),
    "terminating": ("terminating",),
    "unknown": ("unknown", "ready", "busy", "booting"),
}


@dataclass(frozen=True)
class Seen:
    """verdict: `ok`, `note` (worth knowing) or `problem` (to mend)."""

    what: str
    verdict: str
    text: str
    next_step: str | None = None


@dataclass(frozen=True)
class Burning:
    """Something that bills, or may. usd_hr None: nobody says how much."""

    what: str
    provider: str
    text: str
    usd_hr: Decimal | None
    next_step: str


def view(op: Operator, provider: str) -> list[Seen]:
    """One account, with one list. One that cannot be listed is a problem, and nothing is said of its machines."""
    began = op.clock.monotonic()
    try:
        listing = Listing(op.reader(provider))
    except GpuError as exc:
        return [Seen(provider, "problem", exc.message, exc.next_step)]
    took_s = op.clock.monotonic() - began
    op = replace(op, reader=listing.instead_of(op))
    shown = listing.machines()
    found = [Seen(provider, "ok", f"the key is accepted; the list came in {took_s:.1f} s")]
    found += _credit(op, provider, shown)
    found += _machines(op, provider, shown)
    found += _unrecorded(op, provider, shown)
    found += [
        Seen(
            machine.id,
            "problem",
            f"on record as {machine.status}, and {provider} does not show it",
            f"gpu reconcile --provider {provider}",
        )
        for machine in _alive(op, provider)
        if machine.instance_id is not None and not any(s.instance_id == machine.instance_id for s in shown)
    ]
    found += _open_intents(op, provider)
    found += _unsettled(op, provider, shown)
    return found + _guards(op, provider)


def _credit(op: Operator, provider: str, shown: Sequence[Instance]) -> list[Seen]:
    burn = sum((seen.burn_usd_hr or Decimal(0) for seen in shown), Decimal(0))
    what = f"{provider} credit"
    try:
        balance = op.reader(provider).balance()
    except GpuError as exc:
        return [Seen(what, "note", f"cannot be read: {exc.message}")]
    burn = max(burn, balance.spend_usd_hr or Decimal(0))
    if balance.credit_usd is None:
        return [Seen(what, "note", f"{provider} does not say what is left; {format_usd(burn)}/h are burning")]
    if burn <= 0:
        return [Seen(what, "ok", f"{format_usd(balance.credit_usd)}, nothing burns")]
    left_s = float(max(balance.credit_usd, Decimal(0)) / burn * 3600)
    text = f"{format_usd(balance.credit_usd)}, which lasts {format_duration(left_s)} at {format_usd(burn)}/h"
    verdict = "note" if left_s < SHORT_RUNWAY_S else "ok"
    return [Seen(what, verdict, text, f"add credit at {provider}" if verdict == "note" else None)]


def _machines(op: Operator, provider: str, shown: Sequence[Instance]) -> list[Seen]:
    ours = [seen for seen in shown if labels.ours(seen.label, op.project.project_id)]
    burn = sum((seen.burn_usd_hr or Decimal(0) for seen in ours), Decimal(0))
    text = (
        f"{counted(len(ours), 'machine')} of this project at {format_usd(burn)}/h, {len(shown) - len(ours)} of others"
    )
    found = [Seen(f"{provider} machines", "ok", text)]
    on_record = {m.instance_id: m for m in _alive(op, provider) if m.instance_id is not None}
    for seen in shown:
        machine = on_record.get(seen.instance_id)
        if machine is None:
            continue
        problem = _differs(op, machine, seen)
        if problem is not None:
            found.append(Seen(machine.id, "problem", problem, f"gpu reconcile --provider {provider}"))
        else:
            burn_text = "an unknown amount" if seen.burn_usd_hr is None else f"{format_usd(seen.burn_usd_hr)}/h"
            until = f", until {machine.deadline_at}" if machine.deadline_at else ""
            found.append(Seen(machine.id, "ok", f"{machine.status} at {burn_text}{until}"))
    return found


def _differs(op: Operator, machine: Machine, seen: Instance) -> str | None:
    label = labels.ours(seen.label, op.project.project_id)
    if label is None or label.intent != machine.intent:
        return f"{seen.instance_id} carries the label {seen.label!r}, our record says {machine.label!r}"
    if machine.status not in _AGREE.get(seen.status, ()):
        return f"on record as {machine.status}, {seen.provider} says {seen.said or seen.status}"
    if seen.rate_usd_hr is not None and seen.rate_usd_hr - machine.rate_usd_hr > Decimal("0.0001"):
        return f"it costs {format_usd(seen.rate_usd_hr)}/h, on record are {format_usd(machine.rate_usd_hr)}/h"
    if label.deadline_at is not None and op.clock.now() > label.deadline_at and seen.status == "running":
        return f"it runs past its deadline {machine.deadline_at}"
    return None


def _unrecorded(op: Operator, provider: str, shown: Sequence[Instance]) -> list[Seen]:
    found = []
    for one in adoption.unrecorded(op, provider, shown, has_own=True):
        what = f"{provider} {one.seen.instance_id}"
        if one.elsewhere not in (None, runs.owner_of(op)):
            found.append(Seen(what, "note", f"ours, on record in {one.elsewhere.rpartition(':')[0]}"))
        else:
            step = f"gpu reconcile --provider {provider} --adopt"
            found.append(Seen(what, "problem", "carries our label and is not on record", step))
    ids = adoption.project_ids(shown)
    ids.pop(op.project.project_id, None)
    for project_id, count in ids.items():
        text = f"{counted(count, 'instance')} of project {project_id}"
        step = f"if that is this project's lost id: gpu reconcile --adopt --project-id {project_id}"
        found.append(Seen(f"{provider} others", "note", text, step))
    return found


def _open_intents(op: Operator, provider: str) -> list[Seen]:
    """What has begun and nobody wrote how it ended."""
    step = f"gpu reconcile --provider {provider}"
    return [
        Seen(intent.machine_id or intent.id, "problem", f"{intent.action} begun at {intent.ts}: no outcome known", step)
        for intent in intents.read(op.project).values()
        if intent.is_open and intent.provider == provider
    ]


def _unsettled(op: Operator, provider: str, shown: Sequence[Instance]) -> list[Seen]:
    """What was reserved and nobody settles, and what of a machine's past is on no record."""
    step = f"gpu reconcile --provider {provider}"
    found = [Seen("runs", "problem", problem.message, problem.next_step) for problem in runs.damaged(op)]
    found += [
        Seen(run.approval_id, "problem", f"used in {run.owner.rpartition(':')[0]}, which is gone", f"{step} --adopt")
        for run in adoption.orphaned(op)
        if run.provider == provider
    ]
    found += [
        Seen(reserved.machine_ids[-1], "problem", vanished.text_of(name, reserved, provider), step)
        for name, reserved in vanished.named(op, provider, shown)
    ]
    found += [
        Seen(machine.id, "problem", "which jobs it has is not on record", f"{step} --adopt")
        for machine in _alive(op, provider)
        if machine.has_unknown_past and returned.is_doubtful(op, machine)
    ]
    return found


def _guards(op: Operator, provider: str) -> list[Seen]:
    """Whether new machines would be made, and by what their end is sure."""
    what, found = f"{provider} fuse", []
    for action in specs.fuse_actions(op.reader(provider).traits):
        try:
            receipts.require_recent(op, provider, action)
            is_proven = keyproof.last(op, provider, op.account(provider), action) == "proven"
        except GpuError as exc:
            found.append(Seen(what, "note", f"to {action} itself: {exc.message}", exc.next_step))
            continue
        shown = f"a machine of this account has shown that it can {action} itself"
        found.append(Seen(what, "ok", shown if is_proven else f"to {action} itself: a sentinel pass is recent"))
    return found


# what still bills -----------------------------------------------------------------------------------------------------


def leaving(op: Operator, providers: Sequence[str]) -> list[Burning]:
    """All of it, whoever made it: also what is foreign, since an uninstall takes the eyes away from that too."""
    found: list[Burning] = []
    for provider in providers:
        try:
            shown = op.reader(provider).machines()
        except GpuError as exc:
            found.append(Burning("account", provider, f"could not be listed: {exc.message}", None, exc.next_step))
            found += [_on_record(m) for m in _alive(op, provider)]
            continue
        found += [_shown(op, provider, seen) for seen in shown]
        ids = {seen.instance_id for seen in shown}
        found += [_on_record(m) for m in _alive(op, provider) if m.instance_id not in ids]
        found += _volumes(op, provider)
    for intent, one in budget.open_reservations(op.project, op.environ).items():
        text = f"reservation of {format_usd(one.reservation.reserved_usd)} for {intent} is not settled"
        found.append(Burning("reservation", "", text, Decimal(0), "gpu reconcile"))
    return found


def _shown(op: Operator, provider: str, seen: Instance) -> Burning:
    label = labels.parse(seen.label)
    machine = next((m for m in _alive(op, provider) if m.instance_id == seen.instance_id), None)
    state = f"{seen.instance_id} is {seen.status}"
    if machine is not None:
        what = "stopped" if seen.status == "stopped" else "machine"
        return Burning(what, provider, f"{machine.id}: {state}", seen.burn_usd_hr, f"gpu machine destroy {machine.id}")
    if label is not None and label.project_id == op.project.project_id:
        step = f"gpu reconcile --provider {provider} --adopt"
        return Burning("unrecorded", provider, f"{state}, ours and not on record", seen.burn_usd_hr, step)
    whose = f"of project {label.project_id}" if label is not None else "not made by gpu"
    return Burning("foreign", provider, f"{state}, {whose}", seen.burn_usd_hr, f"look at it at {provider}")


def _on_record(machine: Machine) -> Burning:
    rate = machine.storage_usd_hr if machine.status == "stopped" else machine.rate_usd_hr
    text = f"{machine.id} is {machine.status} on record and not shown"
    return Burning("machine", machine.provider, text, rate, f"gpu reconcile --provider {machine.provider}")


def _volumes(op: Operator, provider: str) -> list[Burning]:
    """A network volume bills whatever becomes of machines. Only some providers have them."""
    listed = getattr(op.reader(provider), "volumes", None)
    if listed is None:
        return []
    try:
        return [
            Burning(
                "volume",
                provider,
                f"volume {volume.volume_id} ({volume.size_gb:g} GB, {volume.location})",
                volume.storage_usd_hr,
                f"delete it at {provider}",
            )
            for volume in listed()
        ]
    except GpuError as exc:
        return [Burning("volume", provider, f"volumes cannot be listed: {exc.message}", None, exc.next_step)]


def _alive(op: Operator, provider: str) -> list[Machine]:
    return [m for m in machines.all_machines(op.project) if m.provider == provider and m.status not in states.FINAL]
