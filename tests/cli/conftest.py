"""The command line run in process, its output read as a program would: stdout as JSON checked against its schema."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_skills.cli import main
from gpu_skills.cli.context import Context
from sshd import sshd, sshd_factory

__all__ = ["sshd", "sshd_factory"]


@dataclass
class Result:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def documents(self) -> list[dict]:
        return [json.loads(line) for line in self.stdout.splitlines() if line.strip()]

    @property
    def document(self) -> dict:
        documents = self.documents
        assert len(documents) == 1, f"one document expected: {self.stdout!r} {self.stderr!r}"
        return documents[0]

    @property
    def error(self) -> dict:
        return self.document["error"]


class Terminal(io.StringIO):
    """Standard input that somebody could type at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """gpu("job", "run", "--json", …, cwd=None) → Result. Every JSON document is checked against schemas/cli.

    stdin: what comes on standard input. world: more of the Context, such as a clock. There is no system policy here.
    """
    from gpu_skills import schemas

    def call(*args: str, cwd: Path | None = None, stdin: bytes | Terminal = b"", **world: Any) -> Result:
        capfd.readouterr()
        stream = stdin if isinstance(stdin, Terminal) else io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", stream)
        own = {"system_policy": tmp_path / "no-system-policy.json", "account_home": Path(os.environ["HOME"])}
        world = {**own, **world}
        context = Context(cwd=cwd or tmp_path, environ=dict(os.environ), **world)
        code = main.run(list(args), obj=context)
        out, err = capfd.readouterr()
        result = Result(code, out, err)
        assert "Traceback" not in err and "Traceback" not in out
        if "--json" in args:
            for document in result.documents:
                schema = "cli/error" if "error" in document and "job" not in document else _schema_of(args)
                assert not schemas.problems(document, schema), (schema, schemas.problems(document, schema), document)
        return result

    return call


def _schema_of(args: tuple[str, ...]) -> str:
    words = []
    for arg in args:
        if arg.startswith("-"):
            break
        words.append(arg)
    for count in (2, 1):
        name = "cli/" + "_".join(words[:count])
        from gpu_skills import resources

        if resources.schema_path(name).exists():
            return name
    raise AssertionError(f"no schema for {args}")
