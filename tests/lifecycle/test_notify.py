"""What a person is told, over a real channel: apprise's json:// to a server of this test."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fake_clock import FakeClock
from gpu_skills.clock import timestamp
from gpu_skills.lifecycle import channels, intents, notify
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.notify import Notifier
from gpu_skills.state import policy as policies
from gpu_skills.state import project as projects
from gpu_skills.state import registry
from gpu_skills.state.policy import Spent
from gpu_skills.state.project import Project

TOKEN = "tk_very/secret+word"


@dataclass
class Inbox:
    """A channel that takes messages. status: what it answers. pause: it answers when this is set."""

    port: int = 0
    status: int = 200
    messages: list[dict[str, Any]] = field(default_factory=list)
    authorization: list[str | None] = field(default_factory=list)
    pause: threading.Event | None = None

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.port}/in"

    @property
    def titles(self) -> list[str]:
        return [message["title"] for message in self.messages]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    box = Inbox()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if box.pause is not None:
                box.pause.wait(20)
            box.messages.append(json.loads(body))
            box.authorization.append(self.headers.get("Authorization"))
            self.send_response(box.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    box.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield box
    if box.pause is not None:
        box.pause.set()
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Desk:
    """A project whose policies name targets. said: what went to stderr."""

    project: Project
    root: Path
    clock: FakeClock
    said: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)

    def write(self, *targets: dict[str, Any], of_user: bool = False) -> None:
        place = self.root / "config/gpu/policy.json" if of_user else self.project.path("policy.json")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"ceilings": {}, "notify": list(targets)}))

    def notifier(self, **more: Any) -> Notifier:
        environ = {"HOME": str(self.root), "XDG_CONFIG_HOME": str(self.root / "config"), **self.environ}
        return Notifier(
            project=self.project,
            policy=lambda: policies.load(self.project, environ, system=self.root / "none.json"),
            environ=environ,
            user_state=lambda: self.root / "state",
            clock=self.clock,
            say=self.said.append,
            **more,
        )

    @property
    def everything_written(self) -> str:
        files = [p for p in self.root.rglob("*") if p.is_file() and p.name != "policy.json"]
        return "\n".join(p.read_text() for p in files) + "\n".join(self.said)


@pytest.fixture
def desk(tmp_path: Path, fake_clock: FakeClock) -> Desk:
    root = tmp_path / "lab"
    root.mkdir()
    return Desk(projects.init(root), root, fake_clock)


def test_a_message_says_what_happened_to_what_and_what_to_do(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": inbox.url})
    desk.notifier().send("job_done", "J-000012", duration_s=7325, cost_usd=Decimal("1.25"), label="lora-qwen", gpu=None)
    [message] = inbox.messages
    assert message["title"] == "gpu: J-000012 is done" and message["type"] == "success"
    assert message["message"].split("\n") == [
        "duration: 2h02m",
        "cost: $1.25",
        "label: lora-qwen",
        "next: gpu job pull J-000012",
        f"project: lab ({desk.project.project_id})",
    ]


def test_uncertainty_comes_with_its_steps(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": inbox.url})
    desk.notifier().send("recovery", "m_1", steps=["gpu reconcile", "gpu machine destroy m_1"], rate_usd_hr=0.5)
    [message] = inbox.messages
    assert "rate: $0.50/h\nnext: gpu reconcile\nnext: gpu machine destroy m_1\n" in message["message"]
    assert message["type"] == "failure"


def test_the_same_is_told_once_by_two_polls_and_by_two_processes_at_once(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": inbox.url})
    one, another = desk.notifier(), desk.notifier()
    for notifier in (one, one, another):
        notifier.send("job_done", "J-000001")
    assert len(inbox.messages) == 1

    together = threading.Barrier(8)

    def tell() -> None:
        notifier = desk.notifier()
        together.wait()
        notifier.send("job_stalled", "J-000002")

    threads = [threading.Thread(target=tell) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inbox.titles == ["gpu: J-000001 is done", "gpu: J-000002 stands still"]


def test_another_event_another_subject_and_another_project_are_told_too(
    desk: Desk, inbox: Inbox, tmp_path: Path
) -> None:
    desk.write({"url": inbox.url})
    notifier = desk.notifier()
    notifier.send("job_stalled", "J-000001")
    notifier.send("job_done", "J-000001")
    notifier.send("job_done", "J-000002")
    other = tmp_path / "other"
    other.mkdir()
    second = Desk(projects.init(other), desk.root, desk.clock)
    second.write({"url": inbox.url})
    second.notifier().send("job_done", "J-000001")
    assert len(inbox.messages) == 4


def test_an_end_nobody_saw_is_told_every_day_and_a_stop_with_outputs_too(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": inbox.url})
    notifier = desk.notifier()
    for _ in range(3):
        notifier.send("destroy_unconfirmed", "m_1")
        notifier.send("idle_stop", "m_2", uncollected=["J-000001"])
        notifier.send("idle_stop", "m_3")
        desk.clock.sleep(3600)
    assert len(inbox.messages) == 3
    desk.clock.sleep(86400)
    notifier.send("destroy_unconfirmed", "m_1")
    notifier.send("idle_stop", "m_2", uncollected=["J-000001"])
    notifier.send("idle_stop", "m_3")
    assert len(inbox.messages) == 5


def test_a_dead_channel_fails_nothing_is_said_and_stands_in_the_journal(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": "json://127.0.0.1:9/in", "name": "pager"}, {"url": inbox.url})
    desk.notifier().send("job_failed", "J-000007", reason="exit_code")
    assert len(inbox.messages) == 1, "the other target is told"
    assert desk.said == ["pager was not told of job_failed of J-000007: it was not reached"]
    [seen] = intents.observations(desk.project, "notify_failed")
    assert seen["job_id"] == "J-000007" and seen["details"]["target"] == "pager"


def test_only_the_target_that_failed_is_tried_again_later_and_three_times_at_most(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": "json://127.0.0.1:9/in", "name": "pager"}, {"url": inbox.url})
    for _ in range(6):
        desk.notifier().send("job_failed", "J-000007")
    assert (len(desk.said), len(inbox.messages)) == (1, 1)
    for _ in range(6):
        desk.clock.sleep(700)
        desk.notifier().send("job_failed", "J-000007")
    assert (len(desk.said), len(inbox.messages)) == (notify.TRIES, 1)


def test_a_channel_that_refuses_is_named_with_the_status(desk: Desk, inbox: Inbox) -> None:
    inbox.status = 403
    desk.write({"url": inbox.url, "name": "hook"})
    desk.notifier().send("job_done", "J-000001")
    assert desk.said == ["hook was not told of job_done of J-000001: it answered 403"]


def test_a_channel_that_hangs_is_not_waited_for(desk: Desk, inbox: Inbox) -> None:
    inbox.pause = threading.Event()
    desk.write({"url": inbox.url, "name": "slow"})
    began = time.monotonic()
    desk.notifier(timeout_s=0.3).send("job_done", "J-000001")
    assert time.monotonic() - began < 3
    assert desk.said == ["slow was not told of job_done of J-000001: it did not answer in time"]


def test_whoever_died_while_sending_does_not_silence_the_message_for_ever(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": inbox.url})
    notifier = desk.notifier()
    notifier._claim("job_done J-000001", channels.targets_of(notifier.policy()))  # and here it was killed
    desk.notifier().send("job_done", "J-000001")
    assert inbox.messages == []
    desk.clock.sleep(121)
    desk.notifier().send("job_done", "J-000001")
    assert len(inbox.messages) == 1


def test_a_memory_that_cannot_be_written_does_not_keep_a_message_back_nor_repeat_it(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": inbox.url})
    (desk.root / "state").write_text("a file where the folder should be")
    notifier = desk.notifier()
    notifier.send("destroy_unconfirmed", "m_1")
    notifier.send("destroy_unconfirmed", "m_1")
    assert len(inbox.messages) == 1
    assert "cannot be remembered" in desk.said[0]


@pytest.mark.parametrize("garbage", ["[]", '{"job_done J-000001": 7}', '{"job_done J-000001": {"x": [1]}}'])
def test_a_memory_that_is_something_else_counts_as_nothing_told(desk: Desk, inbox: Inbox, garbage: str) -> None:
    desk.write({"url": inbox.url})
    folder = desk.root / "state/notified"
    folder.mkdir(parents=True)
    (folder / f"{desk.project.project_id}.json").write_text(garbage)
    for _ in range(2):
        desk.notifier().send("job_done", "J-000001")
    assert len(inbox.messages) == 1


def test_what_is_remembered_does_not_grow_for_ever(desk: Desk, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "MANY", 5)
    desk.write({"url": inbox.url})
    notifier = desk.notifier()
    for number in range(6):
        notifier.send("job_done", f"J-{number:06}")
    desk.clock.sleep(91 * 86400)
    notifier.send("job_done", "J-000006")
    [kept] = (desk.root / "state/notified").glob("*.json")
    assert list(json.loads(kept.read_text())) == ["job_done J-000006"]


def test_a_target_is_told_only_what_it_asked_for_and_no_target_costs_nothing(desk: Desk, inbox: Inbox) -> None:
    desk.notifier().send("job_done", "J-000001")
    assert not (desk.root / "state").exists()
    desk.write({"url": inbox.url, "events": ["recovery"]})
    desk.notifier().send("job_done", "J-000001")
    desk.notifier().send("recovery", "J-000001")
    assert inbox.titles == ["gpu: J-000001: it is not certain what happened"]


def test_in_audit_nobody_is_told_and_nothing_is_written_but_a_test_still_works(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": inbox.url})
    notifier = desk.notifier(is_silent=True)
    notifier.send("job_done", "J-000001")
    assert (inbox.messages, desk.said) == ([], []) and not (desk.root / "state").exists()
    [told] = notifier.test()
    assert told.delivered and not (desk.root / "state").exists()


def test_a_policy_that_cannot_be_read_fails_nothing(desk: Desk) -> None:
    desk.project.path("policy.json").write_text("{")
    desk.notifier().send("job_done", "J-000001")
    assert len(desk.said) == 1 and "policy.json" in desk.said[0]


# secrets -----------------------------------------------------------------------------------------------------------


def test_a_token_from_the_environment_reaches_the_channel_and_no_text(desk: Desk, inbox: Inbox) -> None:
    desk.environ["NTFY_TOKEN"] = TOKEN
    desk.write({"url": f"json://127.0.0.1:{inbox.port}/in?+Authorization=${{NTFY_TOKEN}}"})
    desk.notifier().send("job_done", "J-000001", label=f"with {TOKEN} inside")
    assert inbox.authorization == [TOKEN]
    assert TOKEN not in json.dumps(inbox.messages) and "***" in inbox.messages[0]["message"]
    inbox.status = 500
    desk.notifier().send("job_failed", "J-000001", error=TOKEN)
    assert "it answered 500" in desk.said[0]
    assert TOKEN not in desk.everything_written and "127.0.0.1" not in desk.everything_written


def test_a_token_may_come_from_the_projects_env_file(desk: Desk, inbox: Inbox) -> None:
    (desk.root / ".env").write_text(f"GPU_NOTIFY_TOKEN='{TOKEN}'\n")
    desk.write({"url": f"json://127.0.0.1:{inbox.port}/in?+Authorization=${{GPU_NOTIFY_TOKEN}}"})
    desk.notifier().send("job_done", "J-000001")
    assert inbox.authorization == [TOKEN]


def test_a_variable_that_is_missing_is_named(desk: Desk) -> None:
    desk.write({"url": "ntfys://${NTFY_TOKEN}@127.0.0.1/x", "name": "phone"})
    desk.notifier().send("job_done", "J-000001")
    assert desk.said == [
        "phone was not told of job_done of J-000001: NTFY_TOKEN is neither in the environment nor in .env"
    ]


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "VAST_API_KEY", "MY_TOKEN"])
def test_a_projects_policy_cannot_send_other_secrets_of_the_user_away(desk: Desk, inbox: Inbox, name: str) -> None:
    desk.environ[name] = TOKEN
    desk.write({"url": f"json://127.0.0.1:{inbox.port}/in?+X=${{{name}}}"})
    desk.notifier().send("job_done", "J-000001")
    assert inbox.messages == [] and name in desk.said[0]


def test_the_users_policy_may_name_any_variable_but_a_providers_key(desk: Desk, inbox: Inbox) -> None:
    desk.environ |= {"MY_TOKEN": TOKEN, "RUNPOD_API_KEY": "rpa_0123456789"}
    desk.write({"url": f"json://127.0.0.1:{inbox.port}/in?+Authorization=${{MY_TOKEN}}"}, of_user=True)
    desk.notifier().send("job_done", "J-000001")
    assert inbox.authorization == [TOKEN]
    desk.write({"url": f"json://127.0.0.1:{inbox.port}/in?+Authorization=${{RUNPOD_API_KEY}}"}, of_user=True)
    desk.notifier().send("job_done", "J-000002")
    assert len(inbox.messages) == 1 and "RUNPOD_API_KEY is a credential for something else" in desk.said[0]


def test_a_whole_address_may_be_a_secret_of_the_environment_but_not_of_the_env_file(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": "${GPU_NOTIFY_URL}"})
    (desk.root / ".env").write_text(f"GPU_NOTIFY_URL={inbox.url}\n")
    desk.notifier().send("job_done", "J-000001")
    assert inbox.messages == [] and "GPU_NOTIFY_URL is not in the environment" in desk.said[0]
    desk.environ["GPU_NOTIFY_URL"] = inbox.url
    desk.notifier().send("job_done", "J-000002")
    assert len(inbox.messages) == 1


@pytest.mark.parametrize(
    "url",
    [
        "json://me:hunter2hunter2@127.0.0.1:PORT/in",
        "json://127.0.0.1:PORT/in?+Authorization=Bearer%20hunter2hunter2",
        "discord://1234567890123/hunter2hunter2hunter2",
        "tgram://123456789:hunter2hunter2hunter2/12315544/",
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/",
    ],
)
def test_a_secret_that_stands_in_the_policy_is_refused_unsaid(desk: Desk, inbox: Inbox, url: str) -> None:
    desk.write({"url": url.replace("PORT", str(inbox.port))}, of_user=True)
    desk.notifier().send("job_done", "J-000001")
    assert inbox.messages == []
    assert "a secret stands in the policy itself" in desk.said[0] and "hunter2" not in desk.everything_written


@pytest.mark.parametrize("url", ["no-such-kind://x", "json", "://", "json://", "${", "mailto://"])
def test_what_is_no_address_is_reported_and_fails_nothing(desk: Desk, url: str) -> None:
    desk.write({"url": url})
    desk.notifier().send("job_done", "J-000001")
    assert len(desk.said) == 1 and "apprise" in desk.said[0]


def test_control_characters_and_long_texts_of_a_machine_stay_in_their_line(desk: Desk, inbox: Inbox) -> None:
    desk.write({"url": inbox.url})
    desk.notifier().send(
        "job_failed", "J-000001", error="x\x1b[2J\nnext: rm -rf /\n" + "y" * 5000, many=["z" * 900] * 9
    )
    [message] = inbox.messages
    assert "\x1b" not in message["message"] and len(message["message"]) < 1400
    assert not any(line.startswith("next: rm") for line in message["message"].split("\n"))


def test_what_happens_in_a_sandbox_says_so(desk: Desk, inbox: Inbox) -> None:
    project = projects.init(desk.root, name=projects.SANDBOX_NAME)
    sandbox = Desk(project, desk.root, desk.clock)
    sandbox.write({"url": inbox.url})
    sandbox.notifier().send("job_done", "J-000001")
    assert inbox.titles == ["SANDBOX gpu: J-000001 is done"]


@pytest.mark.subprocess
def test_without_apprise_the_message_says_how_to_get_it(desk: Desk) -> None:
    desk.write({"url": "json://127.0.0.1:9/in", "name": "hook"})
    program = (
        "import sys; sys.modules['apprise'] = None\n"
        "from gpu_skills.lifecycle import channels\n"
        "target = channels.Target('hook', 'json://127.0.0.1:9/in')\n"
        "print(channels.deliver([target], 't', 'b', environ={})[0].reason)"
    )
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, 'scripts')\n{program}"],
                          cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True)  # fmt: skip
    assert done.stdout.strip() == "the package apprise is not installed: pip install 'gpu-skills[notify]'", done.stderr


# what is due -------------------------------------------------------------------------------------------------------

START = datetime(2026, 11, 30, 12, tzinfo=UTC)


def machine(**fields: Any) -> Machine:
    known = {"status": "busy", "created_at": "2026-11-30T12:00:00Z", "deadline_at": "2026-11-30T22:00:00Z"}
    return Machine("m_1", "vast", "77", **{**known, **fields})


@pytest.mark.parametrize(
    ("hours", "fields", "is_due"),
    [
        (7.9, {}, False),
        (8, {}, True),
        (9.9, {}, True),
        (10, {}, False),  # it is over: the fuse's matter
        (8, {"status": "unknown"}, True),
        (8, {"status": "stopped"}, False),
        (8, {"status": "destroyed"}, False),
        (8, {"deadline_at": None}, False),
        (8, {"deadline_at": "soon"}, False),
        (8, {"ready_at": "2026-11-30T19:00:00Z"}, False),  # started again: an hour of three
        (8, {"deadline_at": "2026-12-01T12:00:00Z"}, False),  # extended
    ],
)
def test_a_machine_is_due_at_80_percent_of_its_time(hours: float, fields: dict[str, Any], is_due: bool) -> None:
    found = notify.due(now=START + timedelta(hours=hours), machines=[machine(**fields)])
    assert [(one.event, one.subject) for one in found] == ([("deadline_80", "m_1")] if is_due else [])


def test_after_an_extension_80_percent_is_told_again() -> None:
    first, second = ({"deadline_at": f"2026-11-30T{hour}:00:00Z"} for hour in (18, 22))
    keys = {notify.memory_key("deadline_80", "m_1", facts, START) for facts in (first, first, second)}
    assert len(keys) == 2


def ceilings(**limits: int | None) -> policies.Policy:
    return policies.combine([("project", {"ceilings": {"day_usd": None, "month_usd": None, **limits}})])


def spent(**money: str) -> Spent:
    return Spent(**{name: Decimal(value) for name, value in money.items()})


@pytest.mark.parametrize(
    ("limits", "used", "reserved", "subjects"),
    [
        ({"day_usd": 20}, {"day_usd": "15.99"}, "0", []),
        ({"day_usd": 20}, {"day_usd": "16"}, "0", ["day_usd 2026-11-30"]),
        ({"day_usd": 20}, {"day_usd": "6"}, "10", ["day_usd 2026-11-30"]),
        ({"month_usd": 100}, {"month_usd": "80"}, "0", ["month_usd 2026-11"]),
        ({"day_usd": 20, "month_usd": 100}, {"day_usd": "25", "month_usd": "99"}, "0",
         ["day_usd 2026-11-30", "month_usd 2026-11"]),
        ({"day_usd": None}, {"day_usd": "1000"}, "0", []),
        ({"day_usd": 0}, {"day_usd": "0"}, "0", []),
    ],
)  # fmt: skip
def test_a_ceiling_is_due_when_80_percent_is_used_or_reserved(
    limits: dict[str, int | None], used: dict[str, str], reserved: str, subjects: list[str]
) -> None:
    found = notify.due(now=START, policy=ceilings(**limits), spent=spent(**used), reserved_usd=Decimal(reserved))
    assert [one.subject for one in found] == subjects


def test_a_session_and_a_job_are_due_by_their_own_ids() -> None:
    policy = ceilings(session_usd=10, job_usd=5)
    found = notify.due(
        now=START, policy=policy, spent=spent(session_usd="8", job_usd="4"), session="m_1", job="J-000001"
    )
    assert [(one.event, one.subject) for one in found] == [
        ("ceiling_80", "session_usd m_1"), ("ceiling_80", "job_usd J-000001"),
    ]  # fmt: skip
    assert notify.due(now=START, policy=policy, spent=spent(session_usd="8", job_usd="4")) == []


def test_what_is_due_is_told_from_the_records_and_only_where_somebody_listens(
    rig: Callable[..., Any], inbox: Inbox
) -> None:
    r = rig("vast")
    start = r.clock.now()
    one = machine(created_at=timestamp(start), deadline_at=timestamp(start + timedelta(hours=1)))
    registry.put(r.project, "machines", one.to_record())
    r.clock.sleep(3000)
    notify.tell_due(r.op)
    assert r.notices == [], "nobody is named"
    path = r.project.path("policy.json")
    policy = {**json.loads(path.read_text()), "ceilings": {"day_usd": 5}, "notify": [{"url": inbox.url}]}
    path.write_text(json.dumps(policy))
    line = {"kind": "idle", "machine_id": "m_1", "provider": "vast", "cost_usd": 4, "ts": timestamp(r.clock.now())}
    r.project.path("charges.jsonl").write_text(json.dumps(line) + "\n")
    notify.tell_due(r.op)
    day = r.clock.now().date().isoformat()
    assert [(event, subject) for event, subject, _ in r.notices] == [
        ("deadline_80", "m_1"), ("ceiling_80", f"day_usd {day}"),
    ]  # fmt: skip
    r.project.path("policy.json").write_text("{")
    notify.tell_due(r.op)
    assert len(r.notices) == 2


def test_every_event_has_a_next_step_that_is_a_command(desk: Desk) -> None:
    from quoted_commands import Quoted, problem_of

    for event in notify.EVENTS:
        subject = "J-000001" if event.startswith("job") else "m_0123456789"
        _title, body = notify.message(event, subject, {})
        [step] = [line.removeprefix("next: ") for line in body.split("\n") if line.startswith("next: ")]
        assert problem_of(Quoted(event, step, inline=False)) is None, step
