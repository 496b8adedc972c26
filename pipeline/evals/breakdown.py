"""Two runs side by side along every axis: where damage sits, apart from whether the gate lets it pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.evals.accuracy import GENERATED_BUCKETS, bucket, in_order
from pipeline.evals.runs import SCORED, right
from pipeline.stats import paired

Row = dict[str, Any]
Pair = tuple[Row, Row]


def breakdown(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Counts of all pairs (native, variant), and by family, length x depth, script and length of native's answer.

    Every axis is a property of the item or of native, so both sides of a cell are the same items.
    """
    with_depth = [pair for pair in pairs if pair[0].get("depth") is not None]
    with_length = [pair for pair in pairs if pair[0]["generated_tokens"] is not None]
    return {
        "all_items": _cell(pairs),
        "by_family": _by(pairs, lambda row: row["family"]),
        "by_length_and_depth": {
            str(length): _by([pair for pair in with_depth if pair[0]["length"] == length], _depth)
            for length in sorted({native["length"] for native, _ in with_depth})
        },
        "by_generated_tokens": _by(with_length, lambda row: bucket(row["generated_tokens"], GENERATED_BUCKETS)),
        "by_script": _by([pair for pair in pairs if pair[0].get("script")], lambda row: row["script"]),
    }


def counts(before: Sequence[bool], after: Sequence[bool], clusters: Sequence[str]) -> dict[str, Any]:
    """Accuracies, flips both ways and McNemar's p, which knows no clusters and is ``None`` where there are some."""
    flips = paired.Flips.of(before, after)
    return {
        "n": flips.n,
        "native": (flips.both_right + flips.lost) / flips.n,
        "variant": (flips.both_right + flips.won) / flips.n,
        "difference": flips.difference,
        "right_to_wrong": flips.lost,
        "wrong_to_right": flips.won,
        "flip_rate": flips.discordance,
        "recovery": flips.recovery,
        "mcnemar_p": paired.mcnemar_exact(flips) if len(set(clusters)) == flips.n else None,
    }


def _by(pairs: Sequence[Pair], key: Callable[[Row], str]) -> dict[str, dict[str, Any]]:
    names = in_order({key(native) for native, _ in pairs})
    return {name: _cell([pair for pair in pairs if key(pair[0]) == name]) for name in names}


def _cell(pairs: Sequence[Pair]) -> dict[str, Any] | None:
    if not pairs:
        return None
    natives, variants = zip(*pairs, strict=True)
    return counts(list(map(right, natives)), list(map(right, variants)), [row["cluster"] for row in natives]) | {
        f"{what}_{side}": sum(map(holds, rows)) / len(rows)
        for side, rows in (("native", natives), ("variant", variants))
        for what, holds in (("unscored_rate", _unscored), ("repetition_rate", _repeats))
    }


def _depth(row: Row) -> str:
    return f"{row['depth']:g}"


def _unscored(row: Row) -> bool:
    return row["outcome"] not in SCORED


def _repeats(row: Row) -> bool:
    return bool(row.get("repeats"))
