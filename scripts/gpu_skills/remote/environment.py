"""The environment of a job, made in one place for every way a job can start."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpu_skills.errors import ConfigError, one_line

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = ("GPU_", "JAMBU_")
MAX_VALUE_BYTES = 128 << 10  # Linux refuses a single variable above this (MAX_ARG_STRLEN)


def job_environment(
    root: str,
    project_id: str,
    job: str,
    *,
    model_id: str | None = None,
    user_env: Mapping[str, str] | None = None,
    hf_token: str | None = None,
    openai_base_url: str | None = None,
    openai_api_key: str | None = None,
    copy: tuple[int, int] | None = None,
    resume: str | None = None,
    file: str = "gpujob.yaml",
) -> dict[str, str]:
    """What a job finds in its environment, on top of what the machine's own login gives.

    root: the runner's folder on the machine, from its greeting. The user's variables win over everything that is not
    ours by name: `GPU_*`, `JAMBU_*` and the workspace names are a ConfigError, `file` says where they were written.
    copy: (index, count) of a job that was submitted several times at once. resume: where in the job's directory the
    checkpoint lies that it goes on from.
    """
    project = f"{root.rstrip('/')}/projects/{project_id}"
    folder = f"{project}/jobs/{job}"
    workspace = f"{project}/workspace"
    named = {
        "OUTPUT_DIR": f"{folder}/outputs",
        "JOB_ID": job,
        "JOB_DIR": f"{folder}/src",
        "MODEL_ID": model_id or "",
    }
    ours = {prefix + name: value for prefix in _OURS for name, value in named.items()}
    if copy is not None:
        ours |= {"GPU_JOB_INDEX": str(copy[0]), "GPU_JOB_COUNT": str(copy[1])}
    if resume is not None:
        ours["GPU_RESUME_DIR"] = f"{folder}/src/{resume}"
    ours |= {"GPU_WORKSPACE": workspace, "KURA_WORKSPACE": workspace, "KURA_RUN_ID": job}
    environment = {
        "HF_HOME": f"{workspace}/cache/huggingface",
        "HF_HUB_CACHE": f"{workspace}/cache/huggingface/hub",
        "PYTHONUNBUFFERED": "1",
    }
    optional = {"HF_TOKEN": hf_token, "OPENAI_BASE_URL": openai_base_url, "OPENAI_API_KEY": openai_api_key}
    environment |= {name: value for name, value in optional.items() if value}
    for name, value in (user_env or {}).items():
        _check(name, value, ours, file)
        environment[name] = value
    if "HF_HOME" in (user_env or {}) and "HF_HUB_CACHE" not in user_env:
        environment["HF_HUB_CACHE"] = f"{environment['HF_HOME']}/hub"
    return environment | ours


def _check(name: str, value: str, ours: Mapping[str, str], file: str) -> None:
    shown = one_line(str(name), limit=200)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(file=file, problem=f"env: {shown!r} is not a variable name (letters, digits and _)")
    if name in ours or name.startswith(_OURS):
        raise ConfigError(file=file, problem=f"env: {shown} is set by gpu itself: choose another name")
    if not isinstance(value, str):
        raise ConfigError(file=file, problem=f"env: {shown} is not text: put it in quotes")
    if "\0" in value:
        raise ConfigError(file=file, problem=f"env: {shown} has a NUL byte")
    if len(value.encode("utf-8", "surrogateescape")) + len(name) + 2 > MAX_VALUE_BYTES:
        raise ConfigError(file=file, problem=f"env: {shown} is longer than {MAX_VALUE_BYTES >> 10} KiB")
