"""The output's config.json: exactly one quantization config, at the top level, with a complete ignore list."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Checkpoint, declared
from pipeline.quant import schemes, scope
from pipeline.quant.recipe import Recipe
from pipeline.quant.scope import Module

if TYPE_CHECKING:
    from pipeline.quant.planning import Convert

PROVENANCE = "requantization.json"


def build(
    checkpoint: Checkpoint, recipe: Recipe, modules: dict[str, Module], converts: dict[str, Convert]
) -> dict[str, Any]:
    """The source's config with every quantization config removed and the output's own put at the top level."""
    new = without_quantization(checkpoint.config)
    native = [module for module in modules.values() if module.mxfp4 and module.name not in converts]
    groups: list[tuple[list[Module], dict[str, Any]]] = []
    for use_fallback in (False, True):
        members = [step.module for step in converts.values() if step.fallback is use_fallback]
        if members:
            scheme = schemes.fallback(recipe) if use_fallback else schemes.of_recipe(recipe)
            groups.append((members, scheme.config_group([])))
    if native:
        groups.append((native, _native_group(checkpoint)))
    if len(groups) == 1:
        groups[0][1]["targets"] = ["Linear"]
    else:
        # Several schemes in one checkpoint: each names its modules, for "Linear" would claim them all.
        for members, group in groups:
            group["targets"] = targets_for(
                members, [other for others, _ in groups if others is not members for other in others]
            )
    quantized = [module.name for members, _ in groups for module in members]
    formats = {group["format"] for _, group in groups}
    new["quantization_config"] = {
        "quant_method": declared.COMPRESSED_TENSORS,
        "format": formats.pop() if len(formats) == 1 else declared.MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": scope.ignore_list(modules, quantized),
        "config_groups": {f"group_{number}": group for number, (_, group) in enumerate(groups)},
    }
    return new


def without_quantization(config: Any) -> Any:
    """A deep copy of a config without any quantization config, however deeply nested."""
    if isinstance(config, dict):
        return {key: without_quantization(value) for key, value in config.items() if key not in declared.CONFIG_KEYS}
    return [without_quantization(value) for value in config] if isinstance(config, list) else copy.deepcopy(config)


def targets_for(members: list[Module], others: list[Module]) -> list[str]:
    """Regular expressions, one a kind where that tells members from others, that match all ``members`` and no
    ``others``.
    """
    targets = []
    for kind in sorted({module.kind for module in members}):
        pattern = "re:.*" + re.escape(kind).replace(r"experts\.w", r"experts\..*w") + "$"
        compiled = re.compile(pattern.removeprefix("re:"))
        mine = [module.name for module in members if module.kind == kind]
        clash = any(compiled.match(module.name) for module in others) or not all(map(compiled.match, mine))
        targets += sorted(mine) if clash else [pattern]
    return targets


def _native_group(checkpoint: Checkpoint) -> dict[str, Any]:
    _, raw = declared.find_configs(checkpoint.config)[0]
    group = copy.deepcopy(next(iter(raw["config_groups"].values())))
    return group | {"format": group.get("format") or raw["format"]}
