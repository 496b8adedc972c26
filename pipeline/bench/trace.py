"""Traces of real traffic, read from two public layouts and written as the one that ``vllm bench serve`` replays.

* Mooncake, JSON lines: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one id a block of 512
  prompt tokens; equal ids, from the first on, mean an equal prefix).
* BurstGPT, CSV: ``Timestamp`` (s), ``Request tokens``, ``Response tokens``; failed requests have 0 response tokens
  and are left out.  It knows no prefixes, so no two prompts share one.

Prompts are not in either: vllm's ``timed_trace`` data set draws random tokens a block id.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Refused, Unreadable
from pipeline.files import write_text

SEED_SHIFT = 1 << 32
"""Block ids of two seeds never meet: fresh prompts for every repeat, with the same sharing."""
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


@dataclass(frozen=True)
class TraceRequest:
    """One request: arrival in seconds after the first, lengths in tokens, ids of its prompt's blocks."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read(path: Path | str, block_tokens: int) -> list[TraceRequest]:
    """Every request of a trace, by time of arrival; times start at 0.

    Raises :class:`Unreadable` naming file, line and what is wrong with it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: {error}") from None
    rows = _burstgpt(path, text) if _is_csv(text) else _mooncake(path, text, block_tokens)
    if not rows:
        raise Unreadable(f"{path}: holds no request")
    rows.sort(key=lambda row: row[0])
    fresh = 1 + max((block for *_, blocks in rows for block in blocks or ()), default=0)
    requests = []
    for at_s, input_tokens, output_tokens, blocks in rows:
        if blocks is None:  # shares nothing with anybody
            count = math.ceil(input_tokens / block_tokens)
            blocks, fresh = tuple(range(fresh, fresh + count)), fresh + count
        requests.append(TraceRequest(at_s - rows[0][0], input_tokens, output_tokens, tuple(blocks)))
    return requests


def _is_csv(text: str) -> bool:
    return not text.lstrip().startswith(("{", "["))


def _mooncake(path: Path, text: str, block_tokens: int) -> list[tuple]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            row = (
                float(entry["timestamp"]) / 1000,
                int(entry["input_length"]),
                int(entry["output_length"]),
                None if entry.get("hash_ids") is None else tuple(map(int, entry["hash_ids"])),
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise Unreadable(f"{path}, line {number}: {error}") from None
        except KeyError as error:
            raise Unreadable(
                f"{path}, line {number}: has no {error}; wanted are timestamp, input_length, output_length, hash_ids"
            ) from None
        wanted = math.ceil(row[1] / block_tokens)
        if row[3] is not None and len(row[3]) != wanted:
            raise Unreadable(
                f"{path}, line {number}: {len(row[3])} hash_ids for {row[1]} tokens, {wanted} expected at "
                f"{block_tokens} tokens a block (bench.trace_block_tokens)"
            )
        if row[3] and not 0 <= min(row[3]) <= max(row[3]) < SEED_SHIFT:
            raise Unreadable(
                f"{path}, line {number}: hash_ids must be whole numbers from 0 to {SEED_SHIFT - 1}; number the blocks anew"
            )
        rows.append(_checked(path, number, row))
    return rows


def _burstgpt(path: Path, text: str) -> list[tuple]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    rows = []
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        absent = [name for name in BURSTGPT if name not in reader.fieldnames]
        if absent and text.strip():
            raise Unreadable(f"{path}, line 1: has no column {', '.join(absent)}; wanted are {', '.join(BURSTGPT)}")
        for entry in reader:
            at_s, prompt, answer = (entry[name] for name in BURSTGPT)
            row = (float(at_s), int(prompt), int(answer), None)
            if row[2] != 0:
                rows.append(_checked(path, reader.line_num, row))
    except (ValueError, TypeError, csv.Error) as error:
        raise Unreadable(f"{path}, line {reader.line_num}: {error}; wanted are {', '.join(BURSTGPT)}") from None
    return rows


def _checked(path: Path, number: int, row: tuple) -> tuple:
    if row[1] < 1 or row[2] < 1 or not math.isfinite(row[0]):
        raise Unreadable(
            f"{path}, line {number}: a request needs a time and at least one token each way, not {row[:3]}"
        )
    return row


def scaled(
    requests: Sequence[TraceRequest], time_scale: float, length_scale: float, limit: int | None = None
) -> list[TraceRequest]:
    """The first ``limit`` requests with times and lengths multiplied; a length stays at least 1 (output: 2) token."""
    return [
        TraceRequest(
            request.at_s * time_scale,
            max(1, round(request.input_tokens * length_scale)),
            max(2, round(request.output_tokens * length_scale)),
            request.blocks,
        )
        for request in requests[: limit or None]
    ]


def shared_prefixes(
    count: int, prefixes: int, prefix_tokens: int, suffix_tokens: int, output_tokens: int
) -> list[TraceRequest]:
    """``count`` requests, ``prefixes`` prefixes in turn, each request with a continuation of its own.

    Blocks are of ``prefix_tokens``: the first is the prefix.
    """
    pieces = math.ceil(suffix_tokens / prefix_tokens)
    return [
        TraceRequest(
            0.0,
            prefix_tokens + suffix_tokens,
            output_tokens,
            (index % prefixes, *(prefixes + index * pieces + piece for piece in range(pieces))),
        )
        for index in range(count)
    ]


def check_fits(requests: Sequence[TraceRequest], max_model_len: int | None, where: str) -> None:
    """Raise :class:`Refused` when a request is longer than the server takes: dropping it would flatter the figures."""
    longest = max(request.input_tokens + request.output_tokens for request in requests)
    if max_model_len is not None and longest > max_model_len:
        count = sum(request.input_tokens + request.output_tokens > max_model_len for request in requests)
        raise Refused(
            f"{where}: {count} of {len(requests)} requests are longer than the {max_model_len} tokens that the server "
            f"takes, the longest {longest}; set bench.trace_length_scale to {max_model_len / longest:.3g} or less"
        )


def write_timed(requests: Sequence[TraceRequest], path: Path, seed: int, block_tokens: int) -> None:
    """Write what ``--dataset-name timed_trace`` reads, with block ids of this seed's own."""
    lines = []
    spare = max(block for request in requests for block in request.blocks) + 1
    for request in requests:
        needed = math.ceil(request.input_tokens / block_tokens)
        blocks = list(request.blocks[:needed])
        while len(blocks) < needed:  # scaling rounds: a last piece of its own
            blocks.append(spare)
            spare += 1
        entry: dict[str, Any] = {
            "timestamp": request.at_s,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [seed * SEED_SHIFT + block for block in blocks],
        }
        lines.append(json.dumps(entry))
    write_text(path, "\n".join(lines) + "\n")


def describe(requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """What a reader must know of a trace to read its figures."""
    seen: set[tuple[int, ...]] = set()
    shared = 0
    for request in requests:
        prefixes = [request.blocks[: length + 1] for length in range(len(request.blocks))]
        shared += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    blocks = sum(len(request.blocks) for request in requests)
    return {
        "requests": len(requests),
        "duration_s": requests[-1].at_s,
        "input_tokens_mean": sum(request.input_tokens for request in requests) / len(requests),
        "output_tokens_mean": sum(request.output_tokens for request in requests) / len(requests),
        "shared_block_fraction": shared / blocks if blocks else 0.0,
    }
