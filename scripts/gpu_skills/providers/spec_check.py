"""What no create request may contain, whichever provider it goes to. Raises before anything is sent."""

from __future__ import annotations

from gpu_skills.credentials import Credential
from gpu_skills.errors import Bug, UsageError
from gpu_skills.providers.base import MAX_BOOTSTRAP_CHARS, MachineSpec, Traits

MAX_ENV_VALUE_CHARS = 256
MAX_ENV_VARIABLES = 50


def check(spec: MachineSpec, traits: Traits, key: Credential) -> None:
    """UsageError for what the provider cannot take; Bug for a request that would carry the account's own key."""
    if not spec.label or len(spec.label) > traits.max_label_chars or not spec.label.isprintable():
        raise UsageError(f"the label {spec.label[:80]!r} does not fit: 1 to {traits.max_label_chars} characters")
    if len(spec.bootstrap) > MAX_BOOTSTRAP_CHARS:
        raise UsageError(
            f"the bootstrap has {len(spec.bootstrap)} characters, {traits.name} takes {MAX_BOOTSTRAP_CHARS}"
        )
    if spec.disk_gb < 1 or spec.gpu_count < 1:
        raise UsageError(f"disk ({spec.disk_gb} GB) and GPUs ({spec.gpu_count}) have to be 1 or more")
    if spec.bid_usd_hr is not None:
        if not traits.has_interruptible:
            raise UsageError(f"{traits.name} has no interruptible machines", next_step="plan without --interruptible")
        if spec.bid_usd_hr <= 0:
            raise UsageError(f"a bid of ${spec.bid_usd_hr}/h is none")
    if len(spec.env) > MAX_ENV_VARIABLES:
        raise UsageError(f"{len(spec.env)} variables, {traits.name} takes {MAX_ENV_VARIABLES}")
    for name, value in spec.env.items():
        if not name.isascii() or not name.replace("_", "a").isalnum():
            raise UsageError(f"{name[:40]!r} is no name of an environment variable")
        if len(value) > MAX_ENV_VALUE_CHARS and name != "PUBLIC_KEY":
            raise UsageError(
                f"the value of {name} has {len(value)} characters, a create request takes {MAX_ENV_VALUE_CHARS}"
            )
    texts = [spec.label, spec.image, spec.bootstrap, spec.workspace, *spec.env, *spec.env.values()]
    if any(key.value in text for text in texts):
        raise Bug(message=f"a create request would carry the key of the {traits.name} account; it was not sent")
