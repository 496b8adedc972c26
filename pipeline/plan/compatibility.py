"""The compatibility table: does this combination load and answer, and who has seen it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import Unreadable
from pipeline.k3 import LayerKind, ModelFacts

TABLE = Path(__file__).with_name("compatibility.yaml")
VERDICTS = ("yes", "no", "emulated", "untested")
FIELDS = (
    "model",
    "quant",
    "kv",
    "state",
    "platform",
    "architecture",
    "tensor_parallel",
    "pipeline_parallel",
    "decode_context_parallel",
    "expert_parallel",
)


@dataclass(frozen=True)
class Verdict:
    """What the table says, why, and the source of it."""

    verdict: str
    reason: str
    source: str


@dataclass(frozen=True)
class Combination:
    """One cell of the table.  ``model`` is a family: k3, mla, gqa, gdn."""

    model: str
    quant: str
    kv: str
    state: str
    platform: str
    architecture: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    expert_parallel: bool = False


def family(facts: ModelFacts) -> str:
    if facts.is_k3:
        return "k3"
    if LayerKind.GDN in facts.layer_kinds:
        return "gdn"
    return "mla" if facts.uses_mla else "gqa"


@cache
def _table() -> dict[str, Any]:
    table = yaml.load(TABLE.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for row in table["rows"]:
        unknown = set(row) - {*FIELDS, "verdict", "reason", "source"}
        if unknown or row.get("verdict") not in VERDICTS or not row.get("reason") or not row.get("source"):
            problem = f"unknown keys {sorted(unknown)}, or no verdict, reason or source"
            raise Unreadable(f"{TABLE.name}: row {row}: {problem}")
    for row in table["engine_minimum"]:
        if not {"version", "reason", "source"} <= set(row):
            raise Unreadable(f"{TABLE.name}: engine_minimum row {row} lacks version, reason or source")
    return table


def _matches(row: dict[str, Any], combination: Combination) -> bool:
    for name in FIELDS:
        if name not in row:
            continue
        wanted, value = row[name], getattr(combination, name)
        if wanted == "many":
            if value <= 1:
                return False
        elif value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def lookup(combination: Combination) -> Verdict:
    """The first row that matches; ``untested`` where none does."""
    for row in _table()["rows"]:
        if _matches(row, combination):
            return Verdict(row["verdict"], row["reason"], row["source"])
    return Verdict("untested", "no row of the compatibility table covers it", TABLE.name)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".") if part.isdigit())


def engine_too_old(combination: Combination, engine_version: str) -> str | None:
    """Why ``engine_version`` cannot serve the combination; None where it can."""
    for row in _table()["engine_minimum"]:
        if _matches(row, combination):
            if _version(engine_version) < _version(str(row["version"])):
                return f"engine {engine_version} is older than {row['version']}: {row['reason']} ({row['source']})"
            return None
    return None
