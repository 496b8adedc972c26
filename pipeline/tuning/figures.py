"""Pictures of a tuning run: what a device gives against what a user gets, accuracy against memory, a curve an axis."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

from pipeline.tuning.settings import in_order

COLORS = {
    None: "#222222",
    "block_size": "#3b6ea5",
    "prefix_match_unit": "#7a5195",
    "kv": "#2a9d8f",
    "max_num_seqs": "#d1495b",
    "max_num_batched_tokens": "#e08e0b",
    "long_prefill_token_threshold": "#8a6d3b",
    "quant": "#9a9a9a",
}
OTHER = "#555555"
MIB = 1 << 20


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "tuning", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    return plt


def _svg(plt, figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    plt.close(figure)
    return stream.getvalue()


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other exceeds in both coordinates, by the first."""
    best, kept = -math.inf, []
    for x, y in sorted(points, reverse=True):
        if y > best:
            best = y
            kept.append((x, y))
    return kept[::-1]


def pareto_svg(result: Mapping[str, Any]) -> str:
    """Left: tok/s a device against tok/s a user, with the front of what compares.  Right: accuracy against memory.

    Hollow: not comparable in speed (emulated kernels of another quantization) or invalid; shown, never on the front.
    Points carry the numbers of the list beside them: names would cover each other.
    """
    plt = _pyplot()
    wanted = ("output_tok_s_per_device", "output_tok_s_per_user")
    rows = [row for row in result["rows"] if all(row.get(name) is not None for name in wanted)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    speeds, memories, handles = [], [], []
    for number, row in enumerate(rows, 1):
        color, valid = COLORS.get(row["axis"], OTHER), row["status"] == "valid"
        shape = "*" if row["axis"] is None else "o"
        style = {"marker": shape, "s": 170 if row["axis"] is None else 45, "edgecolors": color, "zorder": 3}
        x, y = row["output_tok_s_per_user"], row["output_tok_s_per_device"]
        left.scatter(x, y, facecolors=color if valid else "none", **style)
        speeds.append((x, y, number))
        if row.get("accuracy") is not None and row.get("kv_bytes_allocated") is not None:
            right.scatter(_memory(row), row["accuracy"], facecolors=color, **style)
            memories.append((_memory(row), row["accuracy"], number))
        label = f"{number}  {row['name']}"
        handles.append(
            plt.Line2D([], [], linestyle="", marker=shape, color=color, label=label, fillstyle="full" if valid else "none")
        )
    valid = [(row["output_tok_s_per_user"], row["output_tok_s_per_device"]) for row in rows if row["status"] == "valid"]
    left.plot(*zip(*front(valid)), color="#bbbbbb", zorder=1, linewidth=1)
    left.set(xlabel="output tok/s a user (1000 / TPOT p50)", ylabel="output tok/s a device")
    label = ", emulated" if result["speed_label"] == "emulated" else ""
    left.set_title(f"speed (up and right is better){label}", fontsize=10)
    left.margins(x=0.1, y=0.12)
    right.set(xlabel="weights + KV cache + activation peak, MiB", ylabel="accuracy of the probe", ylim=(-0.05, 1.08))
    right.set_title("accuracy against memory (up and left is better)", fontsize=10)
    right.margins(x=0.1)
    for axis, points in ((left, speeds), (right, memories)):
        _number_points(axis, points)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    return _svg(plt, figure)


def _memory(row: Mapping[str, Any]) -> float:
    return (row["weight_bytes"] + row["kv_bytes_allocated"] + (row["activation_peak_bytes"] or 0)) / MIB


def _number_points(axis, points: list[tuple[float, float, int]]) -> None:
    """Numbers beside the points; points that all but touch share one label."""
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    wide, high = right - left, top - bottom
    groups: list[list[tuple[float, float, int]]] = []
    for x, y, number in sorted(points):
        touching = [
            group for group in groups if any(abs(x - a) < 0.05 * wide and abs(y - b) < 0.05 * high for a, b, _ in group)
        ]
        merged = [*(point for group in touching for point in group), (x, y, number)]
        groups = [group for group in groups if group not in touching] + [merged]
    for group in groups:
        inner = max if group[0][0] < (left + right) / 2 else min
        spot, inwards = (inner(x for x, _, _ in group), max(y for _, y, _ in group)), 1 if inner is max else -1
        axis.annotate(
            ranges([number for _, _, number in group]), spot, xytext=(6 * inwards, 6), textcoords="offset points",
            fontsize=8, ha="left" if inwards > 0 else "right",
        )  # fmt: skip


def ranges(numbers: list[int]) -> str:
    """``1-3, 5`` for 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def knees_svg(result: Mapping[str, Any]) -> str:
    """One panel an axis with a curve: median and range of the repeats against the setting, the knee marked."""
    plt = _pyplot()
    axes = [name for name, knee in in_order(result["knees"]).items() if knee["status"] != "too_few_points"] or ["none"]
    figure, panels = plt.subplots(1, len(axes), figsize=(4.2 * len(axes), 3.6), layout="constrained", squeeze=False)
    baseline = result["rows"][0]
    for panel, name in zip(panels.flat, axes):
        mine = [row for row in result["rows"] if row["axis"] == name and row["status"] == "valid"]
        own = result["baseline"].get(name)
        own = (baseline["effective"] or {}).get(name) if own is None else own
        drawn = [(row["value"], row) for row in mine if row.get("output_tok_s")]
        drawn = sorted(drawn + ([(own, baseline)] if own is not None else []), key=lambda pair: pair[0])
        xs, ys = [max(value, 1) for value, _ in drawn], [row["output_tok_s"] for _, row in drawn]
        low = [row["output_tok_s"] - row["output_tok_s_min"] for _, row in drawn]
        high = [row["output_tok_s_max"] - row["output_tok_s"] for _, row in drawn]
        style = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.2, "color": COLORS.get(name, OTHER)}
        panel.errorbar(xs, ys, yerr=[low, high], **style)
        if own is not None:
            star = {"marker": "*", "markersize": 12, "color": COLORS[None], "zorder": 4}
            panel.plot([max(own, 1)], [baseline["output_tok_s"]], **star)
        knee = result["knees"].get(name, {})
        if knee.get("knee") is not None:
            panel.axvline(max(knee["knee"], 1), color="#999999", linestyle=":", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(xs, [f"{value}" for value, _ in drawn], fontsize=8)
        panel.minorticks_off()
        shown = f"knee at {knee['knee']}" if knee.get("status") == "knee" else knee.get("status", "").replace("_", " ")
        panel.set_title(f"{name}: {shown}", fontsize=9)
        panel.set_ylabel("output tok/s, median and range", fontsize=8)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    return _svg(plt, figure)
