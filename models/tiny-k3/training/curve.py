"""Draw ``curve.json`` (the runs of train.py, in order) as ``curve.png``: answers, items and hints right against tokens seen.

    python curve.py [FOLDER]        (core environment; another model's folder of the same form, default this one)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

HERE = Path(__file__).resolve().parent
SERIES = {"accuracy_1": "answers", "accuracy_2": "items of ordered recall", "accuracy_3": "hints (half-way, training only)"}


def main(folder: Path = HERE) -> None:
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    seen = 0
    for number, run in enumerate(json.loads((folder / "curve.json").read_text())["runs"]):
        points = [point for point in run["points"] if "loss_0" in point]
        tokens = [(seen + point["tokens"]) / 1e6 for point in points]
        for color, (key, label) in enumerate(SERIES.items()):
            drawn = [(x, point[key]) for x, point in zip(tokens, points) if key in point]
            if drawn:
                upper.plot(*zip(*drawn), color=f"C{color}", label=label if number == 1 or color < 2 and not number else None)
        lower.plot(tokens, [point["loss_0"] for point in points], color="C4", label=None if number else "plain text")
        lower.plot(tokens, [point["loss_1"] for point in points], color="C0", label=None if number else "answers")
        seen += run["points"][-1]["tokens"]
        for axis in (upper, lower):
            axis.axvline(seen / 1e6, color="0.8", linewidth=1)
    upper.set(ylabel="accuracy on training documents", ylim=(0, 1))
    lower.set(xlabel="million tokens seen (vertical lines: end of a run)", ylabel="cross-entropy, nats")
    handles, labels = upper.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    upper.legend(unique.values(), unique.keys(), loc="lower right")
    lower.legend(loc="upper right")
    figure.savefig(folder / "curve.png", dpi=90)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
