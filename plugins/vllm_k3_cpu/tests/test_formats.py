"""Every weight format served equals its dequantized definition, activation rounding included, and stays packed in memory."""

import formats
import pytest
import tiny
import torch
from conftest import divergence, prompt, running
from reference import Reference, plain_matmul
from safetensors import safe_open

from vllm_k3_cpu.emulation import _Emulated, kernel_of

EMULATED = {"mxfp4", "nvfp4", "fp8_block"}
DENSE = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MORE_DENSE = (*DENSE, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "f_a_proj", "f_b_proj",
              "routed_expert_down_proj", "routed_expert_up_proj")  # fmt: skip


def rounded(scheme: str, x: torch.Tensor) -> torch.Tensor:
    """What a scheme's dynamic activation quantization leaves of ``x`` [T, K]."""
    activations = formats.SCHEMES[scheme][3]
    if activations is None:
        return x
    groups = x.unflatten(-1, (-1, activations.get("group_size", x.shape[-1])))
    peak = groups.abs().amax(-1, keepdim=True)
    if activations["type"] == "int":
        scale = peak / 127
        return ((groups / scale).round() * scale).flatten(-2)
    scale = peak / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def is_dense(name: str, layers) -> bool:
    return not tiny.is_expert(name) and name.endswith(tuple(f".{layer}.weight" for layer in layers))


def served_and_expected(directory, stored, config, values, schemes, dtype="float32"):
    """Serve the checkpoint; ``schemes(name)``: the scheme of a linear layer or None.  Yields within the running engine."""

    def matmul(name, x, w):
        scheme = schemes(f"{name}.weight")
        return plain_matmul(name, x if scheme is None else rounded(scheme, x), w)

    ids = prompt(100)
    expected = Reference(tiny.TEXT_CONFIG, values, matmul)(ids)
    with running(tiny.write(directory, stored, config), dtype=dtype) as engine:
        return engine.logits(ids)[0], expected, engine.memory(), checks_inside(engine)


def checks_inside(engine) -> dict:
    """Bytes of the emulated experts' parameters, as storages (they must not have grown)."""
    storages = {}
    for module in engine.model.modules():
        kernel = kernel_of(module)
        if isinstance(kernel, _Emulated):
            for name in kernel.format.tensors:
                storage = getattr(module, name).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return {"packed_bytes": sum(storages.values())}


def checkpoint_bytes(directory, dtype: torch.dtype) -> int:
    """Bytes of the text tensors in the file; what K3 has in bfloat16 takes the engine's type."""
    total = 0
    with safe_open(directory / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.startswith("language_model.") and not name.endswith("weight_shape"):
                tensor = file.get_tensor(name)
                total += tensor.numel() * (dtype if tensor.dtype == torch.bfloat16 else tensor.dtype).itemsize
    return total


@pytest.mark.parametrize("scheme", ["mxfp4", "fp8_block", "fp8_channel", "int8_channel", "nvfp4"])
def test_experts_match_their_dequantized_definition(scheme, weights, tmp_path):
    stored, values = formats.quantize(weights, scheme, tiny.is_expert)
    ignore = tiny.NATIVE_IGNORE if scheme == "mxfp4" else tiny.NOT_EXPERTS
    config = formats.quantization_config([formats.group(scheme, ["Linear"])], ignore)
    got, expected, memory, inside = served_and_expected(
        tmp_path, stored, config, values, lambda name: scheme if tiny.is_expert(name) else None
    )
    kl, agreement = divergence(got, expected)
    assert kl <= 1e-4 and agreement >= 0.99
    assert memory["emulated"] == ([scheme] if scheme in EMULATED else [])
    assert memory["weight_bytes"] == checkpoint_bytes(tmp_path, torch.float32)
    if scheme in EMULATED:
        packed = sum(t.numel() * t.element_size() for n, t in stored.items() if tiny.is_expert(n))
        if scheme == "nvfp4":  # w1 and w3 of a fused matrix keep one global scale of the two
            packed -= 4 * sum(n.endswith("w1.weight_global_scale") for n in stored)
        assert inside["packed_bytes"] == packed


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w4a16_g128"])
def test_int4_experts(scheme, weights, tmp_path):
    """vLLM's kernel computes in bfloat16 only: every expert matrix is compared, then the logits coarsely."""
    stored, values = formats.quantize(weights, scheme, tiny.is_expert)
    config = formats.quantization_config([formats.group(scheme, ["Linear"])], tiny.NOT_EXPERTS)
    ids = prompt(100)
    with running(tiny.write(tmp_path, stored, config), dtype="bfloat16") as engine:
        got, memory = engine.logits(ids)[0], engine.memory()
        for e, expert in enumerate(engine.model.language_model.model.layers[2].block_sparse_moe.experts):
            prefix = f"model.layers.2.block_sparse_moe.experts.{e}"
            for layer, names in ((expert.w13, ("w1", "w3")), (expert.w2, ("w2",))):
                w = torch.cat([values[f"{prefix}.{name}.weight"] for name in names])
                x = torch.randn(7, w.shape[1]).bfloat16()
                error = (layer(x)[0].float() - x.float() @ w.t()).norm() / (x.float() @ w.t()).norm()
                assert error < 0.01
    own = divergence(got, Reference(tiny.TEXT_CONFIG, values)(ids))[0]
    unquantized = divergence(got, Reference(tiny.TEXT_CONFIG, weights)(ids))[0]
    assert own < unquantized / 3
    assert memory["kernels"]["CompressedTensorsWNA16"] == ["CPUWNA16LinearKernel"] and memory["emulated"] == []
    shapes = 16 * sum(name.endswith(("w1.weight_shape", "w2.weight_shape")) for name in stored)
    assert memory["weight_bytes"] == checkpoint_bytes(tmp_path, torch.bfloat16) + shapes


@pytest.mark.parametrize(("scheme", "layers"), [("fp8_channel", MORE_DENSE), ("int8_channel", MORE_DENSE),
                                               ("fp8_block", DENSE)])  # fmt: skip
def test_native_experts_beside_quantized_dense_layers(scheme, layers, weights, tmp_path):
    """Mixed config groups: experts stay MXFP4, the dense layers get a scheme of their own."""
    experts, expert_values = formats.quantize(weights, "mxfp4", tiny.is_expert)
    stored, values = formats.quantize(experts | {n: w for n, w in weights.items() if tiny.is_expert(n)}, scheme,
                                      lambda name: is_dense(name, layers))  # fmt: skip
    stored = {n: w for n, w in stored.items() if n not in weights or not tiny.is_expert(n)}
    values |= {n: w for n, w in expert_values.items() if tiny.is_expert(n)}
    dense_targets = [f"re:.*\\.{layer}$" for layer in layers]
    ignore = ["re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*", "re:.*_res_proj", "re:.*\\.b_proj$"]
    ignore += [f"re:.*\\.{layer}$" for layer in MORE_DENSE if layer not in layers]
    config = formats.quantization_config(
        [formats.group("mxfp4", ["re:.*experts\\.\\d+\\.w[123]$"]), formats.group(scheme, dense_targets)], ignore
    )
    got, expected, memory, _ = served_and_expected(
        tmp_path, stored, config, values, lambda name: scheme if is_dense(name, layers) else None
    )
    kl, agreement = divergence(got, expected)
    assert kl <= 1e-4 and agreement >= 0.99
    assert memory["emulated"] == sorted({"mxfp4", scheme} & EMULATED)
    assert memory["kernels"]["CompressedTensorsW4A4Mxfp4"] == ["EmulatedMxfp4Linear"]
