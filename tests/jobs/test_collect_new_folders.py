"""What a later pull brings appears whole: a new folder in one step, whatever broke off before."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_skills.remote.destination import Destination


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """A destination that holds something already."""
    place = tmp_path / "J-000001"
    place.mkdir()
    (place / "log.txt").write_text("line\n")
    return place


def test_a_new_folder_appears_with_everything_in_it(outputs):
    with Destination(outputs) as here:
        for path in (b"checkpoint-10/weights", b"checkpoint-10/deep/optimizer", b"log.txt", b"checkpoint-20/weights"):
            here.write(path, 0o644, path)
        assert sorted(p.name for p in outputs.iterdir()) == ["log.txt"]
        assert (outputs / "log.txt").read_bytes() == b"log.txt"
        here.publish(sync=[b"checkpoint-10/weights"])
        here.remove_staging()
    assert (outputs / "checkpoint-10/deep/optimizer").read_bytes() == b"checkpoint-10/deep/optimizer"
    assert (outputs / "checkpoint-20/weights").read_bytes() == b"checkpoint-20/weights"
    assert sorted(p.name for p in outputs.parent.iterdir()) == ["J-000001"]


def test_what_a_broken_pull_had_of_a_new_folder_is_gone_on_with(outputs):
    with Destination(outputs) as here:
        here.write(b"checkpoint-10/weights", 0o644, b"w")
    assert not (outputs / "checkpoint-10").exists()
    with Destination(outputs) as here:
        assert here.stat(b"checkpoint-10/weights").st_size == 1
        assert here.stat(b"checkpoint-10/optimizer") is None and here.stat(b"checkpoint-30/weights") is None
        here.write(b"checkpoint-10/optimizer", 0o644, b"oo")
        here.publish(sync=[])
    assert sorted(p.name for p in (outputs / "checkpoint-10").iterdir()) == ["optimizer", "weights"]


def test_an_empty_new_folder_appears_too(outputs):
    with Destination(outputs) as here:
        here.make_folder(b"empty")
        assert not (outputs / "empty").exists()
        here.publish(sync=[])
    assert (outputs / "empty").is_dir()


def test_a_folder_inside_one_that_is_there_is_new_by_itself(outputs):
    (outputs / "runs").mkdir()
    with Destination(outputs) as here:
        here.write(b"runs/2/a", 0o644, b"a")
        here.write(b"runs/b", 0o644, b"b")
        assert sorted(p.name for p in (outputs / "runs").iterdir()) == ["b"]
        here.publish(sync=[b"runs/2/a"])
    assert (outputs / "runs/2/a").read_bytes() == b"a"
