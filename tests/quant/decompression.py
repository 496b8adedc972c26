"""What compressed-tensors makes of an output: its own config parser, its own matching, its own decompression."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors import safe_open

from pipeline.checkpoint.declared import Matcher


def load(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, through the safetensors library."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - not a dict
    return tensors


def decompressed(directory: Path) -> dict[str, torch.Tensor]:
    """Module -> weight in the compressor's own dtype, for every module that the config's groups target."""
    raw = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    tensors, ignore, weights = load(directory), Matcher(config.ignore or ()), {}
    modules = {name.rpartition(".")[0] for name in tensors if name.endswith((".weight", ".weight_packed"))}
    for scheme in config.config_groups.values():
        compressor = BaseCompressor.get_value_from_registry(getattr(scheme, "format", None) or config.format)
        targets = Matcher(scheme.targets)
        for module in sorted(modules - weights.keys()):
            state = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.rpartition(".")[0] == module}
            linear = "Linear" in scheme.targets and "weight_scale" in state
            if ignore.first(module) is None and (linear or targets.first(module)):
                weights[module] = _decompress(compressor, state, scheme)
    return weights


def _decompress(compressor, state, scheme) -> torch.Tensor:
    if "weight_packed" in state:
        return compressor.decompress(state, scheme)["weight"]
    # 0.17's naive decompressor guesses the strategy from shapes, and takes one column of blocks for channels.
    return dequantize(state["weight"], state["weight_scale"], args=scheme.weights)
