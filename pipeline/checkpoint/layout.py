"""What tensor names say: layer, expert, role, and which modules an engine loads as one.

The fused sets are vLLM's ``packed_modules_mapping`` (``models/kimi_k3/nvidia/model.py`` for Kimi K3) and the usual
``qkv_proj`` / ``gate_up_proj``.  Every member of a set must be stored in one scheme, or the engine refuses the file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
VISION = re.compile(
    r"(?:^|\.)(?:vision_tower|vision_model|visual|mm_projector|multi_modal_projector|audio_tower|audio_model)(?:\.|$)"
)
# Layers that predict further tokens, where they are not counted on from the decoder's last layer.
PREDICTION = re.compile(r"(?:^|\.)(?:mtp|mtp_layers|nextn)(?:\.|$)")

# Tensors that K3 stores in F32 and that must stay F32: rounding the router's bias changes which experts are chosen.
F32_TENSORS = re.compile(
    r"\.(?:A_log|dt_bias|e_score_correction_bias|self_attn\.(?:[qkv]_)?conv1d\.weight|self_attn\.o_norm\.weight)$"
)
# What a calibrated recipe may rescale, row by row, beside the experts that read it: linear, and nothing else reads it.
SMOOTHED = re.compile(r"\.block_sparse_moe\.routed_expert_down_proj\.weight$")
ROUTER_GATE = re.compile(r"(?:block_sparse_moe|mlp|moe)\.gate$")

FUSED_SETS = (
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
)
EXPERT_SETS = (("w1", "w2", "w3"), ("gate_proj", "up_proj", "down_proj"))
# NVFP4 keeps one global scale for what is multiplied together.
SHARED_GLOBAL_SCALE = (("w1", "w3"), ("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj"))


def layer_of(name: str) -> int | None:
    """Index of the decoder layer that a language-model tensor or module belongs to (``None``: outside, or vision)."""
    if VISION.search(name):
        return None
    match = LAYER.search(name + ".")
    return int(match.group(1)) if match else None


def expert_of(name: str) -> int | None:
    """Index of the routed expert that a tensor or module belongs to."""
    match = EXPERT.search(name + ".")
    return int(match.group(1)) if match else None


def kind_of(module: str) -> str:
    """The module's role, the same in every layer: ``block_sparse_moe.experts.w1``, ``self_attn.o_proj``."""
    match = LAYER.search(module + ".")
    return re.sub(r"\.\d+(?=\.|$)", "", module[match.end() :] if match else module)


def sets_among(modules: Iterable[str], sets: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The groups of at least two siblings among ``modules`` whose last names lie in one of ``sets``."""
    siblings: dict[str, dict[str, str]] = defaultdict(dict)
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        siblings[parent][leaf] = module
    sets = tuple(sets)
    found = (
        tuple(leaves[leaf] for leaf in members if leaf in leaves) for leaves in siblings.values() for members in sets
    )
    return [group for group in found if len(group) > 1]


def fused_sets(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """The groups among ``modules`` that an engine loads as one and that must be of one scheme."""
    modules = list(modules)
    experts = [module for module in modules if expert_of(module) is not None]
    others = [module for module in modules if expert_of(module) is None]
    return sets_among(experts, EXPERT_SETS) + sets_among(others, FUSED_SETS)
