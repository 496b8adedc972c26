"""The picture of the comparison table: one panel a figure, one bar a variant.  Needs matplotlib (core environment)."""

from __future__ import annotations

import io
from typing import Any

from pipeline.report.columns import COLUMNS, SPEED, Column, cell
from pipeline.report.table import Rows, ordered

PANELS = ("accuracy", "output_tok_s", "ttft_ms_p50", "weight_bytes", "kv_capacity_tokens", "activation_peak_bytes")
VALID, EMULATED, INVALID = "#3b6ea5", "#b9cde3", "#c9c9c9"


def comparison_svg(rows: Rows) -> str:
    """SVG text that is the same for the same rows (git sees a change only where a figure changed).

    Grey: the run, or its bench, is not valid.  Pale: the speed of emulated kernels.  Both are shown and neither is to be compared.
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


def color(key: str, row: dict[str, Any]) -> str:
    """Whether a bar may be compared with its neighbours, as a colour."""
    speed = row.get("speed") if key in SPEED else None
    if row["status"] != "valid" or speed == "invalid":
        return INVALID
    return EMULATED if speed == "emulated" else VALID


def label(column: Column, row: dict[str, Any]) -> str:
    """The text at a bar: the table's own."""
    return "not measured" if row.get(column.key) is None else cell(column, row)
