"""Reads the values out of a completion and scores them.  Wording never decides; what could not be read is counted
apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.evals.dataset import Item

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Score:
    """``score`` in [0, 1] is the share of targets found; ``hits`` says which; ``complete``: as many values as asked."""

    score: float
    correct: bool
    hits: tuple[bool, ...]
    found: int
    complete: bool

    @property
    def extraction_failed(self) -> bool:
        """No candidate value at all could be read."""
        return self.found == 0


def answer_part(text: str) -> str | None:
    """What follows the thinking; ``None`` while the thinking is still open."""
    if THINK_CLOSE in text:
        return text.rpartition(THINK_CLOSE)[2]
    return None if THINK_OPEN in text else text


def visible_answer(
    text: str | None, finish_reason: str | None, *, thinking: bool, reasoning: str | None = None
) -> str | None:
    """The part of a completion that may be scored, ``None`` when the model never came to its answer.

    ``thinking``: the model thinks first, so a text that the token limit cut before the closing tag is all thinking,
    even where the chat template opened the tag.  ``reasoning`` is what the server's reasoning parser took out of
    ``text``.
    """
    text = text or ""
    if thinking and finish_reason == "length" and THINK_CLOSE not in text and not reasoning:
        return None
    return answer_part(text)


def extract(text: str, item: Item) -> list[str]:
    """Candidate values of the answer in order of appearance."""
    if item.terminator:
        text = text.partition(item.terminator)[0]
    return re.findall(item.pattern, text)


def score(answer: str | None, item: Item) -> Score:
    """Score the visible answer; ``None`` scores nothing."""
    found = extract(answer, item) if answer is not None else []
    hits = {"exact": _exact, "set": _set, "sequence": _sequence}[item.order](found, item.targets)
    value = sum(hits) / len(hits)
    if item.order == "set":
        # Naming every number of the text is no answer: values beyond those asked for cost what they dilute.
        distinct = len(set(found))
        value = sum(hits) / max(len(hits), distinct)
    return Score(
        score=value,
        correct=value >= item.correct_at,
        hits=tuple(hits),
        found=len(found),
        complete=len(found) >= len(item.targets),
    )


def _exact(found: list[str], targets: tuple[str, ...]) -> list[bool]:
    return [index < len(found) and found[index] == target for index, target in enumerate(targets)]


def _set(found: list[str], targets: tuple[str, ...]) -> list[bool]:
    return [target in found for target in targets]


def _sequence(found: list[str], targets: tuple[str, ...]) -> list[bool]:
    """Targets on a longest common subsequence, so that one item left out does not spoil all that follow."""
    rows = [[0] * (len(found) + 1) for _ in range(len(targets) + 1)]
    for i in range(len(targets) - 1, -1, -1):
        for j in range(len(found) - 1, -1, -1):
            rows[i][j] = rows[i + 1][j + 1] + 1 if targets[i] == found[j] else max(rows[i + 1][j], rows[i][j + 1])
    hits, i, j = [False] * len(targets), 0, 0
    while i < len(targets) and j < len(found):
        if targets[i] == found[j]:
            hits[i], i, j = True, i + 1, j + 1
        elif rows[i + 1][j] >= rows[i][j + 1]:
            i += 1
        else:
            j += 1
    return hits
