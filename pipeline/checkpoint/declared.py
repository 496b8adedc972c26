"""What a config declares about quantization, wherever it says so, and which modules that covers.

The matching is compressed-tensors' own: ``re:`` patterns are ``re.match``-ed against module names, other strings are
module names or class names; ignore wins over targets, an earlier config group over a later one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.errors import Unreadable

CONFIG_KEYS = ("quantization_config", "compression_config")
COMPRESSED_TENSORS = "compressed-tensors"
# Where other tools put their quantization config (ModelOpt, GPTQ, AWQ), beside config.json or instead.
SIDECARS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}

# format -> (name of the weight as stored, its dtype, what a module stores beside it)
STORED = {
    "mxfp4-pack-quantized": ("weight_packed", "U8", ("weight_scale",)),
    "nvfp4-pack-quantized": ("weight_packed", "U8", ("weight_scale", "weight_global_scale")),
    "pack-quantized": ("weight_packed", "I32", ("weight_scale", "weight_shape")),
    "float-quantized": ("weight", "F8_E4M3", ("weight_scale",)),
    "int-quantized": ("weight", "I8", ("weight_scale",)),
    "mxfp8-quantized": ("weight", "F8_E4M3", ("weight_scale",)),
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
            if key in CONFIG_KEYS:
                if value not in (None, {}):
                    found.append((f"{path}.{key}", value if isinstance(value, dict) else {"quant_method": value}))
            else:
                nested += find_configs(value, f"{path}.{key}")
    elif isinstance(config, list):
        for number, value in enumerate(config):
            nested += find_configs(value, f"{path}[{number}]")
    return found + nested


def find_sidecars(directory: Path) -> list[tuple[str, dict[str, Any]]]:
    """Quantization configs in files of their own, as :func:`find_configs` gives those of config.json."""
    found = []
    for name, method in SIDECARS.items():
        if (directory / name).is_file():
            raw = files.read_json(directory / name)
            found.append((name, {"quant_method": method} | (raw if isinstance(raw, dict) else {})))
    return found


def parse(path: str, raw: dict[str, Any]) -> Declared:
    """Read one quantization config.  Raises :class:`Unreadable` naming the first part that is malformed."""
    groups = []
    for name, group in _typed(path, raw, "config_groups", dict, {}).items():
        where = f"{path}.config_groups.{name}"
        if not isinstance(group, dict) or "targets" not in group:
            raise Unreadable(f"{where}: malformed (needs targets and weights)")
        weights = _typed(where, group, "weights", dict, {})
        if weights.get("group_size") == -1:  # an old way to say: the whole row
            weights = weights | {"group_size": None}
        for key, largest in (("num_bits", 32), ("group_size", 1 << 31)):
            number = _typed(f"{where}.weights", weights, key, int, None)
            if number is not None and not 1 <= number <= largest:
                raise Unreadable(f"{where}.weights.{key}: {number!r}, expected 1 to {largest}")
        _typed(f"{where}.weights", weights, "strategy", str, None)
        made = Group(
            name,
            _texts(where, group, "targets"),
            _typed(where, group, "format", str, None) or _typed(path, raw, "format", str, None),
            weights,
            _typed(where, group, "input_activations", dict, None),
        )
        try:
            sound = made.block_structure is None or min(made.block_structure) > 0
        except (TypeError, ValueError, LookupError):
            sound = False
        if not sound:
            said = weights["block_structure"]
            raise Unreadable(f"{where}.weights.block_structure: {said!r:.80}, expected [rows, columns]")
        groups.append(made)
    return Declared(
        path, _typed(path, raw, "quant_method", str, None), _typed(path, raw, "format", str, None),
        _texts(path, raw, "ignore"), tuple(groups), _typed(path, raw, "kv_cache_scheme", dict, None), raw,
    )  # fmt: skip


def _typed(path: str, raw: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise Unreadable(f"{path}.{key}: {value!r:.80}, expected {kind.__name__}")
    return value


def _texts(path: str, raw: dict[str, Any], key: str) -> tuple[str, ...]:
    values = _typed(path, raw, key, list, [])
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise Unreadable(f"{path}.{key}: {wrong[0]!r:.80}, expected str")
    return tuple(values)


def invalid_patterns(config: Declared) -> list[tuple[str, str, str]]:
    """The patterns that are no regular expressions: (JSON path, pattern, why)."""
    places = [(f"{config.path}.ignore", config.ignore)]
    places += [(f"{config.path}.config_groups.{group.name}.targets", group.targets) for group in config.groups]
    found = []
    for path, patterns in places:
        for pattern in patterns:
            try:
                Matcher([pattern])
            except Unreadable as error:
                found.append((path, pattern, str(error)))
    return found


def without_patterns(config: Declared, patterns: Iterable[str]) -> Declared:
    """The config less some patterns, so that the rest of it can still be matched."""
    dropped = set(patterns)

    def kept(of: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(pattern for pattern in of if pattern not in dropped)

    groups = tuple(replace(group, targets=kept(group.targets)) for group in config.groups)
    return replace(config, ignore=kept(config.ignore), groups=groups)


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
                except (re.error, OverflowError, RecursionError) as error:
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
