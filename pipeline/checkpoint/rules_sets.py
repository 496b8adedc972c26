"""Lint rules on modules that belong together: fused sets, the experts of a layer, the layers that hold a KV cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pipeline.checkpoint.finding import WARNING, Finding
from pipeline.checkpoint.layout import expert_of, fused_sets, layer_of
from pipeline.checkpoint.reading import CONFIG
from pipeline.checkpoint.table import Table, is_packed

KV_SCALES = ("k_scale", "v_scale")


def fused(table: Table) -> Iterator[Finding]:
    """Fused sets whole and of one scheme; all experts of a layer of one scheme."""

    def scheme(module: str) -> str:
        weight = table.weight(module)
        group = table.group_of.get(module)
        if not is_packed(table.modules[module]):
            return "unquantized"
        return f"{group.name}, {weight.dtype}" if group else weight.dtype

    matrices = [m for m in table.modules if (w := table.weight(m)) is not None and len(w.shape) == 2]
    for members in fused_sets(matrices):
        said = {module: scheme(module) for module in members}
        if len(set(said.values())) > 1:
            odd = min(members, key=lambda m: list(said.values()).count(said[m]))
            each = ", ".join(f"{module.rpartition('.')[2]}: {what}" for module, what in said.items())
            weight = table.weight(odd)
            yield Finding(
                "fused-torn",
                table.shard(weight.name),
                weight.name,
                f"an engine loads these as one, their schemes differ ({each})",
                "quantize all of them alike, or none",
            )
    by_layer: dict[tuple[int | None, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module in matrices:
        if expert_of(module) is not None:
            by_layer[layer_of(module), module.rpartition(".")[2]][scheme(module)].append(module)
    for (layer, leaf), schemes in by_layer.items():
        usual = max(schemes, key=lambda name: len(schemes[name]))
        for name, members in schemes.items():
            for module in members if name != usual else ():
                weight = table.weight(module)
                yield Finding(
                    "experts-differ",
                    table.shard(weight.name),
                    weight.name,
                    f"{name}, while {len(schemes[usual])} {leaf} of layer {layer} are {usual}",
                    "quantize all experts of a layer alike",
                )


def kv_cache(table: Table) -> Iterator[Finding]:
    """A KV cache scheme that is supported, and whose scales are there for all attention layers or for none."""
    config, text = table.config, table.checkpoint.text_config
    scales = defaultdict(set)
    for module, stored in table.modules.items():
        for name in KV_SCALES:
            if name in stored and layer_of(module) is not None:
                scales[layer_of(module)].add(name)
    if not config or not config.kv_cache:
        return
    where = f"{config.path}.kv_cache_scheme"
    bits, kind = config.kv_cache.get("num_bits"), config.kv_cache.get("type")
    if bits != 8 or kind != "float":
        yield Finding(
            "kv-scheme-unsupported",
            CONFIG,
            "",
            f"{where}: {bits}-bit {kind}; engines take 8-bit float only and fail later",
            "set num_bits 8 and type float, or remove it",
        )
    linear, count = text.get("linear_attn_config"), text.get("num_hidden_layers")
    listed = linear.get("full_attn_layers") if isinstance(linear, dict) else None
    if isinstance(listed, list) and listed and all(type(number) is int for number in listed):
        bearing = {number - 1 for number in listed}  # counted from 1
    else:
        bearing = set(range(count if type(count) is int else 0))
    missing = sorted(layer for layer in bearing if scales[layer] != set(KV_SCALES))
    if missing and len(missing) == len(bearing):
        message = (
            f"{where} is set, none of the {len(bearing)} layers that hold a KV cache ({_ranges(missing)}) "
            "has k_scale and v_scale: uncalibrated, scale=1.0"
        )
        yield Finding("kv-uncalibrated", CONFIG, "", message, "calibrate, or label results as scale 1.0", WARNING)
    else:
        for layer in missing:
            yield Finding(
                "kv-scale-missing",
                CONFIG,
                f"layers.{layer}",
                f"{where} is set; this layer lacks {', '.join(sorted(set(KV_SCALES) - scales[layer]))}, others do not",
                "calibrate all attention layers",
            )


def _ranges(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) < 30 else f"{numbers[0]} to {numbers[-1]}"
