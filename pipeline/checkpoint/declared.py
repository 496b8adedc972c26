"""What a config declares about quantization, wherever it says so, and which modules that covers.

The matching is compressed-tensors' own: ``re:`` patterns are ``re.match``-ed against module names, other strings are
module names or class names; ignore wins over targets, an earlier config group over a later one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Unreadable

CONFIG_KEYS = ("quantization_config", "compression_config")
COMPRESSED_TENSORS = "compressed-tensors"

# format -> (name of the weight as stored, its dtype, what a module stores beside it)
STORED = {
    "mxfp4-pack-quantized": ("weight_packed", "U8", ("weight_scale",)),
    "nvfp4-pack-quantized": ("weight_packed", "U8", ("weight_scale", "weight_global_scale")),
    "pack-quantized": ("weight_packed", "I32", ("weight_scale", "weight_shape")),
    "float-quantized": ("weight", "F8_E4M3", ("weight_scale",)),
    "int-quantized": ("weight", "I8", ("weight_scale",)),
    "naive-quantized": ("weight", None, ("weight_scale",)),
}
MIXED = "mixed-precision"


@dataclass(frozen=True)
class Group:
    """One ``config_groups`` entry."""

    name: str
    targets: tuple[str, ...]
    format: str | None
    weights: dict[str, Any]
    activations: dict[str, Any] | None

    @property
    def num_bits(self) -> int | None:
        return self.weights.get("num_bits")

    @property
    def strategy(self) -> str | None:
        return self.weights.get("strategy")

    @property
    def group_size(self) -> int | None:
        return self.weights.get("group_size")

    @property
    def block_structure(self) -> tuple[int, int] | None:
        """``(rows, columns)`` of a block; old configs write ``"128x128"``."""
        blocks = self.weights.get("block_structure")
        if isinstance(blocks, str):
            blocks = blocks.split("x")
        return (int(blocks[0]), int(blocks[1])) if blocks else None


@dataclass(frozen=True)
class Declared:
    """One quantization config, and the JSON path where it was found."""

    path: str
    method: str | None
    format: str | None
    ignore: tuple[str, ...]
    groups: tuple[Group, ...]
    kv_cache: dict[str, Any] | None
    raw: dict[str, Any]

    @property
    def formats(self) -> set[str | None]:
        return {group.format for group in self.groups} or {self.format}


def find_configs(config: Any, path: str = "$") -> list[tuple[str, dict[str, Any]]]:
    """Every quantization config anywhere in a model config, with its JSON path, outermost first."""
    found, nested = [], []
    if isinstance(config, dict):
        for key, value in config.items():
            if key in CONFIG_KEYS and isinstance(value, dict) and value:
                found.append((f"{path}.{key}", value))
            else:
                nested += find_configs(value, f"{path}.{key}")
    elif isinstance(config, list):
        for number, value in enumerate(config):
            nested += find_configs(value, f"{path}[{number}]")
    return found + nested


def parse(path: str, raw: dict[str, Any]) -> Declared:
    """Read one quantization config.  Raises :class:`Unreadable` when its groups are malformed."""
    groups = []
    for name, group in (raw.get("config_groups") or {}).items():
        try:
            weights = group.get("weights") or {}
            groups.append(
                Group(
                    name,
                    tuple(group["targets"]),
                    group.get("format") or raw.get("format"),
                    weights,
                    group.get("input_activations"),
                )
            )  # fmt: skip
        except (TypeError, KeyError, AttributeError):
            raise Unreadable(f"{path}.config_groups.{name}: malformed (needs targets and weights)") from None
    ignore = raw.get("ignore") or ()
    return Declared(
        path, raw.get("quant_method"), raw.get("format"), tuple(ignore), tuple(groups), raw.get("kv_cache_scheme"), raw
    )


class Matcher:
    """Matches module names against patterns, compiled once."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._exact = {pattern for pattern in self.patterns if not pattern.startswith("re:")}
        self._compiled = {}
        for pattern in self.patterns:
            if pattern.startswith("re:"):
                try:
                    self._compiled[pattern] = re.compile(pattern.removeprefix("re:"))
                except re.error as error:
                    raise Unreadable(f"pattern {pattern!r}: {error}") from None

    def first(self, module: str) -> str | None:
        """The first pattern that matches ``module``."""
        if module in self._exact:
            return module
        return next((pattern for pattern, compiled in self._compiled.items() if compiled.match(module)), None)

    def all(self, module: str) -> set[str]:
        """Every pattern that matches ``module``."""
        hits = {pattern for pattern, compiled in self._compiled.items() if compiled.match(module)}
        return hits | {module} if module in self._exact else hits
