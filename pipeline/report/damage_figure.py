"""The picture of what re-encoding did to the weights: SQNR by layer, one panel a kind of matrix, one line a scheme."""

from __future__ import annotations

import io
from typing import Any

KIND_NAMES = {"w1": "w1 (gate)", "w2": "w2 (down)", "w3": "w3 (up)"}
COLUMNS = 3
EXACT_ABOVE_DB = 6  # where exact layers are drawn: this far above the best that is not


def damage_svg(reports: dict[str, dict[str, Any] | None]) -> str:
    """SVG text, the same for the same reports; ``reports`` are the ``damage`` of metrics/quantize/*.json, by scheme.

    A layer in which nothing changed has no SQNR (the ratio is infinite): it is drawn on the line marked "exact".
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "damage", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    rows = {name: report["by_kind_and_layer"] for name, report in reports.items() if report}
    kinds = {row["kind"] for found in rows.values() for row in found}
    kinds = sorted(kinds, key=lambda kind: ("experts" not in kind, kind))
    finite = [row["sqnr_db"] for found in rows.values() for row in found if row["sqnr_db"] is not None]
    exact = (max(finite) if finite else 40) + EXACT_ABOVE_DB
    layers = sorted({row["layer"] for found in rows.values() for row in found if row["layer"] is not None})
    width, height = min(COLUMNS, max(1, len(kinds))), -(-max(1, len(kinds)) // COLUMNS)
    figure, axes = plt.subplots(
        height, width, figsize=(1.5 + 3.4 * width, 0.8 + 2.8 * height), sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[max(1, len(kinds)) :]:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis, kind in zip(axes.flat, kinds, strict=False):
        for number, name in enumerate(rows):
            found = [row for row in rows[name] if row["kind"] == kind and row["layer"] is not None]
            if not found:
                continue
            values = [exact if row["sqnr_db"] is None else row["sqnr_db"] for row in found]
            # Lines that lie on each other, as exact ones do, stay told apart by the size of their marks.
            (handles[name],) = axis.plot(
                [row["layer"] for row in found], values,
                marker="os^Dvph*"[number % 8], markersize=9 - min(number, 8) * 0.7,
                markerfacecolor="none", markeredgewidth=1.4, linewidth=1.2, color=f"C{number % 10}", label=name,
            )  # fmt: skip
        axis.axhline(exact, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
        axis.text(1.0, exact, " exact", va="center", fontsize=8, color="#666666", transform=axis.get_yaxis_transform())
        axis.set_title(title(kind), fontsize=9)
        axis.set_xticks(layers if len(layers) <= 12 else layers[:: len(layers) // 8])
        axis.spines[["top", "right"]].set_visible(False)
    top = max(finite, default=0)
    axes[0, 0].set_yticks([tick for tick in axes[0, 0].get_yticks() if tick <= top])  # the line "exact" has no height
    for row in axes:
        row[0].set_ylabel("SQNR, dB (higher is better)", fontsize=9)
    for column in range(width):
        lowest = max((i for i in range(height) if i * width + column < len(kinds)), default=0)
        axes[lowest, column].set_xlabel("layer", fontsize=9)
    if handles:
        columns = min(len(handles), 6)
        figure.legend(
            handles.values(), handles.keys(), loc="outside upper center", ncols=columns, fontsize=8, frameon=False
        )
    else:
        axes.flat[0].text(0.5, 0.5, "no weights were re-encoded", ha="center", transform=axes.flat[0].transAxes)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    plt.close(figure)
    return stream.getvalue()


def title(kind: str) -> str:
    """A panel's name: ``experts w1 (gate)`` for ``block_sparse_moe.experts.w1``."""
    parent, _, leaf = kind.rpartition(".")
    return f"{parent.rpartition('.')[2]} {KIND_NAMES.get(leaf, leaf)}".strip()
