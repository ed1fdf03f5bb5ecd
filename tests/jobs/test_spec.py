from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_skills import resources
from gpu_skills.errors import ConfigError, UsageError
from gpu_skills.jobs.spec import JobSpec, Progress, load_spec, looks_like_credential

SECRET = "s3cr3tXYZ-0123"


def load(tmp_path: Path, text: str | None = "run: python train.py\n", **flags: Any) -> JobSpec:
    if text is not None:
        (tmp_path / "gpujob.yaml").write_text(text)
    return load_spec(tmp_path, **{"environ": {}, **flags})


def refused(error: type[UsageError], tmp_path: Path, text: str | None = "run: x\n", **flags: Any) -> UsageError:
    with pytest.raises(error) as caught:
        load(tmp_path, text, **flags)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    return caught.value


FULL = """
run: python train.py --epochs 3
setup: pip install -r requirements.txt
env: {EPOCHS: "3", LR: 1e-4, FLAG: on, EMPTY: "", ZERO: 0}
timeout: 2h
exclude: [data/raw, "*.ckpt"]
label: lora-qwen-7b
expect: [model.safetensors]
progress: {unit: rows, stall: 10m, on_stall: cancel}
outputs: {uri: "s3://bucket/prefix"}
"""


def test_the_file_says_it_all(tmp_path: Path) -> None:
    spec = load(tmp_path, FULL)
    assert (spec.run, spec.setup) == ("python train.py --epochs 3", "pip install -r requirements.txt")
    assert spec.env == {"EPOCHS": "3", "LR": "1e-4", "FLAG": "on", "EMPTY": "", "ZERO": "0"}  # as written
    assert (spec.timeout_s, spec.label, spec.outputs_uri) == (7200, "lora-qwen-7b", "s3://bucket/prefix")
    assert (spec.exclude, spec.expect) == (("data/raw", "*.ckpt"), ("model.safetensors",))
    assert spec.progress == Progress("rows", 600, "cancel")
    assert spec.directory == tmp_path.resolve()


def test_flags_override_the_file_and_add_to_exclude_and_env(tmp_path: Path) -> None:
    spec = load(
        tmp_path, FULL, command=("echo", "a b", "$x"), setup="", timeout="90s", label="other", exclude=["logs/"],
        expect=["a", "b"], env=["EPOCHS=5", "NEW=1"],
    )  # fmt: skip
    assert (spec.run, spec.setup, spec.timeout_s, spec.label) == ("echo 'a b' '$x'", None, 90, "other")
    assert (spec.exclude, spec.expect) == (("data/raw", "*.ckpt", "logs/"), ("a", "b"))
    assert spec.env_values() == {"LR": "1e-4", "FLAG": "on", "EMPTY": "", "ZERO": "0", "EPOCHS": "5", "NEW": "1"}
    assert spec.secret_names == ("EPOCHS", "NEW")
    assert "EPOCHS" not in spec.env


@pytest.mark.parametrize(
    ("command", "run"),
    [
        (("python train.py && echo done",), "python train.py && echo done"),
        (("true",), "true"),
        (("./my;script",), "'./my;script'"),
        (("python", "-c", "print('hi')"), """python -c 'print('"'"'hi'"'"')'"""),
        (("echo", ""), "echo ''"),
        (("a\nb",), "a\nb"),
    ],
)
def test_one_argument_with_white_space_is_a_shell_line_everything_else_is_quoted(
    tmp_path: Path, command: tuple[str, ...], run: str
) -> None:
    assert load(tmp_path, None, command=command).run == run


@pytest.mark.parametrize("command", [(), ("",), ("  ",)])
def test_no_command_anywhere_names_both_places_for_one(tmp_path: Path, command: tuple[str, ...]) -> None:
    error = refused(UsageError, tmp_path, "setup: pip list\n" if not command else None, command=command)
    assert "gpujob.yaml" in error.message and "run" in error.message and "--" in error.message
    assert error.next_step == "gpu job run -- CMD"


def test_the_template_of_a_job_is_valid_also_with_its_comments_taken_away(tmp_path: Path) -> None:
    text = resources.template("gpujob.yaml").read_text()
    assert load(tmp_path, text).run == "python train.py"
    lines = [line.removeprefix("# ") for line in text.splitlines()[1:]]
    spec = load(tmp_path, "\n".join(lines))
    assert spec.timeout_s == 7200 and spec.progress == Progress("rows", 600, "event")


# limits ---------------------------------------------------------------------------------------------------------------


def test_a_timeout_above_max_lifetime_names_both(tmp_path: Path) -> None:
    error = refused(ConfigError, tmp_path, "run: x\ntimeout: 8h\n", max_lifetime_s=21600)
    assert error.message == (
        "timeout 8h (gpujob.yaml:2): is longer than lifecycle.max_lifetime (6h00m), after which the machine stops"
    )
    error = refused(UsageError, tmp_path, timeout="8h", max_lifetime_s=21600)
    assert error.message.startswith("--timeout 8h: is longer than lifecycle.max_lifetime (6h00m)")
    assert load(tmp_path, timeout="6h", max_lifetime_s=21600).timeout_s == 21600
    assert load(tmp_path, timeout="8h", max_lifetime_s=None).timeout_s == 28800
    assert load(tmp_path, max_lifetime_s=21600).timeout_s is None


@pytest.mark.parametrize("timeout", ["0", "soon", "-1h", "99999d", "nan", "1e9", ""])
def test_an_absurd_timeout_is_refused_whichever_way_it_comes(tmp_path: Path, timeout: str) -> None:
    assert "--timeout" in refused(UsageError, tmp_path, timeout=timeout).message
    refused(ConfigError, tmp_path, f'run: x\ntimeout: "{timeout}"\n')


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("run: x\ntimeuot: 2h\n", "gpujob.yaml:2: /timeuot is not a known key, nearest is timeout"),
        ("run: [python, x]\n", "gpujob.yaml:1: /run is a list, allowed: text"),
        ("run: x\nexclude: data\n", 'gpujob.yaml:2: /exclude is "data", allowed: a list'),
        ("run: x\nprogress: {unit: rows, stall: 0}\n", "gpujob.yaml:2: progress.stall must be more than 0"),
        ("run: x\nenv:\n  GPU_ID: 1\n", "gpujob.yaml:3: env GPU_ID: names starting with GPU_, JAMBU_ or KURA_"),
        ("run: x\nenv:\n  A:\n", "gpujob.yaml:3: /env/A is null"),
        ('run: x\nenv: {A: "a\\0b"}\n', "gpujob.yaml:2: env A holds a NUL"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(tmp_path: Path, text: str, where: str) -> None:
    assert refused(ConfigError, tmp_path, text).message.startswith(where)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("command", ("echo", "\udcff")),
        ("setup", "cat \udcff"),
        ("label", "\udcff"),
        ("exclude", ["\udcff*"]),
        ("expect", ["\udcff.bin"]),
    ],
)
def test_bytes_that_are_no_text_are_refused_where_they_would_be_recorded(tmp_path: Path, flag: str, value: Any) -> None:
    assert "is not UTF-8" in refused(UsageError, tmp_path, **{flag: value}).message


def test_a_secret_value_may_be_any_bytes(tmp_path: Path) -> None:
    spec = load(tmp_path, env=["KEY=\udcff\udcfe"])
    assert spec.env_values() == {"KEY": "\udcff\udcfe"}
    json.dumps(spec.to_record(), ensure_ascii=False).encode()


def test_what_no_process_can_be_given_is_refused(tmp_path: Path) -> None:
    for flags in ({"command": ("a\0b",)}, {"setup": "a\0b"}, {"env": ["A=a\0b"]}):
        assert "NUL" in refused(UsageError, tmp_path, **flags).message
    for flags in ({"command": ("x " * 100_000,)}, {"env": ["A=" + "x" * 200_000]}):
        assert "longer than" in refused(UsageError, tmp_path, **flags).message
    refused(UsageError, tmp_path, exclude=[""])
    refused(UsageError, tmp_path, label="x" * 101)


@pytest.mark.parametrize("where", ["missing", "file", "loop"])
def test_a_directory_that_is_none_is_told(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError) as caught:
        load_spec(tmp_path / where, command=("true",))
    assert caught.value.next_step == "gpu job run --dir DIR"


# secrets --------------------------------------------------------------------------------------------------------------


def test_values_of_env_flags_are_in_no_record_and_no_representation(tmp_path: Path) -> None:
    text = f"run: x\nsetup: echo {SECRET}\nenv: {{COPY: 'a {SECRET}'}}\n"
    spec = load(
        tmp_path, text, command=(f"curl -H 'Bearer {SECRET}' x",), label=f"l {SECRET}", env=[f"TOKEN={SECRET}", "N=3"]
    )
    record = json.dumps(spec.to_record())
    assert SECRET not in record and SECRET not in repr(spec)
    assert spec.to_record()["secret"] == ["N", "TOKEN"]
    assert spec.to_record()["run"] == "curl -H 'Bearer ***' x"
    assert spec.env_values()["TOKEN"] == SECRET and SECRET in spec.run


def test_the_record_holds_the_rest_as_plain_json(tmp_path: Path) -> None:
    record = json.loads(json.dumps(load(tmp_path, FULL).to_record()))
    assert record["env"]["LR"] == "1e-4"
    assert record["progress"] == {"unit": "rows", "stall_s": 600, "on_stall": "cancel"}
    assert (record["timeout_s"], record["exclude"], record["secret"]) == (7200, ["data/raw", "*.ckpt"], [])


def test_a_name_alone_takes_the_value_from_the_environment_or_from_dotenv(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TOKEN=from-file\nOTHER=x\n")
    load_token = {"env": ["TOKEN"], "dotenv_root": tmp_path}
    assert load(tmp_path, environ={"TOKEN": "from-env"}, **load_token).secret_env == {"TOKEN": "from-env"}
    assert load(tmp_path, **load_token).secret_env == {"TOKEN": "from-file"}
    error = refused(UsageError, tmp_path, env=["TOKEN"])
    assert "TOKEN" in error.message and error.next_step == "export TOKEN=…"


@pytest.mark.parametrize("given", ["", "=x", "A-B=1", "1A=2", "A B=c", "hf_abc.def=", "Ä=1"])
def test_an_impossible_name_is_refused_without_repeating_what_may_be_a_secret(tmp_path: Path, given: str) -> None:
    message = refused(UsageError, tmp_path, env=[given]).message
    assert not given or given not in message


@pytest.mark.parametrize("name", ["GPU_JOB_ID", "JAMBU_X", "KURA_RUN_ID", "gpu_output_dir"])
def test_names_that_gpu_sets_itself_cannot_be_set(tmp_path: Path, name: str) -> None:
    assert name in refused(UsageError, tmp_path, env=[f"{name}=1"]).message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"), ("token", "x"), ("WANDB_API_KEY", "x"), ("DB_PASSWORD", "x"), ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_ACCESS_KEY_ID", "x"), ("CLIENT_SECRET", "x"), ("OPENAI_APIKEY", "x"), ("PLAIN", "hf_" + "a" * 30),
        ("PLAIN", "AKIA" + "A" * 16), ("PLAIN", "-----BEGIN RSA PRIVATE KEY-----\nabc"),
    ],
)  # fmt: skip
def test_a_credential_in_the_file_is_refused_and_the_flag_named(tmp_path: Path, name: str, value: str) -> None:
    text = "run: x\nenv:\n  " + json.dumps({name: value})[1:-1] + "\n"
    error = refused(ConfigError, tmp_path, text)
    assert error.message.startswith(f"gpujob.yaml:3: env {name} ")
    assert f"--env {name}" in error.next_step
    assert value == "x" or value not in json.dumps(error.to_dict())


@pytest.mark.parametrize(
    "name",
    ["MAX_TOKENS", "TOKENIZERS_PARALLELISM", "TOKENIZER", "PAD_TOKEN", "EOS_TOKEN_ID", "KEY", "MONKEY", "SECRETARY"],
)
def test_names_that_are_about_text_are_no_credentials(name: str) -> None:
    assert not looks_like_credential(name, "value")


def test_an_empty_value_is_no_credential() -> None:
    assert not looks_like_credential("WANDB_API_KEY", "")
