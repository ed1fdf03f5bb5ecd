"""RunPod's pods as real machines: start commands, keys, disks, environments, logs, and the end of everything."""

from __future__ import annotations

import pytest

from sandbox.runpod_calls import RunpodCalls
from sandbox_fixture import eventually, ssh

WORKSPACE = {"persistent": {"size": 10, "path": "/workspace"}}
NO_DELAY = {"provisioning_s": 0, "loading_s": 0, "stopping_s": 0, "reboot_s": 0}


@pytest.fixture
def api(make_sandbox):
    return RunpodCalls(make_sandbox(real=True, delays=NO_DELAY))


@pytest.fixture
def public_key(login_key):
    return login_key.with_suffix(".pub").read_text().strip()


def port_of(api, pod):
    return api.pod(pod["id"])["ssh"]["direct"]["port"]


def in_pod(api, pod, key, command):
    port = port_of(api, pod)
    return eventually(lambda: (done := ssh(key, port, command)).returncode != 255 and done).stdout


def lines(api, pod):
    """What the container has printed so far."""
    instance = api.sandbox.world.instances[pod["id"]]
    with api.sandbox.world.lock:
        api.face.logs.keep_up(instance)
        return [line.text for line in api.face.logs.book(instance).lines if line.source == "container"]


def test_the_image_starts_an_ssh_server_when_it_is_given_a_key(api, login_key, public_key):
    pod = api.running(env={"PUBLIC_KEY": public_key})
    assert "NVIDIA GeForce RTX 4090" in in_pod(api, pod, login_key, "nvidia-smi -L")


def test_without_a_key_the_port_is_there_and_nobody_listens(api, login_key):
    pod = api.running()
    assert ssh(login_key, port_of(api, pod), "true").returncode == 255


def test_args_take_the_place_of_the_start_script_and_may_skip_ssh(api, login_key, public_key):
    pod = api.running(env={"PUBLIC_KEY": public_key}, args="bash -c 'echo \"one  two\"; sleep 600'")
    eventually(lambda: "one  two" in lines(api, pod))
    assert ssh(login_key, port_of(api, pod), "true").returncode == 255


def test_args_run_at_each_start_and_can_go_on_with_the_images_own_script(api, login_key, public_key):
    args = "bash -c 'echo start >>$GPU_SANDBOX_ROOT/workspace/starts; touch $HOME/here; exec /start.sh'"
    pod = api.running(env={"PUBLIC_KEY": public_key}, args=args, mounts=WORKSPACE)
    in_pod(api, pod, login_key, "touch ~/wiped $GPU_SANDBOX_ROOT/workspace/kept")
    starts = api.sandbox.world.instances[pod["id"]].container.volume / "starts"
    for action, times in (("stop", 1), ("start", 2), ("restart", 3)):
        api.act(pod["id"], action)
        api.settle()
        eventually(lambda times=times: starts.read_text().split() == ["start"] * times)
    shown = in_pod(api, pod, login_key, "cd $GPU_SANDBOX_ROOT/workspace; cat starts; ls; ls ~")
    assert shown.split() == ["start", "start", "start", "kept", "starts", "here"]


def test_a_word_that_begins_with_the_mount_path_means_that_of_the_pod(api, login_key, public_key):
    inside = "mkdir -p /workspace/a; d=/workspace/a; echo two >$d/b; echo /other/workspace >/workspace/c"
    args = f"bash -c '{inside}; exec /start.sh'"
    pod = api.running(env={"PUBLIC_KEY": public_key}, args=args, mounts=WORKSPACE)
    shown = in_pod(api, pod, login_key, "cat /workspace/a/b /workspace/c; x='/workspace'; cd $x/a && pwd").split()
    folder = api.sandbox.world.instances[pod["id"]].container.root / "workspace" / "a"
    assert shown == ["two", "/other/workspace", str(folder)]
    assert in_pod(api, pod, login_key, "cat $GPU_SANDBOX_ROOT/workspace/a/b") == "two\n"


def test_a_network_volume_is_shared_and_outlives_its_pods(api, login_key, public_key):
    where = "EU-RO-1"
    for host in api.sandbox.world.catalogue.hosts:
        if host.vendor == "runpod":
            host.location = {**host.location, "data_center": where}
    volume = api.post("/v2/network-volumes", {"name": "v", "size": 10, "dataCenter": where}, 201)
    mounts = {"network": [{"volumeId": volume["id"], "path": "/data"}]}
    first = api.running(env={"PUBLIC_KEY": public_key}, mounts=mounts, dataCenterIds=[where])
    second = api.running(env={"PUBLIC_KEY": public_key}, mounts=mounts, dataCenterIds=[where])
    in_pod(api, first, login_key, "echo hello > $GPU_SANDBOX_ROOT/data/file")
    api.delete(f"/v2/pods/{first['id']}")
    assert in_pod(api, second, login_key, "cat $GPU_SANDBOX_ROOT/data/file") == "hello\n"


def test_the_command_has_the_vendors_environment_and_a_session_lacks_it(api, login_key, public_key):
    names = "RUNPOD_POD_ID RUNPOD_API_KEY RUNPOD_DC_ID RUNPOD_GPU_COUNT RUNPOD_TCP_PORT_22 RUNPOD_PUBLIC_IP OWN"
    args = f"bash -c 'for name in {names}; do echo $name=${{!name}}; done; exec /start.sh'"
    pod = api.running(env={"PUBLIC_KEY": public_key, "OWN": "1"}, args=args)
    eventually(lambda: "OWN=1" in lines(api, pod))
    seen = dict(line.split("=", 1) for line in lines(api, pod) if "=" in line)
    assert seen["RUNPOD_POD_ID"] == pod["id"]
    assert seen["RUNPOD_TCP_PORT_22"] == str(port_of(api, pod))
    assert (seen["RUNPOD_GPU_COUNT"], seen["RUNPOD_PUBLIC_IP"]) == ("1", "127.0.0.1")
    assert in_pod(api, pod, login_key, "echo [$RUNPOD_POD_ID$OWN]") == "[]\n"
    assert RunpodCalls(api.sandbox, seen["RUNPOD_API_KEY"]).pod(pod["id"])["status"] == "RUNNING"


def test_a_pod_ends_itself_with_its_own_key(api):
    code = (
        "import json,os,urllib.request as u; "
        'u.urlopen(u.Request(os.environ["RUNPOD_API_BASE_URL"]+"/v2/pods/"+os.environ["RUNPOD_POD_ID"], '
        'method="DELETE", headers={"Authorization": "Bearer "+os.environ["RUNPOD_API_KEY"], "User-Agent": "fuse"}))'
    )
    pod = api.running(args=f"python3 -c '{code}'")
    eventually(lambda: api.sandbox.world.burning() == [])
    api.get(f"/v2/pods/{pod['id']}", 404)


def test_a_command_that_ends_is_started_again_while_the_pod_bills(api):
    pod = api.running(args="bash -c 'echo again; exit 3'")

    def has_run_thrice():
        api.sandbox.advance(60)
        return lines(api, pod).count("again") >= 3

    eventually(has_run_thrice)
    assert api.pod(pod["id"])["status"] == "RUNNING"
    assert api.sandbox.world.burning() != []


def test_dead_ssh_has_a_port_that_refuses(api, login_key, public_key):
    api.sandbox.world.apply_faults([{"match": {"provider": "runpod", "call": "create"}, "fault": "dead_ssh"}])
    pod = api.running(env={"PUBLIC_KEY": public_key})
    assert ssh(login_key, port_of(api, pod), "true").returncode == 255


def test_logs_stream_both_sources_and_resume_where_they_were_left(api):
    pod = api.running(args="bash -c 'for n in 1 2 3; do echo line $n; done; sleep 600'")
    eventually(lambda: "line 3" in lines(api, pod))
    frames = api.log_frames(pod["id"], until=6)
    assert [data["source"] for _, data in frames] == ["system", "system", *["container"] * 4]
    assert [data["line"] for _, data in frames[3:]] == ["line 1", "line 2", "line 3"]
    assert frames[0][1]["line"].startswith("create container") and frames[0][0].startswith(frames[0][1]["ts"] + "/")
    tail = api.log_frames(pod["id"], "?tail=2&source=container", until=2)
    assert [data["line"] for _, data in tail] == ["line 2", "line 3"]
    resumed = api.log_frames(pod["id"], "?tail=1", until=1, **{"Last-Event-ID": frames[3][0]})
    assert resumed[0][1]["line"] == "line 2"
    assert api.log_frames(pod["id"], "?since=2020-01-01T00:00:00Z&tail=1", until=1)[0] == frames[0]
    for query in ("?source=both", "?tail=5001", "?tail=-1", "?since=soon"):
        api.get(f"/v2/pods/{pod['id']}/logs{query}", 422)
    api.get("/v2/pods/nobody/logs", 404)


def test_a_log_stream_ends_with_its_pod(api):
    pod = api.running()
    with api.call("GET", f"/v2/pods/{pod['id']}/logs", stream=True) as response:
        api.delete(f"/v2/pods/{pod['id']}")
        assert b"stop container" in response.content


def test_a_pull_that_stalls_shows_a_create_without_a_start(api):
    api.sandbox.world.apply_faults([{"match": {"provider": "runpod", "call": "create"}, "fault": "stuck_loading"}])
    pod = api.create()
    api.sandbox.advance(600)
    ((_, data),) = api.log_frames(pod["id"], until=1)
    assert data["line"].startswith("create container")
    assert [line.text for line in api.face.logs.book(api.sandbox.world.instances[pod["id"]]).lines] == [data["line"]]
