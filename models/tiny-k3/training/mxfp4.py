"""MXFP4: 4-bit floats (E2M1) in groups of 32 with one power-of-two scale (E8M0), as OCP MX v1.0 defines them.

Packing follows compressed-tensors' ``mxfp4-pack-quantized``: two codes a byte, the first in the low nibble; the scale byte
is the exponent + 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BIAS = 127


def _exponent(groups: Tensor) -> Tensor:
    """Scale exponent a group [..., 1]: the largest magnitude lands in (3.5, 7], so that clipping at 6 costs at most 1/7."""
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0 ** -100)
    return torch.frexp(largest * (8 / 7)).exponent - 3


def _round(groups: Tensor) -> tuple[Tensor, Tensor]:
    """-> (E2M1 values, exponents), rounding half to even code."""
    exponent = _exponent(groups)
    scaled = torch.ldexp(groups, -exponent)
    size = scaled.abs()
    # The step is a power of two: .5 below 2, 1 below 4, else 2.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step).clamp_max(6.0).copysign(scaled), exponent


def fake_quantize(weight: Tensor) -> Tensor:
    """Weight as MXFP4 would store it; the gradient passes straight through."""
    with torch.no_grad():
        value, exponent = _round(weight.unflatten(-1, (-1, GROUP)))
        error = torch.ldexp(value, exponent).flatten(-2) - weight
    return weight + error


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> (``weight_packed`` U8 [out, in/2], ``weight_scale`` U8 [out, in/32])."""
    value, exponent = _round(weight.float().unflatten(-1, (-1, GROUP)))
    size = value.abs().flatten(-2)
    code = torch.bucketize(size, E2M1[:8]).to(torch.uint8) | (value.flatten(-2).signbit().to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent.squeeze(-1) + BIAS).to(torch.uint8)


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """The inverse of :func:`pack`, in fp32 (exact)."""
    code = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    value = E2M1[code.long()].unflatten(-1, (-1, GROUP))
    return torch.ldexp(value, scale.int().unsqueeze(-1) - BIAS).flatten(-2)
