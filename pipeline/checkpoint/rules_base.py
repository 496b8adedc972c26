"""Lint rules that compare a checkpoint with the one that it was made from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline import files
from pipeline.checkpoint import numbers
from pipeline.checkpoint.declared import CONFIG_KEYS
from pipeline.checkpoint.finding import Finding
from pipeline.checkpoint.headers import Tensor
from pipeline.checkpoint.layout import ROUTER_GATE, SMOOTHED
from pipeline.checkpoint.manifest import same_file
from pipeline.checkpoint.reading import CONFIG, Checkpoint
from pipeline.checkpoint.rules_content import AGAIN, PROVENANCE, chunks_of, values_of
from pipeline.checkpoint.table import Table, is_packed
from pipeline.errors import Unreadable

# Random tokens that are routed by the base's router and by this one, where the two differ.
ROUTED_TOKENS = 1024
# Two roundings to bf16 (the row, and the factor that is read back from it), of the row's largest weight.
SMOOTHING_TOLERANCE = 2.0**-7
EXPERTS_A_TOKEN = ("num_experts_per_token", "num_experts_per_tok")
# What quantization adds to a module, beside what stands for its weight.
OF_QUANTIZATION = ("k_scale", "v_scale", "q_scale", "input_scale", "input_global_scale", "input_zero_point")


def against_base(table: Table, base: Checkpoint) -> Iterator[Finding]:
    """Every module of the base is there, unquantized tensors byte for byte, auxiliary files and the rest of
    config.json too.
    """
    checkpoint = table.checkpoint
    base_modules = _modules_of(base)
    copy = "copy it from the base"
    for module, stored in base_modules.items():
        mine = table.modules.get(module, {})
        quantized = is_packed(stored) or is_packed(mine)
        if quantized:
            weight = stored.get("weight_packed") or stored.get("weight")
            if not mine.get("weight_packed") and not mine.get("weight"):
                yield Finding(
                    "base-missing",
                    base.weight_map[weight.name],
                    weight.name,
                    "in the base, no weight of this module here",
                    copy,
                )
            elif (
                logical := _logical(mine, table, module)
            ) and (wanted := _logical(stored, None, module)) and logical != wanted:
                tensor = mine.get("weight_packed") or mine["weight"]
                yield Finding(
                    "shape-drift",
                    table.shard(tensor.name),
                    tensor.name,
                    f"a matrix of {list(logical)}, in the base {list(wanted)}",
                    AGAIN,
                )
        for parameter, tensor in stored.items():
            if quantized and (_is_of_weight(parameter) or parameter in OF_QUANTIZATION):
                continue
            other = mine.get(parameter)
            if other is None:
                yield Finding("base-missing", base.weight_map[tensor.name], tensor.name, "in the base, not here", copy)
            elif other.dtype != tensor.dtype:
                yield Finding(
                    "dtype-drift",
                    table.shard(tensor.name),
                    tensor.name,
                    f"stored as {other.dtype}, in the base {tensor.dtype}",
                    copy + " byte for byte",
                )
            elif other.shape != tensor.shape:
                yield Finding(
                    "shape-drift",
                    table.shard(tensor.name),
                    tensor.name,
                    f"shape {list(other.shape)}, in the base {list(tensor.shape)}",
                    copy,
                )
        for parameter in sorted(mine.keys() - stored.keys()):
            if not _is_of_weight(parameter) and parameter not in OF_QUANTIZATION:
                name = mine[parameter].name
                yield Finding("base-extra", table.shard(name), name, "not in the base", "drop it")
    for module in sorted(table.modules.keys() - base_modules.keys()):
        for tensor in table.modules[module].values():
            if tensor.parameter not in OF_QUANTIZATION:
                yield Finding("base-extra", table.shard(tensor.name), tensor.name, "not in the base", "drop it")
    for key in sorted((base.config.keys() | checkpoint.config.keys()) - set(CONFIG_KEYS)):
        if _plain(base.config.get(key)) != _plain(checkpoint.config.get(key)):
            yield Finding("config-drift", CONFIG, "", f"$.{key} differs from the base's", "take it from the base")
    for name in base.auxiliary:
        if name == PROVENANCE:
            continue
        if not (checkpoint.directory / name).exists():
            yield Finding("aux-missing", name, "", "in the base, not here", copy)
        elif not same_file(base.directory / name, checkpoint.directory / name):
            yield Finding("aux-changed", name, "", "differs from the base's", copy)


def bytes_against_base(table: Table, base: Checkpoint) -> Iterator[Finding]:
    """Tensors of equal dtype and shape that neither side quantizes hold the same bytes, and so do the parameters of a
    matrix that both store in one way.

    One exception: what a calibrated recipe smoothed, says the provenance, and may smooth, differs by a factor a row.
    """
    smoothed, base_modules = _smoothed(table.checkpoint), _modules_of(base)
    for tensor in base.tensors().values():
        mine = table.modules.get(tensor.module, {})
        other = mine.get(tensor.parameter)
        if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            continue
        of_weight = is_packed(mine) and _is_of_weight(tensor.parameter)
        if of_weight and not _left_as_it_was(mine, base_modules[tensor.module]):
            continue
        pairs = zip(
            chunks_of(base, base.weight_map[tensor.name], tensor),
            chunks_of(table.checkpoint, table.shard(tensor.name), other),
            strict=True,
        )
        if tensor.name in smoothed:
            base_values, mine_values = (np.frombuffer(b"".join(part), np.uint16) for part in zip(*pairs, strict=True))
            yield from _row_factors(table, other, base_values, mine_values)
        elif any(one != two for one, two in pairs):
            yield Finding(
                "bytes-drift",
                table.shard(tensor.name),
                tensor.name,
                f"{tensor.dtype} {list(tensor.shape)} differs from the base",
                "copy it from the base byte for byte",
            )


def routers_against_base(table: Table, base: Checkpoint) -> Iterator[Finding]:
    """A router whose numbers differ from the base's, with the share of tokens that it sends to other experts.

    Near-tied scores make this far larger than the rounding: 5 % of tokens for a router of 896 experts in bf16.
    """
    chosen = next((n for key in EXPERTS_A_TOKEN if type(n := table.checkpoint.text_config.get(key)) is int), 0)
    for module, stored in _modules_of(base).items():
        mine = table.modules.get(module, {})
        if not ROUTER_GATE.search(module) or is_packed(mine) or "weight" not in stored or "weight" not in mine:
            continue
        before, after = _router(base, stored), _router(table.checkpoint, mine)
        if before is None or after is None or before[0].shape != after[0].shape or not 0 < chosen < len(before[0]):
            continue
        if all(np.array_equal(one, two) for one, two in zip(before, after, strict=True)):
            continue
        moved = other_choices(before, after, chosen)
        name = mine["weight"].name
        yield Finding(
            "router-drift",
            table.shard(name),
            name,
            f"{moved} of {ROUTED_TOKENS} random tokens ({moved / ROUTED_TOKENS:.2%}) go to another set of {chosen} "
            "experts than in the base",
            "copy the router and its bias from the base byte for byte",
        )


def other_choices(before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray], chosen: int) -> int:
    """How many of ``ROUTED_TOKENS`` random tokens get another set of experts.

    A router is (weight float32 [experts, hidden], bias float32 [experts]): sigmoid scores, the bias added to choose.
    """
    tokens = np.random.default_rng(0).standard_normal((ROUTED_TOKENS, before[0].shape[1]), np.float32)
    sets = []
    for weight, bias in (before, after):
        with np.errstate(over="ignore"):
            scores = 1 / (1 + np.exp(-tokens @ weight.T)) + bias
        sets.append(np.sort(np.argpartition(-scores, chosen - 1, axis=1)[:, :chosen], axis=1))
    return int((sets[0] != sets[1]).any(axis=1).sum())


def _router(checkpoint: Checkpoint, stored: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray] | None:
    weight, bias = stored["weight"], stored.get("e_score_correction_bias")
    if len(weight.shape) != 2 or any(t is not None and t.dtype not in ("F32", "BF16", "F16") for t in (weight, bias)):
        return None
    matrix, offset = (
        np.zeros(1, np.float32) if t is None else values_of(t.dtype, checkpoint.read(t.name)).astype(np.float32)
        for t in (weight, bias)
    )
    matrix = matrix.reshape(weight.shape)
    return (matrix, np.broadcast_to(offset, len(matrix))) if offset.size in (1, len(matrix)) else None


def _modules_of(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    modules: dict[str, dict[str, Tensor]] = {}
    for tensor in checkpoint.tensors().values():
        modules.setdefault(tensor.module, {})[tensor.parameter] = tensor
    return modules


def _is_of_weight(parameter: str) -> bool:
    """Whether a parameter stands for a weight, whole or in part: ``weight_packed``, ``weight_scale``."""
    return parameter == "weight" or parameter.startswith("weight_")


def _left_as_it_was(mine: dict[str, Tensor], base: dict[str, Tensor]) -> bool:
    """Whether a quantized matrix is stored by the same parameters, of the same dtypes and shapes, as in the base."""
    mine_of, base_of = (
        {name: (t.dtype, t.shape) for name, t in stored.items() if _is_of_weight(name)} for stored in (mine, base)
    )
    return mine_of == base_of


def _smoothed(checkpoint: Checkpoint) -> set[str]:
    """The tensors that the checkpoint's own provenance lists as smoothed, less those that nothing may smooth."""
    try:
        provenance = files.read_json(checkpoint.directory / PROVENANCE)
        names = provenance["calibration"]["changed_tensors"]
    except (Unreadable, KeyError, TypeError):
        return set()
    return {name for name in names if isinstance(name, str) and SMOOTHED.search(name)}


def _row_factors(table: Table, tensor: Tensor, base_bits: np.ndarray, bits: np.ndarray) -> Iterator[Finding]:
    """A bf16 matrix is its base, each row divided by a positive number and rounded."""
    before, after = (numbers.bf16_values(x).reshape(tensor.shape).astype(np.float64) for x in (base_bits, bits))
    energy = np.square(after).sum(1)
    factor = (before * after).sum(1) / np.where(energy > 0, energy, 1)
    off = np.abs(before - after * factor[:, None]).max(1) > SMOOTHING_TOLERANCE * np.abs(before).max(1)
    wrong = int((off | ((factor <= 0) & (energy > 0))).sum())
    if tensor.dtype != "BF16" or wrong:
        yield Finding(
            "smoothing-drift",
            table.shard(tensor.name),
            tensor.name,
            f"declared as smoothed, but {wrong} of {len(off)} rows are not the base's rows times a positive number",
            AGAIN,
        )


def _logical(stored: dict[str, Tensor], table: Table | None, module: str) -> tuple[int, ...] | None:
    """Shape of the matrix that is stored, packing undone."""
    packed = stored.get("weight_packed")
    if packed is None:
        weight = stored.get("weight")
        return weight.shape if weight else None
    if len(packed.shape) != 2 or packed.dtype not in ("U8", "I32"):
        return None
    group = table.group_of.get(module) if table else None
    per_item = 2 if packed.dtype == "U8" else 32 // ((group.num_bits if group else None) or 4)
    return (packed.shape[0], packed.shape[1] * per_item)


def _plain(config: object) -> object:
    if isinstance(config, dict):
        return {key: _plain(value) for key, value in config.items() if key not in CONFIG_KEYS}
    return config
