"""Reading ``config.json``: where the text half is, and which quantization the checkpoint says it has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Refused, Unreadable
from pipeline.files import read_json

# Compressed-tensors container formats (compressed_tensors/config/base.py, CompressionFormat) -> what one weight is
# stored as.
KNOWN_FORMATS = {
    "dense": "bfloat16",
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
    "float-quantized": "float8",
    "int-quantized": "int8",
    "pack-quantized": "int4",
    "naive-quantized": "int8",
    "mixed-precision": "mixed",
}
# ``quant_method`` values of other quantizers: named so that the message can say what the weights are.
OTHER_METHODS = {"fp8": "float8", "gptq": "int4", "awq": "int4", "mxfp4": "mxfp4", "modelopt": "nvfp4"}


# Keys that the planner computes with: at least 1; at least 0; the same or null.
SIZES = frozenset(
    "hidden_size num_hidden_layers num_attention_heads vocab_size intermediate_size moe_intermediate_size head_dim "
    "qk_nope_head_dim v_head_dim num_heads short_conv_kernel_size decoder_sparse_step linear_conv_kernel_dim "
    "linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim patch_size qkv_hidden_size "
    "vt_hidden_size vt_intermediate_size vt_num_hidden_layers init_pos_emb_height init_pos_emb_width".split()
)
COUNTS = frozenset(["qk_rope_head_dim", "first_k_dense_replace"])
OPTIONAL = frozenset(
    "num_experts n_routed_experts num_local_experts num_shared_experts n_shared_experts num_experts_per_token "
    "num_experts_per_tok num_key_value_heads kv_lora_rank q_lora_rank routed_expert_hidden_size moe_layer_freq "
    "shared_expert_intermediate_size attn_res_block_size full_attention_interval max_position_embeddings "
    "text_hidden_size".split()
)
MAY_BE_NULL = {(where, key) for where in ("", "text_config.") for key in ("head_dim", "layer_types", "architectures")}
LISTS = {"kda_layers": int, "full_attn_layers": int, "mlp_only_layers": int, "layer_types": str, "architectures": str}


def check_types(config: dict[str, Any]) -> None:
    """Raise :class:`Unreadable` naming the first key whose value the planner could not compute with."""
    parts = {"": config}
    holders = {"text_config": config, "vision_config": config, "linear_attn_config": text_config(config)}
    for name, holder in holders.items():
        parts[f"{name}."] = part = holder.get(name) or {}
        if not isinstance(part, dict):
            raise Unreadable(f"config.json: {name} is {part!r:.80}, expected a JSON object")
    if "vt_hidden_size" not in parts["vision_config."]:
        del parts["vision_config."]  # of another model, and not computed with
    for where, part in parts.items():
        for key, value in part.items():
            if value is None and (key in OPTIONAL or (where, key) in MAY_BE_NULL):
                continue
            number = value if type(value) is int else -1
            if key in LISTS:
                sound = isinstance(value, list) and all(type(item) is LISTS[key] for item in value)
            elif key == "partial_rotary_factor":
                sound = isinstance(value, (int, float)) and 0 <= value <= 1
            else:
                sound = number >= 1 if key in SIZES else number >= 0 or key not in COUNTS | OPTIONAL
            if not sound:
                raise Unreadable(f"config.json: {where}{key} is {value!r:.80}, which no model can have")


FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class SourceFormat:
    """What the source checkpoint stores.  ``weights`` is one of the values of :data:`KNOWN_FORMATS`."""

    weights: str
    name: str
    where: str

    @property
    def is_quantized(self) -> bool:
        return self.weights not in FLOATS


def read_config(path: Path | str) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint directory (or of the file itself).

    Raises :class:`Unreadable` where the file is missing, is not JSON, or describes no model.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    config = read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise Unreadable(f"{path}: expected a JSON object that describes a model")
    if "model_type" not in text_config(config) and "architectures" not in config:
        raise Unreadable(f"{path}: neither 'model_type' nor 'architectures': this is not a model's config.json")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text half: ``text_config`` where the model is multimodal, else the whole."""
    return config.get("text_config") or config


def declared_quantizations(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every ``quantization_config`` in the file, with where it stands.  More than one is a contradiction waiting to
    happen.  Raises :class:`Unreadable` for one that is no JSON object."""
    found = []
    if config.get("quantization_config"):
        found.append(("quantization_config", config["quantization_config"]))
    if "text_config" in config and text_config(config).get("quantization_config"):
        found.append(("text_config.quantization_config", text_config(config)["quantization_config"]))
    for where, quantization in found:
        _check_quantization(where, quantization)
    return found


def _check_quantization(where: str, quantization: Any) -> None:
    def expect(path: str, value: Any, kind: type) -> None:
        if value is not None and not isinstance(value, kind):
            raise Unreadable(f"{path} is {value!r:.80}, expected {'a JSON object' if kind is dict else kind.__name__}")

    expect(where, quantization, dict)
    for key, kind in (("format", str), ("quant_method", str), ("kv_cache_scheme", dict), ("config_groups", dict)):
        expect(f"{where}.{key}", quantization.get(key), kind)
    for key in ("ignore", "modules_to_not_convert"):
        expect(f"{where}.{key}", quantization.get(key), list)
        for pattern in quantization.get(key) or ():
            expect(f"{where}.{key}: an entry", pattern or 0, str)
    for name, group in (quantization.get("config_groups") or {}).items():
        expect(f"{where}.config_groups.{name}", group or 0, dict)
        expect(f"{where}.config_groups.{name}.weights", group.get("weights"), dict)
        for key, kind in (("group_size", int), ("strategy", str)):
            expect(f"{where}.config_groups.{name}.weights.{key}", (group.get("weights") or {}).get(key), kind)


def source_format(config: dict[str, Any]) -> SourceFormat:
    """The weight format a config declares; bf16 where it declares none.

    Raises :class:`Refused` for a format this pipeline does not know (a guessed format loads as garbage:
    https://github.com/ml-explore/mlx-lm/issues/1865) and for two configs that contradict each other.
    """
    declared = declared_quantizations(config)
    if not declared:
        dtype = text_config(config).get("dtype") or text_config(config).get("torch_dtype") or "bfloat16"
        if dtype not in FLOATS:
            known = ", ".join(FLOATS)
            raise Refused(f"config.json: dtype is {dtype!r:.80}, and no quantization config says more; known: {known}")
        return SourceFormat(dtype, "dense", "dtype")
    names = {where: quantization.get("format") or quantization.get("quant_method") for where, quantization in declared}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{where} says {name!r}" for where, name in names.items())
        raise Refused(f"config.json holds contradicting quantization configs: {listed}; remove the stale one")
    where, quantization = declared[0]
    name = quantization.get("format") or quantization.get("quant_method")
    weights = KNOWN_FORMATS.get(name) or OTHER_METHODS.get(name)
    if weights is None:
        known = ", ".join(sorted({*KNOWN_FORMATS, *OTHER_METHODS}))
        raise Refused(f"{where}.format is {name!r}, which is not a known weight format; known: {known}")
    return SourceFormat(weights, name, where)


def kv_cache_scheme(config: dict[str, Any]) -> dict[str, Any] | None:
    """The ``kv_cache_scheme`` of the declared quantization, if any."""
    for _, quantization in declared_quantizations(config):
        if quantization.get("kv_cache_scheme"):
            return quantization["kv_cache_scheme"]
    return None
