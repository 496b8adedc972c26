"""Pictures of an evaluation: length x depth heat maps, accuracy with intervals by length, flips.  Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from statsmodels.stats.proportion import proportion_confint

from pipeline.files import atomic_open

matplotlib.use("Agg")
matplotlib.rcParams |= {"svg.hashsalt": "evals", "svg.fonttype": "none"}
from matplotlib import pyplot as plt  # noqa: E402  (the backend is chosen first)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

LOST, WON, KEPT = "#b2182b", "#2166ac", "#bbbbbb"
MAPS_A_ROW = 2  # variants beside each other, two maps each
LEAST_REACH = 0.25  # of the scale of differences: smaller ones must not look like much


def grid(comparison: dict[str, Any], key: str) -> tuple[list[str], list[str], np.ndarray]:
    """(lengths, depths, value[depth, length]) of ``key`` in a comparison's cells; NaN where there is no item."""
    cells = comparison["by_length_and_depth"]
    lengths, depths = (sorted(keys, key=float) for keys in (cells, {depth for row in cells.values() for depth in row}))
    values = [[cells[length].get(depth, {}).get(key, np.nan) for length in lengths] for depth in depths]
    return lengths, depths, np.array(values, float)


def heat_maps(comparisons: dict[str, dict[str, Any]], path: Path | str) -> Path:
    """Of every variant, accuracy by length and depth and beside it the difference from native (red: lost).

    The reference has no difference.  Variants without a comparison (invalid runs) are left out.
    """
    shown = {name: block for name, block in comparisons.items() if block.get("by_length_and_depth")}
    rows = max(1, -(-len(shown) // MAPS_A_ROW))
    figure = plt.figure(figsize=(3.2 * 2 * MAPS_A_ROW, 0.9 + 2.1 * rows), layout="constrained")
    axes = figure.subplots(rows, 2 * MAPS_A_ROW, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    differences = [grid(block, "difference")[2] for block in shown.values()]
    reach = max([LEAST_REACH, *(float(np.nanmax(np.abs(values))) for values in differences)])
    accuracy, difference = {"cmap": "viridis", "vmin": 0, "vmax": 1}, {"cmap": "RdBu", "vmin": -reach, "vmax": reach}
    for place, (name, block) in enumerate(shown.items()):
        left, right_hand = axes[place // MAPS_A_ROW, 2 * (place % MAPS_A_ROW) :][:2]
        _map(left, f"{name}: accuracy", grid(block, "variant"), "{:.2f}", accuracy)
        if block["verdict"] != "reference":
            _map(right_hand, f"{name} - native", grid(block, "difference"), "{:+.2f}", difference)
    tables = [block["by_length_and_depth"].values() for block in shown.values()]
    counts = [cell["n"] for table in tables for row in table for cell in row.values()]
    if counts:
        figure.suptitle(
            f"Accuracy by prompt length (tokens, across) and depth of the fact (down): {min(counts)} to {max(counts)} "
            f"items a cell, so one item is {1 / max(counts):.2f} to {1 / min(counts):.2f}",
            fontsize=10,
        )
    return _save(figure, path)


def _map(axis: Axes, title: str, content: tuple[list[str], list[str], np.ndarray], text: str, scale: dict) -> None:
    lengths, depths, values = content
    image = axis.imshow(values, aspect="auto", **scale)
    for (y, x), value in np.ndenumerate(values):
        if not np.isnan(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
            shown = "0" if value == 0 else text.format(value)
            axis.text(x, y, shown, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axis.set_axis_on()
    axis.set_xticks(range(len(lengths)), lengths, fontsize=8)
    axis.set_yticks(range(len(depths)), depths, fontsize=8)
    axis.tick_params(length=0)
    axis.set_title(title, fontsize=9)


def accuracy_by_length(evaluations: dict[str, dict[str, Any]], path: Path | str, confidence: float = 0.95) -> Path:
    """Accuracy of each variant over length, with Wilson intervals; ``evaluations`` are metrics/evals/*.json by variant.

    An evaluation without scores (an invalid run) is left out.
    """
    shown = {name: found["by_length"] for name, found in evaluations.items() if found.get("by_length")}
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for place, (name, by_length) in enumerate(shown.items()):
        lengths = sorted(by_length, key=int)
        shares, below, above = [], [], []
        for length in lengths:
            share, count = by_length[length]["accuracy"], by_length[length]["n"]
            low, high = proportion_confint(round(share * count), count, alpha=1 - confidence, method="wilson")
            shares.append(share)
            below.append(max(0.0, share - low))
            above.append(max(0.0, high - share))
        shift = 1 + 0.02 * (place - (len(shown) - 1) / 2)  # side by side, so that intervals can be told apart
        axes.errorbar(
            [int(length) * shift for length in lengths],
            shares,
            yerr=[below, above],
            marker="o",
            capsize=3,
            label=name,
            linewidth=1,
        )
    ticks = sorted({int(length) for by_length in shown.values() for length in by_length})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(length) for length in ticks])
    axes.minorticks_off()
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel(f"accuracy, {confidence:.0%} interval")
    if shown:
        axes.legend(fontsize=8, ncols=2)
    return _save(figure, path)


def flips(comparisons: dict[str, dict[str, Any]], path: Path | str) -> Path:
    """Answers lost and won against native, by variant: equal means can hide many of both."""
    shown = {name: block["overall"] for name, block in comparisons.items() if block.get("overall")}
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.4 * max(1, len(shown))), layout="constrained")
    names = list(shown)[::-1]
    lost, won = [-shown[name]["right_to_wrong"] for name in names], [shown[name]["wrong_to_right"] for name in names]
    axes.barh(names, lost, color=LOST, label="right to wrong")
    axes.barh(names, won, color=WON, label="wrong to right")
    for y, (left, gained) in enumerate(zip(lost, won, strict=True)):
        # A distance in points, not a space in the text: SVG drops spaces at its ends.
        beside = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(str(-left), (left, y), (-3, 0), ha="right", **beside)
        axes.annotate(str(gained), (gained, y), (3, 0), ha="left", **beside)
    axes.axvline(0, color=KEPT, linewidth=0.8)
    reach = 1.15 * max([1, *won, *(-each for each in lost)])
    axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
    axes.set_xlabel("answers that differ from native's")
    figure.legend(fontsize=8, loc="outside upper center", ncols=2)
    return _save(figure, path)


def _save(figure: Figure, path: Path | str) -> Path:
    path = Path(path)
    with atomic_open(path) as stream:
        figure.savefig(
            stream, format=path.suffix.lstrip(".") or "svg", metadata={"Date": None} if path.suffix == ".svg" else None
        )
    plt.close(figure)
    return path
