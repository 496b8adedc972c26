"""Pictures of a tuning run: what a device gives against what a user gets, accuracy against memory, a curve an axis."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

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
    """
    plt = _pyplot()
    wanted = ("output_tok_s_per_device", "output_tok_s_per_user")
    rows = [row for row in result["rows"] if all(row.get(name) is not None for name in wanted)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    for row in rows:
        color, valid = COLORS[row["axis"]], row["status"] == "valid"
        style = {"marker": "*" if row["axis"] is None else "o", "s": 170 if row["axis"] is None else 45}
        style |= {"facecolors": color if valid else "none", "edgecolors": color}
        left.scatter(row["output_tok_s_per_user"], row["output_tok_s_per_device"], zorder=3, **style)
        if row.get("accuracy") is not None and row.get("kv_bytes_allocated") is not None:
            right.scatter(_memory(row), row["accuracy"], zorder=3, **(style | {"facecolors": color}))
    _labels(left, [(row["output_tok_s_per_user"], row["output_tok_s_per_device"], row["name"]) for row in rows])
    valid = [(row["output_tok_s_per_user"], row["output_tok_s_per_device"]) for row in rows if row["status"] == "valid"]
    left.plot(*zip(*front(valid)), color="#bbbbbb", zorder=1, linewidth=1)
    left.set(xlabel="output tok/s a user (1000 / TPOT p50)", ylabel="output tok/s a device")
    label = ", emulated" if result["speed_label"] == "emulated" else ""
    left.set_title(f"speed (up and right is better){label}", fontsize=10)
    told: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        if row.get("accuracy") is not None and row.get("kv_bytes_allocated") is not None:
            told.setdefault((round(_memory(row), 1), row["accuracy"]), []).append(row["name"])
    texts = {spot: names[0] if len(names) == 1 else f"{len(names)} settings" for spot, names in told.items()}
    _labels(right, [(x, y, text) for (x, y), text in texts.items()])
    right.set(xlabel="weights + KV cache + activation peak, MiB", ylabel="accuracy of the probe")
    right.set_title("accuracy against memory (up and left is better)", fontsize=10)
    right.set_ylim(-0.05, 1.08)
    for axis in (left, right):
        axis.margins(x=0.18, y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    used = {row["axis"] for row in rows}
    handles = [
        plt.Line2D([], [], linestyle="", marker="o", color=color, label=axis or "baseline")
        for axis, color in COLORS.items()
        if axis in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return _svg(plt, figure)


def _memory(row: Mapping[str, Any]) -> float:
    return (row["weight_bytes"] + row["kv_bytes_allocated"] + (row["activation_peak_bytes"] or 0)) / MIB


def _labels(axis, points: list[tuple[float, float, str]]) -> None:
    """Names beside the points, moved apart where two points are close together."""
    placed: list[tuple[float, float]] = []
    if not points:
        return
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    wide, high = (max(xs) - min(xs)) or 1, (max(ys) - min(ys)) or 1
    for x, y, name in sorted(points, key=lambda point: -point[1]):
        shift = 0.0
        while any(
            abs(x - other) < 0.22 * wide and abs(y / high - shift / 100 - spot) < 0.035 for other, spot in placed
        ):
            shift += 3.5
        placed.append((x, y / high - shift / 100))
        leader = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6} if shift else None
        style = {"xytext": (9, 3 - 3.0 * shift), "textcoords": "offset points", "fontsize": 7, "va": "center"}
        axis.annotate(name, (x, y), arrowprops=leader, **style)


def knees_svg(result: Mapping[str, Any]) -> str:
    """One panel an axis with a curve: median and range of the repeats against the setting, the knee marked."""
    plt = _pyplot()
    axes = [name for name, knee in result["knees"].items() if knee["status"] != "too_few_points"] or ["none"]
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
        style = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.2, "color": COLORS.get(name)}
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
