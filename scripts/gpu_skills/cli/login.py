"""`gpu login`: store a credential without it ever standing in argv or on the screen."""

from __future__ import annotations

import sys

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output
from gpu_skills.errors import MissingCredential, NetworkDenied, NoProject, UsageError

_NAMES = {"hf": "HF_TOKEN", "vast": "VAST_API_KEY", "runpod": "RUNPOD_API_KEY"}


@command(
    "login",
    example="printenv HF_TOKEN | gpu login hf",
    exits="0 stored · 2 nothing on stdin, or no token · 3 no network allowed · 5 the provider does not accept it",
)
@click.argument("provider", type=click.Choice(list(_NAMES)))
@click.option("--no-check", is_flag=True, help="Store a key of vast or runpod without asking whether it is accepted.")
def login(context: Context, provider: str, no_check: bool) -> Output:
    """Store a Hugging Face token for jobs, or a provider's key, in your keyring or a file of yours (0600).

    Read from stdin, or typed unseen.
    """
    from gpu_skills import credentials

    token = _typed(context, provider)
    checked = None
    if provider in credentials.KEY_NAMES:
        checked = "not_checked" if no_check else _checked(context, provider, token)
    if credentials.store_in_keyring(provider, token):
        kept: str | dict[str, str] = {"in": "keyring"}
        where = "keyring"
    else:
        kept = token
        where = str(credentials.store_path(context.environ))
    _write(context, provider, kept)
    hints = []
    if provider in credentials.KEY_NAMES:
        hints = _notes(context, provider, token)
    text = f"stored in {where}" + {"hf": "; jobs get it as HF_TOKEN"}.get(provider, f"; {checked}".replace("_", " "))
    return Output({"provider": provider, "stored_in": where, "checked": checked}, text, hints=hints)


def _typed(context: Context, provider: str) -> str:
    from gpu_skills import credentials

    if context.is_interactive:
        import getpass

        token = getpass.getpass("token (not shown): ", stream=sys.stderr)
    else:
        token = sys.stdin.readline(4096) if not sys.stdin.isatty() else ""
    token = token.strip()
    if not token:
        raise MissingCredential(provider=provider, next_step=f"printenv {_NAMES[provider]} | gpu login {provider}")
    if not credentials.is_plausible(token):
        raise UsageError("that does not look like a token", next_step="copy it again: one word, 8 or more characters")
    return token


def _checked(context: Context, provider: str, token: str) -> str:
    """`accepted`, or an error before anything is stored. A key that cannot be tried now is not a wrong key."""
    from gpu_skills.credentials import Credential
    from gpu_skills.errors import Unavailable

    try:
        context.provider_with(Credential(provider, token, "what was typed")).check_key()
    except (NetworkDenied, Unavailable):
        return "not_checked"
    return "accepted"


def _write(context: Context, provider: str, kept: str | dict[str, str]) -> None:
    """The file names what the keyring holds, so that the keyring is opened only for that."""
    from gpu_skills import credentials
    from gpu_skills.state import files

    path = credentials.store_path(context.environ)
    files.make_directory(path.parent)
    files.update(path, lambda stored: {**(stored if isinstance(stored, dict) else {}), provider: kept}, default={})


def _notes(context: Context, provider: str, token: str) -> list[str]:
    """Put it on record where there is a project, and tell when another key comes before this one."""
    from gpu_skills import credentials

    try:
        root = context.project.root
    except NoProject:
        root = None
    found = credentials.provider_key(provider, root, context.environ)
    if root is not None:
        context.note_provider(provider)
    if found is not None and found.value != token:
        return [f"the key from {found.source} comes first and is the one that is used"]
    return []
