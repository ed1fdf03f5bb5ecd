"""The official `vastai` client, unmodified, cannot tell the sandbox from its vendor.

What it sends and what it is answered is in vast/*.json (exchange.py). Its own oddities are the client's and stay: it
exits 0 on every HTTP error, repeats a create that was not answered, keeps an SSH address for ever.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from conformance.clients import HERE, PythonClient
from conformance.exchange import Recording
from gpu_skills.sandbox import Sandbox
from sandbox_fixture import Wire, eventually, ssh
from sshd import make_key
from vast_calls import create, running, show

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

COMMAND_TIMEOUT_S = 60
IMAGE = "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"
PROGRESS = re.compile(r"Loading more\.\.\. \(page \d+\)|\x1b\[K")
STARTUP_TRAFFIC = ["GET /api/v0/gpu_names/unique/", "GET /api/v0/users/current"]
# One expression per line of the request; each result on a line of its own.
SDK = """
import json, sys
from vastai import VastAI
vast = VastAI()
for name, arguments, options in json.loads(sys.argv[1]):
    print("result: " + json.dumps(getattr(vast, name)(*arguments, **options)))
"""
TYPED_SDK = """
import json, os
from vastai.data.instance import InstanceConfig
from vastai.data.query import Query
from vastai.sync.client import SyncClient

client = SyncClient(vast_server=os.environ["VAST_URL"])
offer = client.search(Query({"num_gpus": {"eq": 1}}), order=[["dph_total", "asc"]], limit=1)[0]
made = offer.create_instance(InstanceConfig(image="python:3.12", disk=16, label="typed", runtype="ssh_proxy"))
mine = client.show_instances()
made.destroy()
left = client.show_instances()
print(json.dumps([offer.gpu_name, made.label, made.disk_space, [i.id for i in mine] == [made.id], len(left)]))
"""


class Vastai:
    """`vastai("show user")` as somebody types it, in a home of its own."""

    def __init__(self, client: PythonClient, sandbox: Sandbox, home: Path):
        self.client = client
        self.sandbox = sandbox
        self.home = home
        self.recording = Recording(sandbox, home.parent)
        self.variables = {
            **client.variables,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "VAST_URL": sandbox.url,
            "VAST_API_KEY": sandbox.key("vast"),
            "VASTAI_NO_UPDATE_CHECK": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    def run(self, *words: Any, expect: int = 0) -> subprocess.CompletedProcess[str]:
        arguments = [word for text in map(str, words[:1]) for word in text.split()] + [str(w) for w in words[1:]]
        self.recording.command(" ".join(["vastai", *arguments]))
        return self._run(self.client.run("vastai", *arguments), expect)

    def __call__(self, *words: Any, expect: int = 0) -> str:
        """What it prints. The first text is split at spaces, each further one is one word."""
        done = self.run(*words, expect=expect)
        assert PROGRESS.sub("", done.stderr).strip() == "", done.stderr
        return done.stdout

    def json(self, *words: Any) -> Any:
        return json.loads(self(*words, "--raw"))

    def complaint(self, *words: Any) -> str:
        """What it says of an HTTP error, on stderr and with exit status 0."""
        done = self.run(*words)
        assert done.stdout.strip() == "", done.stdout
        return done.stderr.strip()

    def sdk(self, *calls: tuple[str, list[Any], dict[str, Any]]) -> list[Any]:
        """The results of these methods of `vastai.VastAI`, all in one process."""
        self.recording.command("sdk: " + ", ".join(name for name, _, _ in calls))
        out = self._run(self.client.run_python("-c", SDK, json.dumps(calls)), 0).stdout
        return [json.loads(line.removeprefix("result: ")) for line in out.splitlines() if line.startswith("result: ")]

    def typed_sdk(self) -> Any:
        self.recording.command("sdk: SyncClient")
        return json.loads(self._run(self.client.run_python("-c", TYPED_SDK), 0).stdout)

    def forget_addresses(self) -> None:
        """It would show an address it once saw for ever."""
        for file in (self.home / "cache" / "vastai").glob("ssh_*.json"):
            file.unlink()

    def matches(self, name: str) -> None:
        self.recording.matches(HERE / "vast" / f"{name}.json")

    def _run(self, command: list[str], expect: int) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=self.home,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="session")
def vastai_client(official_client: Callable[[str], PythonClient]) -> PythonClient:
    return official_client("vastai.lock")


@pytest.fixture
def use(vastai_client: PythonClient, make_sandbox: Callable[..., Sandbox], tmp_path: Path) -> Callable[..., Vastai]:
    """The client and a sandbox of its own."""

    def make(**options: Any) -> Vastai:
        home = tmp_path / "user"
        home.mkdir()
        return Vastai(vastai_client, make_sandbox(seed=1, **options), home)

    return make


def port_of(url: str) -> int:
    address = urlsplit(url.strip())
    assert address.username == "root" and address.hostname == "127.0.0.1" and address.port
    return address.port


def create_one(vastai: Vastai, *options: str, query: str = "num_gpus=1 direct_port_count>=1") -> int:
    """Search and create as people do; the id of the instance."""
    offer = vastai.json("search offers", query, "-o", "dph_total", "--limit", "1")[0]
    made = vastai.json(f"create instance {offer['id']} --image {IMAGE} --disk 20 --ssh --direct", *options)
    assert made["success"] is True
    return made["new_contract"]


def test_a_search_gives_what_was_asked_for_in_the_order_and_at_the_price_asked_for(use):
    vastai = use()
    query = "num_gpus=1 gpu_ram>=20 reliability>0.98 geolocation in [SE,US,NO] cuda_vers>=12.4 duration>3 inet_down>100"
    table = vastai("search offers", query, "-o", "dph_total", "--storage", "100", "--limit", "5")
    assert vastai.recording.requests == [*STARTUP_TRAFFIC, "POST /api/v0/bundles/"]
    sent = vastai.recording.body()
    assert sent["num_gpus"] == {"eq": "1"} and sent["reliability"] == {"gt": "0.98"}, "numbers come as text"

    found = vastai.json("search offers", query, "-o", "dph_total", "--storage", "100", "--limit", "5")
    assert 0 < len(found) <= 5 and all(str(offer["id"]) in table for offer in found)
    assert [offer["dph_total"] for offer in found] == sorted(offer["dph_total"] for offer in found)
    for offer in found:
        assert offer["num_gpus"] == 1 and offer["gpu_ram"] >= 20_000 and offer["reliability"] > 0.98
        assert offer["geolocation"][-2:] in ("SE", "US", "NO") and offer["cuda_max_good"] >= 12.4
        assert offer["dph_total"] == pytest.approx(offer["dph_base"] + offer["storage_cost"] * 100 / 720, abs=1e-6)

    new = vastai.json("search offers", query, "--new", "-o", "dph_total", "--storage", "100", "--limit", "5")
    assert [offer["id"] for offer in new] == [offer["id"] for offer in found]

    bids = vastai.json("search offers", "num_gpus>=2 gpu_name=RTX_4090", "-b", "-o", "dlperf-", "--limit", "3")
    assert bids and all(offer["is_bid"] and offer["dph_base"] == offer["min_bid"] for offer in bids)
    assert {offer["gpu_name"] for offer in bids} == {"RTX 4090"}, "an underscore means a space"
    assert [offer["dlperf"] for offer in bids] == sorted((offer["dlperf"] for offer in bids), reverse=True)

    unverified = vastai.json("search offers", "verified=false", "--limit", "500")
    default = vastai.json("search offers")
    assert len(default) == 64, "without a limit"
    assert {offer["verification"] for offer in default} == {"verified"}
    assert unverified and "verified" not in {offer["verification"] for offer in unverified}
    assert vastai.json("search offers", "num_gpus=3 gpu_name=GTX_480") == []
    driver = vastai.json("search offers", "driver_version>=560.35.03 num_gpus=1", "--limit", "20")
    assert driver and all(offer["driver_vers"] >= 560_035_003 for offer in driver)
    vastai.matches("search")


def test_an_instance_from_create_to_destroy(use, login_key, tmp_path):
    vastai = use(real=True)
    sandbox = vastai.sandbox
    later_key = make_key(tmp_path / "later_key")
    assert "ssh-key created" in vastai("create ssh-key", login_key.with_suffix(".pub").read_text().strip())

    onstart = 'echo "$GREETING" >> "$HOME/starts"; echo hello from onstart'
    instance_id = create_one(
        vastai, "--label", "conformance one", "--env", "-e GREETING=hi -p 8080:8080", "--onstart-cmd", onstart
    )
    sent = vastai.recording.body()
    assert sent["runtype"] == "ssh_direc ssh_proxy" and sent["env"] == {"GREETING": "hi", "-p 8080:8080": "1"}
    assert sent["label"] == "conformance one" and sent["onstart"] == onstart and sent["cancel_unavail"] is False
    assert str(instance_id) in vastai("show instances"), "a table also while there is no status"
    sandbox.advance(60)

    def starts(port: int, key: Path = login_key) -> int:
        return len(ssh(key, port, "cat starts").stdout.split())

    assert vastai(f"label instance {instance_id}", "conformance two").strip().endswith("set to conformance two.")
    table = vastai("show instances")
    assert str(instance_id) in table and "running" in table and "conformance two" in table
    shown = vastai.json(f"show instance {instance_id}")
    (row,) = vastai.json("show instances")
    for found in (shown, row):
        assert found["actual_status"] == found["intended_status"] == "running"
        assert found["label"] == "conformance two" and found["disk_space"] == 20
        assert found["image_runtype"] == "ssh_direc ssh_proxy" and not found["is_bid"]
    direct = port_of(vastai(f"ssh-url {instance_id}"))
    assert port_of(vastai(f"scp-url {instance_id}")) == direct == int(shown["ports"]["22/tcp"][0]["HostPort"])
    (proxied,) = vastai.sdk(("ssh_url", [instance_id], {}))
    assert port_of(proxied) == shown["ssh_port"] != direct, "the SDK prefers the other way in"

    eventually(lambda: starts(direct) == 1)
    assert ssh(login_key, direct, "nvidia-smi -L").stdout.count("GPU ") == 1
    assert starts(port_of(proxied)) == 1
    assert ssh(later_key, direct, "true").returncode == 255, "an account's key of later is not let in"
    attached = vastai(f"attach ssh {instance_id}", later_key.with_suffix(".pub"))
    assert "success" in attached and starts(direct, later_key) == 1

    assert vastai(f"stop instance {instance_id}") == f"stopping instance {instance_id}.\n"
    sandbox.advance(60)
    assert vastai.json(f"show instance {instance_id}")["actual_status"] == "stopped"
    assert ssh(login_key, direct, "true").returncode == 255
    assert vastai(f"start instance {instance_id}") == f"starting instance {instance_id}.\n"
    sandbox.advance(60)
    vastai.forget_addresses()
    direct = port_of(vastai(f"ssh-url {instance_id}"))
    eventually(lambda: starts(direct) == 2)

    assert vastai(f"reboot instance {instance_id}") == f"Rebooting instance {instance_id}.\n"
    sandbox.advance(60)
    eventually(lambda: starts(direct) == 3)
    assert vastai(f"recycle instance {instance_id}") == f"Recycling instance {instance_id}.\n"
    sandbox.advance(60)
    vastai.forget_addresses()
    direct = port_of(vastai(f"ssh-url {instance_id}"))
    eventually(lambda: starts(direct) == 1)

    assert vastai(f"destroy instance {instance_id} -y") == f"destroying instance {instance_id}.\n"
    gone = vastai.run(f"show instance {instance_id}", expect=1)
    assert "not found or no longer exists" in gone.stderr
    assert vastai.json("show instances") == []
    assert "404" in vastai.complaint(f"destroy instance {instance_id} -y")
    assert sandbox.settle() and ssh(login_key, direct, "true").returncode == 255
    assert sandbox.world.burning() == []
    vastai.matches("life")


def test_logs_and_commands_come_by_the_detour_over_a_result_url(use):
    vastai = use(real=True)
    onstart = 'echo first line; echo second line >&2; mkdir -p "$HOME/made"; touch "$HOME/made/one" "$HOME/made/two"'
    instance_id = running(vastai.sandbox, Wire(vastai.sandbox), onstart=onstart)
    eventually(lambda: "second line" in vastai(f"logs {instance_id}"))
    assert vastai.recording.requests[-2:] == ["GET /api/v0/sandbox-results/token"] * 2, "the first fetch is too early"
    vastai.recording.calls.clear()  # how often it asked depends on the machine

    assert vastai(f"logs {instance_id} --tail 1").strip() == "second line"
    assert vastai(f"logs {instance_id} --filter first").strip() == "first line"
    assert vastai(f"logs {instance_id} --daemon-logs").strip() != ""
    # The client fetches the text and then trips over it, here as at its vendor.
    done = vastai.run(f"execute {instance_id}", "ls made", expect=1)
    assert "AttributeError: 'str' object has no attribute 'get'" in done.stderr
    assert vastai.recording.exchanges[-1]["reply"]["body"] == "one\ntwo\n"

    listed, _, left, text = vastai.sdk(
        ("execute", [instance_id, "ls made"], {}),
        ("execute", [instance_id, "rm made/one"], {}),
        ("execute", [instance_id, "ls made"], {}),
        ("logs", [instance_id], {"tail": "1"}),
    )
    assert (listed.split(), left.split(), text.strip()) == (["one", "two"], ["two"], "second line")
    assert "Invalid command given" in vastai.complaint(f"execute {instance_id}", "cat made/two")
    vastai.matches("results")


def test_user_charges_and_invoices_agree_with_the_meter(use):
    vastai = use()
    sandbox, wire = vastai.sandbox, Wire(vastai.sandbox)
    instance_id = running(sandbox, wire, label="billed")
    sandbox.advance(7200)
    spent = float(sandbox.world.account("vast").bill.total_usd(sandbox.world.now()))

    user = vastai.json("show user")
    assert user["credit"] == pytest.approx(100 - spent, abs=1e-5) and "api_key" not in user
    assert "vast_sandbox" in vastai("show user")

    span = ["-s", str(int(sandbox.world.now()) - 86_400), "-e", str(int(sandbox.world.now()))]
    charges = vastai.json("show invoices-v1 --charges", *span)
    (row,) = charges["results"]
    assert row["source"] == f"instance-{instance_id}" and row["metadata"]["label"] == "billed"
    assert {item["type"] for item in row["items"]} == {"gpu", "disk", "bwd"}
    assert sum(item["amount"] for item in row["items"]) == pytest.approx(spent, abs=1e-5)
    assert row["amount"] == pytest.approx(spent, abs=1e-3), "rows have three decimals"
    assert str(instance_id) in vastai("show invoices-v1 --charges", *span)
    assert "gpu" in vastai("show invoices-v1 --charges --format tree -v", *span).lower()

    (paid,) = vastai.json("show invoices-v1 --invoices", *span)["results"]
    assert abs(paid["amount"]) == 100
    old = vastai.run("show invoices")
    assert "payment" in old.stdout and "DEPRECATED" in old.stderr

    assert vastai.json(f"show deposit {instance_id}")["refundable_deposit"] == 0
    assert "prepaid for" in vastai(f"prepay instance {instance_id} 10")
    assert vastai.json(f"show deposit {instance_id}")["refundable_deposit"] == 10
    vastai.matches("account")


def test_a_bid_that_is_too_low_that_loses_and_that_wins_again(use):
    vastai = use()
    sandbox, wire = vastai.sandbox, Wire(vastai.sandbox)
    offer = vastai.json("search offers", "num_gpus=1", "-b", "-o", "dph_total", "--limit", "1")[0]
    create_it = f"create instance {offer['id']} --image {IMAGE} --disk 20 --ssh --direct --bid_price"
    assert "bid is below the minimum" in vastai.complaint(f"{create_it} {offer['min_bid'] / 2:.4f}")
    left_behind = vastai.recording.exchanges[-1]["reply"]["body"]["new_contract"]
    assert vastai.json(f"show instance {left_behind}")["intended_status"] == "stopped"

    offer = vastai.json("search offers", "num_gpus=1", "-b", "-o", "dph_total", "--limit", "1")[0]
    create_it = f"create instance {offer['id']} --image {IMAGE} --disk 20 --ssh --direct --bid_price"
    made = vastai.json(f"{create_it} {offer['min_bid'] * 1.1:.4f}")["new_contract"]
    sandbox.advance(60)
    assert vastai.json(f"show instance {made}")["is_bid"] is True
    sandbox.world.apply_faults([{"match": {"instance": made}, "fault": "outbid"}])
    sandbox.advance(60)
    assert show(wire, made)["actual_status"] == "stopped"

    assert vastai(f"change bid {made} --price {offer['min_bid'] * 2:.4f}") == "Per gpu bid price changed\n"
    assert vastai.recording.body()["price"] == pytest.approx(offer["min_bid"] * 2, abs=1e-4)
    sandbox.advance(60)
    assert show(wire, made)["actual_status"] == "running"
    assert vastai(f"change bid {made}") == "Per gpu bid price changed\n"
    assert vastai.recording.body()["price"] is None
    assert show(wire, made)["actual_status"] == "running", "no price means one that wins"
    assert "400" in vastai.complaint(f"change bid {made} --price 0.0001")
    vastai.matches("bids")


def test_more_instances_than_a_page_holds_are_all_found(use):
    vastai = use()
    sandbox, wire = vastai.sandbox, Wire(vastai.sandbox)
    ids = [create(wire, label=f"many-{number % 3}") for number in range(27)]
    sandbox.advance(60)

    assert [row["id"] for row in vastai.json("show instances")] == ids
    assert vastai.recording.requests[-2:] == ["GET /api/v1/instances/"] * 2
    assert [int(line) for line in vastai("show instances -q").split()] == ids
    page = vastai.json("show instances --limit 10")
    assert [row["id"] for row in page["instances"]] == ids[:10] and page["total_instances"] == 27
    page = vastai.json("show instances --limit 25 --next-token", page["next_token"])
    assert [row["id"] for row in page["instances"]] == ids[10:] and page["next_token"] is None
    table = vastai("show instances")
    assert all(str(instance_id) in table for instance_id in ids) and "27 instances" in table

    third = vastai.json("show instances --label many-0 --status running --order-by", "start_date desc")
    assert sorted(row["id"] for row in third) == ids[::3]
    assert vastai.json("show instances --status exited") == []
    assert port_of(vastai(f"ssh-url {ids[-1]}")) > 0, "found on the second page"

    for verb in ("stop", "start"):
        assert "instance" in vastai(f"{verb} instances {ids[0]} {ids[1]}")
    assert "destroying" in vastai("destroy instances -y", *ids[:20])
    assert [row["id"] for row in vastai.json("show instances")] == ids[20:]
    vastai.matches("pages")


def test_what_the_sdk_makes_of_offers_and_instances(use):
    vastai = use()
    gpu_name, label, disk_gb, is_only_one, left = vastai.typed_sdk()
    assert gpu_name and (label, disk_gb, is_only_one, left) == ("typed", 16, True, 0)
    offers, mine = vastai.sdk(
        ("search_offers", ["num_gpus=1 gpu_name=RTX_4090"], {"order": "dph_total", "limit": 2, "storage": 50}),
        ("show_instances", [], {}),
    )
    assert [offer["gpu_name"] for offer in offers] == ["RTX 4090"] * 2 and mine == []
    made, shown = vastai.sdk(
        ("launch_instance", [], {"gpu_name": "RTX_4090", "num_gpus": "1", "image": IMAGE, "disk": 20}),
        ("show_instances", [], {}),
    )
    assert [row["id"] for row in shown] == [made["new_contract"]]
    vastai.matches("sdk")


def test_refusals_and_lost_answers_look_to_the_client_as_they_do_in_life(use):
    vastai = use(faults=[])
    sandbox, wire = vastai.sandbox, Wire(vastai.sandbox)
    assert "Invalid user key" in vastai.complaint("show user --api-key sbx_vast_account_unknown")
    raw = json.loads(vastai.complaint("destroy instance 999 -y --raw"))
    assert raw == {"error": True, "status_code": 404, "msg": "Instance 999 not found."}
    assert "no_such_ask" in vastai.complaint(f"create instance 123456 --image {IMAGE}")
    assert "'image' is required" in vastai.complaint("create instance 123456")

    instance_id = create(wire)
    sandbox.faults.script("vast", "show", "429, 503, ok")
    assert vastai.json(f"show instance {instance_id}")["id"] == instance_id
    assert vastai.recording.requests == [f"GET /api/v0/instances/{instance_id}/"] * 3, "it tries again by itself"

    # A create whose answer is lost is sent again by this client, and rents twice.
    offer = vastai.json("search offers", "num_gpus=1 gpu_name=RTX_4090", "--limit", "1")[0]
    before = len(sandbox.world.instances)
    sandbox.faults.script("vast", "create", "lost_reply, ok")
    vastai.json(f"create instance {offer['id']} --image {IMAGE} --disk 20 --ssh --label twice")
    assert vastai.recording.requests == [f"PUT /api/v0/asks/{offer['id']}/"] * 2
    assert [row["label"] for row in vastai.json("show instances")].count("twice") == 2
    assert len(sandbox.world.instances) == before + 2
    vastai.matches("refusals")


def test_the_client_that_was_asked_is_the_one_of_the_lock(vastai_client, tmp_path):
    done = subprocess.run(
        vastai_client.run("vastai", "--version"),
        env={**vastai_client.variables, "HOME": str(tmp_path), "VASTAI_NO_UPDATE_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    lock = (HERE / "vastai.lock").read_text()
    assert f"vastai=={done.stdout.strip().split()[-1]} " in lock
    assert shutil.which("vastai", path=str(vastai_client.folder / "bin"))
