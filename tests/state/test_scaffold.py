"""gpu.yaml is written once; later only the lines that were asked for change."""

from __future__ import annotations

import pytest

from gpu_skills.config import load_gpu_yaml
from gpu_skills.errors import ConfigError, UsageError
from gpu_skills.state.scaffold import write_gpu_yaml


def write(root, **wanted):
    wanted = {"jobs": False, "min_vram_gb": None, "provider": None, "host": None, **wanted}
    return write_gpu_yaml(root, **wanted, environ={"HOME": str(root)})


def test_a_fresh_file_reads_and_asking_again_changes_nothing(tmp_path):
    wanted = {"jobs": True, "min_vram_gb": 24, "provider": "ssh", "host": "box.lan"}
    assert write(tmp_path, **wanted) == "written"
    found = load_gpu_yaml(tmp_path, environ={"HOME": str(tmp_path)})
    assert (found.provider, found.host, found.runtime.engine) == ("ssh", "box.lan", "none")
    assert found.compute.min_vram_gb == 24 and found.compute.image.startswith("pytorch/pytorch:")
    assert write(tmp_path, **wanted) == "unchanged"
    assert write(tmp_path, min_vram_gb=0) == "changed"
    assert load_gpu_yaml(tmp_path, environ={"HOME": str(tmp_path)}).compute.min_vram_gb is None


def test_only_the_asked_lines_of_a_hand_written_file_change(tmp_path):
    path = tmp_path / "gpu.yaml"
    path.write_text('# ours\ncompute:\n  min_vram_gb: 16   # was enough\n  gpu: "RTX 4090"\nruntime:\n  engine: vllm\n')
    assert write(tmp_path, min_vram_gb=24, provider="local") == "changed"
    assert path.read_text() == (
        "provider: local\n# ours\ncompute:\n  min_vram_gb: 24   # was enough\n"
        '  gpu: "RTX 4090"\nruntime:\n  engine: vllm\n'
    )


def test_a_host_alone_means_provider_ssh_and_an_unknown_provider_is_refused(tmp_path):
    write(tmp_path, host="box")
    assert load_gpu_yaml(tmp_path, environ={"HOME": str(tmp_path)}).provider == "ssh"
    with pytest.raises(UsageError, match="unknown provider 'aws'"):
        write(tmp_path, provider="aws")


def test_a_name_that_no_host_can_have_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match='--host is "my box"'):
        write(tmp_path, host="my box")
    assert not (tmp_path / "gpu.yaml").exists()


@pytest.mark.parametrize(
    ("before", "wanted", "told"),
    [
        (b"provider: l\xffocal\n", {"provider": "local"}, "byte 0xff is not UTF-8"),
        (b"compute: [not, a, mapping]\n", {"provider": "local"}, "compute"),
        (b"provider: local\n", {"min_vram_gb": 24}, "no place for min_vram_gb"),
        (b"host: box\nprovider: ssh\n", {"provider": "local"}, "host is only for provider ssh"),
    ],
)
def test_a_file_that_cannot_be_adjusted_stays_as_it_was(tmp_path, before, wanted, told):
    path = tmp_path / "gpu.yaml"
    path.write_bytes(before)
    with pytest.raises(ConfigError, match=told):
        write(tmp_path, **wanted)
    assert path.read_bytes() == before


def test_a_directory_of_that_name_is_told(tmp_path):
    (tmp_path / "gpu.yaml").mkdir()
    with pytest.raises(ConfigError, match="is a directory"):
        write(tmp_path, provider="local")
