"""`gpu login`: store a credential without it ever standing in argv or on the screen."""

from __future__ import annotations

import sys

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output
from gpu_skills.errors import MissingCredential, UsageError


@command("login", example="printenv HF_TOKEN | gpu login hf", exits="0 stored · 2 nothing on stdin, or no token")
@click.argument("provider", type=click.Choice(["hf"]))
def login(context: Context, provider: str) -> Output:
    """Store a Hugging Face token for jobs (0600, in your configuration directory). Read from stdin, or typed unseen."""
    from gpu_skills import credentials
    from gpu_skills.state import files

    if context.is_interactive:
        import getpass

        token = getpass.getpass("token (not shown): ", stream=sys.stderr)
    else:
        token = sys.stdin.readline(4096) if not sys.stdin.isatty() else ""
    token = token.strip()
    if not token:
        raise MissingCredential(provider=provider, next_step=f"printenv HF_TOKEN | gpu login {provider}")
    if not token.isascii() or not token.isprintable() or " " in token or len(token) < 8:
        raise UsageError("that does not look like a token", next_step="copy it again: one word, 8 or more characters")
    path = credentials.store_path(context.environ)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    files.update(path, lambda stored: {**(stored if isinstance(stored, dict) else {}), provider: token}, default={})
    return Output({"provider": provider, "stored_in": str(path)}, f"stored in {path}; jobs get it as HF_TOKEN")
