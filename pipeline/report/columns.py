"""The columns of the comparison table: one place says what a row holds, how it reads, and which direction is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def binary(value: float) -> str:
    """Bytes for a reader: ``6.01 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.3f} TiB"


@dataclass(frozen=True)
class Column:
    """``better`` is ``higher`` or ``lower``, or None for a column that is not ranked."""

    key: str
    header: str
    show: Callable[[Any], str]
    better: str | None = None


COLUMNS = (
    Column("status", "status", str),
    Column("verdict", "against native", str),
    Column("accuracy", "accuracy", "{:.3f}".format, "higher"),
    Column("kl_to_native", "KL to native, nats", "{:.1e}".format, "lower"),
    Column("output_tok_s", "output tok/s", "{:.0f}".format, "higher"),
    Column("ttft_ms_p50", "TTFT p50 ms", "{:.0f}".format, "lower"),
    Column("weight_bytes", "weights", binary, "lower"),
    Column("kv_bytes_per_token", "KV a token", binary, "lower"),
    Column("kv_capacity_tokens", "KV capacity tokens", "{:,.0f}".format, "higher"),
    Column("kv_scales", "KV scales", str),
    Column("state_bytes_per_sequence", "state a sequence", binary, "lower"),
    Column("activation_peak_bytes", "activation peak", binary, "lower"),
)


SPEED = ("output_tok_s", "ttft_ms_p50")


def cell(column: Column, row: dict[str, Any]) -> str:
    """The text of one cell; a figure that could not be read shows as a dash, never as zero."""
    value = row.get(column.key)
    if value is None:
        return "—"
    return column.show(value) + (speed_mark(row) if column.key in SPEED else "")


def speed_mark(row: dict[str, Any]) -> str:
    """What stands beside a speed that may not be compared with its neighbours; nothing beside one that may."""
    return mark(row.get("speed", "measured"), "measured")


def mark(label: str, usual: str) -> str:
    """`` (not comparable)`` and the like behind a name or a figure; nothing where the label is the ``usual`` one."""
    return "" if label == usual else f" ({label.replace('_', ' ')})"
