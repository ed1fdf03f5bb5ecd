"""SSH for the control conversation: one paramiko connection per command, bound to the machine's pinned key.

The socket is ours, because paramiko leaves Nagle's algorithm on: with it every round trip costs 44 ms in place of 2.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_skills.errors import AuthFailed, GpuError, HostKeyMismatch, NetworkDenied, Unreachable, one_line
from gpu_skills.remote.hostkeys import HostKey, Known, Pin, Pins, known_hosts_of
from gpu_skills.remote.sshconfig import Endpoint, SshSettings, resolve
from gpu_skills.remote.transport import SILENCE_S, STDERR_KEPT_BYTES, Channel, last_line

if TYPE_CHECKING:
    import paramiko

BANNER_TIMEOUT_S = 15.0
AUTH_TIMEOUT_S = 30.0
AGENT_TIMEOUT_S = 5.0
_PROHIBITED = 1  # RFC 4254: administratively prohibited
KEEPALIVE_S = 15
DEAD_PEER_S = 60
WINDOW_BYTES = 16 << 20  # what a machine may send before we have read it
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr", "aes192-ctr")
HOST_KEY_TYPES = (
    "ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "rsa-sha2-512", "rsa-sha2-256",
)  # fmt: skip


class SshTransport:
    """A machine reached over SSH. Connects at the first `start`; further channels share the connection.

    known_hosts: our own file of pins. vouched: a host key fingerprint the provider's log printed, for first contact.
    may_pin: False for whoever only reads.
    """

    python = "python3"

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        machine_id: str,
        known_hosts: Path,
        config_file: Path | None = None,
        environ: Mapping[str, str] | None = None,
        vouched: str | None = None,
        may_pin: bool = True,
    ):
        self.endpoint = endpoint
        self.host = endpoint.host
        self.machine_id = machine_id
        self.pins = Pins(Path(known_hosts), may_write=may_pin)
        self.config_file = config_file
        self.environ = dict(os.environ if environ is None else environ)
        self._vouched = vouched
        self._settings: SshSettings | None = None
        self._connection: paramiko.Transport | None = None
        self._one_connects = threading.RLock()  # a tunnel's threads open their channels on it too
        self.pin: Pin | None = None

    @property
    def settings(self) -> SshSettings:
        if self._settings is None:
            self._settings = resolve(self.endpoint, config_file=self.config_file, environ=self.environ)
        return self._settings

    def start(self, command: str) -> Channel:
        """Raises Unreachable, AuthFailed, HostKeyMismatch or NetworkDenied."""
        with self._one_connects:
            if self._connection is not None:
                # It may be dead without anybody having noticed: a new one costs less than a wrong error.
                with contextlib.suppress(Unreachable):
                    return self._start(command)
                self.close()
            self._connection = self._connect()
            return self._start(command)

    def _start(self, command: str) -> SshChannel:
        assert self._connection is not None
        with translated(self.host, self.settings.user):
            channel = self._connection.open_session(timeout=BANNER_TIMEOUT_S, window_size=WINDOW_BYTES)
            channel.settimeout(BANNER_TIMEOUT_S)
            channel.exec_command(command.encode("utf-8", "surrogateescape"))
        return SshChannel(channel, self.host, self.settings.user)

    def open_port(self, port: int) -> paramiko.Channel:
        """A connection to that port of the machine's own loopback; called by the threads of a tunnel.

        Unreachable when the machine has nothing there, or its server forwards nothing.
        """
        import paramiko

        with self._one_connects:
            if self._connection is None or not self._connection.is_active():
                self.close()
                self._connection = self._connect()
            connection = self._connection
        try:
            with translated(self.host, self.settings.user):
                where = ("127.0.0.1", port)
                return connection.open_channel("direct-tcpip", where, ("127.0.0.1", 0), timeout=BANNER_TIMEOUT_S)
        except Unreachable as exc:
            refusal = exc.__cause__
            if isinstance(refusal, paramiko.ChannelException) and refusal.code == _PROHIBITED:
                reason = "its SSH server forwards no ports (AllowTcpForwarding)"
                raise Unreachable(host=self.host, reason=reason) from refusal
            raise

    def failed(self, words: str) -> GpuError:
        return Unreachable(host=self.host, reason=words or "the connection closed before it said anything")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> paramiko.Transport:
        import paramiko

        logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else its tracebacks reach stderr
        settings = self.settings
        known = known_hosts_of(settings.known_names, settings.known_hosts_files)
        pinned = self.pins.get(self.machine_id)
        with translated(self.host, settings.user):
            stream = _open_stream(settings, self.environ)
            connection = paramiko.Transport(stream, default_window_size=WINDOW_BYTES)
            try:
                connection.banner_timeout = connection.handshake_timeout = BANNER_TIMEOUT_S
                connection.auth_timeout = AUTH_TIMEOUT_S
                security = connection.get_security_options()
                security.ciphers = tuple(c for c in CIPHERS if c in security.ciphers)
                wanted = _key_types(pinned, known)
                security.key_types = tuple(t for t in wanted if t in security.key_types) or security.key_types
                self._handshake(connection, pinned)
                shown = _shown_key(connection)
                self.pin = self.pins.check(self.machine_id, settings.alias, shown, known=known, vouched=self._vouched)
                _log_in(connection, settings, self.host)
                connection.set_keepalive(KEEPALIVE_S)
            except BaseException as exc:
                connection.close()
                stream.close()
                words = getattr(stream, "last_words", "")
                if words and isinstance(exc, paramiko.SSHException | OSError | EOFError):
                    raise Unreachable(host=self.host, reason=f"the way there failed: {words}") from exc
                raise
        return connection

    def _handshake(self, connection: paramiko.Transport, pinned: Pin | None) -> None:
        import paramiko

        try:
            connection.start_client(timeout=BANNER_TIMEOUT_S)
        except paramiko.SSHException as exc:
            if pinned is not None and "no acceptable host key" in str(exc):
                raise HostKeyMismatch(
                    host=self.host,
                    machine=self.machine_id,
                    found=f"not of type {pinned.key.type}",
                    pinned=pinned.key.fingerprint,
                ) from exc
            raise


class SshChannel:
    """A channel of a paramiko connection, with the promises of `transport.Channel`."""

    def __init__(self, channel: paramiko.Channel, host: str, user: str):
        self._channel = channel
        self._host = host
        self._user = user
        self._stderr = bytearray()
        self.timeout_s = SILENCE_S

    def write(self, *buffers: bytes | memoryview) -> None:
        self._channel.settimeout(self.timeout_s)
        with self._reporting("it takes no more data"):
            for buffer in buffers:
                self._channel.sendall(buffer)

    def close_write(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def has_input(self) -> bool:
        return self._channel.recv_ready()

    def read(self, n: int) -> bytes:
        self._channel.settimeout(self.timeout_s)
        with self._reporting("no answer"):
            data = self._channel.recv(n)
        self._drain_stderr()
        return data

    def stderr_tail(self) -> str:
        self._drain_stderr()
        return self._stderr.decode("utf-8", "replace")

    def wait(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while not self._channel.status_event.wait(max(0.0, min(0.05, deadline - time.monotonic()))):
            self._drain_stderr()
            if time.monotonic() >= deadline:
                return None
        status = self._channel.recv_exit_status()
        return status if status >= 0 else None

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()

    def _drain_stderr(self) -> None:
        while self._channel.recv_stderr_ready():
            self._stderr += self._channel.recv_stderr(1 << 16)
            del self._stderr[:-STDERR_KEPT_BYTES]

    @contextlib.contextmanager
    def _reporting(self, complaint: str) -> Iterator[None]:
        try:
            with translated(self._host, self._user):
                yield
        except Unreachable as exc:
            if isinstance(exc.__cause__, TimeoutError):
                raise Unreachable(host=self._host, reason=f"{complaint} for {self.timeout_s:g} s") from exc.__cause__
            raise


# reaching it --------------------------------------------------------------------------------------------------------


def _open_stream(settings: SshSettings, environ: Mapping[str, str]) -> Any:
    if settings.proxy_command is not None:
        return _ProxyStream(settings.proxy_command, environ)
    stream = _open_socket(settings)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # paramiko's keepalive asks for no answer, so only the system can notice that nobody acknowledges it.
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", KEEPALIVE_S), ("TCP_KEEPINTVL", KEEPALIVE_S), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_S * 1000)
    return stream


def _open_socket(settings: SshSettings) -> socket.socket:
    """Try every address of the name; the last failure counts, but a refusal by our own system is said first."""
    failure: OSError | None = None
    addresses = socket.getaddrinfo(
        settings.hostname, settings.port, settings.address_family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    for family, kind, protocol, _, address in addresses:
        stream = socket.socket(family, kind, protocol)
        try:
            stream.settimeout(settings.connect_timeout_s)
            if settings.bind_address:
                stream.bind((settings.bind_address, 0))
            stream.connect(address)
            return stream
        except OSError as exc:
            stream.close()
            if failure is None or not _is_denied(failure):
                failure = exc
    raise failure or OSError(errno.EADDRNOTAVAIL, "the name has no address")


class _ProxyStream:
    """ProxyCommand and ProxyJump: a process of ours whose stdin and stdout are the connection.

    One socket pair in place of two pipes, so that timeouts and shutdown work as on a network socket.
    """

    def __init__(self, command: str, environ: Mapping[str, str]):
        self.last_words = ""  # why a jump host refuses is only told there
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.PIPE,
                env=dict(environ),
                start_new_session=True,
            )
        os.set_blocking(self._process.stderr.fileno(), False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def close(self) -> None:
        self._socket.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if not self._process.stderr.closed:
            self.last_words = last_line((self._process.stderr.read() or b"").decode("utf-8", "replace"))
            self._process.stderr.close()


# who is there, and who we are ---------------------------------------------------------------------------------------


def _key_types(pinned: Pin | None, known: Known) -> tuple[str, ...]:
    """The host key algorithms to offer: the pinned type only; on first contact the types known_hosts has come first."""
    if pinned is not None:
        return pinned.key.algorithms
    first = [algorithm for key in known.keys for algorithm in key.algorithms]
    return tuple(dict.fromkeys([*first, *HOST_KEY_TYPES]))


def _shown_key(connection: paramiko.Transport) -> HostKey:
    key = connection.get_remote_server_key()
    return HostKey(key.get_name(), key.asbytes())


def _log_in(connection: paramiko.Transport, settings: SshSettings, host: str) -> None:
    """Offer keys in the order of `ssh`: agent keys that the configuration names, other agent keys, then key files.

    Never asks: a file with a passphrase that no agent holds is an AuthFailed that says `ssh-add`.
    """
    import paramiko

    locked: list[Path] = []
    offered = 0
    with _agent(settings) as agent_keys:
        for load in _keys(settings, agent_keys, locked):
            key = load()
            if key is None:
                continue
            offered += 1
            try:
                further = connection.auth_publickey(settings.user, key)
            except paramiko.BadAuthenticationType as exc:
                raise _refused(
                    settings, host, f"it wants {' or '.join(map(str, exc.allowed_types))}, not a key"
                ) from exc
            except paramiko.AuthenticationException:
                if not connection.is_active():
                    break
                continue
            except (paramiko.SSHException, EOFError, OSError) as exc:
                if not connection.is_active():  # the server hangs up after too many keys
                    raise _refused(settings, host, f"it hung up after {offered} keys") from exc
                continue  # an agent that will not sign with this key
            if further:
                raise _refused(settings, host, f"it also wants {' and '.join(map(str, further))}")
            return
        if connection.is_active():
            with contextlib.suppress(paramiko.SSHException):
                if not connection.auth_none(settings.user):
                    return
    if locked:
        raise _refused(
            settings,
            host,
            f"{locked[0]} has a passphrase and no agent holds it",
            f"ssh-add {shlex.quote(str(locked[0]))}",
        )
    raise _refused(settings, host, f"{offered} keys were refused" if offered else "there is no key to offer")


def _refused(settings: SshSettings, host: str, reason: str, next_step: str | None = None) -> AuthFailed:
    return AuthFailed(host=host, user=settings.user, reason=reason, next_step=next_step)


def _keys(settings: SshSettings, agent_keys: list[Any], locked: list[Path]) -> Iterator[Callable[[], Any]]:
    held = {key.asbytes(): key for key in agent_keys}
    public = {path: _public_blob(path) for path in settings.identity_files}
    named = [held.pop(blob) for blob in dict.fromkeys(public.values()) if blob in held]
    others = [] if settings.identities_only else list(held.values())
    for key in [*named, *others]:
        yield lambda key=key: key
    taken = {key.asbytes() for key in named}
    for path in settings.identity_files:
        if public[path] is None or public[path] not in taken:
            yield lambda path=path: _load_key(path, settings.certificate_files, locked)


def _load_key(path: Path, certificates: tuple[Path, ...], locked: list[Path]) -> paramiko.PKey | None:
    """The private key of a file; None when it is missing, of a kind we cannot use, or locked (then noted)."""
    import paramiko

    if not path.is_file():
        return None
    try:
        key = paramiko.PKey.from_path(str(path))
    except paramiko.PasswordRequiredException:
        locked.append(path)
        return None
    except TypeError:  # how the layer below says that a password is needed
        locked.append(path)
        return None
    except (paramiko.SSHException, ValueError, OSError, *_unsupported()):
        return None
    for certificate in certificates:
        with contextlib.suppress(paramiko.SSHException, ValueError, OSError):
            key.load_certificate(str(certificate))
    return key


def _unsupported() -> tuple[type[Exception], ...]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from paramiko.pkey import UnknownKeyType

    return UnsupportedAlgorithm, UnknownKeyType


def _public_blob(path: Path) -> bytes | None:
    """The public half of an identity, from `<file>.pub` or from the file itself when the key lives only in an agent."""
    import base64
    import binascii

    for candidate in (path.with_name(path.name + ".pub"), path):
        try:
            with open(candidate, "rb") as stream:
                fields = stream.read(64 << 10).split(None, 2)
            if len(fields) >= 2 and not fields[0].startswith(b"-"):
                return base64.b64decode(fields[1], validate=True)
        except (OSError, binascii.Error, ValueError):
            continue
    return None


@contextlib.contextmanager
def _agent(settings: SshSettings) -> Iterator[list[Any]]:
    """The keys an agent holds; none when there is no agent or it does not answer."""
    import paramiko
    from paramiko.agent import AgentSSH

    if settings.identity_agent is None:
        yield []
        return
    agent, stream = AgentSSH(), socket.socket(socket.AF_UNIX)
    with stream:
        try:
            stream.settimeout(AGENT_TIMEOUT_S)
            stream.connect(settings.identity_agent)
            agent._connect(stream)  # Agent() itself only knows the socket named by the environment
            keys = list(agent.get_keys())
            stream.settimeout(AUTH_TIMEOUT_S)  # it may ask its user for a touch
        except (OSError, paramiko.SSHException, IndexError, ValueError, TypeError):
            keys = []
        yield keys


# foreign errors -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def translated(host: str, user: str) -> Iterator[None]:
    """No exception of paramiko or of a socket passes here untranslated."""
    import paramiko

    try:
        yield
    except GpuError:
        raise
    except paramiko.BadHostKeyException as exc:
        raise HostKeyMismatch(
            host=host, machine=host, found=exc.key.get_name(), pinned=exc.expected_key.get_name()
        ) from exc
    except paramiko.AuthenticationException as exc:
        raise AuthFailed(host=host, user=user, reason=_words(exc)) from exc
    except (paramiko.SSHException, OSError, EOFError) as exc:
        cause = exc
        if isinstance(exc, paramiko.ssh_exception.NoValidConnectionsError):
            cause = next(iter(exc.errors.values()), exc)
        if isinstance(cause, OSError) and _is_denied(cause):
            raise NetworkDenied(reason=_words(cause)) from exc
        raise Unreachable(host=host, reason=_words(cause)) from exc
    except Exception as exc:
        # paramiko hands on whatever its thread met: a hostile packet may be an IndexError or a bad authentication tag.
        if not _comes_from_paramiko(exc):
            raise
        raise Unreachable(host=host, reason=f"it breaks the SSH protocol ({_words(exc)})") from exc


def _comes_from_paramiko(exc: BaseException) -> bool:
    if type(exc).__module__.startswith("paramiko"):
        return True
    frames = traceback.walk_tb(exc.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("paramiko") for frame, _ in frames)


def _is_denied(exc: OSError) -> bool:
    return exc.errno in (errno.EPERM, errno.EACCES)


def _words(exc: BaseException) -> str:
    if isinstance(exc, socket.gaierror):
        return "its name is not known"
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    if isinstance(exc, EOFError):
        return "the connection closed"
    try:
        text = (exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)) or type(exc).__name__
    except Exception:  # one of paramiko's cannot be printed
        text = type(exc).__name__
    if "protocol banner" in text:
        return f"no SSH banner within {BANNER_TIMEOUT_S:g} s"
    return one_line(text, limit=300)
