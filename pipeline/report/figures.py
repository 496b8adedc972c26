"""The picture of the comparison table: one panel a figure, one bar a variant.  Needs matplotlib (core environment)."""

from __future__ import annotations

import io

from pipeline.report.columns import COLUMNS
from pipeline.report.table import Rows, ordered

PANELS = ("accuracy", "output_tok_s", "ttft_ms_p50", "weight_bytes", "kv_capacity_tokens", "activation_peak_bytes")
VALID, INVALID = "#3b6ea5", "#c9c9c9"


def comparison_svg(rows: Rows) -> str:
    """SVG text that is the same for the same rows (git sees a change only where a figure changed).

    Variants whose run is not valid are grey: shown, not to be compared.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "comparison"
    import matplotlib.pyplot as plt

    names = ordered(rows)
    columns = [next(column for column in COLUMNS if column.key == key) for key in PANELS]
    figure, axes = plt.subplots(2, 3, figsize=(12, 1.6 + 0.55 * len(names)), sharey=True, layout="constrained")
    for axis, column in zip(axes.flat, columns, strict=True):
        values = [rows[name].get(column.key) or 0 for name in names]
        colors = [VALID if rows[name]["status"] == "valid" else INVALID for name in names]
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, [cell_text(column, rows[name]) for name in names], padding=3, fontsize=8)
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


def cell_text(column, row) -> str:
    """The label of a bar: the table's own text."""
    value = row.get(column.key)
    return "not measured" if value is None else column.show(value)
