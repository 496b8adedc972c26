"""Writes everything that is derived from metrics/variants: Markdown, CSV, picture, headline."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import Unreadable
from pipeline.files import read_json, write_json, write_text
from pipeline.report.figures import comparison_svg
from pipeline.report.table import Rows, as_csv, headline, markdown

VARIANTS = Path("metrics/variants")


def read_rows(folder: Path = VARIANTS) -> Rows:
    """Every row, by variant name.  Raises :class:`Unreadable` when there is none."""
    rows = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    if not rows:
        raise Unreadable(f"{folder}: no variant has been measured; `python3 -m pipeline repro` does")
    return rows


def build(rows: Rows, target: Path = Path("metrics")) -> None:
    """Write report.md, comparison.csv, comparison.svg and headline.json into ``target``."""
    notes = [f"- {name}: {row['status']}, {row['reason']}" for name, row in rows.items() if row.get("reason")]
    notes += [f"- {name}: its speed is invalid, {row['speed_reason']}" for name, row in rows.items() if row.get("speed_reason")]
    text = ["# Comparison of variants", "", markdown(rows), "![comparison](comparison.svg)", ""]
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
