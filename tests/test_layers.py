"""Imports go down only, and effects leave by the doors only. Read from the source text, so lazy imports count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "scripts" / "gpu_skills"

# From the ground up. On one line nobody imports its neighbour, except on the ground.
GROUND = {
    "errors", "units", "clock", "doors", "resources", "userdirs", "schemas", "strict_yaml", "config", "credentials",
    "bootstrap", "redaction", "wire",
}  # fmt: skip
LAYERS = [
    GROUND,
    {"state", "economics"},
    {"providers", "remote", "runtimes", "artifacts"},
    {"lifecycle", "notify"},
    {"jobs"},
    {"deployments"},
    {"fleet"},
    {"cli", "mcp_server"},
    {"__main__"},
]
# The sandbox stands beside the layers: it speaks the vendors' wire formats and must not learn ours.
SANDBOX_KNOWS = {"errors", "units", "clock", "resources"}
SANDBOX_KNOWN_BY = {"cli"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module as its path below the package, like `remote/ssh.py`, with its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("_data/"):
            yield name, ast.parse(path.read_text(encoding="utf-8"), name)


def part_of(name: str) -> str:
    """`remote/ssh.py` → `remote`, `errors.py` → `errors`, the package's own `__init__.py` → ``."""
    return name.split("/")[0].removesuffix(".py").removesuffix("__init__")


def imported_parts(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """Line and part of our package for each import, however it is spelt and wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ("gpu_skills/" + name).split("/")[: -node.level]
                base = ".".join([*above, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for dotted in names:
            top, _, rest = dotted.partition(".")
            if top == "gpu_skills" and rest:
                yield node.lineno, rest.split(".")[0]


def level(part: str) -> int:
    (found,) = [i for i, parts in enumerate(LAYERS) if part in parts] or [None]
    assert found is not None, f"{part} has no place in the layers: give it one in LAYERS and docs/architecture.md"
    return found


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer == "sandbox":
        return imported in SANDBOX_KNOWS
    if imported == "sandbox":
        return importer in SANDBOX_KNOWN_BY
    if importer in GROUND and imported in GROUND:
        return True
    return level(imported) < level(importer)


def test_imports_go_down_only_and_never_to_a_neighbour():
    wrong = []
    for name, tree in modules():
        importer = part_of(name)
        for line, imported in imported_parts(tree, name):
            if importer and imported != "__version__" and not may_import(importer, imported):
                wrong.append(f"{name}:{line} imports {imported}")
    assert wrong == []


def test_the_package_itself_imports_nothing_of_ours():
    (tree,) = [tree for name, tree in modules() if name == "__init__.py"]
    assert list(imported_parts(tree, "__init__.py")) == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("jobs", "remote", True),
        ("jobs", "lifecycle", True),
        ("fleet", "jobs", True),
        ("jobs", "fleet", False),
        ("remote", "providers", False),
        ("providers", "artifacts", False),
        ("state", "economics", False),
        ("state", "lifecycle", False),
        ("errors", "state", False),
        ("schemas", "resources", True),
        ("sandbox", "providers", False),
        ("sandbox", "errors", True),
        ("providers", "sandbox", False),
        ("cli", "mcp_server", False),
    ],
)
def test_the_rule_itself(importer, imported, allowed):
    assert may_import(importer, imported) is allowed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import gpu_skills.fleet.plan", ["fleet"]),
        ("from gpu_skills import fleet, jobs", ["fleet", "jobs"]),
        ("from gpu_skills.fleet.plan import x", ["fleet"]),
        ("from ..fleet import x", ["fleet"]),
        ("from . import x", ["remote"]),
        ("def f():\n    from gpu_skills import fleet", ["fleet"]),
        ("import os, json", []),
    ],
)
def test_an_import_is_seen_however_it_is_spelt(text, found):
    assert [part for _, part in imported_parts(ast.parse(text), "remote/ssh.py")] == found


# the doors ----------------------------------------------------------------------------------------------------------

# Who may have which effect outside a door, and why. An entry that nothing needs any more fails the test.
ALLOWED = {
    # doors themselves, and what stands behind them
    ("state/files.py", "write"): "is the door state.files.commit, with its locks and folders",
    ("state/journal.py", "write"): "is the door state.journal.append",
    ("remote/runner.py", "write"): "works alone on the machine, behind the door remote.execute",
    ("remote/runner.py", "process"): "starts the job on the machine, behind the door remote.execute",
    ("remote/transport.py", "write"): "feeds the runner's standard input, behind the door remote.execute",
    ("remote/transport.py", "process"): "starts the runner on this machine, behind the door remote.execute",
    ("remote/tunnel.py", "network"): "a port of our loopback; what goes through it is behind the door remote.execute",
    ("remote/ssh.py", "network"): "the connection to a machine, behind the door remote.execute",
    ("remote/ssh.py", "process"): "a ProxyCommand of the user's SSH configuration",
    ("remote/sshconfig.py", "network"): "the name of this host, for the token %l",
    ("remote/sshconfig.py", "process"): "asks `ssh -G`, which changes nothing",
    ("remote/bulk.py", "process"): "rsync and ssh for bulk data, themselves crossings of the door remote.execute",
    ("remote/upload.py", "write"): "links to the files to send, in a temporary folder, for rsync to follow",
    ("remote/download.py", "write"): "outputs on their way into the destination, which the machine cannot name",
    ("remote/destination.py", "write"): "the one place that puts verified outputs into the destination",
    ("wire.py", "network"): "the wire behind the door send",
    ("providers/limits.py", "write"): "when each endpoint was last asked, under a lock: advice, no record",
    ("state/ledger.py", "write"): "the empty folder of a job, which is how its number is taken",
    ("state/query.py", "process"): "a jq program that must not see our environment",
    ("state/spend.py", "process"): "adds up a long ledger on all CPUs",
    ("state/spend.py", "write"): "the pipe from those processes",
    ("lifecycle/approval/signatures.py", "process"): "asks `ssh-keygen -Y verify`, which changes nothing",
    ("lifecycle/approval/signatures.py", "write"): "who may sign, in a temporary folder, for ssh-keygen to read",
    ("remote/runner.py", "network"): "asks the machine's kernel about connections; nothing leaves",
    ("remote/checkup.py", "process"): "tries the GPU on the machine, behind the door remote.execute",
    ("remote/checkup.py", "network"): "tries the network on the machine, behind the door remote.execute",
    ("lifecycle/renting/sshkeys.py", "process"): "ssh-keygen, which makes the key",
    ("lifecycle/renting/sshkeys.py", "write"): "puts the key that ssh-keygen made where it belongs",
    ("lifecycle/runs.py", "write"): "the empty file whose lock says that a run is worked on",
    ("lifecycle/channels.py", "network"): "messages to people: nothing here depends on one, and a lost one is reported",
    ("artifacts/s3_client.py", "network"): "objects in the user's bucket, by boto3 with the user's own settings",
    ("artifacts/incoming.py", "write"): "a file on its way from a store, verified before it is renamed into place",
    ("artifacts/local.py", "write"): "takes an object of a folder away",
    ("runtimes/outputs.py", "write"): "outputs on their way into a folder, under names that are ours",
    ("runtimes/comfy_socket.py", "network"): "the websocket of a service: it only tells, nothing depends on it",
    # beside them
    ("jobs/collect.py", "write"): "the folders of outputs in the user's project",
    ("cli/demo.py", "write"): "a copy of the example in a folder that is the user's own",
    ("cli/debuglog.py", "write"): "the log of --debug, which must work when nothing else does",
    ("bootstrap.py", "write"): "makes the environment before any of this exists",
    ("bootstrap.py", "process"): "runs the installer before any of this exists",
}

NETWORK_MODULES = {
    "socket",
    "requests",
    "urllib3",
    "http",
    "paramiko",
    "boto3",
    "botocore",
    "ftplib",
    "smtplib",
    "ssl",
    "apprise",
    "websockets",
}
PROCESS_MODULES = {"subprocess", "multiprocessing", "pty"}
OS_PROCESS = ("system", "popen", "exec", "spawn", "posix_spawn", "fork", "kill")
OS_WRITES = {
    "rename", "replace", "renames", "unlink", "remove", "removedirs", "rmdir", "mkdir", "makedirs", "symlink", "link",
    "truncate", "ftruncate", "chmod", "fchmod", "chown", "utime", "write", "writev", "pwrite", "mkfifo", "mknod",
}  # fmt: skip
SHUTIL_WRITES = {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "rmtree", "make_archive", "chown"}
PATH_WRITES = {
    "write_text", "write_bytes", "unlink", "rename", "mkdir", "touch", "rmdir", "symlink_to", "hardlink_to", "chmod",
}  # fmt: skip
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}


def effects(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and kind (write, process, network) of everything that reaches outside the process."""
    return sorted(set(_effects(tree)))


def _effects(tree: ast.Module) -> Iterator[tuple[int, str]]:
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((node.lineno, kind) for kind in _kind_of_import(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, kind) for kind in _kind_of_import(node.module or ""))
            for alias in node.names:
                # `from os import replace` would hide a call from the rules below.
                yield from ((node.lineno, kind) for kind in _kind_of_call(node.module or "", alias.name))
                yield from ((node.lineno, kind) for kind in _kind_of_import(f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.Call):
            if _opens_for_writing(node):
                yield node.lineno, "write"
            elif isinstance(node.func, ast.Attribute):
                base = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                yield from ((node.lineno, kind) for kind in _kind_of_call(base, node.func.attr))
                if base not in ("os", "shutil") and _is_path_write(node):
                    yield node.lineno, "write"


def _kind_of_import(module: str) -> Iterator[str]:
    top = module.split(".")[0]
    if top in NETWORK_MODULES or module.startswith("urllib.request"):
        yield "network"
    if top in PROCESS_MODULES:
        yield "process"
    if top == "tempfile":
        yield "write"


def _kind_of_call(base: str, name: str) -> Iterator[str]:
    if base == "os" and name.startswith(OS_PROCESS):
        yield "process"
    if (base == "os" and name in OS_WRITES) or (base == "shutil" and name in SHUTIL_WRITES):
        yield "write"


def _is_path_write(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "replace":
        # Path.replace(target); text has two arguments, and dataclasses.replace keywords
        return len(call.args) == 1 and not call.keywords
    if call.func.attr == "open":
        # Path.open(mode); other classes have an `open` of their own
        return any(isinstance(mode, ast.Constant) and set("wax+") & set(str(mode.value)) for mode in call.args[:1])
    return call.func.attr in PATH_WRITES


def _opens_for_writing(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name) and call.func.id == "open":
        return _writing_mode(call.args[1:2], call.keywords)
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) == "os.open":
        if ast.unparse(call.args[0]) == "os.devnull":
            return False
        flags = " ".join(ast.unparse(argument) for argument in [*call.args[1:], *(k.value for k in call.keywords)])
        return any(flag in flags for flag in WRITING_FLAGS)
    return False


def _writing_mode(positional: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    given = positional + [keyword.value for keyword in keywords if keyword.arg == "mode"]
    if not given:
        return False
    mode = given[0]
    # A mode that is computed may be one that writes.
    return not isinstance(mode, ast.Constant) or any(letter in str(mode.value) for letter in "wax+")


def test_effects_leave_by_the_doors_only():
    found = {}
    for name, tree in modules():
        if name.startswith("sandbox/"):
            continue  # it plays the outside world: what it does is no effect of ours
        for line, kind in effects(tree):
            found.setdefault((name, kind), []).append(line)
    unknown = {f"{name} ({kind}) lines {lines}" for (name, kind), lines in found.items() if (name, kind) not in ALLOWED}
    assert unknown == set(), "use a door, or say in ALLOWED why not"
    assert {entry for entry in ALLOWED if entry not in found} == set(), "exceptions that nothing needs any more"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("open(p)", []),
        ("open(p, 'rb')", []),
        ("open(p, 'w')", ["write"]),
        ("open(p, mode='ab')", ["write"]),
        ("open(p, how)", ["write"]),
        ("os.open(p, os.O_RDONLY | os.O_CLOEXEC)", []),
        ("os.open(p, os.O_CREAT | os.O_WRONLY, 0o600)", ["write"]),
        ("os.open(os.devnull, os.O_WRONLY)", []),
        ("path.open('a')", ["write"]),
        ("path.open()", []),
        ("Session.open(transport)", []),
        ("path.write_text(x)", ["write"]),
        ("path.replace(other)", ["write"]),
        ("text.replace('a', 'b')", []),
        ("replace(record, state='done')", []),
        ("dataclasses.replace(record, state='done')", []),
        ("os.replace(a, b)", ["write"]),
        ("from os import replace", ["write"]),
        ("shutil.which('ssh')", []),
        ("shutil.rmtree(p)", ["write"]),
        ("import tempfile", ["write"]),
        ("def f():\n    import subprocess", ["process"]),
        ("from multiprocessing import Process", ["process"]),
        ("os.system('x')", ["process"]),
        ("os.execv(p, a)", ["process"]),
        ("from urllib.parse import quote", []),
        ("from urllib import request", ["network"]),
        ("import urllib.request", ["network"]),
        ("import http.client", ["network"]),
        ("import paramiko", ["network"]),
        ("if TYPE_CHECKING:\n    import paramiko", []),
    ],
)
def test_an_effect_is_seen_however_it_is_spelt(text, kinds):
    assert [kind for _, kind in effects(ast.parse(text))] == kinds
