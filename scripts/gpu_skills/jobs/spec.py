"""What one job is: `gpujob.yaml` of its directory and the flags of `gpu job run`, checked and put together.

Values from the command line (`--env`) are secret: they reach the job and are written nowhere, only their names are.
Values in gpujob.yaml are recorded, so one that looks like a credential is refused there.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_skills import schemas, strict_yaml
from gpu_skills.config import read_dotenv, read_project_file
from gpu_skills.errors import ConfigError, UsageError
from gpu_skills.strict_yaml import Document
from gpu_skills.units import format_duration, parse_duration

FILE = "gpujob.yaml"
RESERVED_PREFIXES = ("GPU_", "JAMBU_", "KURA_")
MAX_VALUE_BYTES = 100_000  # Linux refuses one string of 128 KiB in argv or environment
MASK = "***"
_SHORTEST_MASKED = 8  # masking "3" everywhere would hide nothing and spoil the text

_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_CREDENTIAL_NAME = re.compile(
    r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|(?:API|ACCESS|SECRET|PRIVATE)_?KEY)(?:_ID)?"
)
# PAD_TOKEN="<pad>" is about text, not about access.
_TEXT_TOKEN = re.compile(r"(?:.*_)?(?:PAD|BOS|EOS|UNK|SEP|CLS|MASK|STOP|IMAGE|SPECIAL)_TOKEN(?:_ID)?")
_CREDENTIAL_VALUE = re.compile(
    r"(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|rpa_)[A-Za-z0-9_-]{16,}"
    r"|AKIA[A-Z0-9]{16}|-----BEGIN [A-Z ]*PRIVATE KEY.*",
    re.DOTALL,
)


@dataclass(frozen=True)
class Progress:
    """stall_s None: a standstill is not looked for. on_stall: event or cancel."""

    unit: str | None
    stall_s: float | None
    on_stall: str


@dataclass(frozen=True, repr=False)
class JobSpec:
    """env: recorded. secret_env: values of `--env`, never shown or written."""

    run: str
    directory: Path
    setup: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    exclude: tuple[str, ...] = ()
    label: str | None = None
    expect: tuple[str, ...] = ()
    progress: Progress | None = None
    outputs_uri: str | None = None

    def __repr__(self) -> str:
        """Without secret values: a log line cannot forget to mask them."""
        return f"JobSpec({self.to_record()})"

    @property
    def secret_names(self) -> tuple[str, ...]:
        return tuple(sorted(self.secret_env))

    def env_values(self) -> dict[str, str]:
        """The whole user environment of the job, secret values included: only for the request that starts it."""
        return {**self.env, **self.secret_env}

    def to_record(self) -> dict[str, Any]:
        """What jobs/<id>/job.json may hold: names of secrets, and no value even where a command repeats it."""
        progress = self.progress
        return {
            "run": self._masked(self.run),
            "setup": self._masked(self.setup),
            "env": {name: self._masked(value) for name, value in self.env.items()},
            "secret": list(self.secret_names),
            "timeout_s": self.timeout_s,
            "exclude": list(self.exclude),
            "label": self._masked(self.label),
            "expect": list(self.expect),
            "progress": None if progress is None else dict(vars(progress)),
            "outputs_uri": self.outputs_uri,
            "directory": os.fsencode(self.directory).decode("utf-8", "replace"),
        }

    def _masked(self, text: str | None) -> Any:
        for value in sorted(self.secret_env.values(), key=len, reverse=True):
            if text and len(value) >= _SHORTEST_MASKED:
                text = text.replace(value, MASK)
        return text


def load_spec(
    directory: Path,
    *,
    command: Sequence[str] = (),
    timeout: str | float | None = None,
    env: Sequence[str] = (),
    label: str | None = None,
    setup: str | None = None,
    exclude: Sequence[str] = (),
    expect: Sequence[str] = (),
    max_lifetime_s: float | None = None,
    environ: Mapping[str, str] | None = None,
    dotenv_root: Path | None = None,
    used_by: str = "gpu job run",
) -> JobSpec:
    """The job of a directory. Flags override the file; `exclude` and `env` add to it.

    command: what came after `--`. env: `NAME=VALUE`, or `NAME` for the value it has in `environ` or in the `.env` of
    `dotenv_root`. max_lifetime_s bounds the timeout. used_by: the command to try again.
    UsageError for the flags, ConfigError for the file.
    """
    environ = os.environ if environ is None else environ
    directory = _directory(directory)
    document = read_project_file(directory, FILE) or Document(FILE, {})
    schemas.check(document.data, "gpujob.yaml", file=FILE, line=document.line_of, error=ConfigError)
    written: dict[str, Any] = document.data
    run = _command_line(command) if command else written.get("run")
    if not run:
        raise UsageError(
            f"no command: {FILE} in {directory.name or directory} has no run and nothing follows --",
            next_step=f"{used_by} -- CMD",
        )
    lines = {"run": run, "setup": written.get("setup") if setup is None else setup or None}
    for name, line in lines.items():
        _check_text(line, f"the {name} command", "put it into a script of the directory")
        _refuse_no_text(line, f"the {name} command")
    secret_env = given_env(env, environ, dotenv_root)
    recorded = {name: value for name, value in _file_env(document).items() if name not in secret_env}
    return JobSpec(
        run=run,
        directory=directory,
        setup=lines["setup"],
        env=recorded,
        secret_env=secret_env,
        timeout_s=_timeout(timeout, document, max_lifetime_s),
        exclude=(*written.get("exclude", ()), *_patterns("--exclude", exclude)),
        label=_label(label) if label is not None else written.get("label"),
        expect=tuple(_patterns("--expect", expect) or written.get("expect", ())),
        progress=_progress(document),
        outputs_uri=(written.get("outputs") or {}).get("uri"),
    )


def _directory(directory: Path) -> Path:
    try:
        resolved = directory.resolve(strict=True)
        is_directory = resolved.is_dir()
    except (OSError, ValueError, RuntimeError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(f"directory {directory}: {reason}", next_step="gpu job run --dir DIR") from exc
    if not is_directory:
        raise UsageError(f"{directory} is not a directory", next_step="gpu job run --dir DIR")
    return resolved


def _command_line(command: Sequence[str]) -> str:
    """One argument with white space in it is a line for the shell; anything else is words, quoted for it."""
    if len(command) == 1 and re.search(r"\s", command[0]):
        return command[0].strip()
    return shlex.join(command) if any(command) else ""


def _check_text(text: str | None, what: str, instead: str) -> None:
    if text is None:
        return
    if "\0" in text:
        raise UsageError(f"{what} holds a NUL character, which no process can be given", next_step="take it out")
    if len(os.fsencode(text)) > MAX_VALUE_BYTES:
        raise UsageError(f"{what} is longer than {MAX_VALUE_BYTES} bytes", next_step=instead)


def _refuse_no_text(text: str | None, what: str) -> None:
    """Bytes of the command line that are no UTF-8 arrive as lone surrogates, which no record can hold."""
    if text is not None and not text.isascii() and _SURROGATE.search(text):
        raise UsageError(f"{what} is not UTF-8", next_step="put it into a script of the directory, or use other names")


def given_env(env: Sequence[str], environ: Mapping[str, str], dotenv_root: Path | None) -> dict[str, str]:
    """Values of `--env NAME=VALUE` and `--env NAME`. UsageError, which repeats no value."""
    values: dict[str, str] = {}
    for given in env:
        name, equals, value = given.partition("=")
        if not _NAME.fullmatch(name):
            # What was typed may be a value whose name was forgotten: it is not repeated.
            raise UsageError(
                "--env takes NAME=VALUE or NAME; this name is not one a variable can have",
                next_step="gpu job run --help",
            )
        _refuse_reserved(name, UsageError(f"--env {name}: {_RESERVED}", next_step="choose another name"))
        if not equals:
            known = environ.get(name) or (read_dotenv(dotenv_root, [name]).get(name) if dotenv_root else None)
            if known is None:
                raise UsageError(
                    f"--env {name}: no value for it in the environment or .env", next_step=f"export {name}=…"
                )
            value = known
        _check_text(value, f"the value of {name}", "put it into a file of the directory")
        values[name] = value
    return values


_RESERVED = "names starting with GPU_, JAMBU_ or KURA_ are set by gpu itself"


def _refuse_reserved(name: str, error: UsageError) -> None:
    if name.upper().startswith(RESERVED_PREFIXES):
        raise error


def _file_env(document: Document) -> dict[str, str]:
    """`env` of the file, each value as it is written there: `1e-4` stays `1e-4`."""
    values: dict[str, str] = {}
    for name in document.data.get("env", {}):
        pointer = f"/env/{strict_yaml.escape(name)}"
        value = document.texts[pointer]
        _refuse_reserved(name, document.error(f"env {name}: {_RESERVED}", pointer))
        if looks_like_credential(name, value):
            raise ConfigError(
                f"{FILE}:{document.line_of(pointer)}: env {name} looks like a credential, and this file is recorded",
                file=FILE,
                pointer=pointer,
                next_step=f"take it out of {FILE} and run: gpu job run --env {name}",
            )
        if "\0" in value:
            raise document.error(f"env {name} holds a NUL character", pointer)
        if len(value.encode()) > MAX_VALUE_BYTES:
            raise document.error(f"env {name} is longer than {MAX_VALUE_BYTES} bytes", pointer)
        values[name] = value
    return values


def looks_like_credential(name: str, value: str) -> bool:
    """By the last words of the name (API_KEY, TOKEN; not MAX_TOKENS), or by the known shape of the value."""
    if _CREDENTIAL_VALUE.fullmatch(value.strip()):
        return True
    upper = name.upper()
    return bool(value and _CREDENTIAL_NAME.fullmatch(upper) and not _TEXT_TOKEN.fullmatch(upper))


def _timeout(flag: str | float | None, document: Document, max_lifetime_s: float | None) -> float | None:
    if flag is not None:
        said, error = f"--timeout {flag}", UsageError
    elif "timeout" in document.data:
        said = f"timeout {document.texts['/timeout']} ({FILE}:{document.line_of('/timeout')})"
        error = ConfigError
    else:
        return None
    value = flag if flag is not None else document.data["timeout"]

    def wrong(problem: str, next_step: str) -> UsageError:
        return error(f"{said}: {problem}", file=FILE, next_step=next_step)

    try:
        timeout_s = parse_duration(value)
    except ValueError as exc:
        raise wrong(str(exc), "gpu job run --timeout 2h") from exc
    if timeout_s <= 0:
        raise wrong("must be more than 0; leave it out for no limit of its own", "gpu job run --timeout 2h")
    if max_lifetime_s is not None and timeout_s > max_lifetime_s:
        raise wrong(
            f"is longer than lifecycle.max_lifetime ({format_duration(max_lifetime_s)}), after which the machine stops",
            "lower the timeout, or raise lifecycle.max_lifetime (gpu doctor --config shows where it is set)",
        )
    return timeout_s


def _patterns(flag: str, given: Sequence[str]) -> tuple[str, ...]:
    for pattern in given:
        if not pattern or "\0" in pattern or len(pattern) > 4096:
            raise UsageError(f"{flag}: {'an empty pattern' if not pattern else 'not a pattern a path can match'}")
        _refuse_no_text(pattern, flag)
    return tuple(given)


def _label(label: str) -> str | None:
    if len(label) > 100:
        raise UsageError(f"--label: {len(label)} characters, at most 100 are allowed")
    _refuse_no_text(label, "--label")
    return label or None


def _progress(document: Document) -> Progress | None:
    written = document.data.get("progress")
    if written is None:
        return None
    stall_s = None
    if "stall" in written:
        try:
            stall_s = parse_duration(written["stall"])
        except ValueError as exc:
            raise document.error(f"progress.stall: {exc}", "/progress/stall") from exc
        if stall_s <= 0:
            raise document.error("progress.stall must be more than 0; leave it out to look for none", "/progress/stall")
    return Progress(unit=written.get("unit"), stall_s=stall_s, on_stall=written.get("on_stall", "event"))
