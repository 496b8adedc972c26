"""Weight formats written from their definitions: packed tensors, the compressed-tensors config, and the exact values
stored.

Each ``encode_*`` takes a float matrix [N, K] and returns (checkpoint tensors by suffix, dequantized float32 matrix).
"""

from __future__ import annotations

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code (sign in bit 3) of every value."""
    nearest = (x.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return (nearest + 8 * (x < 0)).to(torch.uint8)


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([E2M1, -E2M1])[codes.long()]


def encode_mxfp4(w: torch.Tensor):
    groups = w.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-30))) - 2
    codes = _e2m1_codes(groups / torch.exp2(exponent))
    values = (_e2m1_values(codes) * torch.exp2(exponent)).flatten(-2)
    scale = (exponent.squeeze(-1) + 127).to(torch.uint8)
    return {"weight_packed": _pack_nibbles(codes.flatten(-2)), "weight_scale": scale}, values


def encode_nvfp4(w: torch.Tensor, global_scale: torch.Tensor | None = None):
    """compressed-tensors stores the divisor: value = code * weight_scale / weight_global_scale."""
    groups = w.float().unflatten(-1, (-1, 16))
    if global_scale is None:
        global_scale = 448 * 6 / w.float().abs().max()
    scale = (groups.abs().amax(-1, keepdim=True) / 6 * global_scale).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    codes = _e2m1_codes(groups * global_scale / scale.float())
    values = (_e2m1_values(codes) * scale.float() / global_scale).flatten(-2)
    tensors = {"weight_packed": _pack_nibbles(codes.flatten(-2)), "weight_scale": scale.squeeze(-1)}
    return tensors | {"weight_global_scale": global_scale.float().reshape(1)}, values


def encode_fp8_channel(w: torch.Tensor):
    scale = w.float().abs().amax(-1, keepdim=True) / 448
    codes = (w.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def encode_fp8_block(w: torch.Tensor):
    rows, columns = w.shape[0] // 128, w.shape[1] // 128
    blocks = w.float().view(rows, 128, columns, 128)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3), keepdim=True) / 448)))
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    values = (codes.float() * scale).view(w.shape)
    return {"weight": codes.view(w.shape), "weight_scale": scale.view(rows, columns)}, values


def encode_int8(w: torch.Tensor):
    scale = w.float().abs().amax(-1, keepdim=True) / 127
    codes = (w.float() / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def encode_int4(w: torch.Tensor, group: int):
    """pack-quantized: eight offset-binary nibbles an int32, lowest first; bfloat16 scales."""
    groups = w.float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    codes = (groups / scale.float()).round().clamp(-8, 7).int().flatten(-2)
    nibbles = (codes + 8).unflatten(-1, (-1, 8))
    packed = sum(nibbles[..., i] << (4 * i) for i in range(8)).int()
    values = codes.unflatten(-1, (-1, group)) * scale.float()
    tensors = {"weight_packed": packed, "weight_scale": scale.squeeze(-1), "weight_shape": torch.tensor(w.shape)}
    return tensors, values.flatten(-2)


def _weights(num_bits: int, kind: str, strategy: str, **more) -> dict:
    return {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def _dynamic(num_bits: int, kind: str, strategy: str, **more) -> dict:
    return {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": True, **more}


# name -> (encode, compressed-tensors format, weights, input activations)
SCHEMES = {
    "mxfp4": (encode_mxfp4, "mxfp4-pack-quantized",
              _weights(4, "float", "group", group_size=32, scale_dtype="torch.uint8"), None),
    "nvfp4": (encode_nvfp4, "nvfp4-pack-quantized",
              _weights(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"), None),
    "fp8_channel": (encode_fp8_channel, "float-quantized", _weights(8, "float", "channel"),
                    _dynamic(8, "float", "token")),
    "fp8_block": (encode_fp8_block, "float-quantized", _weights(8, "float", "block", block_structure=[128, 128]),
                  _dynamic(8, "float", "group", group_size=128)),
    "int8_channel": (encode_int8, "int-quantized", _weights(8, "int", "channel"), _dynamic(8, "int", "token")),
    "w4a16_g32": (lambda w: encode_int4(w, 32), "pack-quantized", _weights(4, "int", "group", group_size=32), None),
    "w4a16_g128": (lambda w: encode_int4(w, 128), "pack-quantized", _weights(4, "int", "group", group_size=128), None),
}  # fmt: skip


def group(scheme: str, targets: list[str]) -> dict:
    """One entry of ``config_groups``."""
    _, fmt, weights, activations = SCHEMES[scheme]
    return {"targets": targets, "format": fmt, "weights": weights, "input_activations": activations,
            "output_activations": None}  # fmt: skip


def quantization_config(groups: list[dict], ignore: list[str]) -> dict:
    formats = {g["format"] for g in groups}
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision", "ignore": ignore,
        "config_groups": {f"group_{i}": g for i, g in enumerate(groups)},
    }  # fmt: skip


def quantize(weights: dict[str, torch.Tensor], scheme: str, chosen) -> tuple[dict, dict]:
    """Quantize the matrices ``chosen(name)``: (checkpoint tensors, the same weights dequantized to float32)."""
    stored, values = {}, {}
    encode = SCHEMES[scheme][0]
    for name, tensor in weights.items():
        if not chosen(name):
            stored[name] = values[name] = tensor
            continue
        options = {}
        if scheme == "nvfp4":  # matrices that are fused when served share one global scale
            options["global_scale"] = _fused_global_scale(weights, name)
        tensors, values[name] = encode(tensor, **options)
        stored |= {f"{name.removesuffix('weight')}{suffix}": value for suffix, value in tensors.items()}
    return stored, values


def _fused_global_scale(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    mates = [name.replace(".w1.", ".w3."), name.replace(".w3.", ".w1."), name]
    return 448 * 6 / max(weights[mate].float().abs().max() for mate in mates)
