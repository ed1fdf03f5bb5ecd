"""Reaching a machine over SSH: a real server, the user's configuration, host keys, logins, and ways that fail."""

from __future__ import annotations

import errno
import inspect
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import paramiko
import pytest

from gpu_skills.errors import (
    AuthFailed,
    ConfigError,
    GpuError,
    HostKeyMismatch,
    MachineLacks,
    NetworkDenied,
    ProtocolError,
    Unreachable,
)
from gpu_skills.remote import ssh
from gpu_skills.remote.bulk import Bulk
from gpu_skills.remote.session import Session
from gpu_skills.remote.ssh import SshTransport
from gpu_skills.remote.sshconfig import SshEndpoint, resolve
from remote.far_end import CuttingProxy, session_to, transport_to
from sshd import USER, free_port, make_key

HAVE = {"project": "p", "tree": "0" * 64}


def run(transport: SshTransport, command: str) -> tuple[bytes, int | None]:
    channel = transport.start(command)
    out = b""
    while piece := channel.read(1 << 16):
        out += piece
    status = channel.wait(10)
    channel.close()
    return out, status


# the way there ------------------------------------------------------------------------------------------------------


def test_a_command_runs_and_its_output_and_exit_code_come_back(sshd, tmp_path):
    transport = transport_to(sshd, tmp_path)
    assert run(transport, "printf '%s' \"$HOME\"; exit 7") == (str(sshd.home).encode(), 7)
    transport.close()


def test_further_commands_share_one_connection_whose_socket_does_not_wait_for_more(sshd, tmp_path):
    transport = transport_to(sshd, tmp_path)
    run(transport, "true")
    connection = transport._connection
    assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert connection.local_cipher == connection.remote_cipher == "aes128-gcm@openssh.com"
    run(transport, "true")
    assert transport._connection is connection
    assert sshd.log.count("Accepted publickey") == 1
    transport.close()


def test_a_session_over_ssh_answers_in_the_home_of_the_machine(sshd, tmp_path):
    session = Session.open(transport_to(sshd, tmp_path))
    assert session.greeting.root == str(sshd.home / ".gpu-skills")
    assert session.call("have", HAVE) == {"known": False}
    session.close()


def test_an_address_given_with_user_port_and_key_needs_no_configuration(sshd, tmp_path):
    empty = tmp_path / "empty_config"
    empty.write_text("")
    endpoint = SshEndpoint("127.0.0.1", sshd.user, sshd.port, str(sshd.identity))
    transport = SshTransport(endpoint, machine_id="m_1", known_hosts=tmp_path / "k", config_file=empty)
    assert run(transport, "echo hello")[0] == b"hello\n"
    transport.close()


def test_what_a_startup_file_prints_does_not_disturb(sshd, tmp_path):
    (sshd.home / ".bashrc").write_text("echo Welcome to the machine; printf 'no newline: '; echo oops >&2\n")
    session = session_to(sshd, tmp_path)
    assert session.call("have", HAVE) == {"known": False}
    session.close()


def test_a_startup_file_that_prints_without_end_is_given_up(sshd, tmp_path):
    (sshd.home / ".bashrc").write_text("yes | head -c 10000000\n")
    with pytest.raises(ProtocolError, match="more than 64 KiB before the runner spoke"):
        session_to(sshd, tmp_path)


def test_a_startup_file_that_ends_the_shell_is_told_with_its_code(sshd, tmp_path):
    (sshd.home / ".bashrc").write_text("echo no entry >&2; exit 3\n")
    with pytest.raises(ProtocolError, match="code 3 before the runner spoke: no entry"):
        session_to(sshd, tmp_path)


@pytest.mark.parametrize("lacking", ["python3", "bash"])
def test_a_host_without_python3_or_bash_is_named_with_what_it_lacks(sshd_factory, tmp_path, lacking):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"sh", "bash", "python3"} - {lacking}:
        (programs / name).symlink_to(f"/bin/{name}")
    server = sshd_factory(environment={"PATH": str(programs)})
    with pytest.raises(MachineLacks, match=f"machine has no {lacking}"):
        session_to(server, tmp_path)


def test_a_connection_that_was_cut_is_made_again_for_a_repeatable_question(sshd, tmp_path):
    session = session_to(sshd, tmp_path)
    sshd.disconnect_all()
    assert session.call("have", HAVE) == {"known": False}
    session.close()


def test_a_jump_host_leads_to_the_machine(sshd_factory, tmp_path):
    jump, server = sshd_factory(), sshd_factory()
    config = tmp_path / "config"
    config.write_text(
        jump.client_config.read_text().replace("Host machine", "Host jump")
        + server.client_config.read_text()
        + "  ProxyJump jump\n"
    )
    # The user has been on the jump host before.
    subprocess.run(["ssh", "-F", config, "jump", "true"], check=True, capture_output=True)
    known = (jump.folder / "user_known_hosts").read_bytes()
    transport = SshTransport(SshEndpoint("machine"), machine_id="m", known_hosts=tmp_path / "k", config_file=config)
    assert run(transport, "echo there")[0] == b"there\n"
    channel = Bulk(transport).stream().start("echo bulk")
    assert (channel.read(100), channel.stderr_tail()) == (b"bulk\n", "")
    channel.close()
    transport.close()
    assert jump.log.count("Accepted publickey") == 3
    assert (jump.folder / "user_known_hosts").read_bytes() == known


def test_a_jump_host_that_refuses_is_quoted(sshd_factory, tmp_path):
    server = sshd_factory()
    config = tmp_path / "config"
    config.write_text(server.client_config.read_text() + f"  ProxyCommand echo no way >&2; exit 1 # {server.port}\n")
    transport = SshTransport(SshEndpoint("machine"), machine_id="m", known_hosts=tmp_path / "k", config_file=config)
    with pytest.raises(Unreachable, match="the way there failed: no way"):
        transport.start("true")


# host keys ----------------------------------------------------------------------------------------------------------


def test_a_changed_host_key_is_refused_by_both_stacks(sshd, tmp_path):
    transport = transport_to(sshd, tmp_path)
    run(transport, "true")
    first = transport.pin.key.fingerprint
    bulk = Bulk(transport)
    transport.close()
    sshd.restart(new_host_key=True)
    with pytest.raises(HostKeyMismatch) as error:
        transport_to(sshd, tmp_path).start("true")
    assert first in error.value.message
    channel = bulk.stream().start("echo reached")
    assert channel.read(100) == b""
    assert isinstance(bulk.ssh_failed(channel.stderr_tail()), HostKeyMismatch)
    channel.close()


def test_a_host_key_of_another_type_is_a_changed_key(sshd, tmp_path):
    transport = transport_to(sshd, tmp_path)
    run(transport, "true")
    transport.close()
    sshd.restart(new_host_key=True, key_type="ecdsa")
    with pytest.raises(HostKeyMismatch, match="not of type ssh-ed25519"):
        transport_to(sshd, tmp_path).start("true")


@pytest.mark.parametrize("key_type", ["ecdsa", "rsa"])
def test_every_usual_type_of_host_key_is_pinned_for_both_stacks(sshd_factory, tmp_path, key_type):
    server = sshd_factory(key_type=key_type)
    for _ in range(2):
        transport = transport_to(server, tmp_path)
        assert run(transport, "echo a")[0] == b"a\n"
        channel = Bulk(transport).stream().start("echo b")
        assert channel.read(100) == b"b\n"
        channel.close()
        transport.close()
    assert key_type in transport.pin.key.type


def test_a_key_the_user_knows_vouches_and_one_the_user_does_not_know_is_refused(sshd, tmp_path):
    known = sshd.folder / "user_known_hosts"
    known.write_text(f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n")
    transport = transport_to(sshd, tmp_path)
    run(transport, "true")
    assert transport.pin.origin == "known_hosts"
    transport.close()
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text()
    known.write_text(f"[127.0.0.1]:{sshd.port} {other}")
    with pytest.raises(HostKeyMismatch, match="your known_hosts"):
        transport_to(sshd, tmp_path, machine_id="m_2").start("true")


def test_twenty_connections_at_once_leave_the_users_files_as_they_were(sshd, tmp_path):
    config = sshd.client_config
    config.write_text(config.read_text() + f"Host *\n  User bob\n  HashKnownHosts yes\n  SendEnv LANG\n# {USER}\n")
    known = sshd.folder / "user_known_hosts"
    known.write_text(f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n")
    before = config.read_bytes(), known.read_bytes(), sorted(os.listdir(sshd.folder))

    def connect(number: int) -> bytes:
        transport = transport_to(sshd, tmp_path, machine_id=f"m_{number}")
        out, _ = run(transport, f"echo {number}")
        transport.close()
        return out

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(connect, range(20))) == [f"{n}\n".encode() for n in range(20)]
    assert (config.read_bytes(), known.read_bytes(), sorted(os.listdir(sshd.folder))) == before
    assert len((tmp_path / "pins" / "known_hosts").read_text().splitlines()) == 20


# logins -------------------------------------------------------------------------------------------------------------


def test_a_key_that_is_not_welcome_is_a_failed_login(sshd, tmp_path):
    make_key(tmp_path / "stranger")
    shutil.copy(tmp_path / "stranger", sshd.identity)
    shutil.copy(tmp_path / "stranger.pub", f"{sshd.identity}.pub")
    with pytest.raises(AuthFailed, match="1 keys were refused") as error:
        transport_to(sshd, tmp_path).start("true")
    assert sshd.user in error.value.message


def test_a_key_with_a_passphrase_says_ssh_add_and_never_asks(sshd, tmp_path):
    lock(sshd.identity)
    with pytest.raises(AuthFailed, match="has a passphrase and no agent holds it") as error:
        transport_to(sshd, tmp_path).start("true")
    assert error.value.next_step == f"ssh-add {sshd.identity}"


def test_a_key_with_a_passphrase_works_through_an_agent(sshd, tmp_path):
    with agent(tmp_path, sshd.identity) as socket_path:
        lock(sshd.identity)
        environ = {**os.environ, "SSH_AUTH_SOCK": socket_path}
        transport = transport_to(sshd, tmp_path, environ=environ)
        assert run(transport, "echo in")[0] == b"in\n"
        channel = Bulk(transport).stream().start("echo bulk")
        assert channel.read(100) == b"bulk\n"
        channel.close()
        transport.close()


def test_an_agent_named_in_the_configuration_is_asked(sshd, tmp_path):
    with agent(tmp_path, sshd.identity) as socket_path:
        sshd.identity.unlink()  # only its public half is left, as with a hardware key
        sshd.client_config.write_text(sshd.client_config.read_text() + f"  IdentityAgent {socket_path}\n")
        transport = transport_to(sshd, tmp_path)
        assert run(transport, "echo in")[0] == b"in\n"
        transport.close()


def test_an_agent_that_never_answers_does_not_hang_the_login(sshd, tmp_path, monkeypatch):
    monkeypatch.setattr(ssh, "AGENT_TIMEOUT_S", 0.3)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "a.sock"))
        silent.listen()
        environ = {**os.environ, "SSH_AUTH_SOCK": str(tmp_path / "a.sock")}
        transport = transport_to(sshd, tmp_path, environ=environ)
        assert run(transport, "echo in")[0] == b"in\n"
        transport.close()


def test_identity_files_are_tried_in_order_past_those_that_are_missing_or_no_keys(sshd, tmp_path):
    (tmp_path / "rubbish").write_text("not a key")
    lines = sshd.client_config.read_text().splitlines(keepends=True)
    extra = [f"  IdentityFile {tmp_path}/{name}\n" for name in ("missing", "rubbish")]
    sshd.client_config.write_text("".join([*lines[:1], *extra, *lines[1:]]))
    transport = transport_to(sshd, tmp_path)
    assert run(transport, "echo in")[0] == b"in\n"
    transport.close()


def test_a_server_that_wants_a_second_factor_is_named(sshd_factory, tmp_path):
    server = sshd_factory(settings=["AuthenticationMethods publickey,password", "PasswordAuthentication yes"])
    with pytest.raises(AuthFailed, match="also wants password"):
        transport_to(server, tmp_path).start("true")


# ways that do not lead anywhere -------------------------------------------------------------------------------------


def test_a_host_that_is_down_is_unreachable_and_says_how_to_look(sshd, tmp_path):
    sshd.stop()
    with pytest.raises(Unreachable, match="machine did not answer: Connection refused") as error:
        transport_to(sshd, tmp_path).start("true")
    assert error.value.next_step == "ssh machine true"
    sshd.restart()


@pytest.mark.parametrize("banner", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"\xff" * 5000])
def test_a_port_where_no_ssh_server_answers_is_given_up_in_time(sshd, tmp_path, monkeypatch, banner):
    monkeypatch.setattr(ssh, "BANNER_TIMEOUT_S", 0.5)
    with silent_server(banner) as port:
        endpoint = SshEndpoint(sshd.host, port=port)
        began = time.monotonic()
        with pytest.raises(Unreachable) as error:
            transport_to(sshd, tmp_path, endpoint=endpoint).start("true")
    assert time.monotonic() - began < 10
    assert error.value.message.isprintable()


def test_a_server_that_hangs_up_during_the_login_is_unreachable(sshd, tmp_path):
    for limit in (10, 1200, 1800):
        with CuttingProxy(sshd.port, down=[limit]) as proxy:
            endpoint = SshEndpoint(sshd.host, port=proxy.port)
            with pytest.raises((Unreachable, AuthFailed)):
                transport_to(sshd, tmp_path, endpoint=endpoint, machine_id=f"m_{limit}").start("true")


def test_a_system_that_forbids_the_network_is_not_an_outage(sshd, tmp_path, monkeypatch):
    for number in (errno.EPERM, errno.EACCES):

        def denied(self: socket.socket, address: object, number: int = number) -> None:
            raise PermissionError(number, os.strerror(number))

        monkeypatch.setattr(socket.socket, "connect", denied)
        with pytest.raises(NetworkDenied) as error:
            transport_to(sshd, tmp_path).start("true")
        assert error.value.exit_code == 3
        monkeypatch.undo()


def test_no_exception_of_paramiko_or_of_a_socket_passes_untranslated():
    key = paramiko.ECDSAKey.generate()
    arguments = {
        paramiko.BadHostKeyException: ("box", key, key),
        paramiko.BadAuthenticationType: ("no", ["password"]),
        paramiko.ChannelException: (1, "no"),
        paramiko.ProxyCommandFailure: ("nc", 1),
        paramiko.ssh_exception.NoValidConnectionsError: ({("127.0.0.1", 22): ConnectionRefusedError(111, "refused")},),
        paramiko.ssh_exception.PartialAuthentication: (["password"],),
        paramiko.ssh_exception.CouldNotCanonicalize: ("box",),
    }
    found = {
        thing
        for module in (paramiko, paramiko.ssh_exception)
        for _, thing in inspect.getmembers(module, inspect.isclass)
        if issubclass(thing, Exception) and thing.__module__.startswith("paramiko")
    }
    assert len(found) >= 12
    foreign = [thing(*arguments.get(thing, ("words",))) for thing in found]
    foreign += [TimeoutError(), EOFError(), ConnectionResetError(104, "reset"), socket.gaierror(-2, "unknown")]
    for exc in foreign:
        with pytest.raises(GpuError) as error, ssh.translated("box", "me"):
            raise exc
        assert error.value.__cause__ is exc
        assert error.value.message


# the user's configuration -------------------------------------------------------------------------------------------


def write_config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config"
    path.write_text(text)
    return path


@pytest.mark.subprocess
def test_settings_are_what_ssh_itself_makes_of_the_configuration(tmp_path):
    config = write_config(
        tmp_path,
        "Host box\n HostName 10.9.8.7\n Port 2200\n User ann\n IdentityFile ~/.ssh/work_%r\n IdentitiesOnly yes\n"
        f" ConnectTimeout 4\n UserKnownHostsFile {tmp_path}/kh\n ProxyCommand connect %h %p %r 100%%\n"
        "Host *\n User bob\n",
    )
    found = resolve(SshEndpoint("box"), config_file=config)
    assert (found.hostname, found.port, found.user, found.connect_timeout_s) == ("10.9.8.7", 2200, "ann", 4.0)
    assert found.identity_files[0].name == "work_ann"
    assert found.identities_only
    assert found.known_names == ["[10.9.8.7]:2200"]
    assert found.known_hosts_files[0] == tmp_path / "kh"
    assert found.proxy_command == "connect 10.9.8.7 2200 ann 100%"
    other = resolve(SshEndpoint("other", user="root", port=5), config_file=config)
    assert (other.user, other.port, other.hostname, other.proxy_command) == ("root", 5, "other", None)


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("jump", "command"),
    [
        ("hop", "ssh -oBatchMode=yes -oUpdateHostKeys=no -oControlPath=none -F {c} -W '[box]:22' -- hop"),
        (
            "me@hop:2222",
            "ssh -oBatchMode=yes -oUpdateHostKeys=no -oControlPath=none -F {c} -p 2222 -W '[box]:22' -- me@hop",
        ),
        ("a,b", "ssh -oBatchMode=yes -oUpdateHostKeys=no -oControlPath=none -F {c} -J a -W '[box]:22' -- b"),
    ],
)
def test_a_jump_becomes_the_command_that_ssh_would_run(tmp_path, jump, command):
    config = write_config(tmp_path, f"Host box\n ProxyJump {jump}\n")
    assert resolve(SshEndpoint("box"), config_file=config).proxy_command == command.format(c=config)


@pytest.mark.subprocess
def test_a_configuration_that_ssh_rejects_is_quoted(tmp_path):
    config = write_config(tmp_path, "Host box\n Prot 22\n")
    with pytest.raises(ConfigError, match=r"[Bb]ad configuration option: prot"):
        resolve(SshEndpoint("box"), config_file=config)


@pytest.mark.subprocess
def test_a_key_that_is_named_for_a_host_is_the_only_kind_offered(tmp_path: Path) -> None:
    """An agent may hold more keys than a server lets anybody try."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    named = resolve(SshEndpoint("box", "root", 22, str(tmp_path / "key")), environ=environ)
    assert named.identities_only and named.identity_files[0] == tmp_path / "key"
    assert not resolve(SshEndpoint("box", "root", 22), config_file=Path("/dev/null"), environ=environ).identities_only


def test_without_the_ssh_program_there_are_plain_defaults(tmp_path):
    found = resolve(SshEndpoint("box", identity_file="/k/id"), environ={"PATH": str(tmp_path)})
    assert (found.hostname, found.port, found.user) == ("box", 22, USER)
    assert [path.name for path in found.identity_files] == ["id", "id_ed25519", "id_ecdsa", "id_rsa"]


def test_control_works_without_the_ssh_program(sshd, tmp_path):
    endpoint = SshEndpoint("127.0.0.1", sshd.user, sshd.port, str(sshd.identity))
    transport = transport_to(sshd, tmp_path, endpoint=endpoint, environ={"PATH": str(tmp_path)})
    assert run(transport, "echo in")[0] == b"in\n"
    assert not Bulk(transport).has_ssh
    transport.close()


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "", "a b", "a;b", "$(x)", "a\nb", "`x`"])
def test_a_host_that_would_be_an_option_or_a_command_is_refused(host):
    with pytest.raises(ConfigError, match="cannot be a host"):
        resolve(SshEndpoint(host))


# helpers ------------------------------------------------------------------------------------------------------------


def lock(identity: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret words", "-f", identity], check=True, capture_output=True
    )


@contextmanager
def agent(tmp_path: Path, identity: Path) -> Iterator[str]:
    """An ssh-agent of its own that holds one key."""
    path = str(tmp_path / "agent.sock")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 5
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        subprocess.run(
            ["ssh-add", "-q", identity], check=True, env={**os.environ, "SSH_AUTH_SOCK": path}, capture_output=True
        )
        yield path
    finally:
        process.terminate()
        process.wait()


@contextmanager
def silent_server(banner: bytes) -> Iterator[int]:
    """A port that accepts, says its banner and then nothing."""
    port = free_port()
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", port)) as server:

        def accept() -> None:
            try:
                while True:
                    held.append(server.accept()[0])
                    held[-1].sendall(banner)
            except OSError:
                pass

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield port
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    for connection in held:
        connection.close()
