"""The llm-compressor recipes, and what each may change on Kimi K3 beside the experts.

Smoothing moves a scale per channel from an input into the weights before it.  On K3 exactly one edge allows that:
``routed_expert_down_proj`` (bf16, linear, read by nothing but the experts) -> every expert's ``w1`` and ``w3``.  Not
``w3 -> w2``, though other models allow it: SiTU bounds ``w3``'s output by ``25 tanh(up / 25)``, which does not commute
with a scale.  Not the norm before the layer: the router reads it too, and would choose other experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pipeline.checkpoint.layout import SMOOTHED, layer_of
from pipeline.errors import Refused
from pipeline.quant.calibration import SMOOTHING
from pipeline.quant.recipe import Recipe
from pipeline.quant.scope import Module

EXPERTS = r"re:.*\.block_sparse_moe\.experts\.\d+\.w[123]$"


def smoothed_matrices(modules: dict[str, Module], chosen: Iterable[Module], recipe: Recipe) -> list[Module]:
    """The matrices that the method's smoothing rewrites, one a layer of experts.

    Raises :class:`Refused` where the architecture has none (experts without a latent space).
    """
    if recipe.calibration is None or recipe.calibration.method not in SMOOTHING:
        return []
    parents = sorted({module.name.rpartition(".experts.")[0] for module in chosen})
    names = [f"{parent}.routed_expert_down_proj" for parent in parents]
    missing = [name for name in names if name not in modules or not SMOOTHED.search(name + ".weight")]
    if missing:
        raise Refused(
            f"{missing[0]}: no such matrix.  {recipe.calibration.method} smooths the experts' input; without a latent "
            "projection that is the norm's output, which the router reads too: smoothing it would change which experts "
            "are chosen.  Use w4a16_gptq"
        )
    return [modules[name] for name in names]


def modifiers(recipe: Recipe, smoothed: Iterable[Module], left_out: Iterable[str]) -> list[Any]:
    """The modifiers for ``oneshot``; ``left_out`` are the experts (``...experts.7``) that are not calibrated."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.awq.mappings import AWQMapping
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    calibration = recipe.calibration
    scheme = preset_name_to_scheme("W4A16" if recipe.format == "w4a16" else "W8A8", [EXPERTS])
    if recipe.group_size:
        scheme.weights.group_size = recipe.group_size
    settings = {
        "config_groups": {"group_0": scheme},
        "ignore": [f"re:{re.escape(expert)}\\.w[123]$" for expert in left_out],
    }
    edges = [_edge(module) for module in sorted(smoothed, key=lambda module: layer_of(module.name) or 0)]
    if calibration.method == "awq":
        return [
            AWQModifier(mappings=[AWQMapping(source, balanced) for source, balanced in edges]),
            QuantizationModifier(**settings),
        ]
    gptq = GPTQModifier(**settings)
    if calibration.method == "gptq":
        return [gptq]
    strength = calibration.smoothing_strength
    return [SmoothQuantModifier(smoothing_strength=strength, mappings=[[b, s] for s, b in edges]), gptq]


def _edge(module: Module) -> tuple[str, list[str]]:
    """The smoothed matrix and the experts' matrices that read it, as patterns."""
    parent = re.escape(module.name.rpartition(".")[0])
    return f"re:{re.escape(module.name)}$", [rf"re:{parent}\.experts\.\d+\.w{number}$" for number in (1, 3)]
