"""Reference kernels for weight formats vLLM has no CPU kernel for: MXFP4, NVFP4 (weight-only) and FP8 128x128 blocks.

Weights stay in their packed checkpoint form; a layer's dequantized copy lives for one matrix product.  Accuracy and
memory are those of the format; speed is not, and the memory report names these formats as ``emulated``.

A `WeightFormat` is the arithmetic; the three kernel classes below put it behind vLLM's kernel selection, and
`vllm_k3_cpu.moe` applies it to all experts of a layer at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from vllm.model_executor.kernels import linear as vllm_kernels
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4
from vllm.platforms.interface import PlatformEnum

from . import lookup

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_SCALE = 1.0 / (FP8_MAX * 512.0)  # as vLLM's QuantFP8, which keeps an all-zero row from dividing by zero


class WeightFormat(ABC):
    """Packed weights [..., N, K] and how a product with them is computed."""

    name: str
    tensors: tuple[str, ...]  # layer attributes that hold the packed weight

    @abstractmethod
    def weight(self, *tensors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Packed tensors -> [..., N, K] in the compute type."""

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """What the format does to its input; decides the compute type."""
        return x

    def output_scale(self, *tensors: torch.Tensor) -> torch.Tensor | None:
        """Factor [...] still to be applied to the product, or None."""
        return None


class Mxfp4(WeightFormat):
    """E2M1 values with an E8M0 scale per 32: exact in bfloat16.  Activations untouched."""

    name = "mxfp4"
    tensors = ("weight", "weight_scale")

    def weight(self, packed, scale, *, dtype):
        values = lookup.decode_e2m1(packed, dtype)
        return _times_groups(values, lookup.decode(lookup.e8m0_table(dtype), scale))


class Nvfp4(WeightFormat):
    """E2M1 values with an E4M3 scale per 16 (their product is exact in bfloat16) and one float32 scale a matrix."""

    name = "nvfp4"
    tensors = ("weight", "weight_scale", "weight_global_scale")

    def weight(self, packed, scale, global_scale, *, dtype):
        values = lookup.decode_e2m1(packed, dtype)
        return _times_groups(values, lookup.decode(lookup.fp8_table(torch.float8_e4m3fn, dtype), scale))

    def output_scale(self, packed, scale, global_scale):
        return global_scale


class Fp8Block(WeightFormat):
    """E4M3 values with a float32 scale per 128x128 block; activations rounded to E4M3 per token and 128 inputs.

    The product runs in float32: FP8 tensor cores accumulate in float32 and rescale every 128 inputs.
    """

    name = "fp8_block"
    tensors = ("weight", "weight_scale")
    block = 128

    def weight(self, values, scale, *, dtype):
        decoded = lookup.decode(lookup.fp8_table(torch.float8_e4m3fn, torch.float32), values)
        rows = scale.float().repeat_interleave(self.block, -2)[..., : decoded.shape[-2], :]
        if decoded.shape[-1] % self.block == 0:
            return _times_groups(decoded, rows)
        return decoded * rows.repeat_interleave(self.block, -1)[..., : decoded.shape[-1]]

    def activations(self, x):
        padded = F.pad(x.float(), (0, -x.shape[-1] % self.block)).unflatten(-1, (-1, self.block))
        scale = (padded.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min_(_SMALLEST_SCALE)
        codes = (padded / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        values = lookup.decode(lookup.fp8_table(torch.float8_e4m3fn, torch.float32), codes)
        return (values * scale).flatten(-2)[..., : x.shape[-1]]


def _times_groups(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[..., K] times one scale [..., K / g] per g values, in place."""
    values.unflatten(-1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1))
    return values


def apply(weight_format: WeightFormat, layer: torch.nn.Module, x: torch.Tensor, bias=None) -> torch.Tensor:
    """One linear layer: [..., K] -> [..., N] in the type of ``x``."""
    tensors = [getattr(layer, name) for name in weight_format.tensors]
    rounded = weight_format.activations(x)
    out = F.linear(rounded, weight_format.weight(*tensors, dtype=rounded.dtype))
    if (scale := weight_format.output_scale(*tensors)) is not None:
        out = out * scale
    out = out.to(x.dtype)
    return out if bias is None else out + bias


class EmulatedKernel:
    """Part shared by the three kernel classes: always available, weights left as they were loaded."""

    format: WeightFormat

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        pass

    def apply_weights(self, layer, x, bias=None, **kwargs):
        return apply(self.format, layer, x, bias)


class EmulatedMxfp4Linear(EmulatedKernel, MxFp4LinearKernel):
    format = Mxfp4()


class EmulatedNvfp4Linear(EmulatedKernel, NvFp4LinearKernel):
    format = Nvfp4()


class EmulatedFp8BlockLinear(EmulatedKernel, Fp8BlockScaledMMLinearKernel):
    format = Fp8Block()
    apply_input_quant = False

    @classmethod
    def can_implement(cls, config):
        shape = config.weight_quant_key.scale.group_shape
        if (shape.row, shape.col) != (Fp8Block.block, Fp8Block.block):
            return False, f"emulates 128x128 blocks only, not {shape.row}x{shape.col}"
        return super().can_implement(config)

    def apply_block_scaled_mm(self, A, B, As, Bs):
        raise NotImplementedError("apply_weights computes the whole product")


def register() -> None:
    """Offer the kernels after vLLM's own CPU kernels, which stay preferred where they run (FP8 blocks with AMX)."""
    if EmulatedMxfp4Linear in vllm_kernels._POSSIBLE_MXFP4_KERNELS.get(PlatformEnum.CPU, []):
        return
    vllm_kernels.register_linear_kernel(EmulatedMxfp4Linear, PlatformEnum.CPU, "mxfp4")
    vllm_kernels._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(PlatformEnum.CPU, []).append(EmulatedFp8BlockLinear)
    # vLLM picks a CUDA kernel for weight-only NVFP4 before it looks at the platform's list.
    original = compressed_tensors_w4a4_nvfp4.init_nvfp4_linear_kernel

    def init_nvfp4_linear_kernel(use_a16: bool = False):
        return EmulatedNvfp4Linear(NvFp4LinearLayerConfig()) if use_a16 else original(use_a16=use_a16)

    compressed_tensors_w4a4_nvfp4.init_nvfp4_linear_kernel = init_nvfp4_linear_kernel


def kernel_of(layer: torch.nn.Module):
    """The kernel object a quantized linear layer resolved to, or None (unquantized)."""
    scheme = getattr(layer, "scheme", None)
    return getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)
