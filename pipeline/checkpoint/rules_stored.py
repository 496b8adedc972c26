"""Lint rules on what is declared against what is stored, module by module: names, dtypes and shapes, headers only."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.checkpoint import declared
from pipeline.checkpoint.declared import Group
from pipeline.checkpoint.finding import WARNING, Finding
from pipeline.checkpoint.headers import Tensor
from pipeline.checkpoint.layout import ROUTER_GATE
from pipeline.checkpoint.table import Table, is_packed

NATIVE_FORMAT = "mxfp4-pack-quantized"
BESIDE_WEIGHT = (
    "weight_scale", "weight_scale_inv", "weight_shape", "weight_global_scale", "weight_zero_point", "weight_g_idx"
)  # fmt: skip
EXPONENTS = ("U8", "F8_E8M0")
SCALE_DTYPES = {
    NATIVE_FORMAT: EXPONENTS, "mxfp8-quantized": EXPONENTS, "nvfp4-pack-quantized": ("F8_E4M3",)
}  # fmt: skip


def whole(table: Table) -> Iterator[Finding]:
    """Each module has one weight, and has it where it has scales."""
    listed = table.checkpoint.index or {}
    for module, stored in table.modules.items():
        if "weight" in stored and "weight_packed" in stored:
            name = stored["weight"].name
            message = f"stored beside {module}.weight_packed: which one is loaded is an engine's choice"
            yield Finding("weight-twice", table.shard(name), name, message, "keep the one that the config describes")
        elif "weight" not in stored and "weight_packed" not in stored:
            orphan = next((stored[name] for name in BESIDE_WEIGHT if name in stored), None)
            if orphan is not None and not {f"{module}.weight", f"{module}.weight_packed"} & listed.keys():
                message = f"{orphan.parameter} is stored, the weight that it belongs to is not"
                shard = table.shard(orphan.name)
                yield Finding("weight-missing", shard, orphan.name, message, "requantize this module")


def stored_as_declared(table: Table) -> Iterator[Finding]:
    """Declared against stored, both ways; names, dtypes and shapes of weights and scales."""
    served_as_mxfp4 = table.config.format == NATIVE_FORMAT and table.checkpoint.text_config.get(
        "model_type"
    ) == "kimi_linear"
    for module, stored in table.modules.items():
        weight = table.weight(module)
        if weight is None:
            continue
        packed, group = is_packed(stored), table.group_of.get(module)
        shard = table.shard(weight.name)
        if packed and ROUTER_GATE.search(module):
            yield Finding(
                "router-quantized",
                shard,
                weight.name,
                f"the router is stored as {weight.dtype}: near-tied experts change places",
                "copy it from the source",
            )
        if packed and module in table.ignored:
            yield Finding(
                "ignored-but-quantized",
                shard,
                weight.name,
                f"ignored by the config, stored as {weight.dtype}",
                "remove it from ignore, or store it unquantized",
            )
        elif packed and group is None:
            yield Finding(
                "quantized-not-declared",
                shard,
                weight.name,
                f"stored as {weight.dtype}, no config group targets it",
                "add it to a config group",
            )
        elif packed:
            yield from _parameters(table, module, stored, weight, group)
        elif group is not None:
            rule = "; vLLM serves K3's mxfp4 files by a rule that quantizes routed experts only"
            note = rule if served_as_mxfp4 else ""
            yield Finding(
                "declared-not-quantized", shard, weight.name,
                f"declared quantized by {table.config.path}.config_groups.{group.name}, stored as {weight.dtype}{note}",
                "add it to ignore", WARNING if served_as_mxfp4 else "error",
            )  # fmt: skip


def _parameters(
    table: Table, module: str, stored: dict[str, Tensor], weight: Tensor, group: Group
) -> Iterator[Finding]:
    expected = declared.STORED.get(group.format or "")
    if expected is None:
        return
    parameter, dtype, others = expected
    shard = table.shard(weight.name)
    again = "requantize this module"
    if weight.parameter != parameter or (dtype is not None and weight.dtype != dtype):
        yield Finding(
            "format-mismatch",
            shard,
            weight.name,
            f"declared {group.format} ({parameter}, {dtype}), stored as {weight.parameter}, {weight.dtype}",
            "correct the format, or " + again,
        )
        return
    others += ("weight_zero_point",) if group.weights.get("symmetric") is False else ()
    others += ("weight_g_idx",) if group.weights.get("actorder") in ("group", True) else ()
    for name in others:
        if name not in stored:
            yield Finding(
                "scale-missing",
                shard,
                f"{module}.{name}",
                f"{group.format} needs it beside {weight.name}; an engine would use garbage or 0",
                again,
            )
    if group.weights.get("symmetric") is True and (zero := stored.get("weight_zero_point")) is not None:
        yield Finding(
            "format-mismatch",
            table.shard(zero.name),
            zero.name,
            "a zero point is stored, the weights are declared symmetric: an engine drops it and decodes other numbers",
            "declare symmetric false, or " + again,
        )
    # Static is what an absent key means; "local" (NVFP4) has a global scale from calibration beside its dynamic ones.
    static_input = group.activations is not None and group.activations.get("dynamic", False) is not True
    if static_input and "input_scale" not in stored and "input_global_scale" not in stored:
        yield Finding(
            "scale-missing",
            shard,
            f"{module}.input_scale",
            "activations are declared static, no input scale is stored: 1/0 at run time",
            "calibrate this module, or declare dynamic activations",
        )
    yield from _shapes(table, module, stored, weight, group)


def _shapes(table: Table, module: str, stored: dict[str, Tensor], weight: Tensor, group: Group) -> Iterator[Finding]:
    shard = table.shard(weight.name)
    if len(weight.shape) < 2 or not all(weight.shape):
        message = f"shape {list(weight.shape)}: only a matrix with rows and columns can be quantized"
        yield Finding("not-a-matrix", shard, weight.name, message, "store it unquantized, and add it to ignore")
    if len(weight.shape) != 2:
        return
    rows, columns = weight.shape
    if weight.parameter == "weight_packed":
        columns = columns * (2 if weight.dtype == "U8" else 32 // (group.num_bits or 4))
    wanted: tuple[int, ...] | None = None
    if group.strategy in ("group", "tensor_group") and group.group_size:
        if columns % group.group_size:
            yield Finding(
                "indivisible",
                shard,
                weight.name,
                f"{columns} columns % group {group.group_size} = {columns % group.group_size}",
                "use a smaller group, or leave it unquantized",
            )
        wanted = (rows, -(-columns // group.group_size))
    elif group.strategy == "block" and group.block_structure:
        height, width = group.block_structure
        if rows % height or columns % width:
            yield Finding(
                "indivisible",
                shard,
                weight.name,
                f"{rows}x{columns} % block {height}x{width} = {rows % height}, {columns % width}",
                "use fp8_channel, or leave it unquantized",
            )
        wanted = (-(-rows // height), -(-columns // width))
    elif group.strategy == "channel":
        wanted = (rows, 1)
    elif group.strategy == "tensor":
        wanted = (1,)
    if (overall := stored.get("weight_global_scale")) is not None and (overall.shape, overall.dtype) != ((1,), "F32"):
        yield Finding(
            "scale-shape",
            table.shard(overall.name),
            overall.name,
            f"{overall.dtype} {list(overall.shape)}, one F32 number is needed",
            "requantize this module",
        )
    scale = stored.get("weight_scale")
    if scale is None:
        return
    shapes = {wanted, *{"channel": [(rows,)], "tensor": [(), (1, 1)]}.get(group.strategy or "", [])}
    if wanted is not None and scale.shape not in shapes:
        yield Finding(
            "scale-shape",
            table.shard(scale.name),
            scale.name,
            f"shape {list(scale.shape)}, a weight of {rows}x{columns} needs {list(wanted)}",
            "requantize this module",
        )
    dtypes = SCALE_DTYPES.get(group.format or "", ("F32", "BF16", "F16"))
    if scale.dtype not in dtypes:
        yield Finding(
            "scale-dtype",
            table.shard(scale.name),
            scale.name,
            f"dtype {scale.dtype}, {group.format} needs {' or '.join(dtypes)}",
            "requantize this module",
        )
