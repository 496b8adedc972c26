"""tuning/ablation.{json,csv,md} and its pictures."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.files import write_json, write_text
from pipeline.report.columns import binary
from pipeline.tuning.figures import knees_svg, pareto_svg
from pipeline.tuning.settings import in_order

CSV = (
    "name", "axis", "value", "status", "reason", "coincides_with", "output_tok_s", "output_tok_s_min",
    "output_tok_s_max", "difference_pct", "low_pct", "high_pct", "output_tok_s_per_device", "output_tok_s_per_user",
    "ttft_ms_p50", "tpot_ms_p50", "e2el_ms_p50", "goodput_requests_s", "preemptions", "kv_cache_usage_max", "block_size",
    "num_blocks", "kv_capacity_tokens", "waste_tokens", "waste_bytes", "waste_fraction", "kv_share", "weight_bytes",
    "activation_peak_bytes", "accuracy", "degenerate", "same_answers_as_baseline", "usd_per_million_output_tokens",
    "energy_j_per_output_token",
)  # fmt: skip


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Everything that is read of a tuning run, into ``folder``."""
    write_json(folder / "ablation.json", result)
    write_text(folder / "ablation.csv", as_csv(result))
    write_text(folder / "ablation.md", markdown(result))
    write_text(folder / "pareto.svg", pareto_svg(result))
    write_text(folder / "knees.svg", knees_svg(result))


def as_csv(result: Mapping[str, Any]) -> str:
    """The rows unrounded; an empty field is a figure that could not be measured or not be compared."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(result["rows"])
    return stream.getvalue()


def change(row: Mapping[str, Any]) -> str:
    """``+4.1 % [+1.0, +7.3]``, or why there is none."""
    if row["axis"] is None:
        return "baseline"
    if row["coincides_with"]:
        return f"same engine as {row['coincides_with']}"
    if row["status"] == "not_comparable":
        return "not comparable"
    if row["difference_pct"] is None:
        return row["status"]
    return "{difference_pct:+.1f} % [{low_pct:+.1f}, {high_pct:+.1f}]".format(**row)


COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("setting", lambda row: row["name"]),
    ("effective block", lambda row: _number((row["effective"] or {}).get("block_size"), "{:.0f}")),
    ("output tok/s a device", lambda row: _number(row.get("output_tok_s_per_device"), "{:.0f}")),
    ("against the baseline", change),
    ("tok/s a user", lambda row: _number(row.get("output_tok_s_per_user"), "{:.1f}")),
    ("TTFT p50 ms", lambda row: _number(row.get("ttft_ms_p50"), "{:.0f}")),
    ("TPOT p50 ms", lambda row: _number(row.get("tpot_ms_p50"), "{:.1f}")),
    ("KV capacity tokens", lambda row: _number(row.get("kv_capacity_tokens"), "{:,.0f}")),
    ("KV use at most", lambda row: _number(row.get("kv_cache_usage_max"), "{:.0%}")),
    ("preemptions", lambda row: _number(row.get("preemptions"), "{:.0f}")),
    ("activation peak", lambda row: _bytes(row.get("activation_peak_bytes"))),
    ("accuracy probe", lambda row: _number(row.get("accuracy"), "{:.2f}")),
)


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else form.format(value)


def _bytes(value: float | None) -> str:
    return "—" if value is None else binary(value)


def _table(headers: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(headers) + " |", "|---|" + "---:|" * (len(headers) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def markdown(result: Mapping[str, Any]) -> str:
    """The tuning report."""
    found, rows = result["recommendation"], result["rows"]
    told, second = _setting(found["moved"]), found["runner_up"]
    lines = [f"# Tuning {result['variant']}, one setting at a time", ""]
    if found["verdict"] == "beats":
        lines.append(f"**Recommended: {told}.** In a fresh paired run it {found['statement']}.")
    else:
        lines.append(f"**Keep the default.** Best candidate: {told}; {found['statement']}.")
    if second:
        lines.append(f"Runner-up: {_setting(second['moved'])}; {second['statement']}.")
    lines += [
        "",
        f"Differences are of {result['objective']} against the baseline `{result['baseline']['name']}`, with "
        f"{result['confidence']:.0%} Welch intervals over repeats.  Points are measured one after the other: drift of "
        "the machine is in them, and only the paired run is free of it.",
        "",
        *_table([name for name, _ in COLUMNS], [[show(row) for _, show in COLUMNS] for row in rows]),
    ]
    if result["speed_label"] == "emulated":
        lines += ["Speed is that of emulated kernels: it compares settings of this variant, never quantizations.", ""]
    lines += ["![pareto](pareto.svg)", "", "## Knees", "", f"Method: {result['knee_method']}.", ""]
    lines += _table(
        ["axis", "knee", "best median at", "Kneedle's point", "points"],
        [
            [axis, str(knee["knee"]) if knee["status"] == "knee" else knee["status"], *(
                "—" if knee[name] is None else str(knee[name]) for name in ("best", "kneedle", "points"))]
            for axis, knee in in_order(result["knees"]).items()
        ],
    )  # fmt: skip
    lines += ["![knees](knees.svg)", "", "The star is the baseline, the dotted line the knee.", "", "## Block size", ""]
    lines += [
        "The engine rounds a requested block up until an attention page holds a state page.  Waste is the empty part "
        "of one request's last block; share is the cache's of weights, cache and activation peak.",
        "",
    ]
    lines += _table(
        [
            *("requested", "effective", "same engine as", "blocks", "capacity, tokens"),
            *("waste a request", "of blocks held", "KV share"),
        ],
        [
            [
                "(default)" if row["axis"] is None else str(row["value"]),
                _number((row["effective"] or {}).get("block_size"), "{:.0f}"),
                row["coincides_with"] or "—",
                _number((row["effective"] or {}).get("num_blocks"), "{:.0f}"),
                _number(row.get("kv_capacity_tokens"), "{:,.0f}"),
                _waste(row),
                _number(row.get("waste_fraction"), "{:.0%}"),
                _number(row.get("kv_share"), "{:.0%}"),
            ]
            for row in rows
            if row["axis"] in (None, "block_size")
        ],
    )
    lines += _prefixes(rows)
    notes = [f"- {row['name']}: {row['status']}, {row['reason']}" for row in rows if row["reason"]]
    along = [row for row in rows if row["also_moved"] and not row["coincides_with"]]
    notes += [f"- {row['name']} also moved {_moved(row)}" for row in along]
    if notes:
        lines += ["## Notes", "", *notes, ""]
    return "\n".join(lines)


def _prefixes(rows: list[Mapping[str, Any]]) -> list[str]:
    """Tokens of a shared prefix that came from the cache, by its length."""
    probed = [row for row in rows if row.get("prefix_hits")]
    if not probed:
        return []
    lengths = [str(hit["prefix_tokens"]) for hit in probed[0]["prefix_hits"]]
    parallel = probed[0]["parallel_hits"]
    together = f"{parallel['answers']} answers to {parallel['prompt_tokens']}"
    hits = [
        [
            row["name"],
            *(str(hit["hit_tokens"]) for hit in row["prefix_hits"]),
            "{hit_tokens} of {possible_tokens}".format(**row["parallel_hits"]),
        ]
        for row in probed
    ]
    return [
        "## Shared prefixes",
        "",
        "Tokens served from the prefix cache when a second prompt shares so many tokens with a first one; and when one "
        "request asks for several answers to a prompt of so many.",
        "",
        *_table(["setting", *lengths, together], hits),
    ]


def _setting(moved: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} = {value}" for axis, value in in_order(moved).items()) or "the default"


def _waste(row: Mapping[str, Any]) -> str:
    return "—" if row.get("waste_tokens") is None else f"{row['waste_tokens']} tokens, {_bytes(row['waste_bytes'])}"


def _moved(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} to {value}" for name, value in sorted(row["also_moved"].items()))
