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
    for name in others:
        if name not in stored:
            yield Finding(
                "scale-missing",
                shard,
                f"{module}.{name}",
                f"{group.format} needs it beside {weight.name}; an engine would use garbage or 0",
                again,
            )
    static_input = group.activations is not None and group.activations.get("dynamic") is False
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
    if len(weight.shape) != 2:
        return
    rows, columns = weight.shape
    shard = table.shard(weight.name)
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
    scale = stored.get("weight_scale")
    if scale is None:
        return
    shapes = {wanted, (rows,)} if group.strategy == "channel" else {wanted}
    if wanted is not None and scale.shape not in shapes:
        yield Finding(
            "scale-shape",
            table.shard(scale.name),
            scale.name,
            f"shape {list(scale.shape)}, a weight of {rows}x{columns} needs {list(wanted)}",
            "requantize this module",
        )
    dtypes = {
        NATIVE_FORMAT: ("U8", "F8_E8M0"), "nvfp4-pack-quantized": ("F8_E4M3",)
    }.get(group.format or "", ("F32", "BF16", "F16"))
    if scale.dtype not in dtypes:
        yield Finding(
            "scale-dtype",
            table.shard(scale.name),
            scale.name,
            f"dtype {scale.dtype}, {group.format} needs {' or '.join(dtypes)}",
            "requantize this module",
        )
