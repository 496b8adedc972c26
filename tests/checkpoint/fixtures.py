"""A small checkpoint in Kimi K3's released layout, made with numpy alone, and ways to break it.

``write_k3`` makes the MXFP4 original: four layers (KDA, KDA, KDA, MLA), a dense MLP in layer 0, latent experts after
it, a vision tower, the nested quantization config with its incomplete ignore list.  ``requantize_roughly`` swaps the
experts for another format with arbitrary (valid) contents, so that lint can be tested without the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

HIDDEN, LATENT, INTER, DENSE, EXPERTS, LAYERS = 128, 128, 128, 256, 4, 4
HEADS, HEAD_DIM, VOCAB = 2, 32, 64
PREFIX = "language_model.model."
EXPERT = PREFIX + "layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
NUMPY = {"F32": np.float32, "BF16": np.uint16, "U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64,
         "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F16": np.float16}  # fmt: skip
Tensors = dict[str, tuple[str, np.ndarray]]

NATIVE_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*",
    ],
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized", "targets": ["Linear"],
            "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True,
                "dynamic": False, "scale_dtype": "torch.uint8", "observer": "minmax", "observer_kwargs": {},
                "actorder": None,
                "block_structure": None, "zp_dtype": None,
            },
        }
    },
}  # fmt: skip
COMPLETE_IGNORE = [
    "re:.*lm_head$", "re:.*embed_tokens$", "re:.*vision_tower.*", "re:.*mm_projector.*", "re:.*_res_proj$",
    r"re:.*\.gate$", "re:.*conv1d$", "re:.*self_attn.*", "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj$",
    r"re:.*routed_expert_(down|up)_proj$",
]  # fmt: skip


def model_config() -> dict:
    """config.json of the fixture."""
    text = {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16",
        "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 0, "num_experts": EXPERTS, "num_experts_per_token": 2,
        "hidden_size": HIDDEN, "routed_expert_hidden_size": LATENT, "moe_intermediate_size": INTER,
        "intermediate_size": DENSE, "vocab_size": VOCAB, "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": HEADS, "head_dim": HEAD_DIM
        },
        "quantization_config": json.loads(json.dumps(NATIVE_CONFIG)),
    }  # fmt: skip
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"}, "text_config": text, "vision_config": {},
    }  # fmt: skip


def bf16(values: np.ndarray) -> tuple[str, np.ndarray]:
    """float32 -> bfloat16 bits, truncated."""
    return "BF16", (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def mxfp4(rng: np.random.Generator, rows: int, columns: int, spread: int) -> tuple[np.ndarray, np.ndarray]:
    """Random packed codes and E8M0 exponents that differ by at most ``spread``."""
    packed = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    return packed, rng.integers(120 - spread, 121, (rows, columns // 32)).astype(np.uint8)


def k3_tensors(seed: int = 0, spread: int = 3, packed: bool = True) -> Tensors:
    """All tensors by name; ``packed`` False stores the experts as bf16 instead."""
    rng = np.random.default_rng(seed)
    width = HEADS * HEAD_DIM
    tensors: Tensors = {}

    def dense(name: str, *shape: int) -> None:
        tensors[name] = bf16(rng.standard_normal(shape) * 0.05)

    def f32(name: str, *shape: int) -> None:
        tensors[name] = ("F32", rng.standard_normal(shape).astype(np.float32))

    for layer in range(LAYERS):
        at = f"{PREFIX}layers.{layer}."
        attention = at + "self_attn."
        for norm in ("input_layernorm", "post_attention_layernorm", "mlp_res_norm", "self_attention_res_norm"):
            dense(f"{at}{norm}.weight", HIDDEN)
        dense(at + "mlp_res_proj.weight", 1, HIDDEN)
        dense(at + "self_attention_res_proj.weight", 1, HIDDEN)
        dense(attention + "o_proj.weight", HIDDEN, width)
        dense(attention + "g_proj.weight", width, HIDDEN)
        if layer < 3:
            for name in "qkv":
                dense(f"{attention}{name}_proj.weight", width, HIDDEN)
                f32(f"{attention}{name}_conv1d.weight", width, 1, 4)
            dense(attention + "b_proj.weight", HEADS, HIDDEN)
            dense(attention + "f_a_proj.weight", HEAD_DIM, HIDDEN)
            dense(attention + "f_b_proj.weight", width, HEAD_DIM)
            f32(attention + "A_log", HEADS)
            f32(attention + "dt_bias", width)
            f32(attention + "o_norm.weight", HEAD_DIM)
        else:
            dense(attention + "q_a_proj.weight", 64, HIDDEN)
            dense(attention + "q_b_proj.weight", width, 64)
            dense(attention + "kv_a_proj_with_mqa.weight", 80, HIDDEN)
            dense(attention + "kv_b_proj.weight", 96, 64)
        mlp, inter = (at + "mlp.", DENSE) if layer == 0 else (at + "block_sparse_moe.shared_experts.", 2 * INTER)
        dense(mlp + "gate_proj.weight", inter, HIDDEN)
        dense(mlp + "up_proj.weight", inter, HIDDEN)
        dense(mlp + "down_proj.weight", HIDDEN, inter)
        if layer == 0:
            continue
        moe = at + "block_sparse_moe."
        dense(moe + "gate.weight", EXPERTS, HIDDEN)
        f32(moe + "gate.e_score_correction_bias", EXPERTS)
        dense(moe + "routed_expert_down_proj.weight", LATENT, HIDDEN)
        dense(moe + "routed_expert_up_proj.weight", HIDDEN, LATENT)
        for expert in range(EXPERTS):
            for name, rows, columns in (("w1", INTER, LATENT), ("w3", INTER, LATENT), ("w2", LATENT, INTER)):
                module = EXPERT.format(layer=layer, expert=expert, name=name)
                codes, exponents = mxfp4(rng, rows, columns, spread)
                if packed:
                    tensors[module + ".weight_packed"] = ("U8", codes)
                    tensors[module + ".weight_scale"] = ("U8", exponents)
                else:
                    dense(module + ".weight", rows, columns)
    dense(PREFIX + "embed_tokens.weight", VOCAB, HIDDEN)
    dense(PREFIX + "norm.weight", HIDDEN)
    dense("language_model.lm_head.weight", VOCAB, HIDDEN)
    dense("vision_tower.encoder.blocks.0.wqkv.weight", 48, 16)
    dense("mm_projector.proj.0.weight", HIDDEN, 16)
    return tensors


def save(path: Path, tensors: Tensors, order: list[str] | None = None) -> None:
    """Write one safetensors file, wide items first as the reference library does, or in the given order."""
    order = order or sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    header, position = {}, 0
    for name in order:
        dtype, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(data.shape), "data_offsets": [position, position + data.nbytes]}
        position += data.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for name in order:
            stream.write(np.ascontiguousarray(tensors[name][1]).tobytes())


def load(path: Path) -> Tensors:
    """Read one safetensors file; the arrays may be written to."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            data = np.frombuffer(
                raw[8 + length + start : 8 + length + end], NUMPY[entry["dtype"]]
            ).reshape(entry["shape"])
            tensors[name] = (entry["dtype"], data.copy())
    return tensors


def write_checkpoint(directory: Path, tensors: Tensors, config: dict, shards: int = 3) -> Path:
    """Write config, shards (whole layers together), index and auxiliary files."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number + 1:05d}-of-{shards:06d}.safetensors" for number in range(shards)]
    files: dict[str, Tensors] = {name: {} for name in names}
    for name, tensor in tensors.items():
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else LAYERS
        files[names[min(layer * shards // (LAYERS + 1), shards - 1)]][name] = tensor
    for name, content in files.items():
        save(directory / name, content)
    write_index(directory)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "LICENSE").write_text("licence\n")
    (directory / "configuration_kimi_k3.py").write_text("from .helpers_kimi_k3 import x\n")
    (directory / "helpers_kimi_k3.py").write_text("x = 1\n")
    return directory


def write_index(directory: Path) -> None:
    """Write the index that the shards call for."""
    contents = {path.name: load(path) for path in sorted(directory.glob("*.safetensors"))}
    weight_map = {tensor: name for name, tensors in contents.items() for tensor in tensors}
    total = sum(data.nbytes for tensors in contents.values() for _, data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_k3(directory: Path, *, seed: int = 0, spread: int = 3, shards: int = 3, packed: bool = True) -> Path:
    """The MXFP4 original (or, ``packed`` False, a bf16 one without quantization config)."""
    config = model_config()
    if not packed:
        del config["text_config"]["quantization_config"]
    return write_checkpoint(directory, k3_tensors(seed, spread, packed), config, shards)


def requantize_roughly(tensors: Tensors, config: dict, form: str) -> tuple[Tensors, dict]:
    """Experts in ``form`` (fp8, int8, w4a16, nvfp4) with arbitrary contents, and the config that describes them."""
    rng = np.random.default_rng(1)
    formats = {
        "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, True),
        "fp8_block": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            True,
        ),
        "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, True),
        "w4a16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, False),
        "nvfp4": (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            False,
        ),
    }  # fmt: skip
    name, weights, activations = formats[form]
    new: Tensors = {}
    for tensor, value in tensors.items():
        module, _, parameter = tensor.rpartition(".")
        if parameter == "weight_packed":
            rows, columns = value[1].shape[0], value[1].shape[1] * 2
            ones = np.full((rows, 1), 0.5, np.float32)
            small = rng.integers(0, 100, (rows, columns)).astype(np.uint8)
            if form == "fp8":
                new |= {f"{module}.weight": ("F8_E4M3", small), f"{module}.weight_scale": ("F32", ones)}
            elif form == "fp8_block":
                blocks = np.full((rows // 128, columns // 128), 0.5, np.float32)
                new |= {f"{module}.weight": ("F8_E4M3", small), f"{module}.weight_scale": ("F32", blocks)}
            elif form == "int8":
                new |= {f"{module}.weight": ("I8", small.view(np.int8)), f"{module}.weight_scale": ("F32", ones)}
            elif form == "w4a16":
                new[f"{module}.weight_packed"] = (
                    "I32", rng.integers(0, 1 << 31, (rows, columns // 8)).astype(np.int32)
                )
                new[f"{module}.weight_scale"] = bf16(np.full((rows, columns // 32), 0.5))
                new[f"{module}.weight_shape"] = ("I64", np.array([rows, columns]))
            else:
                new[f"{module}.weight_packed"] = ("U8", small[:, : columns // 2].copy())
                new[f"{module}.weight_scale"] = ("F8_E4M3", np.full((rows, columns // 16), 0x38, np.uint8))
                new[f"{module}.weight_global_scale"] = ("F32", np.ones(1, np.float32))
        elif not tensor.endswith("weight_scale"):
            new[tensor] = value
    config = json.loads(json.dumps(config))
    config["text_config"].pop("quantization_config", None)
    dynamic = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": name, "ignore": list(COMPLETE_IGNORE), "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "format": name, "weights": weights | {"symmetric": True, "dynamic": False},
                "input_activations": dynamic if activations else None,
            }
        },
    }  # fmt: skip
    return new, config


def write_rough(directory: Path, form: str) -> Path:
    """A checkpoint in another format than K3's own."""
    return write_checkpoint(directory, *requantize_roughly(k3_tensors(), model_config(), form))


# -- damage ------------------------------------------------------------------------------------------------------------


def shard_of(directory: Path, tensor: str) -> Path:
    """The file that holds a tensor."""
    return directory / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][tensor]


def edit_tensors(directory: Path, tensor: str, change: Callable[[Tensors], None], reindex: bool = True) -> None:
    """Change the tensors of the shard that holds ``tensor``."""
    path = shard_of(directory, tensor)
    tensors = load(path)
    change(tensors)
    save(path, tensors)
    if reindex:
        write_index(directory)


def put(directory: Path, tensor: str, dtype: str, data: np.ndarray, beside: str | None = None) -> None:
    """Replace a tensor, or add one in the shard of ``beside``."""
    edit_tensors(directory, beside or tensor, lambda tensors: tensors.__setitem__(tensor, (dtype, data)))


def drop(directory: Path, tensor: str, reindex: bool = True) -> None:
    """Remove a tensor from its shard."""
    edit_tensors(directory, tensor, lambda tensors: tensors.__delitem__(tensor), reindex)


def edit_values(directory: Path, tensor: str, change: Callable[[np.ndarray], None]) -> None:
    """Change a tensor's values in place."""
    edit_tensors(directory, tensor, lambda tensors: change(tensors[tensor][1]))


def edit_json(directory: Path, name: str, change: Callable[[dict], None]) -> None:
    """Change a JSON file in place."""
    content = json.loads((directory / name).read_text())
    change(content)
    (directory / name).write_text(json.dumps(content))


def parameters(tensors: Tensors) -> int:
    """Number of stored items."""
    return sum(math.prod(data.shape) for _, data in tensors.values())
