"""Reads the server's log: its end for errors, and the few facts that nothing but the log tells.

A number that comes from a log line always keeps the raw line beside it: log lines change between versions, and some are
wrong for hybrid models (https://github.com/vllm-project/vllm/issues/28228), so nothing is computed from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_BYTES = 4 << 20
TAIL_BYTES = 16_384
ERROR_LINES = 40


def last_lines(path: Path, count: int = ERROR_LINES) -> str:
    """The last ``count`` lines of a log, read from its end: logs can be large.  Empty when there is none."""
    try:
        with open(path, "rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])


def _number(text: str) -> float:
    return float(text.replace(",", ""))


FACTS: dict[str, tuple[re.Pattern[str], Callable[[re.Match[str]], Any]]] = {
    "weights_load_s": (re.compile(r"Loading weights took ([\d.]+) seconds"), lambda m: _number(m[1])),
    "kv_cache_tokens": (re.compile(r"KV cache size: ([\d,]+) tokens"), lambda m: int(_number(m[1]))),
    "max_concurrency": (
        re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.,]+)x"),
        lambda m: _number(m[1]),
    ),
    "attention_block_size": (re.compile(r"Setting attention block size to (\d+) tokens"), lambda m: int(m[1])),
    "kv_scales": (re.compile(r"Using KV cache scaling factor 1\.0"), lambda m: "uncalibrated (scale 1.0)"),
    "query_scales": (
        re.compile(r"Using uncalibrated q_scale|does not provide a q scaling factor"),
        lambda m: "uncalibrated",
    ),
    "attention_backend": (re.compile(r"Using (\S+) (?:attention )?backend(?: out of|\.|$)"), lambda m: m[1]),
}


CAUSES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|Free memory on device"),
        "the GPU's memory did not suffice: see with nvidia-smi who else holds it, or lower max-num-batched-tokens, "
        "max-model-len or the KV pool in hardware.flags (`python3 -m pipeline plan` tells what fits)",
    ),
    (
        re.compile(r"No available memory for the cache blocks|To serve at least one request"),
        "the KV pool is too small for one request of max-model-len tokens: raise kv-cache-memory-bytes or lower "
        "max-model-len in hardware.flags",
    ),
    (
        re.compile(r"can't allocate memory|Cannot allocate memory|std::bad_alloc|^MemoryError", re.MULTILINE),
        "the host's memory did not suffice",
    ),
    (re.compile(r"[Aa]ddress already in use"), "another process took the port in between: start again"),
    (re.compile(r"No space left on device"), "a disk, or /dev/shm, is full"),
)
"""What ends servers most often, and what to do about it."""


def cause(text: str) -> str | None:
    """Why a server ended, by the end of its log; ``None`` where that says nothing known."""
    return next((remedy for pattern, remedy in CAUSES if pattern.search(text)), None)


def start_of(path: Path) -> str:
    """The first 4 MiB of a log: all that is said while loading, however long the server then runs."""
    with open(path, "rb") as stream:
        return stream.read(START_BYTES).decode(errors="replace")


def facts(text: str) -> dict[str, dict[str, Any]]:
    """What a log says: ``{name: {"value": ..., "raw": line}}`` for each known line, the last one where it repeats."""
    found = {}
    for line in text.splitlines():
        for name, (pattern, value) in FACTS.items():
            if match := pattern.search(line):
                found[name] = {"value": value(match), "raw": line.strip()}
    return found
