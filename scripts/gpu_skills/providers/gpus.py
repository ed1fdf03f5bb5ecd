"""The name of a GPU, however it is spelt: `RTX_4090`, `NVIDIA GeForce RTX 4090` and `rtx 4090` are one model."""

from __future__ import annotations

import re

# Words that say nothing about the model.
_NOISE = {"NVIDIA", "GEFORCE", "TESLA", "QUADRO", "GENERATION", "EDITION", "GPU", "Q"}
# Words that make it another model: they are on both sides or on neither.
_DISTINCT = {"TI", "SUPER", "ADA", "D", "LAPTOP", "MOBILE", "PRO", "MAX"}
_SIZE = re.compile(r"\d{1,3}GB?")
_SOLD_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 141, 180, 192, 288)


def same_model(wanted: str, found: str) -> bool:
    """Whether `found` is what was asked for. Less may be asked than found (`A100` takes an A100 SXM4), not more.

    >>> same_model("RTX 3090", "RTX 3090 Ti"), same_model("H100", "NVIDIA H100 80GB HBM3")
    (False, True)
    """
    asked, has = _words(wanted), _words(found)
    if not asked or not has:
        return False
    return asked <= has and not (asked ^ has) & _DISTINCT


def canonical(name: str) -> str:
    """A short name to show: `NVIDIA GeForce RTX 4090` → `RTX 4090`."""
    words = [w for w in re.split(r"[\s_]+", name.strip()) if w.upper() not in {"NVIDIA", "GEFORCE", "TESLA"}]
    return " ".join(words) or name.strip()


def size_on_label_gb(name: str) -> int | None:
    """The memory a name states: `A100 80GB` → 80."""
    match = re.search(r"\b(\d{1,3}) ?GB\b", name.upper())
    return int(match[1]) if match else None


def size_class_gb(mib: float) -> float:
    """The size a card is sold as, from what it reports: 23,034 MiB is a 24 GB card, 46,068 a 48 GB one."""
    gib = mib / 1024
    return float(min((s for s in _SOLD_GB if s >= gib - 0.6), default=round(gib)))


def _words(name: str) -> set[str]:
    text = name.upper().replace("_", " ").replace("-", " ").replace("/", " ")
    text = re.sub(r"\b(\d{1,3}) GB\b", r"\1GB", text)
    text = re.sub(r"\bSXM\d\b", "SXM", text)
    text = re.sub(r"\b(\d{4})(TI|S|ADA|D)\b", _spelt_out, text)
    return {w for w in text.split() if w not in _NOISE and not _SIZE.fullmatch(w)}


def _spelt_out(match: re.Match[str]) -> str:
    return f"{match[1]} {'SUPER' if match[2] == 'S' else match[2]}"
