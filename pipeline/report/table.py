"""The comparison table as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from pipeline.report.columns import COLUMNS, cell

Rows = dict[str, dict[str, Any]]


def markdown(rows: Rows) -> str:
    """One line a variant, ``native`` first, then by name."""
    lines = [
        "| variant | " + " | ".join(column.header for column in COLUMNS) + " |",
        "|---|" + "|".join("---" if column.better is None else "---:" for column in COLUMNS) + "|",
    ]
    for name in ordered(rows):
        lines.append(f"| {name} | " + " | ".join(cell(column, rows[name]) for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def as_csv(rows: Rows) -> str:
    """The same rows unrounded, for `dvc plots` and spreadsheets; a missing figure is an empty field."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["variant", *(column.key for column in COLUMNS)])
    for name in ordered(rows):
        writer.writerow([name, *(rows[name].get(column.key) for column in COLUMNS)])
    return stream.getvalue()


def headline(rows: Rows) -> dict[str, Any]:
    """Flat and small, for `dvc exp show`, which needs unique names: ``fp8_auto_accuracy`` and so on."""
    keys = ("accuracy", "output_tok_s", "weight_bytes", "kv_capacity_tokens")
    flat = {f"{name.replace('-', '_')}_{key}": rows[name].get(key) for name in ordered(rows) for key in keys}
    return flat | {"variants": len(rows), "invalid": sum(row["status"] != "valid" for row in rows.values())}


def ordered(rows: Iterable[str]) -> list[str]:
    """Variant names in the order in which people read them."""
    return sorted(rows, key=lambda name: (not name.startswith("native-"), name))
