"""What an image and the packages of a job ask of a machine: room, CUDA and a driver. Pure.

Read from names: the image's tag, and the wheels that `setup` and the requirements files install. `images.json` knows
some images and which driver came with which CUDA; for an image it does not know there is a stated, careful assumption.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

UNKNOWN_GB = 20.0
UNKNOWN_CUDA = 12.8

_CUDA_IN_TAG = (
    re.compile(r"cuda[-_]?(\d{1,2})\.(\d{1,2})"),  # cuda12.8, cuda-12.8.1
    re.compile(r"(?<![a-z])cu(\d{2})(\d)\d?(?!\d)"),  # cu128, cu1281
    re.compile(r"cuda[-_]?(\d{2})(?![\d.])()"),  # cuda12
)
_PLAIN_VERSION = re.compile(r"(\d{1,2})\.(\d{1,2})")
# Each gives major and minor, the minor may be empty. Told with the words that matched, so that a person finds them.
_WHEELS = (
    re.compile(r"(?<![\w.\[\]-])[\w.\[\]-]+==[\w.]+\+cu(\d{2})(\d)\b", re.I),
    re.compile(r"https?://[^\s\"']*/cu(\d{2})(\d)\b", re.I),
    re.compile(r"torch[-_]backend[= \"']{1,4}cu(\d{2})(\d)\b", re.I),
    re.compile(r"\bnvidia-cuda-runtime(?:-cu\d+)?(?:==|~=|>=)(\d{2})\.(\d+)", re.I),
    re.compile(r"\b(?:pytorch-cuda|cuda-toolkit|cuda-version|cudatoolkit)\s*[=~>]{1,2}\s*(\d{2})\.(\d+)", re.I),
    re.compile(r"\bcupy-cuda(\d{2})x()\b", re.I),
    re.compile(r"\bjax\[cuda(\d{2})()(?:[-_]\w+)?\]", re.I),
    re.compile(r"\bnvidia-[a-z-]+-cu(\d{2})()\b", re.I),
)
_TORCH = re.compile(r"(?<![\w.-])torch\s*(?:==|>=|~=)\s*(\d+)\.(\d+)(?![\w.]*\+)", re.I)
_REQUIREMENTS = re.compile(r"(?<!\S)(?:-r|--requirement|-c|--constraint)[= ]?\s*([^\s;&|]+)")
_INSTALL = re.compile(r"\b(?:pip[\d.]*|uv)\b.*\b(?:install|sync)\b")
_SCRIPT = re.compile(
    r"(?<![\w./-])(?:python[\d.]*|bash|sh|torchrun|accelerate\s+launch)((?:\s+-[-\w=.]+)*)\s+([\w./-]+\.(?:py|sh))(?![\w/])"
)
# After these a file may be there that no directory had.
_MAKES_FILES = re.compile(
    r"\|\||\b(?:if|test|cd|git|wget|curl|tar|unzip|cp|mv|hf|huggingface-cli|make|aws|rclone)\b|>|<<"
)


@dataclass(frozen=True)
class Wheel:
    """A package that brings its own CUDA. said: its words; where: the file, or `setup`."""

    cuda: float
    said: str
    where: str


@dataclass(frozen=True)
class Needs:
    """size_gb: of the image on disk. cuda: what the host's driver has to allow, or None. driver: the first that does.

    is_size_known, is_cuda_known: read or stated, not assumed.
    """

    image: str
    size_gb: float
    is_size_known: bool
    image_cuda: float | None
    is_cuda_known: bool
    wheels: tuple[Wheel, ...] = ()

    @property
    def wheel(self) -> Wheel | None:
        """The one that asks for most."""
        return max(self.wheels, key=lambda w: w.cuda, default=None)

    @property
    def cuda(self) -> float | None:
        asked = [c for c in (self.image_cuda, self.wheel and self.wheel.cuda) if c is not None]
        return max(asked, default=None)

    @property
    def driver(self) -> str | None:
        return None if self.cuda is None else driver_for(self.cuda)

    @property
    def is_of_wheel(self) -> bool:
        """Whether a wheel, not the image, decides which driver it takes."""
        return self.wheel is not None and (self.image_cuda is None or self.wheel.cuda > self.image_cuda)

    @property
    def because(self) -> str:
        """Who asks for this CUDA, for people."""
        if self.wheel is not None and self.is_of_wheel:
            return f"{self.wheel.said} ({self.wheel.where})"
        return f"image {self.image}" + ("" if self.is_cuda_known else " (assumed: its name does not say)")

    def assumptions(self) -> list[str]:
        """What is not known and was assumed, for the approver."""
        found = []
        if not self.is_size_known:
            found.append(
                f"the size of image {self.image} is not known: {self.size_gb:g} GB assumed (compute.image_gb says it)"
            )
        if not self.is_cuda_known and self.image_cuda is not None and not self.is_of_wheel:
            found.append(f"image {self.image} does not say which CUDA it needs: {self.image_cuda:g} assumed")
        return found


def needs(image: str, texts: Mapping[str, str] | None = None, *, size_gb: float | None = None) -> Needs:
    """texts: what installs packages, by where it stands: `setup`, `requirements.txt`. size_gb: what the user states."""
    name, tag = split(image)
    known = _known(name, tag)
    cuda = _cuda_of_tag(tag, is_version=bool(known.get("tag_is_cuda")))
    is_cuda_known = cuda is not None or "cuda" in known
    if cuda is None:
        cuda = known.get("cuda", UNKNOWN_CUDA)
    stated = size_gb if size_gb is not None else known.get("size_gb")
    return Needs(
        image=image,
        size_gb=UNKNOWN_GB if stated is None else float(stated),
        is_size_known=stated is not None,
        image_cuda=cuda,
        is_cuda_known=is_cuda_known,
        wheels=tuple(wheel for where, text in (texts or {}).items() for wheel in wheels_in(where, text)),
    )


def wheels_in(where: str, text: str) -> list[Wheel]:
    """The packages of one text that bring their own CUDA. Comments do not count."""
    found: dict[str, Wheel] = {}
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line)[:2000]
        for pattern in _WHEELS:
            for match in pattern.finditer(line):
                said = re.sub(r"//[^/@\s]*@", "//", match[0].strip())[:120]  # an index may stand there with a password
                found.setdefault(said, Wheel(_version(match[1], match[2]), said, where))
        # The wheels of PyPI, where no index says otherwise.
        if "index-url" not in line and "find-links" not in line:
            for match in _TORCH.finditer(line):
                cuda = _cuda_of_torch(int(match[1]), int(match[2]))
                if cuda is not None and not _has_index(text):
                    found.setdefault(match[0], Wheel(cuda, match[0].strip(), where))
    return list(found.values())


def requirement_files(command: str | None) -> list[str]:
    """The files that the installs of a command line name with -r or -c; no addresses."""
    parts = re.split(r"&&|\|\||[;|\n]", command or "")
    return _distinct(m[1] for part in parts if _INSTALL.search(part) for m in _REQUIREMENTS.finditer(part))


def nested_files(requirements: str) -> list[str]:
    """The files that a requirements file names itself."""
    lines = (line.strip() for line in requirements.splitlines())
    return _distinct(m[1] for line in lines if line.startswith("-") for m in _REQUIREMENTS.finditer(line))


def _distinct(names: Iterable[str]) -> list[str]:
    shown = (name.strip("'\"") for name in names)
    return list(dict.fromkeys(name for name in shown if name and "://" not in name and "$" not in name))


def scripts(command: str | None) -> list[str]:
    """The scripts that a command line runs and that must be there before: `python train.py` → train.py.

    Nothing where something before may bring the file: a `cd`, a download, a redirection.
    """
    if not command or _MAKES_FILES.search(command):
        return []
    named = (match[2] for match in _SCRIPT.finditer(command) if not re.search(r"(^|\s)-[mc]\b", match[1]))
    return list(dict.fromkeys(name for name in named if not name.startswith("/") and ".." not in name.split("/")))


def makes_files(command: str | None) -> bool:
    """Whether a command may bring files that the directory does not have."""
    return bool(command and _MAKES_FILES.search(command))


def driver_for(cuda: float) -> str | None:
    """The first driver branch that allows this CUDA: 12.8 → "570"."""
    return next((str(driver) for version, driver in _table()["drivers"] if version >= cuda - 1e-9), None)


def split(image: str) -> tuple[str, str]:
    """(name, tag) without the registry that is meant anyway, and without a digest."""
    name = image.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        head, tag = name, ""
    for prefix in ("docker.io/", "index.docker.io/", "library/"):
        head = head.removeprefix(prefix)
    return head.lower(), tag.lower()


def _known(name: str, tag: str) -> dict[str, Any]:
    return next((e for e in _table()["images"] if e["name"] == name and re.search(e["tag"], tag)), {})


def _cuda_of_tag(tag: str, *, is_version: bool) -> float | None:
    patterns: Iterable[re.Pattern[str]] = (_PLAIN_VERSION,) if is_version else _CUDA_IN_TAG
    found = next((match for pattern in patterns if (match := pattern.search(tag))), None)
    return None if found is None else _version(found[1], found[2])


def _cuda_of_torch(major: int, minor: int) -> float | None:
    since = [cuda for version, cuda in _table()["torch"] if tuple(map(int, version.split("."))) <= (major, minor)]
    return since[-1] if since else None


def _has_index(text: str) -> bool:
    return re.search(r"(?:index-url|find-links|torch[-_]backend)", text, re.I) is not None


def _version(major: str, minor: str) -> float:
    return float(f"{int(major)}.{int(minor or 0)}")


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("images.json").read_text(encoding="utf-8"))
