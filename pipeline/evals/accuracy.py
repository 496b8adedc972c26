"""From logged samples to accuracy: overall and by family, length, depth, language and length of the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from pipeline.evals.runs import CLASSES, SCORED, UNSCORED
from pipeline.evals.settings import Thresholds

Sample = dict[str, Any]
GENERATED_BUCKETS = (8, 32, 128, 512, 2048, 8192)
POSITION_BUCKET = 16
POSITION_FROM = 32  # answers with fewer values have no profile over positions
FAMILY_MIN = 8  # a family with fewer items does not decide about the run


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Accuracy with its bounds: every unscored answer counted as wrong, and left out.

    ``accuracy`` is the first of the two.  ``accuracy_stderr`` is the sample standard error of a mean,
    sqrt(p(1-p)/(n-1)).
    """
    n = len(samples)
    right = sum(sample["outcome"] == "correct" for sample in samples)
    scored = sum(sample["outcome"] in SCORED for sample in samples)
    mean = right / n if n else None
    return {
        "n": n,
        "n_scored": scored,
        "accuracy": mean,
        "accuracy_stderr": math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None,
        "accuracy_unscored_wrong": mean,
        "accuracy_unscored_left_out": right / scored if scored else None,
        "score_mean": sum(sample["score"] for sample in samples) / n if n else None,
    }


def report(samples: list[Sample], thresholds: Thresholds) -> dict[str, Any]:
    """Everything :func:`summary` says, in total and by every axis, with rates of each class and the run's status."""
    n = len(samples)
    classes = {kind: sum(sample["outcome"] == kind for sample in samples) for kind in CLASSES}
    rates = {f"{kind}_rate": count / n if n else None for kind, count in classes.items()}
    failures = [sample for sample in samples if sample["outcome"] in SCORED]
    extraction = sum(sample["extraction_failed"] for sample in failures) / len(failures) if failures else None
    reasons = _reasons(samples, classes, extraction, thresholds)
    return (
        summary(samples)
        | rates
        | {
            "status": "invalid" if reasons else "valid",
            "reason": "; ".join(reasons) or None,
            "outcomes": classes,
            "extraction_failure_rate": extraction,
            "repetition_rate": sum(sample["repeats"] for sample in samples) / n if n else None,
            "by_family": by(samples, lambda s: s["family"]),
            "by_length": by(samples, lambda s: s["length"]),
            "by_depth": by([s for s in samples if s["depth"] is not None], lambda s: f"{s['depth']:g}"),
            "by_language": by(samples, lambda s: s["language"]),
            "by_script": by(samples, lambda s: s["script"]),
            "by_generated_tokens": by(
                [s for s in samples if s["generated_tokens"] is not None],
                lambda s: bucket(s["generated_tokens"], GENERATED_BUCKETS),
            ),
            "by_family_and_length": {
                family: by([s for s in samples if s["family"] == family], lambda s: s["length"])
                for family in _keys(samples, lambda s: s["family"])
            },
            "by_length_and_depth": {
                str(length): by(
                    [s for s in samples if s["length"] == length and s["depth"] is not None],
                    lambda s: f"{s['depth']:g}",
                )
                for length in _keys(samples, lambda s: s["length"])
            },
            "by_output_position": by_output_position(samples),
        }
    )


def by(samples: Iterable[Sample], key: Callable[[Sample], Any]) -> dict[str, dict[str, Any]]:
    """:func:`summary` of each group, in the natural order of the keys."""
    samples = list(samples)
    return {
        str(value): summary([sample for sample in samples if key(sample) == value]) for value in _keys(samples, key)
    }


def _keys(samples: Iterable[Sample], key: Callable[[Sample], Any]) -> list[Any]:
    return in_order({key(sample) for sample in samples})


def in_order(keys: Iterable[Any]) -> list[Any]:
    """Keys of groups as people expect them: numbers and buckets (``8-32``, ``8192+``) by size, then names."""

    def order(value: Any) -> tuple:
        head = str(value).split("-")[0].rstrip("+")
        try:
            return (0, float(head), "")
        except ValueError:
            return (1, 0.0, str(value))

    return sorted(keys, key=order)


def bucket(value: int, edges: tuple[int, ...]) -> str:
    """The name of the half-open bucket that holds ``value``: ``0-8``, ``8-32``, ..., ``8192+``."""
    low = 0
    for edge in edges:
        if value < edge:
            return f"{low}-{edge}"
        low = edge
    return f"{low}+"


def by_output_position(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """Share of values found by their place in long answers: errors that accumulate with generation show here."""
    counts: dict[int, list[int]] = {}
    for sample in samples:
        if len(sample["hits"]) >= POSITION_FROM:
            for place, hit in enumerate(sample["hits"]):
                cell = counts.setdefault(place // POSITION_BUCKET, [0, 0])
                cell[0] += hit
                cell[1] += 1
    return {
        f"{start * POSITION_BUCKET}-{(start + 1) * POSITION_BUCKET}": {"found": right / n, "n": n}
        for start, (right, n) in sorted(counts.items())
    }


def _reasons(samples: list[Sample], classes: dict[str, int], extraction: float | None, limits: Thresholds) -> list[str]:
    """Why this run cannot be trusted; empty when it can."""
    n = len(samples)
    if not n:
        return ["no item was answered"]
    reasons = [
        f"{classes[kind]} of {n} answers are {kind} ({classes[kind] / n:.1%}, allowed {getattr(limits, kind):.1%})"
        for kind in UNSCORED
        if classes[kind] > getattr(limits, kind) * n
    ]
    if extraction is not None and extraction > limits.extraction_failure:
        reasons.append(
            f"no value could be read from {extraction:.1%} of the answers (allowed {limits.extraction_failure:.1%})"
        )
    for family in _keys(samples, lambda s: s["family"]):
        group = [sample for sample in samples if sample["family"] == family]
        lost = sum(sample["outcome"] in UNSCORED for sample in group)
        if len(group) >= FAMILY_MIN and lost > limits.family_unscored * len(group):
            reasons.append(
                f"{lost} of {len(group)} {family} answers cannot be scored (allowed {limits.family_unscored:.0%})"
            )
    return reasons
