"""The comparison table as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from pipeline.report.columns import COLUMNS, SPEED, cell, speed_mark

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


REPLAY = (
    ("goodput_requests_s", "goodput, requests/s", "{:.2f}"),
    ("goodput_fraction", "requests within the limits", "{:.0%}"),
    ("ttft_ms_p50", "TTFT p50 ms", "{:.0f}"),
    ("ttft_ms_p99", "TTFT p99 ms", "{:.0f}"),
    ("tpot_ms_p50", "TPOT p50 ms", "{:.1f}"),
    ("e2el_ms_p50", "whole answer p50 ms", "{:.0f}"),
    ("output_tok_s_per_user", "tok/s a user", "{:.1f}"),
    ("output_tok_s_per_device", "output tok/s a device", "{:.0f}"),
    ("prefix_hit_rate", "prompt tokens from the prefix cache", "{:.0%}"),
)


def replay_markdown(rows: Rows) -> str:
    """The replayed trace, one line a variant; empty where no variant replayed one."""
    names = [name for name in ordered(rows) if "trace_status" in rows[name]]
    if not names:
        return ""
    lines = ["| variant | " + " | ".join(header for _, header, _ in REPLAY) + " |", "|---|" + "---:|" * len(REPLAY)]
    for name in names:
        row = rows[name]
        mark = " (invalid)" if row["trace_status"] != "valid" else speed_mark(row)
        cells = [_shown(row.get(f"trace_{key}"), form) for key, _, form in REPLAY]
        cells[0] += mark
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _shown(value: float | None, form: str) -> str:
    return "—" if value is None else form.format(value)


def as_csv(rows: Rows) -> str:
    """The same rows unrounded, for `dvc plots` and spreadsheets; a missing figure is an empty field.

    ``label`` is the variant with the mark of its speed, for a plot of speeds; equal ``speed_key``: equal conditions.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["variant", "label", *(column.key for column in COLUMNS), "speed", "speed_key"])
    for name in ordered(rows):
        row = rows[name]
        figures = [row.get(column.key) for column in COLUMNS]
        writer.writerow([name, name + speed_mark(row), *figures, row.get("speed"), row.get("speed_key")])
    return stream.getvalue()


def headline(rows: Rows) -> dict[str, Any]:
    """Flat and small, for `dvc exp show`, which needs unique names: ``fp8_auto_accuracy`` and so on.

    A name has no room for a mark, so a speed that may not be compared is left out.
    """
    keys = ("accuracy", "output_tok_s", "weight_bytes", "kv_capacity_tokens")
    flat = {
        f"{name.replace('-', '_')}_{key}": None if key in SPEED and speed_mark(rows[name]) else rows[name].get(key)
        for name in ordered(rows)
        for key in keys
    }
    return flat | {"variants": len(rows), "invalid": sum(row["status"] != "valid" for row in rows.values())}


def ordered(rows: Iterable[str]) -> list[str]:
    """Variant names in the order in which people read them."""
    return sorted(rows, key=lambda name: (not name.startswith("native-"), name))
