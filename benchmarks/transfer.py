"""Uploads and downloads over loopback SSH against plain rsync and tar, a fresh connection each, hash checks included.

Everything lies in memory (/dev/shm), so that the disk is not what is measured. ROUNDS=n takes the median of n (3).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpu_skills.jobs.pack import pack
from gpu_skills.lifecycle.ahead import Ahead
from gpu_skills.remote.bulk import Bulk
from gpu_skills.remote.session import Session
from gpu_skills.remote.ssh import SshTransport
from gpu_skills.remote.sshconfig import SshEndpoint
from gpu_skills.remote.transfer import download, upload
from gpu_skills.remote.tree import parse_manifest
from report import Figure, in_turn
from sshd import Sshd, start_sshd

ROUNDS = int(os.environ.get("ROUNDS", "3"))
BIG_BYTES = int(os.environ.get("BIG_MIB", "1024")) << 20
SMALL_FILES = 10_000


def main() -> list[Figure]:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        tempfile.TemporaryDirectory(prefix="gpu-benchmark-", dir=memory) as folder,
        start_sshd(Path(folder, "sshd")) as server,
    ):
        bench = _Bench(Path(folder), server)
        figures = bench.tree("1 GiB" if BIG_BYTES == 1 << 30 else f"{BIG_BYTES >> 20} MiB", _big, 1.15)
        figures += bench.tree(f"{SMALL_FILES:,} files of 4 KiB", _small, 1.0)
        return figures


class _Bench:
    def __init__(self, folder: Path, server: Sshd):
        self.folder = folder
        self.server = server
        self.ssh = f"ssh -F {server.client_config}"
        self.numbers = itertools.count(1)
        self.without_rsync = folder / "bin"
        self.without_rsync.mkdir()
        (self.without_rsync / "ssh").symlink_to(shutil.which("ssh"))
        self.session().close()  # a machine that was used before has its runner and its pin
        subprocess.run([*self.ssh.split(), server.host, "true"], check=True, stderr=subprocess.DEVNULL)

    def tree(self, name: str, make: Callable[[Path], None], limit: float) -> list[Figure]:
        source, target, cache = self.folder / "source", self.folder / "target", self.folder / "cache"
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        make(source)
        host = self.server.host

        def fresh() -> None:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            shutil.rmtree(self.folder / "root" / "projects", ignore_errors=True)

        rsync = f"rsync -a -e '{self.ssh}'"
        up = in_turn(
            {
                "rsync": _shell(f"{rsync} {source}/ {host}:{target}/"),
                "gpu": lambda: self.upload(source, "p"),
                "tar": _shell(f"tar -C {source} -c . | {self.ssh} {host} tar -C {target} -x"),
                "gpu without rsync": lambda: self.upload(source, "p", rsync=False),
            },
            rounds=ROUNDS,
            before=fresh,
        )
        fresh()
        _shell(f"{rsync} {source}/ {host}:{target}/")()
        self.upload(source, "p", cache=cache)
        time.sleep(2)  # what was changed a moment ago is hashed again
        self.upload(source, "p", cache=cache)
        again = in_turn(
            {
                "rsync": _shell(f"{rsync} {source}/ {host}:{target}/"),
                "gpu": lambda: self.upload(source, "p", cache=cache),
            },
            rounds=2 * ROUNDS + 1,
        )
        outputs = self.job_with_outputs(source)

        def empty() -> None:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()

        down = in_turn(
            {
                "rsync": _shell(f"{rsync} {host}:{outputs}/ {target}/"),
                "gpu": lambda: self.download(target),
                "tar": _shell(f"{self.ssh} {host} tar -C {outputs} -c . | tar -C {target} -x"),
                "gpu without rsync": lambda: self.download(target, rsync=False),
            },
            rounds=ROUNDS,
            before=empty,
        )
        return [
            Figure(f"{name} up", up["gpu"], "rsync -a", up["rsync"], limit=limit),
            Figure(f"{name} down", down["gpu"], "rsync -a", down["rsync"], limit=limit),
            Figure(f"{name} up again, unchanged", again["gpu"], "rsync -a", again["rsync"], limit=1.5),
            Figure(f"{name} up without rsync", up["gpu without rsync"], "tar | ssh tar", up["tar"], limit=1.3),
            Figure(f"{name} down without rsync", down["gpu without rsync"], "ssh tar | tar", down["tar"], limit=1.3),
        ]

    def session(self, *, rsync: bool = True) -> Session:
        environ = dict(os.environ) if rsync else {**os.environ, "PATH": str(self.without_rsync)}
        transport = SshTransport(
            SshEndpoint(self.server.host),
            machine_id="m_bench",
            known_hosts=self.folder / "pins" / "known_hosts",
            config_file=self.server.client_config,
            environ=environ,
        )
        return Session.open(transport, root=str(self.folder / "root"))

    def upload(self, source: Path, project: str, *, rsync: bool = True, cache: Path | None = None) -> None:
        ahead = Ahead(lambda: self.session(rsync=rsync))  # as `gpu job run` connects
        packed = pack(source, limit_bytes=1 << 40, cache_path=cache)
        session = ahead.take()
        upload(session, Bulk(session.transport), project, packed.tree)
        session.close()

    def download(self, target: Path, *, rsync: bool = True) -> None:
        session = self.session(rsync=rsync)
        chunks: list[bytes] = []
        session.call("manifest", self.job, on_data=lambda header, data: chunks.append(data))
        download(session, Bulk(session.transport), "p", self.job["job"], parse_manifest(chunks), target)
        session.close()

    def job_with_outputs(self, source: Path) -> Path:
        """An ended job whose outputs are the files of `source`."""
        self.job = {"project": "p", "job": f"J-{next(self.numbers):06d}"}
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        session = self.session()
        tree = pack(empty).tree
        upload(session, None, "p", tree)
        spec = {
            "id": self.job["job"],
            "nonce": secrets.token_hex(8),
            "tree": tree.digest,
            "run": f"cp -r {source}/. $GPU_OUTPUT_DIR",
        }
        spec |= {"setup": None, "timeout_s": None, "expect": [], "progress": None, "label": None, "secret": []}
        folder = self.folder / "root" / "projects" / "p" / "jobs" / self.job["job"] / "outputs"
        session.call("start", {"project": "p", "job": spec, "env": {"GPU_OUTPUT_DIR": str(folder)}})
        while (status := session.call("status", {"project": "p", "jobs": [self.job["job"]]})["jobs"][0])[
            "state"
        ] == "running":
            time.sleep(0.2)
        assert status["state"] == "succeeded", status
        session.close()
        return folder


def _shell(line: str) -> Callable[[], None]:
    return lambda: subprocess.run(line, shell=True, check=True, stdin=subprocess.DEVNULL) and None


def _big(folder: Path) -> None:
    with open(folder / "big.bin", "wb") as file:
        for _ in range(BIG_BYTES >> 20):
            file.write(os.urandom(1 << 20))


def _small(folder: Path) -> None:
    for number in range(SMALL_FILES):
        path = folder / f"d{number % 100:02d}" / f"{number:05d}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(hashlib.sha256(str(number).encode()).digest() * 128)
