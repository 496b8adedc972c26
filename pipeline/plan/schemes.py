"""Quantization schemes as data, and what one matrix of each weight format weighs in the file and in the engine.

Bytes of a format follow the parameters that vLLM 0.32 registers
(vllm/model_executor/layers/quantization/{mxfp4.py,compressed_tensors/schemes/*.py}), which are also the tensors in
the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Refused
from pipeline.k3 import ModelFacts, Role, Tensor, declared_quantizations, source_format

DTYPE_BYTES = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
}
BLOCK = 128  # FP8 block scales, both directions

DENSE_ROLES = frozenset({Role.SHARED_EXPERT, Role.DENSE_MLP})


@dataclass(frozen=True)
class Scheme:
    """One key of ``--quant``.  ``group`` is the number of input weights that share a scale, where the format has
    one."""

    key: str
    format: str
    scope: str = "experts"
    group: int | None = None
    calibrated: bool = False
    activations: str = "bfloat16"


SCHEMES = {
    scheme.key: scheme
    for scheme in (
        Scheme("native", "native"),
        Scheme("bf16", "bfloat16", "none"),
        Scheme("fp8", "fp8_block", activations="float8"),
        Scheme("fp8_channel", "fp8_channel", activations="float8"),
        Scheme("fp8_dense", "fp8_block", "dense_only", activations="float8"),
        Scheme("fp8_all", "fp8_block", "dense_too", activations="float8"),
        Scheme("int8", "int8_channel", activations="int8"),
        Scheme("int8_dense", "int8_channel", "dense_only", activations="int8"),
        Scheme("int8_sq", "int8_channel", calibrated=True, activations="int8"),
        Scheme("w4a16", "int4", group=32),
        Scheme("w4a16_g128", "int4", group=128),
        Scheme("w4a16_gptq", "int4", group=32, calibrated=True),
        Scheme("w4a16_awq", "int4", group=32, calibrated=True),
        Scheme("nvfp4", "nvfp4", group=16),
    )
}

Parts = tuple[tuple[str, int], ...]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _fp8_block(rows: int, columns: int) -> Parts:
    return ("float8_e4m3fn", rows * columns), ("float32", _ceil(rows, BLOCK) * _ceil(columns, BLOCK))


def _fp8_channel(rows: int, columns: int) -> Parts:
    return ("float8_e4m3fn", rows * columns), ("float32", rows)


def _int8_channel(rows: int, columns: int) -> Parts:
    return ("int8", rows * columns), ("float32", rows)


def _int4(group: int) -> Callable[[int, int], Parts]:
    def parts(rows: int, columns: int) -> Parts:
        # Eight weights to an int32; ``weight_shape`` is two int64.
        return ("int32", rows * _ceil(columns, 8)), ("bfloat16", rows * _ceil(columns, group)), ("int64", 2)

    return parts


def _mxfp4(rows: int, columns: int) -> Parts:
    return ("uint8", rows * _ceil(columns, 2)), ("uint8", rows * _ceil(columns, 32))


def _nvfp4(rows: int, columns: int) -> Parts:
    return (
        ("uint8", rows * _ceil(columns, 2)),
        ("float8_e4m3fn", rows * _ceil(columns, 16)),
        ("float32", 1),
    )


@dataclass(frozen=True)
class Storage:
    """How one matrix is stored.  ``block`` = (rows, columns) that share a scale: where tensor parallelism may cut."""

    name: str
    parts: Callable[[int, int], Parts]
    block: tuple[int, int]


def storage(name: str, group: int | None = None) -> Storage:
    """The storage of weight format ``name``; raises :class:`Refused` for one that is not known."""
    if name == "int4":
        return Storage(name, _int4(group or 128), (1, group or 128))
    known = {
        "fp8_block": Storage(name, _fp8_block, (BLOCK, BLOCK)),
        "fp8_channel": Storage(name, _fp8_channel, (1, 1)),
        "int8_channel": Storage(name, _int8_channel, (1, 1)),
        "mxfp4": Storage(name, _mxfp4, (1, 32)),
        "nvfp4": Storage(name, _nvfp4, (1, 16)),
    }
    if name not in known:
        raise Refused(f"no weight format {name!r}; known: int4, {', '.join(sorted(known))}")
    return known[name]


def scheme(key: str) -> Scheme:
    """The scheme under a ``--quant`` key.  Raises :class:`Refused` listing the known ones."""
    if key not in SCHEMES:
        raise Refused(f"no quantization {key!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[key]


# Recipe names (pipeline.quant) -> weight formats here.
RECIPE_FORMATS = {"w4a16": "int4", "w2_control": "int4"}


def scheme_of_recipe(key: str, recipe: dict[str, Any]) -> Scheme:
    """The scheme that a quantization recipe (one entry of the parameters' ``quant.schemes``) amounts to."""
    known = SCHEMES.get(key)
    name = recipe.get("format", "native")
    name = RECIPE_FORMATS.get(name, name)
    if name not in ("native", "bfloat16"):
        storage(name, recipe.get("group_size"))  # raises for a format that is not known
    group = recipe.get("group_size") or {"int4": 32, "nvfp4": 16}.get(name)
    activations = {"fp8_block": "float8", "fp8_channel": "float8", "int8_channel": "int8"}.get(name, "bfloat16")
    calibrated = bool(recipe.get("calibration") or (known and known.calibrated))
    return Scheme(key, name, recipe.get("scope", "experts"), group, calibrated, activations)


def known_as(chosen: Scheme) -> str:
    """The key under which the compatibility table knows a scheme; its own key where no scheme here is the same."""
    same = (chosen.format, chosen.scope, chosen.group)
    equal = [key for key, other in SCHEMES.items() if (other.format, other.scope, other.group) == same]
    if chosen.key in equal:
        return chosen.key
    return equal[0] if equal else f"{chosen.key}:{chosen.format}:{chosen.scope}:{chosen.group}"


def _in_scope(tensor: Tensor, scope: str, has_experts: bool) -> bool:
    if not tensor.linear or scope == "none":
        return False
    if not has_experts:
        # A dense model has no experts to quantize: the default scope is then every linear layer.
        return True
    dense = tensor.role in DENSE_ROLES or tensor.name.endswith("self_attn.o_proj")
    return (tensor.is_expert and scope != "dense_only") or (dense and scope in ("dense_too", "dense_only"))


def has_block_scales(config: dict[str, Any]) -> bool:
    """Whether the declared quantization scales FP8 weights by blocks (else by output channel)."""
    for _, declared in declared_quantizations(config):
        groups = (declared.get("config_groups") or {}).values()
        strategies = {(group.get("weights") or {}).get("strategy") for group in groups}
        if declared.get("weight_block_size") or "block" in strategies:
            return True
    return False


def _declared_storage(config: dict[str, Any], facts: ModelFacts) -> Callable[[Tensor], Storage | None]:
    """Native: what the checkpoint's own quantization config says.

    K3's files are served by vLLM's ``Mxfp4Config``, which quantizes routed experts and nothing else whatever the file's
    (incomplete) ignore list says.
    """
    source = source_format(config)
    if not source.is_quantized:
        return lambda tensor: None
    declared = declared_quantizations(config)[0][1]
    if source.weights == "mxfp4":
        packed = storage("mxfp4")
        return lambda tensor: packed if tensor.is_expert else None
    group = next(iter((declared.get("config_groups") or {"": {}}).values()))
    weights = group.get("weights") or {}
    names = {
        "float8": "fp8_block" if has_block_scales(config) else "fp8_channel",
        "int8": "int8_channel",
        "int4": "int4",
        "nvfp4": "nvfp4",
    }
    if source.weights not in names:
        raise Refused(f"{source.where}: format {source.name!r} holds several weight formats; name one with --quant")
    packed = storage(names[source.weights], weights.get("group_size") or declared.get("group_size"))
    ignored = declared.get("ignore") or declared.get("modules_to_not_convert") or ()
    exact = {pattern for pattern in ignored if not pattern.startswith("re:")}
    try:
        expressions = [re.compile(pattern[3:]) for pattern in ignored if pattern.startswith("re:")]
    except re.error as error:
        said = f"{source.where}.ignore: {error.pattern!r} is no regular expression ({error})"
        raise Refused(f"{said}; correct it") from None

    def declared_storage(tensor: Tensor) -> Storage | None:
        name = tensor.name.replace("{e}", "0")
        skipped = name in exact or any(expression.match(name) for expression in expressions)
        return packed if tensor.linear and not skipped else None

    return declared_storage


def storage_rule(config: dict[str, Any], facts: ModelFacts, chosen: Scheme) -> Callable[[Tensor], Storage | None]:
    """``rule(tensor)`` is the storage of a tensor under the scheme; None where it stays as it is in the source.

    FP8 blocks fall back to channel scales for a matrix whose dimensions are not multiples of 128.
    """
    native = _declared_storage(config, facts)
    if chosen.format == "native":
        return native
    if chosen.format == "bfloat16":
        return lambda tensor: None
    packed = storage(chosen.format, chosen.group)
    fallback = storage("fp8_channel") if chosen.format == "fp8_block" else None
    has_experts = facts.num_experts > 0

    def rule(tensor: Tensor) -> Storage | None:
        if not _in_scope(tensor, chosen.scope, has_experts):
            # ``dense_only`` leaves the experts as they are in the source.
            return native(tensor) if chosen.scope == "dense_only" else None
        if fallback and any(size % BLOCK for size in tensor.shape):
            return fallback
        return packed

    return rule


def matrix_parts(tensor: Tensor, stored: Storage | None, shape: tuple[int, ...]) -> Parts:
    """(dtype, elements) of one tensor of local ``shape``."""
    if stored is None:
        return ((tensor.dtype, math.prod(shape)),)
    return stored.parts(*shape)
