"""`gpu deployment …`: the stable handle of a machine that serves a model."""

from __future__ import annotations

from gpu_skills.cli.base import LazyGroup

_C = "gpu_skills.cli."
deployment = LazyGroup(
    "deployment",
    help="Deployments: machines that serve a model, by the id that jobs name.",
    lazy={
        "run": (_C + "deployment_run:run", "Ask a ready one for a result; rents nothing."),
    },
)
