"""`gpu model …`: what a deployment serves, and the workflows that run on it."""

from __future__ import annotations

from gpu_skills.cli.base import LazyGroup

_C = "gpu_skills.cli."
model = LazyGroup(
    "model",
    help="Models and the workflows that run on them.",
    lazy={
        "add-workflow": (_C + "add_workflow:add_workflow", "Put a ComfyUI workflow on record; spends nothing."),
    },
)
