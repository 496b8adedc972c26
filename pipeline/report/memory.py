"""What one rank's memory is made of, predicted and measured, in the same five parts."""

from __future__ import annotations

from typing import Any

from pipeline.report.columns import binary

PARTS = {
    "weights": "weights",
    "kv": "KV pool",
    "state": "recurrent state",
    "activation": "activation peak",
    "rest": "rest of the process",
}


def parts(report: dict[str, Any]) -> dict[str, int | None]:
    """Bytes by part from one rank's memory report, or from the planner's prediction of it; None where it does not say.

    Tokens and states share one pool: ``state`` is what ``max_num_seqs`` sequences keep of it in padded pages, ``kv`` is what is left for
    tokens.  ``rest`` is resident memory beyond the other parts (the interpreter, libraries, buffers); nothing predicts it.
    """
    pool, weights, activation = (report.get(key) for key in ("kv_bytes_allocated", "weight_bytes", "activation_peak_bytes"))
    state = (report.get("state_block_bytes_per_sequence") or 0) * (report.get("max_num_seqs") or 0)
    resident = report.get("rss_bytes")
    # A pool that holds fewer sequences than asked for is all state at worst.
    state = min(state, pool) if pool is not None else state
    known = sum(part or 0 for part in (weights, pool))
    return {
        "weights": weights,
        "kv": None if pool is None else pool - state,
        "state": state,
        "activation": activation,
        # Between two steps activations are not there, so resident memory is what it is without them.
        "rest": max(0, resident - known) if resident is not None else None,
    }


def by_rank(predictions: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``[{"rank", "predicted", "measured"}]``: the parts of every rank that either side knows."""
    expected, told = ({report["rank"]: parts(report) for report in side} for side in (predictions, measured))
    nothing = dict.fromkeys(PARTS)
    return [
        {"rank": rank, "predicted": expected.get(rank, nothing), "measured": told.get(rank, nothing)}
        for rank in sorted(expected.keys() | told.keys())
    ]


def table(comparisons: dict[str, dict[str, Any]]) -> str:
    """Markdown, one line a variant and rank, ``predicted / measured`` in each cell."""
    lines = ["| variant | rank | " + " | ".join(PARTS.values()) + " |", "|---|---:|" + "---:|" * len(PARTS)]
    for name, comparison in comparisons.items():
        for entry in comparison.get("memory_parts") or ():
            cells = " | ".join(_cell(entry["predicted"][part], entry["measured"][part]) for part in PARTS)
            lines.append(f"| {name} | {entry['rank']} | {cells} |")
    return "\n".join(lines) + "\n"


def _cell(predicted: float | None, measured: float | None) -> str:
    if predicted == measured == 0:
        return "none"
    return " / ".join("—" if value is None else binary(value) for value in (predicted, measured))


def findings(comparisons: dict[str, dict[str, Any]]) -> list[str]:
    """Every disagreement beyond tolerance, with its variant."""
    return [f"{name}: {text}" for name, comparison in comparisons.items() for text in comparison.get("memory_findings") or ()]


def section(comparisons: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of Markdown: the table, the picture and what disagrees; none where nothing was compared."""
    if not comparisons:
        return []
    found = findings(comparisons)
    agreement = "Weights, pages, blocks, tokens and states agree within 2 %, activation peaks within 15 %."
    end = ["### Findings beyond tolerance", "", *(f"- {finding}" for finding in found), ""] if found else [agreement, ""]
    return ["## Memory of a rank, predicted / measured", "", table(comparisons), "![memory](memory.svg)", "", *end]
