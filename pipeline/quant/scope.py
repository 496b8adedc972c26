"""Which modules a recipe re-encodes, from the checkpoint's names and headers alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.checkpoint import Checkpoint, declared
from pipeline.checkpoint.layout import ROUTER_GATE, expert_of, fused_sets, kind_of, layer_of
from pipeline.errors import Refused
from pipeline.quant.recipe import Recipe

SOURCE_FORMAT = "mxfp4-pack-quantized"
FLOATS = ("BF16", "F16", "F32")

# K3: what is never part of a fused set that must stay bf16 (the attention inputs hold b_proj with 96 rows).
K3_DENSE = re.compile(
    r"\.self_attn\.o_proj$|\.shared_experts\.(?:gate|up|down)_proj$|\.mlp\.(?:gate|up|down)_proj$"
)
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
GENERIC_DENSE = re.compile(r"(?:proj|\.w[123]|\.fc\d|\.dense\w*)$")


@dataclass(frozen=True)
class Module:
    """A weight matrix of the source: ``tensors`` are (packed, scale) for MXFP4, (weight,) for floats."""

    name: str
    mxfp4: bool
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    shard: str

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    @property
    def family(self) -> str:
        """Modules that take one scheme together: all experts, a whole MLP, an attention's projections."""
        return "experts" if expert_of(self.name) is not None else self.kind.rpartition(".")[0]


def is_k3(checkpoint: Checkpoint) -> bool:
    """Whether the language model is of Kimi K3's architecture (KDA/MLA hybrid with latent experts)."""
    return checkpoint.text_config.get("model_type") == "kimi_linear" or checkpoint.config.get("model_type") == "kimi_k3"


def has_experts(checkpoint: Checkpoint, modules: Iterable[str]) -> bool:
    """Whether the model routes between experts: its config says so, or its tensors do."""
    declared_experts = any(checkpoint.text_config.get(key) for key in EXPERT_COUNTS)
    return declared_experts or any(expert_of(name) is not None for name in modules)


def source_format(checkpoint: Checkpoint) -> str | None:
    """``mxfp4-pack-quantized`` or ``None`` (floats).  Raises :class:`Refused` for any other or contradicting
    declaration.
    """
    if sidecars := declared.find_sidecars(checkpoint.directory):
        name, raw = sidecars[0]
        raise Refused(
            f"{checkpoint.directory}: already quantized, says {name} ({raw['quant_method']}); dequantize it first, or "
            "remove the file where it is left over"
        )
    configs = [declared.parse(path, raw) for path, raw in declared.find_configs(checkpoint.config)]
    if not configs:
        return None
    said = {(config.method, tuple(sorted(map(str, config.formats)))) for config in configs}
    where = " and ".join(f"{config.path} ({', '.join(sorted(map(str, config.formats)))})" for config in configs)
    if len(said) > 1:
        raise Refused(
            f"{checkpoint.directory}: contradicting quantization configs at {where}; keep the one that is true"
        )
    if said != {(declared.COMPRESSED_TENSORS, (SOURCE_FORMAT,))}:
        method = configs[0].method or "no quant_method"
        raise Refused(
            f"{checkpoint.directory}: already quantized at {where}, method {method}; requantization starts from "
            f"{SOURCE_FORMAT} or from bf16, fp16 or f32 weights: dequantize it first, or use recipe native"
        )
    if not configs[0].groups:
        where = f"{checkpoint.directory}: {configs[0].path}"
        raise Refused(f"{where} has no config_groups, so nothing says which weights it describes; take the source's own")
    return SOURCE_FORMAT


def modules_of(checkpoint: Checkpoint) -> dict[str, Module]:
    """Every weight matrix of the source.  Raises :class:`Refused` for packed weights without their scale or config, and
    for matrices that are stored twice, empty, or packed as another tool packs them.

    The dtype of MXFP4 is BF16, whatever the config says of the rest: llm-compressor dequantizes it to that.
    """
    packed_source = source_format(checkpoint) is not None
    found, problems = {}, []
    tensors = checkpoint.tensors()
    for name, tensor in tensors.items():
        module, shard = tensor.module, checkpoint.weight_map[name]
        if tensor.parameter == "weight_packed":
            scale = tensors.get(f"{module}.weight_scale")
            if f"{module}.weight" in tensors:
                problems.append(f"{name} ({shard}) is stored beside {module}.weight: one of them is left over")
            elif not packed_source:
                problems.append(f"{name} ({shard}) is packed, but config.json has no quantization_config")
            elif scale is None:
                problems.append(f"{name} ({shard}) has no {module}.weight_scale in any shard")
            elif not _is_mxfp4(tensor.dtype, tensor.shape, scale.dtype, scale.shape):
                problems.append(
                    f"{name} ({shard}) is {tensor.dtype} {list(tensor.shape)} with scale {scale.dtype} "
                    f"{list(scale.shape)}, not MXFP4 (U8 [out, in/2] and U8 [out, in/32])"
                )
            else:
                shape = (tensor.shape[0], tensor.shape[1] * 2)
                found[module] = Module(module, True, (name, scale.name), shape, "BF16", shard)
        elif tensor.parameter == "qweight":
            problems.append(f"{name} ({shard}) is packed as GPTQ or AWQ packs, config.json has no quantization_config")
        elif tensor.parameter == "weight" and len(tensor.shape) >= 2 and all(tensor.shape):
            found[module] = Module(module, False, (name,), tensor.shape, tensor.dtype, shard)
    if problems:
        raise Refused(_listed(f"{checkpoint.directory}: {len(problems)} weights cannot be read", problems))
    return found


def _is_mxfp4(dtype: str, shape: tuple[int, ...], scale_dtype: str, scale_shape: tuple[int, ...]) -> bool:
    return (
        dtype == "U8" and scale_dtype in ("U8", "F8_E8M0") and len(shape) == 2 and all(shape) and shape[1] % 16 == 0
        and scale_shape == (shape[0], shape[1] // 16)
    )  # fmt: skip


def select(checkpoint: Checkpoint, modules: dict[str, Module], recipe: Recipe) -> list[Module]:
    """The modules that the recipe re-encodes, in the order of ``modules``.

    ``experts`` is where a mixture of experts keeps its weights.  A model that has none keeps them in its linear layers, so the
    scope then means those (the planner counts them the same way).
    Raises :class:`Refused` where the scope is empty, a fused set would be torn, or a weight is no float and no MXFP4.
    """
    dense = K3_DENSE if is_k3(checkpoint) else GENERIC_DENSE
    wanted = recipe.scope if recipe.scope != "experts" or has_experts(checkpoint, modules) else "dense_too"
    chosen = [
        module for module in modules.values()
        if (layer_of(module.name) is not None and not ROUTER_GATE.search(module.name))
        and (wanted != "dense_only" if expert_of(module.name) is not None
             else wanted != "experts" and bool(dense.search(module.name)) and len(module.shape) == 2)
    ]  # fmt: skip
    if not chosen:
        other = "dense_too" if recipe.scope == "experts" else "experts"
        raise Refused(
            f"{checkpoint.directory}: scope {recipe.scope} matches none of {len(modules)} weight matrices; "
            f"use scope {other}"
        )
    odd = [
        f"{module.name} ({module.shard}) is {module.dtype}"
        for module in chosen
        if not module.mxfp4 and module.dtype not in FLOATS
    ]
    if odd:
        raise Refused(_listed(f"{checkpoint.directory}: {len(odd)} weights in scope are neither MXFP4 nor floats", odd))
    names = {module.name for module in chosen}
    torn = [group for group in fused_sets(modules) if 0 < len(names & set(group)) < len(group)]
    if torn:
        raise Refused(_listed(
            f"scope {recipe.scope} would quantize part of {len(torn)} fused sets, which an engine loads as one",
            [", ".join(f"{name}{'' if name in names else ' (left out)'}" for name in group) for group in torn],
        ))  # fmt: skip
    return chosen


# What stays as it is, most general first.  Written into the output's ignore list where it matches something.
IGNORE_PATTERNS = (
    r"re:.*lm_head$",
    r"re:.*embed_tokens$",
    r"re:.*vision_tower.*",
    r"re:.*visual\..*",
    r"re:.*mm_projector.*",
    r"re:.*_res_proj$",
    r"re:.*\.gate$",
    r"re:.*conv1d$",
    r"re:.*self_attn.*",
    r"re:.*self_attn\.(?!o_proj).*",
    r"re:.*shared_experts.*",
    r"re:.*\.experts\..*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj$",
    r"re:.*routed_expert_(down|up)_proj$",
)


def ignore_list(modules: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """A complete ignore list: every matrix that stays unquantized is matched, no quantized one is, each pattern
    matches.

    Patterns where they hold (they also match an engine's fused names), module names for the rest.
    """
    taken = set(quantized)
    left = [module for module in modules if module not in taken]
    chosen: list[str] = []
    for pattern in IGNORE_PATTERNS:
        compiled = re.compile(pattern.removeprefix("re:"))
        if any(map(compiled.match, taken)):
            continue
        kept = [module for module in left if not compiled.match(module)]
        if len(kept) < len(left):
            chosen.append(pattern)
            left = kept
    return chosen + sorted(left)


def _listed(title: str, items: list[str], shown: int = 10) -> str:
    rest = [f"  and {len(items) - shown} more"] if len(items) > shown else []
    return "\n".join([title + ":", *(f"  {item}" for item in items[:shown]), *rest])


def parameters(module: Module) -> int:
    """Number of weights."""
    return math.prod(module.shape)
