"""Logged samples read back: one run of one variant, and what it was run under."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Unreadable
from pipeline.files import write_text

SCORED = ("correct", "incorrect")
UNSCORED = ("unfinished", "empty", "degenerate", "stuck", "error")
CLASSES = SCORED + UNSCORED
"""Classes of answers, explained in :mod:`pipeline.evals.outcomes`."""
SAMPLES = "samples.jsonl"
NEEDED = {"id", "family", "length", "cluster", "prompt_hash", "outcome", "score", "hits", "generated_tokens"}
KEPT = NEEDED | {"depth", "language", "script", "repeats"}
"""What of a sample a comparison can use: all but the texts."""


@dataclass(frozen=True)
class Run:
    """The header and the rows of a ``samples.jsonl``."""

    header: dict[str, Any]
    rows: tuple[dict[str, Any], ...]

    @property
    def by_hash(self) -> dict[str, dict[str, Any]]:
        """Rows by the hash of their prompt, which is what runs are paired by (document numbers depend on the task
        list).
        """
        return {row["prompt_hash"]: row for row in self.rows}

    @property
    def repeated(self) -> int:
        """Prompts that occur more than once: they could not be paired."""
        return sum(count > 1 for count in Counter(row["prompt_hash"] for row in self.rows).values())


def load_run(samples: Path | str | Run) -> Run:
    """Read ``samples.jsonl`` (or pass a run through).  Raises :class:`Unreadable` naming the file and line."""
    if isinstance(samples, Run):
        return samples
    path = Path(samples)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            missing = set() if number == 1 else NEEDED - row.keys()
        except (json.JSONDecodeError, AttributeError):
            raise Unreadable(f"{path}, line {number}: not a JSON object") from None
        if missing:
            raise Unreadable(f"{path}, line {number}: lacks {sorted(missing)}")
        if number > 1 and row["outcome"] not in CLASSES:  # would count as wrong
            raise Unreadable(f"{path}, line {number}: outcome {row['outcome']!r} is none of {', '.join(CLASSES)}")
        rows.append(row)
    if not rows or rows[0].get("kind") != "header":
        raise Unreadable(f"{path}: does not begin with the header of a finished run")
    return Run(rows[0], tuple(rows[1:]))


def write_run(run: Run, path: Path | str) -> None:
    """Write ``run`` as :func:`load_run` reads it."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (run.header, *run.rows)))


def without_texts(run: Run) -> Run:
    """The same run with of each row only what a comparison can use (:data:`KEPT`): small enough for git."""
    return Run(run.header, tuple({key: row[key] for key in sorted(KEPT & row.keys())} for row in run.rows))


def right(row: dict[str, Any]) -> bool:
    """Unscored answers count as wrong; too many of them make a run invalid before anybody compares it."""
    return row["outcome"] == "correct"


def exactly_right(row: dict[str, Any]) -> bool:
    """Every value of the answer right, whatever share of a list counts as correct."""
    return row["outcome"] == "correct" and all(row["hits"])
