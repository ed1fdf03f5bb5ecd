"""Instances are real: SSH logins, start commands, disks, environment, and processes that die with them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpu_skills.sandbox import processes
from sandbox_fixture import Wire, eventually, ssh
from vast_calls import cheapest, create, running, show

ONE_GPU = {"gpu_name": {"eq": "RTX 4090"}, "num_gpus": {"eq": 2}, "direct_port_count": {"gte": 1}}


@pytest.fixture
def sandbox(make_sandbox):
    return make_sandbox(real=True, seed=4)


@pytest.fixture
def api(sandbox, login_key):
    wire = Wire(sandbox)
    wire("POST", "/api/v0/ssh/", {"ssh_key": Path(f"{login_key}.pub").read_text()})
    return wire


def direct_port(api: Wire, instance_id: int) -> int:
    return int(show(api, instance_id)["ports"]["22/tcp"][0]["HostPort"])


def test_ssh_gets_in_directly_and_by_the_proxy_and_finds_the_gpus_of_the_offer(sandbox, api, login_key):
    offer = cheapest(api, **ONE_GPU)
    instance_id = running(sandbox, api, offer=offer)
    found = show(api, instance_id)
    query = "nvidia-smi --query-gpu=name,memory.total,driver_version,compute_cap --format=csv,noheader,nounits"
    expected = f"NVIDIA GeForce RTX 4090, 24564, {offer['driver_version']}, 8.9\n" * 2
    assert direct_port(api, instance_id) != found["ssh_port"]
    for port in (direct_port(api, instance_id), found["ssh_port"]):
        assert 20000 <= port < 32768
        assert ssh(login_key, port, query).stdout == expected
    table = ssh(login_key, found["ssh_port"], "nvidia-smi && nvidia-smi -L").stdout
    assert f"Driver Version: {offer['driver_version']}" in table
    assert table.count("UUID: GPU-") == 2


def test_a_key_that_was_not_attached_does_not_get_in_and_one_that_is_does_at_once(sandbox, api, login_key, tmp_path):
    from sshd import make_key

    stranger = make_key(tmp_path / "stranger")
    instance_id = running(sandbox, api)
    port = direct_port(api, instance_id)
    assert ssh(stranger, port, "true").returncode == 255
    api("POST", f"/api/v0/instances/{instance_id}/ssh/", {"ssh_key": Path(f"{stranger}.pub").read_text()})
    sandbox.settle()
    assert ssh(stranger, port, "echo in").stdout == "in\n"
    assert ssh(login_key, port, "echo too").stdout == "too\n"


def test_the_start_command_has_the_environment_sessions_have_what_it_left_them_and_home_is_the_instances(
    sandbox, api, login_key
):
    start = "env | grep _ >> /etc/environment; echo started as $CONTAINER_ID with $OWN; pwd"
    instance_id = running(sandbox, api, onstart=start, env={"OWN": "a b", "-p 8000:8000": "1"})
    container = sandbox.world.instances[instance_id].container
    eventually(lambda: str(container.home) in container.read_log())
    assert f"started as {instance_id} with a b\n" in container.read_log()
    words = "echo $VAST_CONTAINERLABEL/$OWN/$CONTAINER_API_KEY/$VAST_TCP_PORT_8000/$VAST_URL; pwd; echo $HOME"
    out = ssh(login_key, direct_port(api, instance_id), words).stdout.splitlines()
    key = sandbox.world.instances[instance_id].key.value
    assert out == [f"C.{instance_id}//{key}/8000/{sandbox.url}", str(container.home), str(container.home)]


def test_without_that_sessions_see_nothing_of_the_containers_environment(sandbox, api, login_key):
    instance_id = running(sandbox, api, env={"OWN_A": "1"})
    assert ssh(login_key, direct_port(api, instance_id), "env").stdout.count("OWN_A") == 0


def test_a_session_has_nothing_of_what_this_computers_own_shell_would_set(sandbox, api, login_key):
    """sshd starts the shell of the user who runs the sandbox, and that would read their .bashrc."""
    instance_id = running(sandbox, api)
    lines = ssh(login_key, direct_port(api, instance_id), "env").stdout.splitlines()
    names = {line.split("=")[0] for line in lines if not line.startswith(("SSH_", "GPU_SANDBOX_"))}
    of_sshd = {"MAIL", "MOTD_SHOWN", "PWD", "OLDPWD", "SHLVL", "_"}
    assert names - of_sshd == {"HOME", "USER", "LOGNAME", "SHELL", "LANG", "PATH", "TMPDIR"}


def test_a_machine_ends_itself_with_its_own_key(sandbox, api):
    start = (
        "python3 -c \"import os, urllib.request as u; r = u.Request(os.environ['VAST_URL'] + '/api/v0/instances/' + "
        "os.environ['CONTAINER_ID'] + '/', b'{}', {'Authorization': 'Bearer ' + os.environ['CONTAINER_API_KEY'], "
        "'Content-Type': 'application/json'}, method='DELETE'); print(u.urlopen(r).status)\""
    )
    instance_id = create(api, onstart=start)
    sandbox.advance(60)
    eventually(lambda: show(api, instance_id) is None)
    assert sandbox.world.burning() == []


def test_a_reboot_keeps_disk_and_port_and_runs_the_start_command_again(sandbox, api, login_key):
    instance_id = running(sandbox, api, onstart="echo boot >> ~/boots")
    port = direct_port(api, instance_id)
    ssh(login_key, port, "echo kept > file; (setsid sleep 600 </dev/null >/dev/null 2>&1 &)")
    api("PUT", f"/api/v0/instances/reboot/{instance_id}/")
    sandbox.advance(60)
    assert direct_port(api, instance_id) == port
    eventually(lambda: ssh(login_key, port, "cat boots").stdout == "boot\nboot\n")
    assert ssh(login_key, port, "cat file; pgrep -f '^sleep 600' -s 0").stdout == "kept\n"


def test_a_recycle_wipes_the_disk_and_takes_the_accounts_keys_of_now(sandbox, api, login_key):
    instance_id = running(sandbox, api, onstart="echo boot >> ~/boots")
    ssh(login_key, direct_port(api, instance_id), "echo gone > file")
    api("PUT", f"/api/v0/instances/recycle/{instance_id}/")
    sandbox.advance(60)
    port = direct_port(api, instance_id)
    assert eventually(lambda: ssh(login_key, port, "ls").stdout) == "boots\n"
    assert ssh(login_key, port, "cat boots").stdout == "boot\n"


def test_a_stop_keeps_the_disk_and_a_start_gives_another_port_with_the_same_host_key(sandbox, api, login_key):
    instance_id = running(sandbox, api)
    before, container = direct_port(api, instance_id), sandbox.world.instances[instance_id].container
    host_key = container.host_key
    ssh(login_key, before, "echo kept > file")
    api("PUT", f"/api/v0/instances/{instance_id}/", {"state": "stopped"})
    sandbox.advance(10)
    assert ssh(login_key, before, "true").returncode == 255
    api("PUT", f"/api/v0/instances/{instance_id}/", {"state": "running"})
    sandbox.advance(60)
    after = direct_port(api, instance_id)
    assert after != before
    assert ssh(login_key, after, "cat file").stdout == "kept\n"
    assert container.host_key == host_key


def marked(sandbox, instance_id: int) -> set[int]:
    container = sandbox.world.instances[instance_id].container
    return processes.instance_processes(container.mark, container.directory, container.own_pids())


@pytest.mark.parametrize("how", ["stop", "destroy", "sandbox"])
def test_every_process_dies_with_its_instance_whatever_it_did_to_get_away(make_sandbox, login_key, how):
    with_own_end = make_sandbox(real=True)
    api = Wire(with_own_end)
    api("POST", "/api/v0/ssh/", {"ssh_key": Path(f"{login_key}.pub").read_text()})
    instance_id = running(with_own_end, api, onstart="sleep 700 & (setsid nohup sleep 701 &) ; exec sleep 702")
    port = direct_port(api, instance_id)
    ssh(
        login_key,
        port,
        "(setsid env -i /bin/sleep 703 </dev/null >/dev/null 2>&1 &) ; setsid -f sleep 704 </dev/null >/dev/null 2>&1",
    )
    pids = eventually(lambda: found if len(found := marked(with_own_end, instance_id)) >= 6 else None)
    if how == "stop":
        api("PUT", f"/api/v0/instances/{instance_id}/", {"state": "stopped"})
    elif how == "destroy":
        api("DELETE", f"/api/v0/instances/{instance_id}/")
    else:
        with_own_end.stop()
    with_own_end.settle()
    eventually(lambda: not [pid for pid in pids if _runs(pid)])


def _runs(pid: int) -> bool:
    return any(process.pid == pid and not process.is_zombie for process in processes.snapshot())


def test_one_instances_end_leaves_the_others_alone(sandbox, api, login_key):
    first, second = running(sandbox, api), running(sandbox, api)
    api("DELETE", f"/api/v0/instances/{first}/")
    sandbox.settle()
    assert ssh(login_key, direct_port(api, second), "echo here").stdout == "here\n"


@pytest.mark.parametrize(
    ("fault", "args", "out"),
    [
        ("missing_gpu", {}, "1\n"),
        ("missing_gpu", {"count": 2}, "0\n"),
        ("no_gpu_driver", {}, "0\n"),
    ],
)
def test_a_machine_can_lack_gpus(sandbox, api, login_key, fault, args, out):
    sandbox.faults.add([{"match": {"call": "create"}, "fault": fault, "args": args}])
    instance_id = running(sandbox, api, offer=cheapest(api, **ONE_GPU))
    command = "nvidia-smi -L | grep -c UUID"
    assert ssh(login_key, direct_port(api, instance_id), command).stdout == out


def test_ssh_can_be_dead_while_the_vendor_says_running(sandbox, api, login_key):
    sandbox.faults.add([{"match": {"call": "create"}, "fault": "dead_ssh"}])
    instance_id = running(sandbox, api)
    assert ssh(login_key, direct_port(api, instance_id), "true").returncode == 255


def test_after_a_start_the_old_port_may_be_shown_once(sandbox, api):
    sandbox.faults.add([{"match": {"call": "create"}, "fault": "old_port"}])
    instance_id = running(sandbox, api)
    before = direct_port(api, instance_id)
    for state in ("stopped", "running"):
        api("PUT", f"/api/v0/instances/{instance_id}/", {"state": state})
        sandbox.advance(60)
    assert direct_port(api, instance_id) == before
    assert direct_port(api, instance_id) != before


def test_the_host_key_can_change_with_the_next_start(sandbox, api):
    instance_id = running(sandbox, api)
    container = sandbox.world.instances[instance_id].container
    before = container.host_key
    sandbox.world.apply_faults([{"match": {"instance": instance_id}, "fault": "changed_host_key"}])
    sandbox.advance(60)
    assert show(api, instance_id)["actual_status"] == "running"
    assert container.host_key != before


def test_with_args_the_command_is_the_container_and_ends_with_it(sandbox, api):
    instance_id = create(api, runtype="args", args=["sh", "-c", "echo done; exit 3"], onstart=None)
    sandbox.advance(60)
    found = eventually(lambda: s if (s := show(api, instance_id))["actual_status"] == "exited" else None)
    assert "code 3" in found["status_msg"]
    assert [entry["kind"] for entry in sandbox.world.burning()] == ["disk"]


def fetch(api: Wire, url: str) -> bytes:
    """The way the official client does: until it is there."""
    path = url.removeprefix(api.sandbox.url)
    anybody = Wire(api.sandbox, key=None)
    answers = []

    def is_ready() -> bool:
        answers.append(anybody.full("GET", path))
        return answers[-1][0] == 200

    eventually(is_ready)
    assert answers[0][0] == 404, "the first fetch comes too early"
    return answers[-1][2]


def test_logs_come_by_detour_with_tail_and_filter(sandbox, api):
    instance_id = running(sandbox, api, onstart="seq 1 20")
    container = sandbox.world.instances[instance_id].container
    eventually(lambda: "20\n" in container.read_log())

    def logs(**body: str) -> str:
        _, reply = api("PUT", f"/api/v0/instances/request_logs/{instance_id}/", body)
        return fetch(api, reply["result_url"]).decode()

    assert logs(tail="2") == "19\n20\n"
    assert logs(filter="1", tail="3") == "17\n18\n19\n"
    assert "running" in logs(daemon_logs="true")


def test_execute_runs_ls_rm_and_du_inside_the_instance_only(sandbox, api, login_key, tmp_path):
    instance_id = running(sandbox, api)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    ssh(login_key, direct_port(api, instance_id), "mkdir d; echo 1 > d/file; ln -s / out")

    def execute(command: str) -> str:
        status, reply = api("PUT", f"/api/v0/instances/command/{instance_id}/", {"command": command})
        assert status == 200, reply
        return fetch(api, reply["result_url"]).decode()

    assert execute("ls d") == "file\n"
    assert execute("ls /root/d") == "file\n"
    assert execute("rm d/file") == ""
    assert execute("ls d") == ""
    for command in (f"rm {outside}", f"rm out{outside}", f"rm ../../../../../../../..{outside}"):
        execute(command)
    assert outside.read_text() == "mine"
    for command in ("cat d", "", "x" * 513, "ls 'open"):
        assert api("PUT", f"/api/v0/instances/command/{instance_id}/", {"command": command})[0] == 400
    assert api("PUT", f"/api/v0/instances/command/{instance_id}/", raw=b"[")[0] == 483


def test_a_copy_between_two_instances_is_real(sandbox, api, login_key):
    first, second = running(sandbox, api), running(sandbox, api)
    ssh(login_key, direct_port(api, first), "mkdir d; echo data > d/file")
    body = {"src_id": str(first), "dst_id": f"C.{second}", "src_path": "/root/d", "dst_path": "/root/e"}
    assert api("PUT", "/api/v0/commands/copy_direct/", {"client_id": "me", **body})[1]["success"] is True
    sandbox.settle()
    assert ssh(login_key, direct_port(api, second), "cat e/file").stdout == "data\n"


def test_files_go_in_and_out_by_scp(sandbox, api, login_key, tmp_path):
    instance_id = running(sandbox, api)
    (tmp_path / "up").write_text("content")
    from gpu_skills.sandbox.containers import USER

    words = ["scp", "-q", "-F", "/dev/null", "-i", str(login_key), "-o", "UserKnownHostsFile=/dev/null"]
    words += ["-o", "StrictHostKeyChecking=no", "-P", str(direct_port(api, instance_id)), str(tmp_path / "up")]
    subprocess.run([*words, f"{USER}@127.0.0.1:arrived"], check=True, capture_output=True, timeout=20)
    home = sandbox.world.instances[instance_id].container.home
    assert (home / "arrived").read_text() == "content"


def test_nothing_of_the_callers_environment_reaches_a_machine(sandbox, api, login_key, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "canary")
    instance_id = running(sandbox, api, onstart="env; echo end")
    container = sandbox.world.instances[instance_id].container
    eventually(lambda: "end\n" in container.read_log())
    assert "canary" not in container.read_log()
    assert "canary" not in ssh(login_key, direct_port(api, instance_id), "env").stdout


def test_this_machines_own_environment_file_is_left_alone(sandbox, api):
    path = Path("/etc/environment")
    before = (path.read_bytes(), path.stat().st_mtime_ns) if path.exists() else None
    instance_id = running(sandbox, api, onstart="echo SANDBOX_CANARY=1 >> /etc/environment; echo end")
    container = sandbox.world.instances[instance_id].container
    eventually(lambda: "end\n" in container.read_log())
    assert (container.root / "etc" / "environment").read_text() == "SANDBOX_CANARY=1\n"
    assert ((path.read_bytes(), path.stat().st_mtime_ns) if path.exists() else None) == before


def test_a_sandbox_without_sshd_says_what_to_install(sandbox, api, monkeypatch):
    from gpu_skills.sandbox import containers

    monkeypatch.setattr(containers.shutil, "which", lambda *args, **more: None)
    instance_id = create(api)
    sandbox.advance(60)
    found = show(api, instance_id)
    assert found["actual_status"] == "created"
    assert "install openssh-server" in found["status_msg"]
    assert sandbox.world.crashes.pop()
