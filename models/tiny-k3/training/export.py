"""Write a TinyK3 in Kimi K3's released layout, and read such a directory back into a TinyK3.

Layout: names under ``language_model.``; routed experts as ``experts.E.w{1,2,3}.weight_packed`` / ``.weight_scale`` (U8);
``F32`` tensors stay F32, everything else is BF16; one shard a decoder layer, then embeddings and head, projector, vision
tower.  The vision tower and projector have the released names and random weights: they make the layout complete, nothing
trains or runs them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import vocabulary
from config import TEXT, TOKEN_IDS, VISION, released_config
from model import TinyK3
from mxfp4 import pack, unpack

PREFIX = "language_model."
F32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
INDEX = "model.safetensors.index.json"


def released_tensors(model: TinyK3) -> dict[str, Tensor]:
    """The checkpoint's text tensors by released name, experts packed."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach()
        expert = re.fullmatch(r"(.*)\.experts_(w[123])", name)
        if expert:
            for number, weight in enumerate(value):
                stem = f"{PREFIX}model.{expert[1]}.experts.{number}.{expert[2]}"
                tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"] = pack(weight)
            continue
        name = PREFIX + name if name.startswith("lm_head") else f"{PREFIX}model.{name}"
        tensors[name] = value.to(torch.float32 if name.endswith(F32) else torch.bfloat16)
    return tensors


def vision_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Random BF16 tensors of the smallest vision tower and projector that have the released names."""
    draw, hidden, width = torch.Generator().manual_seed(seed), VISION["vt_hidden_size"], VISION["qkv_hidden_size"]
    merged = hidden * math.prod(VISION["merge_kernel_size"])
    grid = (VISION["init_pos_emb_height"], VISION["init_pos_emb_width"])
    shapes = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, VISION["patch_size"], VISION["patch_size"]),
        "vision_tower.patch_embed.pos_emb.weight": (*grid, hidden),
        "vision_tower.encoder.final_layernorm.weight": (hidden,),
        "mm_projector.proj.0.weight": (merged, merged), "mm_projector.proj.2.weight": (TEXT["hidden_size"], merged),
        "mm_projector.post_norm.weight": (TEXT["hidden_size"],),
    }
    for number in range(VISION["vt_num_hidden_layers"]):
        block, inner = f"vision_tower.encoder.blocks.{number}.", VISION["vt_intermediate_size"]
        shapes |= {f"{block}norm0.weight": (hidden,), f"{block}norm1.weight": (hidden,),
                   f"{block}mlp.fc0.weight": (inner, hidden), f"{block}mlp.fc1.weight": (hidden, inner),
                   f"{block}wqkv.weight": (3 * width, hidden), f"{block}wo.weight": (hidden, width)}
    return {name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) * 0.02).bfloat16()
            for name, shape in shapes.items()}


def _shard_number(name: str) -> int:
    """0-based shard: one a decoder layer, then the rest of the text model, projector, vision tower."""
    layer, layers = re.search(r"\.layers\.(\d+)\.", name), TEXT["num_hidden_layers"]
    if layer:
        return int(layer[1])
    return layers + ("mm_projector" in name) + 2 * ("vision_tower" in name)


def export(model: TinyK3, directory: Path) -> int:
    """Write config, tokenizer, shards and index; return the bytes of all tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = released_tensors(model) | vision_tensors()
    shards: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        shards.setdefault(_shard_number(name), {})[name] = value.contiguous()
    weight_map = {}
    for number, shard in sorted(shards.items()):
        file = f"model-{number + 1:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # safetensors makes 0600
        weight_map |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for value in tensors.values())
    generation = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 256, **TOKEN_IDS}
    for file, value in ((INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}),
                        ("config.json", released_config()), ("generation_config.json", generation)):
        (directory / file).write_text(json.dumps(value, indent=2) + "\n")
    vocabulary.write(directory)
    return total


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint directory, as stored."""
    files = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    return {name: value for file in files for name, value in load_file(directory / file).items()}


def load(directory: Path) -> TinyK3:
    """A TinyK3 in fp32 with the directory's (dequantized) weights.  Raises ``KeyError`` or torch's error on a misfit."""
    stored = read_tensors(directory)
    config = json.loads((directory / "config.json").read_text())["text_config"]
    model = TinyK3(config).eval()
    state = {}
    for name in model.state_dict():
        expert = re.fullmatch(r"(.*)\.experts_(w[123])", name)
        if expert:
            stems = [f"{PREFIX}model.{expert[1]}.experts.{number}.{expert[2]}" for number in range(config["num_experts"])]
            state[name] = torch.stack([unpack(stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"])
                                       for stem in stems])
        else:
            state[name] = stored[PREFIX + name if name.startswith("lm_head") else f"{PREFIX}model.{name}"].float()
    model.load_state_dict(state)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write the checkpoint")
    parser.add_argument("--state", type=Path, help="safetensors written by train.py; without it, random weights")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = TinyK3(TEXT)
    if arguments.state:
        model.load_state_dict(load_file(arguments.state))
    print(export(model.eval(), arguments.directory), "bytes of tensors")


if __name__ == "__main__":
    main()
