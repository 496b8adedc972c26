"""Writes everything that is derived from what the variants measured: Markdown, CSV, pictures, headline."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import Unreadable
from pipeline.evals import figures
from pipeline.evals.runs import SAMPLES, load_run
from pipeline.files import read_json, write_json, write_text
from pipeline.report.damage_figure import damage_svg
from pipeline.report.figures import comparison_svg
from pipeline.report.table import Rows, as_csv, headline, markdown, ordered

VARIANTS, PAIRS, COMPARISONS = Path("metrics/variants"), Path("metrics/pairs"), Path("metrics/comparisons")
QUANTIZE = Path("metrics/quantize")


def read_rows(folder: Path = VARIANTS) -> Rows:
    """Every row, by variant name.  Raises :class:`Unreadable` when there is none."""
    rows = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    if not rows:
        raise Unreadable(f"{folder}: no variant has been measured; `python3 -m pipeline repro` does")
    return rows


def build(rows: Rows, target: Path = Path("metrics")) -> None:
    """Write report.md, comparison.csv, headline.json and the pictures into ``target``."""
    notes = [f"- {name}: {row['status']}, {row['reason']}" for name, row in rows.items() if row.get("reason")]
    notes += [f"- {name}: its speed is invalid, {row['speed_reason']}" for name, row in rows.items() if row.get("speed_reason")]
    text = ["# Comparison of variants", "", markdown(rows), "![comparison](comparison.svg)", ""]
    text += ["![accuracy by length](accuracy_by_length.svg)", "", "![answers lost and won](flips.svg)", ""]
    text += ["What re-encoding did to the weights:", "", "![SQNR by layer](damage_by_layer.svg)", ""]
    if any(row.get("speed") == "emulated" for row in rows.values()):
        text += [
            "Speed here is that of reference kernels standing in for kernels that this platform lacks: it ranks nothing across "
            "quantizations.  Accuracy and memory are not affected.",
            "",
        ]
    if notes:
        text += ["## Notes", "", *notes, ""]
    write_text(target / "report.md", "\n".join(text))
    write_text(target / "comparison.csv", as_csv(rows))
    write_text(target / "comparison.svg", comparison_svg(rows))
    write_json(target / "headline.json", headline(rows))


def build_evaluation_pictures(rows: Rows, target: Path = Path("metrics")) -> None:
    """Write accuracy_by_length.svg and flips.svg: of every variant in ``rows`` whose answers are here."""
    names = [name for name in ordered(rows) if (PAIRS / name / SAMPLES).exists()]
    figures.accuracy_by_length({name: load_run(PAIRS / name / SAMPLES) for name in names}, target / "accuracy_by_length.svg")
    comparisons = {path.stem: read_json(path) for path in sorted(COMPARISONS.glob("*.json"))}
    figures.flips({name: comparisons[name] for name in ordered(comparisons)}, target / "flips.svg")


def build_damage_picture(rows: Rows, target: Path = Path("metrics"), folder: Path = QUANTIZE) -> None:
    """Write damage_by_layer.svg: the damage reports of the quantizations in ``rows``.  Raises :class:`Unreadable` for an absent one."""
    quants = dict.fromkeys(name.rpartition("-")[0] for name in ordered(rows))
    reports = {quant: read_json(folder / f"{quant}.json")["damage"] for quant in quants}
    write_text(target / "damage_by_layer.svg", damage_svg(reports))
