"""``python3 -m pipeline diff [REVISION]``: what the working tree's figures have become since a revision.

``dvc metrics diff`` subtracts whatever stands under one name.  Here a change is told only where both sides were
measured alike: accuracy on the same questions, speed under the same conditions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.bench import key
from pipeline.errors import Unreadable
from pipeline.files import read_json
from pipeline.report.columns import binary
from pipeline.report.table import ordered

METRICS = Path("metrics")
KINDS = ("variants", "evals", "bench")
SPEEDS = {"output_tok_s": "output tok/s", "ttft_ms_p50": "TTFT p50 ms", "tpot_ms_p50": "TPOT p50 ms"}
MEMORY = {
    "weight_bytes": ("weights", binary),
    "kv_bytes_per_token": ("KV a token", binary),
    "kv_capacity_tokens": ("KV capacity tokens", "{:,.0f}".format),
    "activation_peak_bytes": ("activation peak", binary),
}
Side = dict[str, dict[str, Any]]
"""Of one variant: kind of metrics -> content."""


def main(argv: list[str]) -> int:
    """Print, as Markdown, every figure that differs between a git revision and the working tree."""
    parser = argparse.ArgumentParser(prog="python3 -m pipeline diff", description=main.__doc__)
    parser.add_argument("revision", nargs="?", default="HEAD", help="e.g. main (default: HEAD)")
    revision = parser.parse_args(argv).revision
    print("\n".join(markdown(revision, committed(revision), here())))
    return 0


def here() -> dict[str, Side]:
    """The working tree's metrics by variant."""
    paths = [path for kind in KINDS for path in (METRICS / kind).glob("*.json")]
    return by_variant({str(path): read_json(path, finite=True) for path in paths})


def committed(revision: str) -> dict[str, Side]:
    """The metrics of a revision by variant.  Raises :class:`Unreadable` for one that git does not know."""
    folders = [f"{METRICS}/{kind}/" for kind in KINDS]
    names = _git("ls-tree", "-r", "--name-only", revision, "--", *folders).splitlines()
    return by_variant({name: json.loads(_git("show", f"{revision}:./{name}")) for name in names})


def by_variant(files: dict[str, dict[str, Any]]) -> dict[str, Side]:
    """``metrics/<kind>/<variant>.json`` -> content, as variant -> kind -> content."""
    found: dict[str, Side] = {}
    for name, content in files.items():
        found.setdefault(Path(name).stem, {})[Path(name).parent.name] = content
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Unreadable(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def markdown(revision: str, before: dict[str, Side], after: dict[str, Side]) -> list[str]:
    """Lines of a table of what differs, and below it why some of that is no change."""
    lines, reasons = [f"| variant | figure | {revision} | here | change |", "|---|---|---:|---:|---:|"], []
    for name in ordered(before.keys() | after.keys()):
        sides = [side.get(name, {}) for side in (before, after)]
        if not all(kind in side for side in sides for kind in KINDS):
            reasons.append(f"- {name}: only {revision if name in before else 'here'}, or measured in part on one side")
            continue
        for figure, values, change, reason in differences(*sides):
            lines.append(f"| {name} | {figure} | {' | '.join(values)} | {change} |")
            if reason and f"- {name}: {reason}" not in reasons:
                reasons.append(f"- {name}: {reason}")
    return [*lines, "", *reasons]


def differences(before: Side, after: Side) -> list[tuple[str, list[str], str, str | None]]:
    """(figure, its two values, change, why there is none) of every figure of one variant that differs."""
    rows = [side["variants"] for side in (before, after)]
    found = []

    def tell(
        name: str, figure: str, show: Callable[[Any], str], change: Callable[[float, float], str], reason: str | None
    ) -> None:
        values = [row.get(name) for row in rows]
        if values[0] == values[1]:
            return
        told = "not comparable" if reason else "—" if None in values else change(*values)
        found.append((figure, ["—" if value is None else show(value) for value in values], told, reason))

    questions = _other_questions(before["evals"], after["evals"])
    tell("accuracy", "accuracy", "{:.3f}".format, lambda a, b: f"{b - a:+.3f}", questions)
    speed = key.compare(before["bench"], after["bench"])
    for name, figure in SPEEDS.items():
        between = (speed["ranges"] or {}).get(name)
        tell(name, figure, "{:.1f}".format, lambda a, b: _percent(a, b) + _range(between), speed["reason"])
    for name, (figure, show) in MEMORY.items():
        tell(name, figure, show, _percent, None)
    return found


def _percent(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else "—"


def _range(ratios: list[float] | None) -> str:
    """The lowest and highest change between any two repeats: what a change of medians is worth."""
    return "" if ratios is None else " ({:+.1%} to {:+.1%})".format(*(ratio - 1 for ratio in ratios))


def _other_questions(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    for side in (before, after):
        if side["status"] != "valid":
            return f"an evaluation is {side['status']}: {side['reason']}"
    return None if before["dataset_key"] == after["dataset_key"] else "accuracy is of other questions"
