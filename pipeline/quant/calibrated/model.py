"""Kimi K3 in llm-compressor's definition, every weight accounted for: a silent hole ends here, not in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from pipeline.checkpoint import Checkpoint, numbers
from pipeline.errors import Invalid, Refused
from pipeline.quant.scope import Module


def load(checkpoint: Checkpoint, modules: Iterable[Module]) -> nn.Module:
    """The model in bf16 with its experts dequantized; what the source stores in F32 stays F32.

    ``modules`` are the experts' matrices.  Raises :class:`Refused` where loading leaves a parameter out, invents one
    or meets a NaN, :class:`Invalid` where an expert's weight is not what the source's bytes decode to.
    """
    from compressed_tensors.compressors import ModelCompressor
    from llmcompressor.modeling.kimi_k3 import KimiK3ForConditionalGeneration
    from llmcompressor.modeling.kimi_k3.configuration_kimi_k3 import KimiK3Config
    from llmcompressor.modeling.patch.kimi_k3_patch import patch_kimi_k3_ignore
    from transformers import AutoConfig

    modules = list(modules)
    AutoConfig.register("kimi_k3", KimiK3Config, exist_ok=True)  # oneshot asks for the config by the model's path
    with patch_kimi_k3_ignore():  # the released ignore list forgets modules; without this they come out random
        model, info = KimiK3ForConditionalGeneration.from_pretrained(
            checkpoint.directory, dtype=torch.bfloat16, output_loading_info=True
        )
    problems = [f"{kind.replace('_', ' ')}: {_few(found)}" for kind, found in sorted(info.items()) if found]
    if problems:
        raise Refused(f"{checkpoint.directory}: the model does not load whole\n  " + "\n  ".join(problems))
    if any(module.mxfp4 for module in modules):
        ModelCompressor.from_pretrained_model(model).decompress_model(model)
        _forget_quantization(model)
    for config in (model.config, model.config.text_config):
        config.__dict__.pop("quantization_config", None)  # the source's: what follows is another
        config.use_cache = False
    _restore_f32(model, checkpoint)
    check_finite(model, "before calibration")
    for module in modules:
        weight = model.get_submodule(module.name).weight.float().numpy(force=True)
        if not np.array_equal(weight, source_values(checkpoint, module)):
            raise Invalid(f"{module.name}: loaded with other values than {module.shard} holds")
    return model.eval()


def check_memory(checkpoint: Checkpoint, modules: Iterable[Module]) -> None:
    """Raise :class:`Refused` where the dequantized model does not fit into this host's memory.

    The released model takes 5.5 TB in bf16.
    """
    unpacked = sum(2 * math.prod(module.shape) for module in modules if module.mxfp4)
    rest = sum(tensor.size_bytes for tensor in checkpoint.tensors().values() if tensor.dtype != "U8")
    available = psutil.virtual_memory().available
    if unpacked + rest > available:
        raise Refused(
            f"{checkpoint.directory}: calibration holds the model in bf16, {(unpacked + rest) / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB of memory are free; take a larger host, or w4a16 or int8, which stream"
        )


def source_values(checkpoint: Checkpoint, module: Module) -> np.ndarray:
    """float32 ``[rows, columns]`` of a matrix, from the source's bytes."""
    rows, columns = module.shape
    if module.mxfp4:
        packed, exponents = (np.frombuffer(checkpoint.read(name), np.uint8) for name in module.tensors)
        return numbers.mxfp4_values(packed.reshape(rows, -1), exponents.reshape(rows, -1))
    if module.dtype != "BF16":
        raise Refused(f"{module.name} ({module.shard}) is {module.dtype}: calibrated recipes take MXFP4 and BF16")
    return numbers.bf16_values(np.frombuffer(checkpoint.read(module.tensors[0]), np.uint16)).reshape(rows, columns)


def _forget_quantization(model: nn.Module) -> None:
    """Decompression leaves each matrix its old scheme and scale: an expert that is not calibrated would keep them."""
    for linear in model.modules():
        for name in [name for name, _ in linear.named_parameters(recurse=False) if name.startswith("weight_")]:
            delattr(linear, name)
        for name in ("quantization_scheme", "quantization_status"):
            linear.__dict__.pop(name, None)
    model.hf_quantizer, model.is_quantized = None, False


def _restore_f32(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Loading in bf16 rounds the router's bias, among others, and with it the choice of experts."""
    parameters = dict(model.named_parameters())
    for name, tensor in checkpoint.tensors().items():
        if tensor.dtype == "F32" and name in parameters:
            values = np.frombuffer(checkpoint.read(name), np.float32).reshape(tensor.shape)
            parameters[name].data = torch.from_numpy(values.copy()).to(parameters[name].device)


def check_finite(model: nn.Module, when: str) -> None:
    """Raise :class:`Refused` naming the parameters that hold NaN or infinity."""
    bad = [name for name, value in model.named_parameters() if value.is_floating_point() and not _finite(value)]
    if bad:
        raise Refused(f"{len(bad)} parameters are NaN or infinite {when}: {_few(bad)}; nothing is written")


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value.float()).all())


def _few(names: Any) -> str:
    names = sorted(map(str, names))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
