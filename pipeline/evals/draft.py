"""What a task template produces before it is sized: needles with places, a question, and how the answer is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["exact", "set", "sequence"]


@dataclass(frozen=True)
class Answer:
    """The expected values and how they are found in a completion.  Wording never decides, only the values do."""

    targets: tuple[str, ...]
    pattern: str
    """Regular expression of one candidate value."""
    order: Order = "exact"
    """``exact``: place by place; ``set``: any order, nothing else; ``sequence``: longest common subsequence."""
    terminator: str | None = None
    """What follows it is not part of the answer."""


@dataclass(frozen=True)
class Needle:
    """A sentence and its place in the filler: 0 = at its beginning, 1 = right before the question."""

    depth: float
    text: str


@dataclass(frozen=True)
class Draft:
    """An item that still lacks its filler."""

    needles: list[Needle]
    question: str
    answer: Answer
    answer_tokens: int
    """Tokens of a full answer, end mark included; templates of natural language leave 0 and the generator counts."""
    preamble: str = ""
    has_depth: bool = True
