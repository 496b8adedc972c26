"""Every format served equals its dequantized definition, activation rounding included, and stays packed."""

import formats
import pytest
import tiny
import torch
from conftest import divergence, prompt, running
from reference import Reference, plain_matmul
from safetensors import safe_open

from vllm_k3_cpu.emulation import EmulatedKernel, kernel_of

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


def reference_of(values, schemes) -> Reference:
    """``schemes(weight name)``: the scheme of a linear layer, or None."""

    def matmul(name, x, w):
        scheme = schemes(f"{name}.weight")
        return plain_matmul(name, x if scheme is None else rounded(scheme, x), w)

    return Reference(tiny.TEXT_CONFIG, values, matmul)


def worst_layer(engine, values, schemes, input_type=torch.float32) -> tuple[float, int]:
    """Largest relative error of a quantized linear layer on random input, and how many such layers there are."""
    fused = engine.model.packed_modules_mapping
    worst, count = 0.0, 0
    for name, module in engine.model.language_model.named_modules():
        if getattr(module, "scheme", None) is None:
            continue
        prefix, _, last = name.rpartition(".")
        parts = [f"{prefix}.{part}.weight" for part in fused.get(last, [last])]
        w = torch.cat([values[part].float() for part in parts])
        x = torch.randn(7, w.shape[1]).to(input_type)
        expected = rounded(schemes(parts[0]), x.float()) @ w.t()
        worst = max(worst, ((module(x)[0].float() - expected).norm() / expected.norm()).item())
        count += 1
    return worst, count


def emulated_storage_bytes(engine) -> int:
    """Bytes of the storages behind emulated layers' weights (they must not have grown)."""
    storages = {}
    for module in engine.model.modules():
        kernel = kernel_of(module)
        if isinstance(kernel, EmulatedKernel):
            for name in kernel.format.tensors:
                storage = getattr(module, name).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


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

    def schemes(name):
        return scheme if tiny.is_expert(name) else None

    ids = prompt(100)
    with running(tiny.write(tmp_path, stored, config)) as engine:
        got, memory, packed_bytes = engine.logits(ids)[0], engine.memory(), emulated_storage_bytes(engine)
        assert worst_layer(engine, values, schemes) == (pytest.approx(0, abs=1e-3), 4 * 8 * 2)
    kl, agreement = divergence(got, reference_of(values, schemes)(ids))
    assert kl <= 1e-4 and agreement >= 0.99
    assert memory["emulated"] == ([scheme] if scheme in EMULATED else [])
    assert memory["weight_bytes"] == checkpoint_bytes(tmp_path, torch.float32)
    if scheme in EMULATED:
        packed = sum(t.numel() * t.element_size() for n, t in stored.items() if tiny.is_expert(n))
        if scheme == "nvfp4":  # w1 and w3 of a fused matrix keep one global scale of the two
            packed -= 4 * sum(n.endswith("w1.weight_global_scale") for n in stored)
        assert packed_bytes == packed


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w4a16_g128"])
def test_int4_experts(scheme, weights, tmp_path):
    """vLLM's kernel computes in bfloat16 only: every expert matrix is compared, then the logits coarsely."""
    stored, values = formats.quantize(weights, scheme, tiny.is_expert)
    config = formats.quantization_config([formats.group(scheme, ["Linear"])], tiny.NOT_EXPERTS)
    ids = prompt(100)
    with running(tiny.write(tmp_path, stored, config), dtype="bfloat16") as engine:
        got, memory = engine.logits(ids)[0], engine.memory()
        worst, count = worst_layer(engine, values, lambda name: scheme, torch.bfloat16)
    assert worst < 0.01 and count == 4 * 8 * 2
    own = divergence(got, Reference(tiny.TEXT_CONFIG, values)(ids))[0]
    unquantized = divergence(got, Reference(tiny.TEXT_CONFIG, weights)(ids))[0]
    assert own < unquantized / 3
    assert memory["kernels"]["CompressedTensorsWNA16"] == ["CPUWNA16LinearKernel"] and memory["emulated"] == []
    shapes = 16 * sum(name.endswith(("w1.weight_shape", "w2.weight_shape")) for name in stored)
    assert memory["weight_bytes"] == checkpoint_bytes(tmp_path, torch.bfloat16) + shapes


@pytest.mark.parametrize(
    ("scheme", "layers", "count"),
    [("fp8_channel", MORE_DENSE, 42), ("int8_channel", MORE_DENSE, 42), ("fp8_block", DENSE, 20)],
)
def test_native_experts_beside_quantized_dense_layers(scheme, layers, count, weights, tmp_path):
    """Mixed config groups: experts stay MXFP4, the dense layers get a scheme of their own.

    Logits are compared coarsely: a last-bit difference before a rounding boundary moves an activation by a whole FP8
    step.
    """
    experts, expert_values = formats.quantize(weights, "mxfp4", tiny.is_expert)
    stored, values = formats.quantize(weights, scheme, lambda name: is_dense(name, layers))
    stored = {n: t for n, t in stored.items() if not tiny.is_expert(n)} | {
        n: t for n, t in experts.items() if tiny.is_expert(n)
    }
    values |= {n: w for n, w in expert_values.items() if tiny.is_expert(n)}
    ignore = ["re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*", "re:.*_res_proj", "re:.*\\.b_proj$"]
    ignore += [f"re:.*\\.{layer}$" for layer in MORE_DENSE if layer not in layers]
    groups = [
        formats.group("mxfp4", ["re:.*experts\\.\\d+\\.w[123]$"]),
        formats.group(scheme, [f"re:.*\\.{layer}$" for layer in layers]),
    ]

    def schemes(name):
        return "mxfp4" if tiny.is_expert(name) else scheme if is_dense(name, layers) else None

    ids = prompt(100)
    with running(tiny.write(tmp_path, stored, formats.quantization_config(groups, ignore))) as engine:
        got, memory = engine.logits(ids)[0], engine.memory()
        assert worst_layer(engine, values, schemes) == (pytest.approx(0, abs=5e-3), 4 * 8 * 2 + count)
    own = divergence(got, reference_of(values, schemes)(ids))[0]
    unquantized = divergence(got, Reference(tiny.TEXT_CONFIG, weights)(ids))[0]
    assert own < unquantized / 3
    assert memory["emulated"] == sorted({"mxfp4", scheme} & EMULATED)
    assert memory["kernels"]["CompressedTensorsW4A4Mxfp4"] == ["EmulatedMxfp4Linear"]
