"""Lint rules on what is declared (quantization config) against what is stored (names, dtypes, shapes): headers only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.checkpoint import declared
from pipeline.checkpoint.declared import Declared, Group, Matcher
from pipeline.checkpoint.finding import WARNING, Finding
from pipeline.checkpoint.headers import Tensor
from pipeline.checkpoint.layout import ROUTER_GATE, expert_of, fused_sets, layer_of
from pipeline.checkpoint.reading import CONFIG, Checkpoint
from pipeline.errors import Unreadable

OTHER_METHODS = frozenset(
    ("fp8", "mxfp4", "gptq", "awq", "modelopt", "modelopt_fp4", "quark", "bitsandbytes", "gguf", "auto-round", "inc", "torchao",
     "fbgemm_fp8", "deepseek_v4_fp8", "gpt_oss_mxfp4", "humming", "moe_wna16")
)  # fmt: skip
QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
KV_SCALES = ("k_scale", "v_scale")
NATIVE_FORMAT = "mxfp4-pack-quantized"


@dataclass
class Table:
    """The modules of a checkpoint with their parameters, and what the config says of each."""

    checkpoint: Checkpoint
    config: Declared | None
    modules: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    group_of: dict[str, Group] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)

    def shard(self, tensor: str) -> str:
        return self.checkpoint.weight_map.get(tensor, "")

    def weight(self, module: str) -> Tensor | None:
        """The stored weight, packed or not."""
        stored = self.modules[module]
        return stored.get("weight_packed") or stored.get("weight")


def is_packed(stored: dict[str, Tensor]) -> bool:
    """Whether a module's parameters are those of a quantized matrix."""
    weight = stored.get("weight")
    return "weight_packed" in stored or (
        weight is not None and (weight.dtype in QUANTIZED_DTYPES or "weight_scale" in stored or "weight_scale_inv" in stored)
    )


def is_linear(module: str, weight: Tensor, kimi: bool) -> bool:
    """Whether a float weight is one that the target ``Linear`` claims: a matrix that is no embedding, norm or convolution.

    K3's router gate is a bare parameter in its own module, not a Linear.
    """
    leaf = module.rpartition(".")[2]
    if weight.parameter != "weight" or len(weight.shape) != 2 or (kimi and ROUTER_GATE.search(module)):
        return False
    return not any(word in leaf for word in ("embed", "wte", "wpe", "norm", "conv", "pos_emb"))


def configs(checkpoint: Checkpoint) -> Iterator[Finding | Declared]:
    """Exactly one quantization config where something is quantized; yields findings, then the one in effect."""
    found = declared.find_configs(checkpoint.config)
    quantized = [name for name, tensor in checkpoint.tensors().items()
                 if tensor.parameter == "weight_packed" or tensor.dtype in QUANTIZED_DTYPES]  # fmt: skip
    if not found:
        if quantized:
            shard = checkpoint.weight_map[quantized[0]]
            message = f"{len(quantized)} tensors are quantized (first: this one), config.json has no quantization_config"
            yield Finding("config-missing", shard, quantized[0], message, "write the quantization_config")
        return
    if len(found) > 1:
        each = "; ".join(f"{path} says {raw.get('quant_method')}/{raw.get('format')}" for path, raw in found)
        yield Finding("config-duplicate", CONFIG, "", f"{len(found)} quantization configs: {each}", "keep the one that describes the tensors (top level), delete the rest")
    try:
        config = declared.parse(*found[0])
    except Unreadable as error:
        yield Finding("config-malformed", CONFIG, "", str(error), "write the quantization_config again")
        return
    if config.method != declared.COMPRESSED_TENSORS:
        known = config.method in OTHER_METHODS
        message = f"{config.path}.quant_method is {config.method!r}" + (", whose layout is not linted" if known else ", which no engine knows")
        yield Finding("method-not-linted" if known else "method-unknown", CONFIG, "", message, "check it with the tool that made it" if known else "write quant_method compressed-tensors", WARNING if known else "error")
        return
    formats = {config.format, *config.formats} - {None}
    for name in sorted(formats - declared.STORED.keys() - {declared.MIXED, "dense"}):
        yield Finding("format-unknown", CONFIG, "", f"{config.path}: format {name!r} is not one of {', '.join(declared.STORED)}", "correct the format: engines guess, and guess wrong")
    for group in config.groups:
        if len({group.format, config.format} - {None, declared.MIXED}) > 1:
            yield Finding("format-conflict", CONFIG, "", f"{config.path}.config_groups.{group.name} says {group.format}, the config says {config.format}", "make them agree, or say mixed-precision")
    yield config


def table_of(checkpoint: Checkpoint, config: Declared | None) -> Table:
    """Sort tensors by module and match each module against ignore and targets."""
    table = Table(checkpoint, config)
    for name, tensor in checkpoint.tensors().items():
        table.modules[tensor.module][tensor.parameter] = tensor
    return table


def matching(table: Table) -> Iterator[Finding]:
    """Fill in what the config says of each module; report patterns that match nothing."""
    config = table.config
    kimi = table.checkpoint.text_config.get("model_type") == "kimi_linear"
    ignore = Matcher(config.ignore)
    groups = [(group, Matcher(group.targets)) for group in config.groups]
    unused_ignore, unused_targets = dict.fromkeys(config.ignore), {(g.name, t): None for g in config.groups for t in g.targets}
    for module, stored in table.modules.items():
        hits = ignore.all(module) if unused_ignore else ({ignore.first(module)} - {None})
        for pattern in hits:
            unused_ignore.pop(pattern, None)
        weight = table.weight(module)
        if hits:
            table.ignored.add(module)
        if weight is None:
            continue
        for group, matcher in groups:
            target = matcher.first(module)
            if target is None and "Linear" in group.targets and (is_packed(stored) or is_linear(module, weight, kimi)):
                target = "Linear"
            if target is not None:
                unused_targets.pop((group.name, target), None)
                if not hits:
                    table.group_of.setdefault(module, group)
                break
    for pattern in unused_ignore:
        yield Finding("ignore-unmatched", CONFIG, "", f"{config.path}.ignore: {pattern!r} matches none of {len(table.modules)} modules", "remove it, or use the checkpoint's own (unfused) names")
    for name, target in unused_targets:
        if not target[:1].isupper() or target == "Linear":  # other class names cannot be told from tensor names
            yield Finding("target-unmatched", CONFIG, "", f"{config.path}.config_groups.{name}.targets: {target!r} matches no weight", "remove it, or use the checkpoint's own (unfused) names")


def stored_as_declared(table: Table) -> Iterator[Finding]:
    """Declared against stored, both ways; names, dtypes and shapes of weights and scales."""
    served_as_mxfp4 = table.config.format == NATIVE_FORMAT and table.checkpoint.text_config.get("model_type") == "kimi_linear"
    for module, stored in table.modules.items():
        weight = table.weight(module)
        if weight is None:
            continue
        packed, group = is_packed(stored), table.group_of.get(module)
        shard = table.shard(weight.name)
        if packed and ROUTER_GATE.search(module):
            yield Finding("router-quantized", shard, weight.name, f"the router is stored as {weight.dtype}: near-tied experts change places", "copy it from the source")
        if packed and module in table.ignored:
            yield Finding("ignored-but-quantized", shard, weight.name, f"ignored by the config, stored as {weight.dtype}", "remove it from ignore, or store it unquantized")
        elif packed and group is None:
            yield Finding("quantized-not-declared", shard, weight.name, f"stored as {weight.dtype}, no config group targets it", "add it to a config group")
        elif packed:
            yield from _parameters(table, module, stored, weight, group)
        elif group is not None:
            note = "; vLLM serves K3's mxfp4 files by a rule that quantizes routed experts only" if served_as_mxfp4 else ""
            yield Finding(
                "declared-not-quantized", shard, weight.name,
                f"declared quantized by {table.config.path}.config_groups.{group.name}, stored as {weight.dtype}{note}",
                "add it to ignore", WARNING if served_as_mxfp4 else "error",
            )  # fmt: skip


def _parameters(table: Table, module: str, stored: dict[str, Tensor], weight: Tensor, group: Group) -> Iterator[Finding]:
    expected = declared.STORED.get(group.format or "")
    if expected is None:
        return
    parameter, dtype, others = expected
    shard = table.shard(weight.name)
    again = "requantize this module"
    if weight.parameter != parameter or (dtype is not None and weight.dtype != dtype):
        yield Finding("format-mismatch", shard, weight.name, f"declared {group.format} ({parameter}, {dtype}), stored as {weight.parameter}, {weight.dtype}", "correct the format, or " + again)
        return
    for name in others:
        if name not in stored:
            yield Finding("scale-missing", shard, f"{module}.{name}", f"{group.format} needs it beside {weight.name}; an engine would use garbage or 0", again)
    static_input = group.activations is not None and group.activations.get("dynamic") is False
    if static_input and "input_scale" not in stored and "input_global_scale" not in stored:
        yield Finding("scale-missing", shard, f"{module}.input_scale", "activations are declared static, no input scale is stored: 1/0 at run time", "calibrate this module, or declare dynamic activations")
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
            yield Finding("indivisible", shard, weight.name, f"{columns} columns % group {group.group_size} = {columns % group.group_size}", "use a smaller group, or leave it unquantized")
        wanted = (rows, -(-columns // group.group_size))
    elif group.strategy == "block" and group.block_structure:
        height, width = group.block_structure
        if rows % height or columns % width:
            yield Finding("indivisible", shard, weight.name, f"{rows}x{columns} % block {height}x{width} = {rows % height}, {columns % width}", "use fp8_channel, or leave it unquantized")
        wanted = (-(-rows // height), -(-columns // width))
    elif group.strategy == "channel":
        wanted = (rows, 1)
    scale = stored.get("weight_scale")
    if scale is None:
        return
    shapes = {wanted, (rows,)} if group.strategy == "channel" else {wanted}
    if wanted is not None and scale.shape not in shapes:
        yield Finding("scale-shape", table.shard(scale.name), scale.name, f"shape {list(scale.shape)}, a weight of {rows}x{columns} needs {list(wanted)}", "requantize this module")
    dtypes = {NATIVE_FORMAT: ("U8", "F8_E8M0"), "nvfp4-pack-quantized": ("F8_E4M3",)}.get(group.format or "", ("F32", "BF16", "F16"))
    if scale.dtype not in dtypes:
        yield Finding("scale-dtype", table.shard(scale.name), scale.name, f"dtype {scale.dtype}, {group.format} needs {' or '.join(dtypes)}", "requantize this module")


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
            yield Finding("fused-torn", table.shard(weight.name), weight.name, f"an engine loads these as one, their schemes differ ({each})", "quantize all of them alike, or none")
    by_layer: dict[tuple[int | None, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module in matrices:
        if expert_of(module) is not None:
            by_layer[layer_of(module), module.rpartition(".")[2]][scheme(module)].append(module)
    for (layer, leaf), schemes in by_layer.items():
        usual = max(schemes, key=lambda name: len(schemes[name]))
        for name, members in schemes.items():
            for module in members if name != usual else ():
                weight = table.weight(module)
                yield Finding("experts-differ", table.shard(weight.name), weight.name, f"{name}, while {len(schemes[usual])} {leaf} of layer {layer} are {usual}", "quantize all experts of a layer alike")


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
        yield Finding("kv-scheme-unsupported", CONFIG, "", f"{where}: {bits}-bit {kind}; engines take 8-bit float only and fail later", "set num_bits 8 and type float, or remove it")
    linear = text.get("linear_attn_config") or {}
    if linear.get("full_attn_layers"):
        bearing = {number - 1 for number in linear["full_attn_layers"]}  # counted from 1
    else:
        bearing = set(range(int(text.get("num_hidden_layers") or 0)))
    missing = sorted(layer for layer in bearing if scales[layer] != set(KV_SCALES))
    if missing and len(missing) == len(bearing):
        message = f"{where} is set, none of the {len(bearing)} layers that hold a KV cache ({_ranges(missing)}) has k_scale and v_scale: uncalibrated, scale=1.0"
        yield Finding("kv-uncalibrated", CONFIG, "", message, "calibrate, or label results as scale 1.0", WARNING)
    else:
        for layer in missing:
            yield Finding("kv-scale-missing", CONFIG, f"layers.{layer}", f"{where} is set, this layer lacks {', '.join(sorted(set(KV_SCALES) - scales[layer]))}, others have them", "calibrate all attention layers")


def _ranges(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) < 30 else f"{numbers[0]} to {numbers[-1]}"
