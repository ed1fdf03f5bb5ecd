"""What an image's name and a job's packages ask of the host."""

from __future__ import annotations

import pytest

from gpu_skills.lifecycle.plans import images


@pytest.mark.parametrize(
    ("image", "cuda", "driver"),
    [
        ("pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime", 12.8, "570"),
        ("docker.io/pytorch/pytorch:2.9.1-cuda13.0-cudnn9-devel", 13.0, "580"),
        ("runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404", 12.8, "570"),
        ("me/trainer:cu118", 11.8, "520"),
        ("me/trainer:cuda-12.4.1-py312", 12.4, "550"),
        ("nvidia/cuda:12.4.1-cudnn-devel-ubuntu22.04", 12.4, "550"),
        ("localhost:5000/me/trainer:cuda12", 12.0, "525"),
        ("python:3.12-slim", None, None),
    ],
)
def test_the_tag_says_which_cuda_and_with_it_which_driver(image, cuda, driver):
    found = images.needs(image)
    assert (found.cuda, found.driver) == (cuda, driver)


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("pip install torch==2.9.0+cu130", 13.0),
        ("pip install torch --index-url https://download.pytorch.org/whl/cu128", 12.8),
        ("--extra-index-url https://download.pytorch.org/whl/cu118\ntorch==2.9.0", 11.8),
        ("uv pip install --torch-backend=cu126 torch", 12.6),
        ("conda install pytorch-cuda=12.4 -c nvidia", 12.4),
        ("nvidia-cuda-runtime-cu12==12.8.90", 12.8),
        ("cupy-cuda12x", 12.0),
        ("jax[cuda13]", 13.0),
        ("torch==2.8.0", 12.8),
        ("torch>=2.11", 13.0),
    ],
)
def test_a_wheel_with_a_cuda_of_its_own_is_found(text, cuda):
    assert max(wheel.cuda for wheel in images.wheels_in("setup", text)) == cuda


@pytest.mark.parametrize(
    "text", ["numpy==2.1", "# torch==2.9.0+cu130", "torch", "torchvision==0.23", "pip install focus==1.0", "echo cu130"]
)
def test_what_brings_no_cuda_asks_for_none(text):
    assert images.wheels_in("setup", text) == []


def test_the_stricter_of_image_and_wheel_decides_and_is_named():
    found = images.needs("pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime", {"reqs.txt": "torch==2.9.0+cu130\n"})
    assert (found.cuda, found.driver, found.is_of_wheel) == (13.0, "580", True)
    assert found.because == "torch==2.9.0+cu130 (reqs.txt)"
    older = images.needs("pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime", {"setup": "pip install torch==2.4.0+cu121"})
    assert (older.cuda, older.is_of_wheel) == (12.8, False)


def test_an_index_with_a_password_is_told_without_it():
    text = "pip install torch --index-url https://me:hunter2hunter2@wheels.example.org/whl/cu128"
    (wheel,) = images.wheels_in("setup", text)
    assert "hunter2" not in wheel.said and wheel.said.endswith("/whl/cu128")


def test_an_unknown_image_is_assumed_with_care_and_says_so():
    found = images.needs("me/unheard-of:latest")
    assert (found.size_gb, found.cuda) == (images.UNKNOWN_GB, images.UNKNOWN_CUDA)
    told = " ".join(found.assumptions())
    assert "20 GB assumed" in told and "12.8 assumed" in told
    stated = images.needs("me/unheard-of:cuda12.4", size_gb=7.5)
    assert stated.size_gb == 7.5 and stated.assumptions() == []


def test_the_files_an_install_names_are_found_and_no_other_option_is_mistaken_for_one():
    command = "pip install -r requirements.txt --requirement=dev.txt -c 'limits.txt' && rm -r build && python -c 'x'"
    assert images.requirement_files(command) == ["requirements.txt", "dev.txt", "limits.txt"]
    assert images.requirement_files("uv pip install -r https://example.org/r.txt") == []
    assert images.nested_files("-r base.txt\nnumpy\n  -c pins.txt\n# -r old.txt\n") == ["base.txt", "pins.txt"]


@pytest.mark.parametrize(
    ("command", "scripts"),
    [
        ("python train.py --config a.py", ["train.py"]),
        ("bash scripts/go.sh", ["scripts/go.sh"]),
        ("torchrun --nproc-per-node=2 src/train.py", ["src/train.py"]),
        ("python -u a.py; python3 b.py", ["a.py", "b.py"]),
        ("python -m train", []),
        ("python -c 'print(1)'", []),
        ("cd repo && python train.py", []),
        ("git clone https://example.org/x && python x/train.py", []),
        ("python /opt/tool/train.py", []),
        ("test -f a.py || python b.py", []),
    ],
)
def test_the_scripts_of_a_command_are_those_that_must_be_there_before_it(command, scripts):
    assert images.scripts(command) == scripts


def test_a_long_line_is_read_in_time():
    import time

    begun = time.perf_counter()
    images.wheels_in("requirements.txt", "\n".join(["a" * 4000 + "==" + "1." * 2000] * 60))
    images.scripts("python " + "a/" * 20000)
    assert time.perf_counter() - begun < 5
