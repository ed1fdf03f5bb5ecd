"""What an instance really is: a directory, an OpenSSH server of its own, and the processes that run in it.

    <directory>/root      the container's own disk; `root/root` is HOME; wiped by what wipes it at the vendor
    <directory>/volume    the volume disk, reachable as `root/<mount path>`; survives a stop
    <directory>/etc       what the vendor's host keeps outside: keys, sshd_config, environment, the log

There is no isolation: it runs as the user who started the sandbox, on this machine. Absolute paths inside are those of
this machine; `GPU_SANDBOX_ROOT` names the directory that stands for `/`. Only where a start command or the command of
an SSH session names a mount path, a word that begins with it means that of the instance.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_skills.sandbox import processes

USER = pwd.getpwuid(os.getuid()).pw_name
# Below the kernel's range for outgoing connections (32768-60999), which may hold any port of it at any time.
PORTS = range(20000, 32000)
START_TIMEOUT_S = 15.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/libexec/sftp-server",
                "/usr/lib/ssh/sftp-server")  # fmt: skip


# What may stand before a path that begins a word, in the words of sed.
_BEFORE_PATH = r"""(^|[[:space:]=:(<>]["']?)"""


class CannotStart(Exception):
    """The real container did not come up: what sshd or the system said."""


@dataclass
class Boot:
    """What one start of a container is given.

    environment: of the main process and all it starts. session_environment: of SSH sessions, which at some vendors do
    not see the former. command: run by bash at every start; its output is the container's log. gpus: see nvidia_smi.py.
    sshd: False leaves starting one to the command, which finds the way in `$GPU_SANDBOX_ROOT/start.sh`: `start_script`
    with `{sshd}` replaced by the command of an SSH server that stays in the foreground. port: of that server, if free.
    """

    environment: Mapping[str, str]
    session_environment: Mapping[str, str]
    command: str | None = None
    authorized_keys: Sequence[str] = ()
    gpus: dict[str, Any] = field(default_factory=dict)
    mounts: Mapping[str, Path | None] = field(default_factory=dict)  # mount path → directory; None: the volume disk
    sshd: bool = True
    banner: str = ""  # text that the SSH server prints before each login
    has_proxy: bool = False  # the vendor also offers a proxy: a second port that stays the same over restarts
    start_script: str = "#!/bin/sh\nexec {sshd}\n"
    port: int = 0
    on_exit: Callable[[int], Any] | None = None  # the command ended by itself with this code


class Container:
    """One container. Its methods block and must not run at the same time: the world queues them per instance."""

    def __init__(self, directory: Path, mark: str):
        self.directory = directory
        self.mark = mark
        self.port = 0
        self.proxy_port = 0
        self._sshd: subprocess.Popen[bytes] | None = None
        self._main: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> Path:
        return self.directory / "root"

    @property
    def volume(self) -> Path:
        return self.directory / "volume"

    @property
    def etc(self) -> Path:
        return self.directory / "etc"

    @property
    def home(self) -> Path:
        return self.root / "root"

    @property
    def host_key(self) -> str:
        """`ssh-ed25519 AAAA…`"""
        return " ".join((self.etc / "host_key.pub").read_text().split()[:2])

    @property
    def is_running(self) -> bool:
        return self._sshd is not None and self._sshd.poll() is None

    def own_pids(self) -> set[int]:
        return {process.pid for process in (self._sshd, self._main) if process is not None}

    # one life ----------------------------------------------------------------------------------------------------

    def start(self, boot: Boot, port: int = 0) -> int:
        """Bring it up and return the SSH port. port: try this one first. Raises CannotStart."""
        self._lay_out(boot)
        if not (self.etc / "host_key").exists():
            self.new_host_key()
        self.authorize(boot.authorized_keys)
        self._write_environments(boot)
        (self.etc / "banner").write_text(boot.banner)
        if boot.has_proxy and not self.proxy_port:
            self.proxy_port = free_port()
        if boot.sshd:
            self.port = self._start_sshd_on_a_free_port(port)
        else:
            self.port = port or boot.port or free_port()
            self._write_sshd_config(self.port)
        self._write_start_script(boot)
        self.log(f"container started, ssh on port {self.port}\n") if boot.sshd else self.log("container started\n")
        if boot.command:
            self._start_main(boot)
        return self.port

    def stop(self) -> None:
        """End every process of it. What is on its disks stays."""
        survived = not processes.kill_instance(self.mark, self.directory, self.own_pids())
        for process in (self._sshd, self._main):
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        self._sshd = self._main = None
        if survived:
            raise CannotStart(f"processes of {self.mark} outlive SIGKILL")

    def wipe(self) -> None:
        """A fresh container disk, as from the image; the volume disk and the host's own files stay."""
        shutil.rmtree(self.root, ignore_errors=True)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    # while it runs -----------------------------------------------------------------------------------------------

    def authorize(self, keys: Sequence[str]) -> None:
        """Replace the keys that may log in; sshd reads them at each login."""
        path = self.etc / "authorized_keys"
        new = path.with_name("authorized_keys.new")
        new.write_text("".join(key.strip() + "\n" for key in keys))
        new.chmod(0o600)
        new.replace(path)

    def new_host_key(self) -> None:
        """Another host key, in force with the next start of its SSH server."""
        for name in ("host_key", "host_key.pub"):
            (self.etc / name).unlink(missing_ok=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.etc / "host_key")],
            check=True,
            stdin=subprocess.DEVNULL,
            env={"PATH": SYSTEM_PATH},
        )

    def set_gpus(self, gpus: dict[str, Any]) -> None:
        (self.etc / "gpus.json").write_text(json.dumps(gpus))

    def log(self, text: str) -> None:
        with open(self.etc / "log", "a", encoding="utf-8") as stream:
            stream.write(text)

    def read_log(self, *, tail: int | None = None, limit_bytes: int = 1_000_000) -> str:
        """What the main process printed, the newest `tail` lines."""
        try:
            with open(self.etc / "log", "rb") as stream:
                stream.seek(max(stream.seek(0, os.SEEK_END) - limit_bytes, 0))
                lines = stream.read().decode("utf-8", "replace").splitlines(keepends=True)
        except FileNotFoundError:
            return ""
        return "".join(lines if tail is None else lines[-tail:] if tail > 0 else [])

    # how -----------------------------------------------------------------------------------------------------------

    def _lay_out(self, boot: Boot) -> None:
        for folder in (self.etc / "bin", self.home, self.root / "etc", self.root / "tmp", self.volume):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for mount_path, target in boot.mounts.items():
            link = self.root / mount_path.strip("/")
            if link.is_symlink() or not _is_below(link, self.root):
                continue
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.is_dir() and not any(link.iterdir()):
                link.rmdir()
            if not link.exists():
                link.symlink_to(self.volume if target is None else target)
        self.set_gpus(boot.gpus)
        smi = self.etc / "bin" / "nvidia-smi"
        program = Path(__file__).with_name("nvidia_smi.py")
        words = [sys.executable, "-S", "-E", str(program), str(self.etc / "gpus.json")]
        _write_program(smi, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')

    def _base_environment(self) -> dict[str, str]:
        """What every process of the instance has. Nothing of the environment the sandbox was started in."""
        return {
            "HOME": str(self.home),
            "USER": USER,
            "LOGNAME": USER,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "PATH": f"{self.etc / 'bin'}:{os.path.dirname(sys.executable)}:{SYSTEM_PATH}",
            "TMPDIR": str(self.root / "tmp"),
            "GPU_SANDBOX_ROOT": str(self.root),
            processes.MARK: self.mark,
        }

    def _write_environments(self, boot: Boot) -> None:
        self._main_environment = {**self._base_environment(), **boot.environment}
        session = {**self._base_environment(), **boot.session_environment}
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in session.items())
        sftp = next((path for path in SFTP_SERVERS if os.path.exists(path)), "sftp-server")
        # /etc/environment is where start commands leave what sessions shall see; here it lies below the own root.
        _write_program(
            self.etc / "login",
            "#!/bin/bash\n"
            f"{exports}"
            f"file={shlex.quote(str(self.root / 'etc' / 'environment'))}\n"
            'if [ -r "$file" ]; then while IFS= read -r line || [ -n "$line" ]; do\n'
            '  [[ "$line" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || continue\n'
            '  value="${line#*=}"; value="${value%\\"}"; export "${line%%=*}=${value#\\"}"\n'
            'done < "$file"; fi\n'
            "unset file line value\n"
            'cd "$HOME" || exit 1\n'
            f"{self._mapping_of_mounts(boot)}"
            'case "$SSH_ORIGINAL_COMMAND" in\n'
            '  "") exec bash ;;\n'
            f"  internal-sftp*|*/sftp-server*) exec {sftp} ;;\n"
            '  *) exec bash -c "$SSH_ORIGINAL_COMMAND" ;;\n'
            "esac\n",
        )

    def _mapping_of_mounts(self, boot: Boot) -> str:
        """Lines of the login script that turn mount paths in what a session asks for into those of this instance."""
        rules = "".join(
            f"s#{_BEFORE_PATH}{re.escape(path)}([^A-Za-z0-9_.-]|$)#\\1{self.root}{path}\\2#g;" for path in _paths(boot)
        )
        if not rules:
            return ""
        # Twice: a blank between two paths belongs to the end of the first.
        return f'SSH_ORIGINAL_COMMAND="$(sed -E {shlex.quote(rules * 2)} <<<"$SSH_ORIGINAL_COMMAND")"\n'

    def _start_main(self, boot: Boot) -> None:
        assert boot.command is not None
        # The habit of leaving variables for sessions in /etc/environment must not reach this machine's own file.
        command = boot.command.replace("/etc/environment", f"{self.root}/etc/environment")
        for path in _paths(boot):
            before = _BEFORE_PATH.replace("[:space:]", r"\s")
            command = re.sub(rf"{before}{re.escape(path)}(?![\w.-])", rf"\g<1>{self.root}{path}", command)
        with open(self.etc / "log", "ab") as output:
            self._main = process = subprocess.Popen(
                ["/bin/bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.home,
                env=self._main_environment,
                start_new_session=True,
            )
        if boot.on_exit is not None:
            import threading

            def wait() -> None:
                code = process.wait()
                if self._main is process:
                    boot.on_exit(code)

            threading.Thread(target=wait, name=f"main process of {self.mark}", daemon=True).start()

    def _write_start_script(self, boot: Boot) -> None:
        """The image's own start script."""
        command = shlex.join([find_sshd(), "-D", "-f", str(self.etc / "sshd_config"), "-E", str(self.etc / "sshd.log")])
        _write_program(self.root / "start.sh", boot.start_script.replace("{sshd}", command))

    def _start_sshd_on_a_free_port(self, wanted: int) -> int:
        failure = ""
        for attempt in range(20):
            port = wanted if wanted and attempt == 0 else free_port()
            self._write_sshd_config(port)
            failure = self._launch_sshd()
            if not failure:
                return port
            if "in use" not in failure:
                break
            if self.proxy_port:
                self.proxy_port = free_port()
        raise CannotStart(f"sshd does not start: {failure}")

    def _write_sshd_config(self, port: int) -> None:
        (self.etc / "sshd_config").write_text(
            f"Port {port}\n"
            f"{f'Port {self.proxy_port}' if self.proxy_port else ''}\n"
            "ListenAddress 127.0.0.1\n"
            f"HostKey {self.etc}/host_key\n"
            f"PidFile {self.etc}/sshd.pid\n"
            f"AuthorizedKeysFile {self.etc}/authorized_keys {self.home}/.ssh/authorized_keys\n"
            f"Banner {self.etc}/banner\n"
            f"ForceCommand {self.etc}/login\n"
            "SetEnv SHLVL=1\n"  # else the shell that sshd starts reads the .bashrc of whoever runs the sandbox
            "StrictModes no\n"  # the key file may lie below a folder that everybody may write to, like /tmp
            "UsePAM no\n"
            "UseDNS no\n"
            "PermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\n"
            "MaxStartups 200\n"
            "MaxSessions 100\n"
            "PrintMotd no\n"
            "PrintLastLog no\n"
            "Subsystem sftp internal-sftp\n"
        )

    def _launch_sshd(self) -> str:
        """Start it and wait until it says that it listens; the text of its log when it does not."""
        if os.getuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        log = self.etc / "sshd.log"
        log.write_text("")
        self._sshd = process = subprocess.Popen(
            [find_sshd(), "-D", "-f", str(self.etc / "sshd_config"), "-E", str(log)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": SYSTEM_PATH, processes.MARK: self.mark},
            start_new_session=True,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            # Its own word, not a connection that succeeds: a stranger may listen on that port.
            said = log.read_text(errors="replace")
            if "Bind to port" in said:
                break  # of two ports it would go on with the other one
            if said.count("Server listening on") == 1 + bool(self.proxy_port):
                return ""
            if process.poll() is not None:
                break
            time.sleep(0.005)
        process.kill()
        process.wait()
        return log.read_text(errors="replace") or "no word within the time"


def find_sshd() -> str:
    """The full path, which sshd insists on. Raises CannotStart when there is none."""
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    if found is None:
        raise CannotStart("there is no OpenSSH server on this machine: install openssh-server")
    return found


def free_port() -> int:
    """A port that nobody has at this moment. Somebody may take it next: be ready to ask again."""
    for port in random.SystemRandom().sample(PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise CannotStart("no free port between 20000 and 31999")


def _paths(boot: Boot) -> list[str]:
    """Mount paths that stand for a directory of the instance."""
    return [path.rstrip("/") for path in boot.mounts if re.fullmatch(r"(/[A-Za-z0-9._-]+)+/?", path)]


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o700)


def _is_below(path: Path, top: Path) -> bool:
    return path != top and os.path.normpath(path).startswith(os.path.normpath(top) + os.sep)
