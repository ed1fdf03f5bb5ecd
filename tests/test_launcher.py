"""The launcher and the environment it makes, on a checkout in miniature: one tiny wheel, and a `uv` that we can hold.

The real uv, pip and lock take part in the last tests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.subprocess

ROOT = Path(__file__).resolve().parent.parent
PYTHON = str(Path(sys._base_executable).resolve())

# What the launcher is to start: it tells what it sees.
FAKE_CLI = """
import json, os, sys
import tinydep
def main():
    where = os.path.abspath(__file__)
    print(json.dumps({"argv": sys.argv, "environ": dict(os.environ), "answer": tinydep.ANSWER, "where": where,
                      "prefix": sys.prefix, "path": sys.path, "cwd": os.getcwd()}))
    return 7 if "fail" in sys.argv else 0
"""

# Does what uv does for us, with the tools at hand. If there is a file `hold` it says so, and waits for `let-go`.
FAKE_UV = """#!{python} -I
import os, subprocess, sys, time, zipfile
state = {state!r}
with open(state + "/calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "--version":
    print("uv 0.0.0")
elif sys.argv[1] == "venv":
    subprocess.run([{python!r}, "-I", "-m", "venv", "--without-pip", sys.argv[-1]], check=True)
    if os.path.exists(state + "/hold"):
        open(state + "/holding", "w").close()
        while not os.path.exists(state + "/let-go"):
            time.sleep(0.02)
elif os.path.exists(state + "/complaint"):
    print(open(state + "/complaint").read(), file=sys.stderr)
    sys.exit(2)
else:
    env = sys.argv[sys.argv.index("--python") + 1].removesuffix("/bin/python")
    site = next(e.path + "/site-packages" for e in os.scandir(env + "/lib") if e.name.startswith("python"))
    zipfile.ZipFile({wheel!r}).extractall(site)
"""


class Checkout:
    """A copy of the launcher with a tiny lock, a cache of its own and an environment with nothing of the caller."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.root = folder / "check out"  # a path with a space is common enough
        self.scripts = self.root / "scripts"
        self.gpu = self.scripts / "gpu"
        self.cache = folder / "cache" / "gpu-skills"
        self.wheel = tiny_wheel(folder)
        self.running: list[subprocess.Popen[str]] = []
        package = self.scripts / "gpu_skills"
        (package / "cli").mkdir(parents=True)
        for name in ("gpu", "environment.sh"):
            shutil.copy(ROOT / "scripts" / name, self.scripts)
        for name in ("__init__.py", "__main__.py", "bootstrap.py", "errors.py"):
            shutil.copy(ROOT / "scripts" / "gpu_skills" / name, package)
        (package / "cli" / "__init__.py").write_text("")
        (package / "cli" / "main.py").write_text(FAKE_CLI)
        self.lock = self.root / "requirements.lock"
        self.lock.write_text(f"tinydep==1.0 \\\n    --hash=sha256:{sha256(self.wheel)}\n")
        self.bin = folder / "bin"
        self.bin.mkdir()
        uv = self.bin / "uv"
        uv.write_text(FAKE_UV.format(python=PYTHON, state=str(folder), wheel=str(self.wheel)))
        uv.chmod(0o755)
        (folder / "home").mkdir()
        self.environ = {
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(self.cache.parent),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "GPU_PYTHON": PYTHON,
            "UV_FIND_LINKS": str(folder),
        }

    def start(self, *arguments: str, **changes: str | None) -> subprocess.Popen[str]:
        environ = {k: v for k, v in {**self.environ, **changes}.items() if v is not None}
        process = subprocess.Popen(
            [str(self.gpu), *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def run(self, *arguments: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **changes)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def seen(self, *arguments: str, **changes: str | None) -> dict:
        """Run and return what the command line saw; it must have worked."""
        done = self.run(*arguments, **changes)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def environments(self) -> list[Path]:
        return sorted(self.cache.glob("env-*"))

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def installs(self) -> int:
        return sum(call.startswith("pip install") for call in self.calls())

    def hold(self) -> None:
        """The installers that start from now on stop half-way."""
        (self.folder / "hold").touch()

    def stop_holding(self) -> None:
        """Those that start from now on run through; those held stay so."""
        (self.folder / "hold").unlink()

    def release(self) -> None:
        (self.folder / "let-go").touch()

    def wait_until_held(self) -> None:
        wait_until((self.folder / "holding").exists)

    def complain(self, text: str) -> None:
        (self.folder / "complaint").write_text(text)


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def tiny_wheel(folder: Path) -> Path:
    """tinydep 1.0: one module, pure Python."""
    files = {
        "tinydep.py": "ANSWER = 42\n",
        "tinydep-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinydep\nVersion: 1.0\n",
        "tinydep-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "tinydep-1.0.dist-info/RECORD"
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(text)}")
    wheel = folder / "tinydep-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(record, "\n".join([*rows, f"{record},,"]) + "\n")
    return wheel


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def one_line_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Failed with exactly one line of error, which has these words, and no traceback."""
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if not re.match(r"gpu: (making its Python|process \d+ is)", line)]
    assert len(told) == 1, done.stderr
    assert re.fullmatch(r"gpu: .+; next: .+ \[[a-z_]+\]", told[0])
    for word in words:
        assert word in told[0]


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path)
    yield made
    made.release()
    for process in made.running:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


# the usual way ------------------------------------------------------------------------------------------------------


def test_the_first_start_makes_the_environment_and_says_so_and_the_second_says_nothing(checkout):
    first = checkout.run("job", "ls")
    assert first.returncode == 0
    assert json.loads(first.stdout)["answer"] == 42
    assert re.search(r"making its Python environment in .*\(1 packages; first use", first.stderr)
    assert re.search(r"environment ready after \d+\.\d s", first.stderr)
    second = checkout.run("job", "ls")
    assert (second.returncode, second.stderr) == (0, "")
    assert checkout.installs() == 1
    assert list(checkout.cache.glob("making-*")) == []


def test_a_later_start_needs_no_other_program(checkout):
    checkout.seen()
    environ = {**checkout.environ, "PATH": "/nowhere"}
    done = subprocess.run([shutil.which("bash"), checkout.gpu, "x"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_arguments_and_the_exit_code_pass_unchanged(checkout):
    checkout.seen()
    done = checkout.run("job", "run", "--", "a b", "", "$(x)", "*", "fail")
    assert done.returncode == 7
    assert json.loads(done.stdout)["argv"] == ["gpu", "job", "run", "--", "a b", "", "$(x)", "*", "fail"]


def test_the_python_variables_of_the_caller_do_not_change_it_and_reach_child_processes(checkout, tmp_path):
    evil = tmp_path / "evil"
    (evil / "gpu_skills").mkdir(parents=True)
    (evil / "gpu_skills" / "__init__.py").write_text("raise SystemExit('from PYTHONPATH')")
    (evil / "sitecustomize.py").write_text("raise SystemExit('from PYTHONPATH')")
    checkout.seen()
    python = {"PYTHONPATH": str(evil), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHOME": "/nowhere", "PYTHONOPTIMIZE": "2"}
    # Names that a script of the shell could be using for itself.
    plain = {name: "theirs" for name in ("env", "lock", "cache", "target", "python", "name", "platform")}
    seen = checkout.seen(**python, **plain)
    assert seen["where"].startswith(str(checkout.scripts))
    shell = {"_", "SHLVL", "PWD", "OLDPWD", "LC_CTYPE"}  # set by any bash; LC_CTYPE by Python in the C locale
    assert {k: v for k, v in seen["environ"].items() if k not in shell} == {**checkout.environ, **python, **plain}


@pytest.mark.parametrize("way", ["link", "link to a link", "PATH", "bash gpu", "relative", "linked folder"])
def test_it_starts_from_anywhere_and_through_links(checkout, tmp_path, way):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    environ, cwd = checkout.environ, elsewhere
    if way == "link":
        (elsewhere / "g").symlink_to(checkout.gpu)
        command = ["./g"]
    elif way == "link to a link":
        (elsewhere / "one").symlink_to("../check out/scripts/gpu")
        (tmp_path / "two").symlink_to("else where/one")
        command = [str(tmp_path / "two")]
    elif way == "PATH":
        environ = {**environ, "PATH": f"{checkout.scripts}:{environ['PATH']}"}
        command = ["gpu"]
    elif way == "bash gpu":
        command, cwd = ["bash", "gpu"], checkout.scripts
    elif way == "relative":
        command = ["../check out/scripts/./gpu"]
    else:
        (elsewhere / "s").symlink_to(checkout.scripts)
        command = ["s/gpu"]
    done = subprocess.run(
        ["env", *command], cwd=cwd, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["where"] == str(checkout.scripts / "gpu_skills" / "cli" / "main.py")
    assert seen["cwd"] == str(cwd)


def test_nothing_is_written_beside_the_sources_and_compiled_code_is_kept_in_the_cache(checkout):
    before = sorted(checkout.root.rglob("*"))
    checkout.seen(PYTHONDONTWRITEBYTECODE="1")
    assert sorted(checkout.root.rglob("*")) == before
    (env,) = checkout.environments()
    compiled = {file.name.split(".")[0] for file in (env / "pycache").rglob("*.pyc")}
    assert {"main", "tinydep"} <= compiled


def test_a_start_records_when_the_environment_was_used(checkout):
    checkout.seen()
    (env,) = checkout.environments()
    os.utime(env / "used", (1, 1))
    checkout.seen()
    assert time.time() - (env / "used").stat().st_mtime < 60


# when an environment is made ----------------------------------------------------------------------------------------


def test_a_changed_lock_makes_a_new_environment_and_leaves_the_old_to_other_checkouts(checkout):
    old = checkout.seen()["prefix"]
    text = checkout.lock.read_text()
    checkout.lock.write_text(text + "# one byte is enough\n")
    assert checkout.seen()["prefix"] != old
    checkout.lock.write_text(text)
    assert checkout.seen()["prefix"] == old
    assert checkout.installs() == 2


def test_an_environment_whose_python_vanished_is_made_again(checkout):
    checkout.seen()
    (env,) = checkout.environments()
    (env / "bin" / "python").unlink()
    (env / "bin" / "python").symlink_to("/nowhere/python3.11")
    assert checkout.seen()["answer"] == 42
    assert checkout.installs() == 2


def test_an_environment_whose_python_does_not_start_is_made_again(checkout):
    checkout.seen()
    (env,) = checkout.environments()
    (env / "bin" / "python").unlink()
    (env / "bin" / "python").write_text("#!/nowhere/python\n")
    (env / "bin" / "python").chmod(0o755)
    assert checkout.seen()["answer"] == 42
    assert checkout.installs() == 2


def test_an_environment_without_a_package_is_named_in_one_line(checkout):
    checkout.seen()
    (env,) = checkout.environments()
    next(env.glob("lib/*/site-packages/tinydep.py")).unlink()
    done = checkout.run()
    one_line_error(done, str(env), "lacks tinydep", "remove that folder")


def test_environments_unused_for_30_days_are_removed_when_another_is_made(checkout):
    text = checkout.lock.read_text()
    days = 24 * 3600
    kept, removed = [], []
    for comment, unused_s, into in [("a", 31 * days, removed), ("b", 29 * days, kept)]:
        checkout.lock.write_text(f"{text}# {comment}\n")
        env = Path(checkout.seen()["prefix"])
        into.append((env, unused_s))
    for env, unused_s in kept + removed:
        os.utime(env / "used", (time.time() - unused_s,) * 2)
    checkout.lock.write_text(text)
    new = Path(checkout.seen()["prefix"])
    assert checkout.environments() == sorted([new, *(env for env, _ in kept)])


# two at once, and dying half-way ------------------------------------------------------------------------------------


def test_of_two_that_start_at_once_one_makes_the_environment_and_the_other_waits(checkout):
    checkout.hold()
    first = checkout.start()
    checkout.wait_until_held()
    second = checkout.start()
    heard = second.stderr.readline()
    assert re.search(r"gpu: process \d+ is making the environment; waiting for it", heard)
    checkout.release()
    for process in (first, second):
        out, _ = process.communicate(timeout=60)
        assert json.loads(out)["answer"] == 42
    assert checkout.installs() == 1


def test_killed_half_way_it_leaves_nothing_that_is_trusted(checkout):
    checkout.hold()
    first = checkout.start()
    checkout.wait_until_held()
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait(timeout=20) == -signal.SIGKILL
    assert checkout.environments() == []
    assert len(list(checkout.cache.glob("making-*"))) == 1
    checkout.stop_holding()
    assert checkout.seen()["answer"] == 42
    assert list(checkout.cache.glob("making-*")) == []


def test_the_next_start_does_not_wait_for_an_installer_whose_maker_was_killed(checkout):
    checkout.hold()
    first = checkout.start()
    checkout.wait_until_held()
    maker = int((checkout.cache / "making.lock").read_text())
    os.kill(maker, signal.SIGKILL)
    checkout.stop_holding()
    assert checkout.seen()["answer"] == 42
    assert first.wait(timeout=20) == 1


# one line of error --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("complaint", "words"),
    [
        (
            "  x Failed\nerror: Failed to fetch: `https://index.example/simple/tinydep/`\n  Caused by: dns error",
            ["Failed to fetch", "install.log", "check the network"],
        ),
        ("error: Failed to write: No space left on device (os error 28)", ["no space left", "free some space"]),
        ("error: Hash mismatch for `tinydep==1.0`", ["Hash mismatch", "the lock names"]),
    ],
    ids=["offline", "disk full", "other file"],
)
def test_a_failed_installation_is_one_line_with_the_next_step(checkout, complaint, words):
    checkout.complain(complaint)
    # Where pip is asked in turn, it finds nothing either, without asking anyone.
    done = checkout.run(PIP_NO_INDEX="1", GPU_PYTHON=without_ensurepip(checkout))
    one_line_error(done, *words)
    assert checkout.environments() == [] and list(checkout.cache.glob("making-*")) == []


def without_ensurepip(checkout: Checkout) -> str:
    """A Python that starts and cannot make an environment itself, as Debian's without python3-venv."""
    prefix = checkout.folder / "debian"
    subprocess.run([PYTHON, "-I", "-m", "venv", "--without-pip", prefix], check=True)
    site = next(prefix.glob("lib/python*/site-packages"))
    # Also under -I: a .pth line runs at every start.
    (site / "none.pth").write_text("import sys; sys.modules['ensurepip'] = None\n")
    return str(prefix / "bin" / "python")


def test_with_json_the_error_is_a_document_too_and_a_job_run_ends_with_its_own_code(checkout):
    checkout.complain("error: no route to host")
    python = without_ensurepip(checkout)
    done = checkout.run("job", "run", "--json", "--", "true", GPU_PYTHON=python)
    assert done.returncode == 125
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "environment_failed" and "no route to host" in error["message"]
    assert "next_step" in error and "Traceback" not in done.stderr


def test_no_home_is_one_line(checkout):
    one_line_error(checkout.run(HOME=None, XDG_CACHE_HOME=None), "HOME is not set", "XDG_CACHE_HOME")


def test_a_relative_cache_variable_is_not_followed(checkout):
    assert checkout.seen(XDG_CACHE_HOME="cache")["prefix"].startswith(str(checkout.folder / "home" / ".cache"))


def test_a_cache_that_cannot_be_written_is_one_line(checkout):
    checkout.cache.parent.write_text("a file where the folder should be")
    one_line_error(checkout.run(), "cannot write", "XDG_CACHE_HOME")


def path_with(checkout: Checkout, **programs: str) -> str:
    """A PATH of nothing but what a launcher needs, and these programs: a path to link to, or the text of a script."""
    folder = checkout.folder / "only"
    folder.mkdir()
    for name in ("bash", "env"):
        (folder / name).symlink_to(shutil.which(name))
    for name, content in programs.items():
        file = folder / name.replace("_", ".")
        if content.startswith("/"):
            file.symlink_to(content)
        else:
            file.write_text(content)
            file.chmod(0o755)
    return str(folder)


def test_without_any_python_it_says_what_to_install(checkout):
    done = checkout.run("status", "--json", GPU_PYTHON=None, PATH=path_with(checkout))
    one_line_error(done, "no Python 3.11 or newer", "apt install python3", "brew install python")
    assert json.loads(done.stdout)["error"]["code"] == "missing_program"


def test_a_python_that_is_offered_but_does_not_run_or_is_too_old_is_passed_over(checkout):
    shim = "#!/bin/sh\necho 'version manager: not installed' >&2\nexit 127\n"
    old = "#!/bin/sh\nexit 1\n"
    path = path_with(checkout, python3_14=shim, python3_12=old, python3=PYTHON, uv=str(checkout.bin / "uv"))
    done = checkout.run(GPU_PYTHON=None, PATH=path)
    assert done.returncode == 0, done.stderr
    assert "version manager" not in done.stderr


def test_a_python_named_by_the_user_that_does_not_run_is_an_error_and_nothing_else_is_tried(checkout):
    one_line_error(checkout.run(GPU_PYTHON="/nowhere/python3.12"), "GPU_PYTHON")


# the real installers ------------------------------------------------------------------------------------------------


def test_pip_is_asked_first_when_only_its_own_settings_say_where_packages_are(checkout):
    settings = checkout.folder / "home" / ".config" / "pip"
    settings.mkdir(parents=True)
    (settings / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {checkout.folder}\nuser = true\n")
    assert checkout.seen(UV_FIND_LINKS=None)["answer"] == 42
    assert checkout.calls() == []


@pytest.mark.slow
def test_pip_steps_in_for_a_uv_that_does_not_run_and_refuses_a_file_with_another_hash(checkout):
    (checkout.bin / "uv").write_text("#!/bin/sh\nexit 127\n")
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout.folder)}
    assert checkout.seen(**pip)["answer"] == 42
    checkout.lock.write_text(checkout.lock.read_text().replace(sha256(checkout.wheel), "0" * 64))
    one_line_error(checkout.run(**pip), "HASH", "the lock names")


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["as the user has it", "pip"])
def test_the_real_lock_makes_an_environment_that_starts_the_real_command_line(tmp_path, real_environment, installer):
    environ = {**real_environment, "XDG_CACHE_HOME": str(tmp_path)}
    if installer == "pip":
        environ = {**environ, "PATH": "/usr/local/bin:/usr/bin:/bin", "GPU_PYTHON": PYTHON}
    run = dict(env=environ, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    first = subprocess.run([ROOT / "scripts" / "gpu", "--version"], **run)
    assert first.returncode == 0, first.stderr
    assert re.search(r"\d+\.\d+", first.stdout)
    assert "environment ready" in first.stderr
    (env,) = (tmp_path / "gpu-skills").glob("env-*")
    imports = "import click, jq, jsonschema, paramiko, pathspec, requests, rich, yaml"
    assert subprocess.run([env / "bin" / "python", "-I", "-c", imports], **run).stderr == ""
    assert subprocess.run([ROOT / "scripts" / "gpu", "--version"], **run).stderr == ""


# scripts/test -------------------------------------------------------------------------------------------------------


def scripts_test(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / "test", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)


def test_a_program_that_the_tests_need_and_ci_lacks_is_an_error_that_names_it(checkout):
    tools = {name: shutil.which(name) for name in ("dirname", "python3")}
    path = path_with(checkout, **tools, id="#!/bin/sh\necho 1000\n")
    done = scripts_test(PATH=path, CI="true", HOME=str(checkout.folder / "home"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"test: not installed here: .*rsync jq.*; install them, .* skipped", line)


@pytest.mark.slow
def test_a_run_that_chooses_no_test_has_failed(real_environment):
    done = scripts_test("tests/test_guards.py", "-k", "no_such_test", "-p", "no:cacheprovider", **real_environment)
    assert "no tests ran" in done.stdout
    assert done.returncode == 5


# the locks ----------------------------------------------------------------------------------------------------------


def locked(name: str) -> dict[str, str]:
    """Package to version; each entry must name hashes and nothing but hashes."""
    entries = re.split(r"\n(?=\S)", (ROOT / name).read_text().strip())
    found = {}
    for entry in entries:
        head, *hashes = (line.strip().removesuffix(" \\") for line in entry.splitlines())
        package, version = head.split(" ;")[0].split("==")
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes), head
        found[package] = version.strip()
    return found


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9._-]+", line)[0].lower().replace("_", "-") for line in requirements}


def test_every_dependency_of_the_project_is_locked_and_no_index_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime, test = locked("requirements.lock"), locked("requirements-test.lock")
    assert names(project["project"]["dependencies"]) <= set(runtime)
    assert names(project["dependency-groups"]["test"]) <= set(test)
    # The tests run against what users get.
    assert runtime.items() <= test.items()
    for name in ("requirements.lock", "requirements-test.lock"):
        text = (ROOT / name).read_text()
        assert "://" not in text
        assert text.isascii(), "the launcher counts its characters"
