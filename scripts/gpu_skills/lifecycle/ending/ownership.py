"""Is this instance ours to change? Asked right before each stop and each destroy, of what the provider shows then.

Two witnesses have to agree: our own record and the label at the provider. One alone is a mistake waiting to happen: an
id typed wrong, a label copied by hand, an instance id that another machine has by now.
"""

from __future__ import annotations

from gpu_skills.errors import NotOwned, OtherAccount
from gpu_skills.lifecycle import labels
from gpu_skills.lifecycle.labels import Label
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.providers.known import traits_of
from gpu_skills.state import budget

PROTECTED = "protected"


def require_ours(op: Operator, machine: Machine, seen: Instance) -> Label:
    """The label at the provider, when it says what our record says; NotOwned otherwise.

    The deadline in it may differ: an extension writes it first.
    """
    label = labels.ours(seen.label, op.project.project_id)
    agree = (
        machine.is_rented
        and machine.provider == seen.provider
        and machine.instance_id == seen.instance_id
        and label is not None
        and label.intent == machine.intent
    )
    if not agree or label is None:
        shown = seen.label if seen.label is not None else "none"
        raise NotOwned(machine=f"{seen.provider} {seen.instance_id}", label=repr(shown)[:160])
    return label


# In a record: the account that showed the machine last, where it is not by name the one it was rented in.
SEEN_IN = "seen_in_account"


def account_of(op: Operator, provider: str) -> str:
    """The name that records have for the account of the key in use."""
    return budget.account_directory(provider, op.account(provider), op.environ).name


def require_its_account(op: Operator, machine: Machine) -> None:
    """Before its absence counts: the account asked is the one it was rented in, or has shown it before (a key that was
    renewed may have another fingerprint). OtherAccount if not.
    """
    if machine.account is None:
        return
    if account_of(op, machine.provider) not in (machine.account, machine.extra.get(SEEN_IN)):
        raise OtherAccount(what=machine.id, provider=machine.provider)


def needs_named_approval(machine: Machine, seen: Instance | None) -> bool:
    """Whether ending it takes an approval that names it: marked so here, locked there, or in production."""
    is_locked = seen is not None and seen.is_locked
    return PROTECTED in machine.conditions or machine.machine_class == "production" or is_locked


def workspace_survives(seen: Instance) -> bool:
    """Whether what jobs wrote is there again after a stop: where only a mount of its own is, it has to have one."""
    return traits_of(seen.provider).stop_keeps == "disk" or bool(seen.storage_usd_hr)


def may_be_stopped(seen: Instance) -> bool:
    """Whether the provider takes a stop of it. One beyond recovery may only be able to go, and bills until then."""
    is_lost = seen.status == "unknown" and seen.dead_end is not None
    return not is_lost or traits_of(seen.provider).stops_what_is_lost
