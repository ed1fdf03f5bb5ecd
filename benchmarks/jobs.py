"""A whole job on a ready host over loopback SSH, and a hundred submissions at once, through the command line.

Against the plain tools a person would use by hand: ssh for the command, rsync for the directory there and back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import HERE, Figure, in_turn
from sshd import Sshd, start_sshd

ROUNDS = int(os.environ.get("ROUNDS", "5"))
SUBMISSIONS = int(os.environ.get("SUBMISSIONS", "100"))


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as name, start_sshd(Path(name, "sshd")) as server:
        folder = Path(name)
        project = _project(folder, server)
        gpu = _command_line(folder, project)
        gpu("setup")
        whole = in_turn(
            {"gpu": lambda: gpu("job", "run", "--", "true"), "by hand": lambda: _by_hand(folder, project, server)},
            rounds=ROUNDS,
        )
        one = in_turn({"one": lambda: gpu("job", "run", "--detach", "--", "true")}, rounds=ROUNDS)["one"]
        many = in_turn(
            {"many": lambda: gpu("job", "run", "--detach", "--copies", str(SUBMISSIONS), "--", "true")},
            rounds=1,
            warm_up=0,
        )["many"]
    return [
        Figure("gpu job run -- true", whole["gpu"], "ssh true, rsync up and down", whole["by hand"], limit=2.5),
        Figure(f"{SUBMISSIONS} detached submissions", many, "one submission", one, limit=20.0),
    ]


def _project(folder: Path, server: Sshd) -> Path:
    project = folder / "project"
    project.mkdir()
    for number in range(20):
        (project / f"module_{number}.py").write_text(f"VALUE = {number}\n" * 100)
    (project / "hosts.yaml").write_text(
        f"hosts: {{box: {{address: 127.0.0.1, port: {server.port}, user: {server.user}, "
        f'identity_file: "{server.identity}", root: "{folder / "machine"}"}}}}\n'
    )
    return project


def _command_line(folder: Path, project: Path):
    environment = {**os.environ, "HOME": str(folder)}
    program = [sys.executable, "-I", str(HERE.parent / "scripts/gpu_skills/__main__.py")]

    def gpu(*args: str) -> None:
        done = subprocess.run([*program, *args], cwd=project, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"gpu {' '.join(args)}: exit {done.returncode}: {done.stderr}")

    gpu("init", "--jobs", "--provider", "ssh", "--host", "box")
    return gpu


def _by_hand(folder: Path, project: Path, server: Sshd) -> None:
    ssh = f"ssh -F {server.client_config}"
    there = f"{server.host}:{folder / 'by-hand'}/"
    subprocess.run([*ssh.split(), server.host, "true"], check=True, stdin=subprocess.DEVNULL)
    subprocess.run(["rsync", "-a", "-e", ssh, f"{project}/", there], check=True)
    subprocess.run(["rsync", "-a", "-e", ssh, there, f"{folder / 'back'}/"], check=True)
