"""Sorts answers into classes, so that a broken run is never read as a bad model.

``correct`` and ``incorrect`` are scored.  The others say why there is nothing to score: ``unfinished`` (cut by the
token limit), ``empty``, ``degenerate`` (one token or phrase over and over, replacement characters, the prompt given
back), ``stuck`` (past its deadline), ``error`` (no answer at all).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.evals.dataset import Item
from pipeline.evals.scoring import Score, score, visible_answer

RUN_WORDS = 8
CYCLE_WORDS, CYCLE_TIMES, CYCLE_COVER_WORDS = 32, 4, 16
CYCLE_CHARS, CYCLE_CHAR_TIMES, CYCLE_COVER_CHARS = 24, 8, 48
ONE_CHARACTER = 4
REPLACEMENT_SHARE, REPLACEMENT_MIN = 0.2, 3
ECHO_CHARS, ECHO_MIN = 64, 16


@dataclass(frozen=True)
class Outcome:
    """The class of one answer, its score, and whether it repeats itself (which a right answer may do as well)."""

    kind: str
    score: Score
    repeats: bool


def classify(
    item: Item,
    text: str | None,
    finish_reason: str | None,
    *,
    thinking: bool = False,
    error: str | None = None,
    stuck: bool = False,
    reasoning: str | None = None,
) -> Outcome:
    """Class of one completion of a generated item; see :func:`pipeline.evals.scoring.visible_answer` for the
    arguments.
    """
    answer = visible_answer(text, finish_reason, thinking=thinking, reasoning=reasoning)
    repeats = degeneration(text or reasoning or "", item) is not None
    return classify_scored(
        score(answer, item), answer, finish_reason, repeats=repeats, error=error, stuck=stuck, reasoning=reasoning
    )


def classify_scored(
    result: Score,
    answer: str | None,
    finish_reason: str | None,
    *,
    repeats: bool,
    error: str | None = None,
    stuck: bool = False,
    reasoning: str | None = None,
) -> Outcome:
    """Class of one completion whose visible ``answer`` (``None``: never reached) was scored by whoever knows the
    task.
    """
    return Outcome(_kind(result, answer, finish_reason, repeats, error, stuck, reasoning), result, repeats)


def _kind(
    result: Score,
    answer: str | None,
    finish_reason: str | None,
    repeats: bool,
    error: str | None,
    stuck: bool,
    reasoning: str | None,
) -> str:
    if stuck or error is not None:
        return "stuck" if stuck else "error"
    if result.correct:
        return "correct"
    if repeats:
        return "degenerate"
    if answer is None:
        return "unfinished"
    if not answer.strip():
        return "unfinished" if finish_reason == "length" and (reasoning or "").strip() else "empty"
    # Everything said so far is right and the limit cut it: the budget is at fault, not the model.
    cut_short = finish_reason == "length" and not result.complete and sum(result.hits) == result.found > 0
    return "unfinished" if cut_short else "incorrect"


def degeneration(text: str, item: Item | None = None) -> str | None:
    """How ``text`` repeats itself, or its prompt from the beginning, in words; or ``None``."""
    begins = text.strip()[:ECHO_CHARS]
    if item is not None and len(begins) >= ECHO_MIN and item.prompt.lstrip().startswith(begins):
        return f"the first {len(begins)} characters of the prompt"
    bare = "".join(text.split())
    broken = text.count("\ufffd")
    if broken >= REPLACEMENT_MIN and broken >= REPLACEMENT_SHARE * len(bare):
        return f"{broken} replacement characters in {len(bare)}"
    if item is not None and bare in item.targets:
        return None
    if len(bare) >= ONE_CHARACTER and len(set(bare)) == 1:
        return f"{bare[0]!r} {len(bare)} times"
    words = text.split()
    run = _longest_run(words)
    if run >= RUN_WORDS:
        return f"one word {run} times in a row"
    times, period = _cycle(words, CYCLE_WORDS)
    if times >= CYCLE_TIMES and times * period >= CYCLE_COVER_WORDS:
        return f"the last {period} words {times} times in a row"
    times, period = _cycle(bare, CYCLE_CHARS)
    if times >= CYCLE_CHAR_TIMES and times * period >= CYCLE_COVER_CHARS:
        return f"the last {period} characters {times} times in a row"
    return None


def _longest_run(words: list[str]) -> int:
    longest = run = 0
    for index, word in enumerate(words):
        run = run + 1 if index and word == words[index - 1] else 1
        longest = max(longest, run)
    return longest


def _cycle(units: list[str] | str, longest: int) -> tuple[int, int]:
    """(times, period) of the repetition at the end of ``units`` that covers most, over periods up to ``longest``.

    The last repetition may be incomplete: the token limit cuts anywhere.
    """
    best = (0, 1)
    for period in range(1, min(longest, len(units) // 2) + 1):
        same = 0
        while same < len(units) - period and units[-1 - same] == units[-1 - same - period]:
            same += 1
        times = (same + period) // period if same else 0
        if times * period > best[0] * best[1]:
            best = (times, period)
    return best
