"""Writes everything that is derived from what the variants measured: Markdown, CSV, pictures, headline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import Unreadable
from pipeline.evals import figures
from pipeline.files import read_json, write_json, write_text
from pipeline.report import accuracy, memory, speed
from pipeline.report.columns import mark
from pipeline.report.damage_figure import damage_svg
from pipeline.report.figures import comparison_svg, memory_svg
from pipeline.report.table import Rows, as_csv, headline, markdown, ordered, replay_markdown

VARIANTS, EVALUATIONS = Path("metrics/variants"), Path("metrics/evals")
COMPARISONS, QUANTIZE = Path("metrics/comparisons"), Path("metrics/quantize")
DAMAGE = ["## What re-encoding did to the weights", "", "![SQNR by layer](damage_by_layer.svg)", ""]
EMULATED = (
    "Speed here is that of reference kernels standing in for kernels that this platform lacks: it ranks nothing across "
    "quantizations.  Accuracy and memory are not affected."
)


def read_rows(folder: Path = VARIANTS) -> Rows:
    """Every row, by variant name.  Raises :class:`Unreadable` when there is none, or for a file that holds none."""
    rows = {path.stem: read_json(path, finite=True) for path in sorted(folder.glob("*.json"))}
    if not rows:
        raise Unreadable(f"{folder}: no variant has been measured; `python3 -m pipeline repro` does")
    for name, row in rows.items():
        if not isinstance(row, dict) or "status" not in row:
            raise Unreadable(f"{folder / name}.json: is no row of the table; `dvc repro compare@{name}` writes it")
    return rows


def read_comparisons(folder: Path = COMPARISONS) -> dict[str, dict[str, Any]]:
    """Every variant's comparison with native, in the order of the table."""
    names = ordered(path.stem for path in folder.glob("*.json"))
    return {name: read_json(folder / f"{name}.json", finite=True) for name in names}


def build_all() -> Rows:
    """Write the whole report from what lies under metrics/; the rows are returned.  Raises :class:`Unreadable`."""
    rows, comparisons = read_rows(), read_comparisons()
    build(rows, comparisons=comparisons)
    build_pictures(rows, comparisons)
    build_damage_picture(rows)
    return rows


def build(rows: Rows, target: Path = Path("metrics"), comparisons: dict[str, dict[str, Any]] | None = None) -> None:
    """Write report.md, comparison.csv, headline.json and the picture of the table into ``target``."""
    notes = [f"- {name}: {row['status']}, {row['reason']}" for name, row in rows.items() if row.get("reason")]
    notes += [
        f"- {name}: its speed is {row['speed'].replace('_', ' ')}, {row['speed_reason']}"
        for name, row in rows.items()
        if row.get("speed_reason")
    ]
    notes += [
        f"- {name}: against native {block['verdict'].replace('_', ' ')}, {block['reason']}"
        for name, block in (comparisons or {}).items()
        if block.get("verdict") in ("not_comparable", "not_gateable", "invalid")
    ]
    text = ["# Comparison of variants", ""]
    if replay := replay_markdown(rows):
        text += ["## Real traffic, replayed at its own times", "", replay, "## The same model under synthetic load", ""]
    text += [markdown(rows), "![comparison](comparison.svg)", ""]
    if any(row.get("speed") == "emulated" for row in rows.values()):
        text += [EMULATED, ""]
    text += [line for part in (accuracy, speed, memory) for line in part.section(comparisons or {})] + DAMAGE
    if notes:
        text += ["## Notes", "", *notes, ""]
    write_text(target / "report.md", "\n".join(text))
    write_text(target / "comparison.csv", as_csv(rows))
    write_text(target / "comparison.svg", comparison_svg(rows))
    write_json(target / "headline.json", headline(rows))


def build_pictures(rows: Rows, comparisons: dict[str, dict[str, Any]], target: Path = Path("metrics")) -> None:
    """Write memory.svg, heat_maps.svg, flips.svg, and accuracy_by_length.svg of every variant whose evaluation is here."""
    files = {name: EVALUATIONS / f"{name}.json" for name in ordered(rows)}
    marks = {name: mark(comparisons.get(name, {}).get("status", "valid"), "valid") for name in files}
    evaluations = {name + marks[name]: read_json(path) for name, path in files.items() if path.exists()}
    figures.accuracy_by_length(evaluations, target / "accuracy_by_length.svg")
    figures.heat_maps(comparisons, target / "heat_maps.svg")
    figures.flips(comparisons, target / "flips.svg")
    write_text(target / "memory.svg", memory_svg(comparisons))


def build_damage_picture(rows: Rows, target: Path = Path("metrics"), folder: Path = QUANTIZE) -> None:
    """Write damage_by_layer.svg: the damage reports of the quantizations in ``rows``.  Raises :class:`Unreadable` for an absent one."""
    quants = dict.fromkeys(name.rpartition("-")[0] for name in ordered(rows))
    reports = {quant: read_json(folder / f"{quant}.json")["damage"] for quant in quants}
    write_text(target / "damage_by_layer.svg", damage_svg(reports))
