"""Is the baseline itself what it should be?  Asked first: 91.9 against a published 93.5 is a model, 27.8 against 46.0
a harness.

Reference scores: ``{family: {length: {"score" (or "accuracy"), "n"}}}``, at the top of the file or under ``families``
or ``scores``; ``n: null`` for a published score whose n nobody tells.  A score is the share of items whose whole
answer is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scipy import stats as scipy_stats
from statsmodels.stats.proportion import test_proportions_2indep as two_proportions

from pipeline.errors import Unreadable
from pipeline.evals.breakdown import breakdown
from pipeline.evals.runs import Run, exactly_right, load_run
from pipeline.evals.settings import GateSettings, parse_gates
from pipeline.files import read_json
from pipeline.stats.multiplicity import holm

ALIASES = {"tracking": "variable_tracking", "ordered": "ordered_recall", "frequent": "frequent_words"}
CONTINUITY = 0.5


def reference(
    native_samples: Path | str | Run, reference_scores: Path | str | dict | None, gates: GateSettings | dict
) -> dict[str, Any]:
    """The ``comparison`` block of the reference variant: not compared with itself, but with its reference scores."""
    run, gates = load_run(native_samples), parse_gates(gates)
    if run.header.get("status") != "valid":
        return {
            "status": "invalid",
            "verdict": "invalid",
            "reason": f"the native run is invalid: {run.header.get('reason')}",
            "baseline": None,
        }
    baseline = {
        "verdict": "unchecked",
        "reason": "model.reference_scores is null: nothing says what native should reach",
        "cells": {},
    }
    if reference_scores is not None:
        baseline = check(run, reference_scores, gates)
    itself = [(row, row) for row in run.rows]
    return {"status": "valid", "verdict": "reference", "reason": None, "baseline": baseline} | breakdown(itself)


def check(
    native_samples: Path | str | Run, reference_scores: Path | str | dict, gates: GateSettings | dict
) -> dict[str, Any]:
    """Native against reference scores, cell by cell and over all of them.

    ``fail`` when some cell is below its reference by more than ``baseline_tolerance`` and more than sampling explains
    (one-sided score test of two proportions, Holm over the cells, level ``baseline_alpha``); else ``pass``.
    ``unchecked`` when no cell is in both.  Scores above their reference are no fault.
    """
    gates, run = parse_gates(gates), load_run(native_samples)
    expected = scores_of(reference_scores)
    cells: dict[str, dict[str, Any]] = {}
    for family, lengths in expected.items():
        for length, (score, n_reference) in lengths.items():
            rows = [row for row in run.rows if row["family"] == family and row["length"] == length]
            if rows:
                cells[f"{family} {length}"] = _cell(sum(map(exactly_right, rows)), len(rows), score, n_reference, gates)
    if not cells:
        return {
            "verdict": "unchecked",
            "reason": "no family and length is both in the data set and in the reference scores",
            "cells": {},
        }
    if len(cells) > 1:
        cells["all"] = _pooled(list(cells.values()), gates)
    for cell, adjusted in zip(cells.values(), holm([cell["p"] for cell in cells.values()]), strict=True):
        cell["p_holm"] = adjusted
        cell["verdict"] = "fail" if adjusted < gates.baseline_alpha else "pass"
    failed = [
        f"{name}: {cell['native']:.3f} (n {cell['n']}) against a reference of {cell['reference']:.3f} "
        f"(n {cell['reference_n']}), p {cell['p_holm']:.1e}"
        for name, cell in cells.items()
        if cell["verdict"] == "fail"
    ]
    return {
        "verdict": "fail" if failed else "pass",
        "reason": "; ".join(failed) or None,
        "cells": cells,
        "tolerance": gates.baseline_tolerance,
    }


def scores_of(raw: Path | str | dict) -> dict[str, dict[int, tuple[float, int | None]]]:
    """``{family: {length: (score, n)}}``.  Raises :class:`Unreadable` for scores outside [0, 1] or none at all."""
    where = "reference scores" if isinstance(raw, dict) else str(raw)
    content = raw if isinstance(raw, dict) else read_json(raw)
    content = content.get("families") or content.get("scores") or content
    scores: dict[str, dict[int, tuple[float, int | None]]] = {}
    for family, lengths in content.items():
        if not isinstance(lengths, dict):
            continue
        for length, cell in lengths.items():
            score = cell.get("score", cell.get("accuracy")) if isinstance(cell, dict) else None
            if not str(length).isdigit() or not isinstance(score, (int, float)) or not 0 <= score <= 1:
                raise Unreadable(f"{where}: {family}, {length}: no score in [0, 1]")
            scores.setdefault(ALIASES.get(family, family), {})[int(length)] = (float(score), cell.get("n"))
    if not scores:
        raise Unreadable(f"{where}: holds no {{family: {{length: {{score, n}}}}}}")
    return scores


def _cell(right: int, n: int, score: float, n_reference: int | None, gates: GateSettings) -> dict[str, Any]:
    return {
        "n": n,
        "native": right / n,
        "reference": score,
        "reference_n": n_reference,
        "p": _too_low(right, n, score, n_reference, gates.baseline_tolerance),
    }


def _pooled(cells: list[dict[str, Any]], gates: GateSettings) -> dict[str, Any]:
    """All cells as one, the reference weighted as the items are: small cells that each show nothing add up."""
    total = sum(cell["n"] for cell in cells)
    score = sum(cell["n"] * cell["reference"] for cell in cells) / total
    known = [cell["reference_n"] for cell in cells]
    right = round(sum(cell["n"] * cell["native"] for cell in cells))
    return _cell(right, total, score, None if None in known else sum(known), gates)


def _too_low(right: int, n: int, score: float, n_reference: int | None, tolerance: float) -> float:
    """One-sided p of H0: the true score is at most ``tolerance`` below the reference."""
    floor = max(score - tolerance, 0.0)
    if right / n >= floor:
        return 1.0
    if n_reference is None:
        return float(scipy_stats.binomtest(right, n, floor, alternative="less").pvalue)
    # A score of exactly 0 or 1 has no variance of its own: half an item keeps the statistic finite.
    wanted = min(max(score * n_reference, CONTINUITY), n_reference - CONTINUITY)
    measured = min(max(right, CONTINUITY), n - CONTINUITY)
    return float(
        two_proportions(
            measured, n, wanted, n_reference, value=-tolerance, compare="diff", method="score", alternative="smaller"
        ).pvalue
    )
