"""The picture of the comparison table: one panel a figure, one bar a variant.  Needs matplotlib (core environment)."""

from __future__ import annotations

import io
from typing import Any

from pipeline.report.columns import COLUMNS, SPEED, Column, cell
from pipeline.report.memory import PARTS
from pipeline.report.table import Rows, ordered

PANELS = ("accuracy", "output_tok_s", "ttft_ms_p50", "weight_bytes", "kv_capacity_tokens", "activation_peak_bytes")
PART_COLORS = {"weights": "#3b6ea5", "kv": "#e0a13c", "state": "#7a9e4f", "activation": "#b5546b", "rest": "#c9c9c9"}
SMALL_PARTS = ("weights", "state", "activation")
VALID, EMULATED, INVALID = "#3b6ea5", "#b9cde3", "#c9c9c9"


def comparison_svg(rows: Rows) -> str:
    """SVG text that is the same for the same rows (git sees a change only where a figure changed).

    Grey: the run, or its bench, is not valid or not comparable.  Pale: the speed of emulated kernels.  Both are shown and neither is
    to be compared.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "comparison", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    names = ordered(rows)
    columns = [next(column for column in COLUMNS if column.key == key) for key in PANELS]
    figure, axes = plt.subplots(2, 3, figsize=(12, 1.6 + 0.55 * len(names)), sharey=True, layout="constrained")
    for axis, column in zip(axes.flat, columns, strict=True):
        values = [rows[name].get(column.key) or 0 for name in names]
        bars = axis.barh(names, values, color=[color(column.key, rows[name]) for name in names])
        axis.bar_label(bars, [label(column, rows[name]) for name in names], padding=3, fontsize=8)
        arrow = {"higher": "higher is better", "lower": "lower is better"}[column.better]
        axis.set_title(f"{column.header} ({arrow})", fontsize=9)
        axis.margins(x=0.28)
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes.flat[0].invert_yaxis()
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    plt.close(figure)
    return stream.getvalue()


def memory_svg(comparisons: dict[str, dict[str, Any]]) -> str:
    """One rank's memory in parts, predicted above measured, one pair of stacked bars a variant; SVG text as :func:`comparison_svg`'s.

    Left: what differs between variants.  Right: everything, with the pool of fixed size and the rest of the process.
    A variant with a finding beyond tolerance is marked; a part that one side does not know is missing from its bar.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "memory", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    names = [name for name in ordered(comparisons) if comparisons[name].get("memory_parts")]
    figure, axes = plt.subplots(1, 2, figsize=(13, 1.8 + 0.75 * max(1, len(names))), sharey=True, layout="constrained")
    for axis, shown in zip(axes, (SMALL_PARTS, tuple(PARTS)), strict=True):
        for place, name in enumerate(names):
            rank = comparisons[name]["memory_parts"][0]
            for offset, side in ((-0.19, "predicted"), (0.19, "measured")):
                left = 0.0
                for part in shown:
                    size = (rank[side][part] or 0) / 2**20
                    hatch = "//" if side == "predicted" else None
                    axis.barh(place + offset, size, 0.34, left, color=PART_COLORS[part], hatch=hatch, edgecolor="white", linewidth=0.4)
                    left += size
                unknown = [PARTS[part] for part in shown if rank[side][part] is None and part != "rest"]
                text = f"{left:,.1f} {side}" + (f", without {', '.join(unknown)}" if unknown else "")
                axis.annotate(text, (left, place + offset), (3, 0), textcoords="offset points", va="center", fontsize=7)
        axis.margins(x=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("MiB on rank 0")
    marks = [f"{name} (!)" if comparisons[name].get("memory_findings") else name for name in names]
    axes[0].set_yticks(range(len(names)), marks)
    axes[0].invert_yaxis()
    axes[0].set_title("weights, state of all sequences, activation peak", fontsize=9)
    axes[1].set_title("with the KV pool, and what else the process holds (not predicted)", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=PART_COLORS[part]) for part in PARTS]
    figure.legend(handles, PARTS.values(), ncols=len(PARTS), loc="outside upper center", fontsize=8, frameon=False)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    plt.close(figure)
    return stream.getvalue()


def color(key: str, row: dict[str, Any]) -> str:
    """Whether a bar may be compared with its neighbours, as a colour."""
    speed = row.get("speed") if key in SPEED else None
    judged = row.get("verdict") if key == "accuracy" else speed
    if row["status"] != "valid" or judged in ("invalid", "not_comparable"):
        return INVALID
    return EMULATED if speed == "emulated" else VALID


def label(column: Column, row: dict[str, Any]) -> str:
    """The text at a bar: the table's own."""
    return "not measured" if row.get(column.key) is None else cell(column, row)
