"""Lint rules on the quantization config itself: exactly one, known, consistent, and no pattern that matches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.checkpoint import declared
from pipeline.checkpoint.declared import Declared, Matcher
from pipeline.checkpoint.finding import WARNING, Finding
from pipeline.checkpoint.reading import CONFIG, Checkpoint
from pipeline.checkpoint.table import QUANTIZED_DTYPES, Table, is_linear, is_packed
from pipeline.errors import Unreadable

OTHER_METHODS = frozenset(
    ("fp8", "mxfp4", "mxfp8", "gptq", "awq", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "quark",
     "bitsandbytes", "gguf", "auto-round", "inc", "torchao", "fbgemm_fp8", "deepseek_v4_fp8", "gpt_oss_mxfp4",
     "humming", "moe_wna16", "auto_gptq", "auto_awq", "gptq_marlin", "awq_marlin", "experts_int8", "hqq", "aqlm", "eetq", "vptq",
     "fp_quant", "quanto")
)  # fmt: skip
# The names that GPTQ, AWQ (and compressed-tensors) give a matrix of packed integers.
PACKED = ("weight_packed", "qweight")


def configs(checkpoint: Checkpoint) -> Iterator[Finding | Declared]:
    """Exactly one quantization config where something is quantized; yields findings, then the one in effect."""
    try:
        sidecars = declared.find_sidecars(checkpoint.directory)
    except Unreadable as error:
        yield Finding("config-malformed", "", "", str(error), "write it again, or remove it")
        sidecars = []
    found = declared.find_configs(checkpoint.config)
    yield from _agreement(found, sidecars)
    if not found:
        if sidecars:
            yield Finding(
                "method-not-linted", sidecars[0][0], "",
                f"the weights are described here ({sidecars[0][1]['quant_method']}) and not in config.json; their "
                "layout is not linted", "check it with the tool that made it", WARNING,
            )  # fmt: skip
            return
        quantized = [name for name, tensor in checkpoint.tensors().items()
                     if tensor.parameter in PACKED or tensor.dtype in QUANTIZED_DTYPES]  # fmt: skip
        if quantized:
            shard = checkpoint.weight_map[quantized[0]]
            message = f"{len(quantized)} tensors are quantized (first: this one), no quantization_config in config.json"
            yield Finding("config-missing", shard, quantized[0], message, "write the quantization_config")
        return
    try:
        config = declared.parse(*found[0])
    except Unreadable as error:
        yield Finding("config-malformed", CONFIG, "", str(error), "write the quantization_config again")
        return
    if config.method != declared.COMPRESSED_TENSORS:
        known = config.method in OTHER_METHODS
        message = f"{config.path}.quant_method is {config.method!r}" + (
            ", whose layout is not linted" if known else ", which no engine knows"
        )
        yield Finding(
            "method-not-linted" if known else "method-unknown",
            CONFIG,
            "",
            message,
            "check it with the tool that made it" if known else "write quant_method compressed-tensors",
            WARNING if known else "error",
        )
        return
    yield from _formats(config)
    broken = declared.invalid_patterns(config)
    for path, _, reason in broken:
        yield Finding("pattern-invalid", CONFIG, "", f"{path}: {reason}", "correct it: an engine stops at start-up")
    yield declared.without_patterns(config, [pattern for _, pattern, _ in broken])


def _agreement(
    found: list[tuple[str, dict[str, Any]]], sidecars: list[tuple[str, dict[str, Any]]]
) -> Iterator[Finding]:
    """One config in config.json; a file of another tool's beside it describes the same method."""
    if len(found) > 1:
        each = "; ".join(f"{path} says {raw.get('quant_method')}/{raw.get('format')}" for path, raw in found)
        yield Finding(
            "config-duplicate",
            CONFIG,
            "",
            f"{len(found)} quantization configs: {each}",
            "keep the one that describes the tensors (top level), delete the rest",
        )
    for name, raw in sidecars if found else ():
        method, other = str(found[0][1].get("quant_method")), str(raw["quant_method"])
        if not method.startswith(other):  # ModelOpt writes modelopt_fp4 and the like
            yield Finding(
                "config-duplicate", name, "",
                f"a second quantization config ({other}), {found[0][0]} in config.json says {method}",
                "keep the one that describes the tensors, delete the other",
            )  # fmt: skip


def _formats(config: Declared) -> Iterator[Finding]:
    """Each group has one format that an engine knows."""
    formats = {config.format, *config.formats} - {None}
    for name in sorted(formats - declared.STORED.keys() - {declared.MIXED, "dense"}):
        yield Finding(
            "format-unknown",
            CONFIG,
            "",
            f"{config.path}: format {name!r} is not one of {', '.join(declared.STORED)}",
            "correct the format: engines guess, and guess wrong",
        )
    for group in config.groups:
        where = f"{config.path}.config_groups.{group.name}"
        if group.format in (None, declared.MIXED):
            message = f"{where} has no format of its own, the config says {config.format}"
            yield Finding("format-unknown", CONFIG, "", message, "name the group's format")
        if len({group.format, config.format} - {None, declared.MIXED}) > 1:
            yield Finding(
                "format-conflict",
                CONFIG,
                "",
                f"{where} says {group.format}, the config says {config.format}",
                "make them agree, or say mixed-precision",
            )


def matching(table: Table) -> Iterator[Finding]:
    """Fill in what the config says of each module; report patterns that match nothing."""
    config = table.config
    kimi = table.checkpoint.text_config.get("model_type") == "kimi_linear"
    ignore = Matcher(config.ignore)
    groups = [(group, Matcher(group.targets)) for group in config.groups]
    unused_ignore, unused_targets = dict.fromkeys(config.ignore), {
        (g.name, t): None for g in config.groups for t in g.targets
    }
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
        yield Finding(
            "ignore-unmatched",
            CONFIG,
            "",
            f"{config.path}.ignore: {pattern!r} matches none of {len(table.modules)} modules",
            "remove it, or use the checkpoint's own (unfused) names",
        )
    for name, target in unused_targets:
        if not target[:1].isupper() or target == "Linear":  # other class names cannot be told from tensor names
            yield Finding(
                "target-unmatched",
                CONFIG,
                "",
                f"{config.path}.config_groups.{name}.targets: {target!r} matches no weight",
                "remove it, or use the checkpoint's own (unfused) names",
            )
