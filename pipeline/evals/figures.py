"""Pictures of an evaluation: length x depth heat maps, accuracy with intervals by length, flips.  Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from statsmodels.stats.proportion import proportion_confint

from pipeline.evals.compare import right
from pipeline.evals.runs import Run
from pipeline.files import atomic_open

matplotlib.use("Agg")
matplotlib.rcParams |= {"svg.hashsalt": "evals", "svg.fonttype": "none"}
from matplotlib import pyplot as plt  # noqa: E402  (the backend is chosen first)
from matplotlib.figure import Figure  # noqa: E402

LOST, WON, KEPT = "#b2182b", "#2166ac", "#bbbbbb"


def grid(run: Run) -> tuple[list[int], list[float], np.ndarray, np.ndarray]:
    """(lengths, depths, accuracy[depth, length], n[depth, length]); accuracy is NaN where there is no item."""
    rows = [row for row in run.rows if row.get("depth") is not None]
    lengths, depths = sorted({row["length"] for row in rows}), sorted({row["depth"] for row in rows})
    n, correct = np.zeros((len(depths), len(lengths)), int), np.zeros((len(depths), len(lengths)))
    for row in rows:
        cell = depths.index(row["depth"]), lengths.index(row["length"])
        n[cell] += 1
        correct[cell] += right(row)
    with np.errstate(invalid="ignore"):
        return lengths, depths, correct / n, n


def heat_map(run: Run, title: str, path: Path | str, native: Run | None = None) -> Path:
    """Accuracy by length and depth; with ``native``, the difference from it (red: lost)."""
    lengths, depths, values, n = grid(run)
    if native is not None:
        other_lengths, other_depths, reference, _ = grid(native)
        if (lengths, depths) != (other_lengths, other_depths):
            raise ValueError(f"{title}: the two runs have different lengths or depths")
        values = values - reference
    figure, axes = plt.subplots(figsize=(1.6 + 1.1 * len(lengths), 1.6 + 0.6 * len(depths)), layout="constrained")
    scale = {"cmap": "RdYlGn", "vmin": 0, "vmax": 1} if native is None else {"cmap": "RdBu", "vmin": -1, "vmax": 1}
    image = axes.imshow(values, aspect="auto", **scale)
    for (y, x), value in np.ndenumerate(values):
        if n[y, x]:
            axes.text(
                x, y, f"{value:+.2f}" if native is not None else f"{value:.2f}", ha="center", va="center", fontsize=9
            )
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("depth of the fact")
    axes.set_title(title)
    figure.colorbar(image, ax=axes, label="accuracy" if native is None else "accuracy minus native's")
    return _save(figure, path)


def accuracy_by_length(runs: dict[str, Run], path: Path | str, confidence: float = 0.95) -> Path:
    """Accuracy of each run over length, with Wilson intervals."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for place, (name, run) in enumerate(runs.items()):
        lengths = sorted({row["length"] for row in run.rows})
        shares, below, above = [], [], []
        for length in lengths:
            answers = [right(row) for row in run.rows if row["length"] == length]
            low, high = proportion_confint(sum(answers), len(answers), alpha=1 - confidence, method="wilson")
            share = sum(answers) / len(answers)
            shares.append(share)
            below.append(max(0.0, share - low))
            above.append(max(0.0, high - share))
        shift = 1 + 0.02 * (place - (len(runs) - 1) / 2)  # side by side, so that intervals can be told apart
        axes.errorbar(
            [length * shift for length in lengths],
            shares,
            yerr=[below, above],
            marker="o",
            capsize=3,
            label=name,
            linewidth=1,
        )
    ticks = sorted({row["length"] for run in runs.values() for row in run.rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(length) for length in ticks])
    axes.minorticks_off()
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel(f"accuracy, {confidence:.0%} interval")
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
        axes.text(left, y, f"{-left} ", ha="right", va="center", fontsize=8)
        axes.text(gained, y, f" {gained}", ha="left", va="center", fontsize=8)
    axes.axvline(0, color=KEPT, linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlabel("answers that differ from native's")
    axes.legend(fontsize=8, loc="lower right")
    return _save(figure, path)


def _save(figure: Figure, path: Path | str) -> Path:
    path = Path(path)
    with atomic_open(path) as stream:
        figure.savefig(
            stream, format=path.suffix.lstrip(".") or "svg", metadata={"Date": None} if path.suffix == ".svg" else None
        )
    plt.close(figure)
    return path
