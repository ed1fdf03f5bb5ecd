"""What a log and a machine say about a failure: which classes, by which lines, the root cause first. Pure.

A log is hostile: it may have no end, one line of it neither, and its bytes may be anything. So text comes in pieces,
and none is kept but a few lines. A sign's literal text is looked for first; its expression sees a window around that.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from gpu_skills.errors import one_line
from gpu_skills.jobs.diagnose.failures import UNKNOWN, FailureClass, Sign, catalogue
from gpu_skills.jobs.follow import LineFolder
from gpu_skills.redaction import redact

EVIDENCE_LINES = 3  # kept of one class
SHOWN_CHARS = 300
LAST_LINES = 200  # a weak sign before them was survived
LINES_BEFORE = 30  # where `after` is looked for
_PIECE_BYTES = 64 << 10
_LONGEST_LINE = 256 << 10  # of a longer one the end; what is unprintable takes many times its size
_AROUND = 400  # what an expression sees on both sides of the literal text
_HITS_IN_A_LINE = 8
_REDACTED_AROUND = 2000
_WEAK_KEPT = 50
# Code in a traceback names an error without it being one.
_CODE = re.compile(r"\s{0,80}(?:(?:raise|except|if|elif)\s|#|//)")
# What an error looks like whose class is not known.
_ERROR = re.compile(r"\s{0,8}(?:[\w.]{1,80}(?:Error|Exception|Interrupt)\b|(?:fatal|error|panic)\b ?:)", re.IGNORECASE)


@dataclass(frozen=True)
class Text:
    """Something to read, in pieces. source: what it is, as evidence names it: log, end, gpu …

    is_account: it tells what happened, so its errors are worth showing when no class fits.
    """

    source: str
    pieces: Iterable[bytes]
    is_account: bool = False


@dataclass(frozen=True)
class Evidence:
    """One line, safe to show and without secrets. line: from 1, of what was read of the source."""

    source: str
    line: int
    text: str


@dataclass
class Finding:
    """A class of failure and why: the first lines that say so, of `matches`. weak: only signs others may explain."""

    failure: FailureClass
    position: tuple[int, int]  # which text, which line
    is_weak: bool = False
    matches: int = 0
    evidence: list[Evidence] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)

    def add(self, evidence: Evidence, details: dict[str, str]) -> None:
        self.details = {**details, **self.details}
        if evidence in self.evidence[-1:]:
            return
        self.matches += 1
        if len(self.evidence) < EVIDENCE_LINES:
            self.evidence.append(evidence)


def classify(
    texts: Iterable[Text],
    *,
    secrets: Iterable[str] = (),
    only: Collection[str] | None = None,
    has_failed: bool = True,
) -> list[Finding]:
    """Every class that the texts show, the root cause first: strong before weak, then by rank, then by position.

    secrets: values that may not be shown. only: no other classes than these. has_failed: that something did fail is
    known, so when no class fits the answer is `unknown`, with what looks like errors.
    """
    reader = _Reader(tuple(secrets), only)
    for text in texts:
        reader.read(text)
    found = sorted(reader.findings(), key=lambda f: (f.is_weak, f.failure.rank, f.position))
    if found or not has_failed:
        return found
    return [reader.unknown()]


class _Reader:
    def __init__(self, secrets: tuple[str, ...], only: Collection[str] | None):
        known = catalogue()
        self._classes, self._handled = known.classes, known.handled
        self._signs = [sign for sign in known.signs if only is None or sign.failure in only]
        self._secrets = secrets
        self._texts = 0
        self._found: dict[tuple[str, bool], Finding] = {}
        self._errors: list[tuple[str, int, str]] = []
        self._tail: deque[tuple[str, int, str]] = deque(maxlen=EVIDENCE_LINES)

    def read(self, text: Text) -> None:
        self._texts += 1
        before: deque[str] = deque(maxlen=LINES_BEFORE)
        weak: deque[tuple[str, Evidence, dict[str, str]]] = deque(maxlen=_WEAK_KEPT)
        number = 0
        for lines in _lines(text.pieces):
            block = "\n".join(lines).lower()
            signs = [sign for sign in self._signs if sign.has in block]
            for line in lines:
                number += 1
                for sign, start, end, details in self._signs_in(line, before, signs):
                    evidence = Evidence(text.source, number, excerpt(line, start, end, self._secrets))
                    if sign.is_weak:
                        weak.append((sign.failure, evidence, details))
                    else:
                        self._add(sign.failure, False, evidence, details)
                if text.is_account:
                    self._remember(text.source, number, line)
                before.append(line[:SHOWN_CHARS])
        for failure, evidence, details in weak:
            if number - evidence.line < LAST_LINES:
                self._add(failure, True, evidence, details)

    def findings(self) -> Iterator[Finding]:
        return (f for (name, is_weak), f in self._found.items() if not (is_weak and (name, False) in self._found))

    def unknown(self) -> Finding:
        seen = self._errors or list(self._tail)
        evidence = [Evidence(source, number, excerpt(line, 0, 0, self._secrets)) for source, number, line in seen]
        return Finding(UNKNOWN, (0, 0), matches=len(seen), evidence=evidence)

    def _add(self, failure: str, is_weak: bool, evidence: Evidence, details: dict[str, str]) -> None:
        first = Finding(self._classes[failure], (self._texts, evidence.line), is_weak)
        self._found.setdefault((failure, is_weak), first).add(evidence, details)

    def _remember(self, source: str, number: int, line: str) -> None:
        """The first errors and the newest one, and the last lines: what is shown when no class fits."""
        if _ERROR.match(line):
            del self._errors[EVIDENCE_LINES - 1 :]
            self._errors.append((source, number, line[:_REDACTED_AROUND]))
        elif not self._errors and line and not line.isspace():
            self._tail.append((source, number, line[:_REDACTED_AROUND]))

    def _signs_in(
        self, line: str, before: deque[str], signs: list[Sign]
    ) -> Iterator[tuple[Sign, int, int, dict[str, str]]]:
        """Of these signs the ones in the line, where, and what their expressions name."""
        if not signs:
            return
        low = line.lower()
        if len(low) != len(line):  # a few letters become longer; the places have to be the same
            line = low
        for sign in signs:
            at, hits = low.find(sign.has), 0
            while at >= 0 and hits < _HITS_IN_A_LINE:
                found = self._seen(sign, line, low, at, before)
                if found is not None:
                    yield (sign, *found)
                    break
                at, hits = low.find(sign.has, at + len(sign.has)), hits + 1

    def _seen(
        self, sign: Sign, line: str, low: str, at: int, before: deque[str]
    ) -> tuple[int, int, dict[str, str]] | None:
        left, right = max(0, at - _AROUND), at + len(sign.has) + _AROUND
        around = low[left:right]
        if any(text in around for text in (*sign.excluded, *self._handled)) or (not left and _CODE.match(line)):
            return None
        start, end, details = at, at + len(sign.has), {}
        if sign.match is not None:
            found = sign.match.search(line[left:right])
            if found is None:
                return None
            start, end, details = left + found.start(), left + found.end(), _named(found)
        if sign.after is not None:
            context = next(filter(None, map(sign.after.search, reversed(before))), None)
            if context is None:
                return None
            details |= _named(context)
        return start, end, details


def _lines(pieces: Iterable[bytes]) -> Iterator[list[str]]:
    """Folded lines, a block at a time."""
    folder = LineFolder(longest=_LONGEST_LINE)
    for piece in pieces:
        for start in range(0, len(piece), _PIECE_BYTES):
            yield folder.feed(piece[start : start + _PIECE_BYTES])
    yield folder.finish()


def _named(found: re.Match[str]) -> dict[str, str]:
    return {name: one_line(value, limit=200) for name, value in found.groupdict().items() if value}


def excerpt(line: str, start: int, end: int, secrets: tuple[str, ...] = ()) -> str:
    """What to show of a line around a match: no secret, no control character, not too long.

    Secrets go before the line is cut, or half of one would stay; a word that was cut anyway goes with them.
    """
    left, right = max(0, start - _REDACTED_AROUND), end + _REDACTED_AROUND
    head, tail = line[left:start], line[end:right]
    if left:
        head = head.partition(" ")[2]
    if right < len(line):
        tail = tail.rpartition(" ")[0]
    before = len(redact(head, secrets))
    shown = redact(head + line[start:end] + tail, secrets)
    begin = max(0, min(before - 60, len(shown) - SHOWN_CHARS))
    cut = shown[begin : begin + SHOWN_CHARS]
    return one_line(("…" if begin or left else "") + cut.strip() + ("…" if begin + SHOWN_CHARS < len(shown) else ""))
