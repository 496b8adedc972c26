"""Every recipe of conf/quant, made in the quantization environment from the trained model, is served as what its file
decodes to.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import divergence, running
from safetensors.torch import load_file, save_file
from test_formats import reference_of, worst_layer

REPOSITORY = Path(__file__).resolve().parents[3]
TINY = REPOSITORY / "models" / "tiny-k3"
PREFIX = "language_model."
NOT_RECIPES = ("all",)
KEYS = sorted(path.stem for path in (REPOSITORY / "conf" / "quant").glob("*.yaml") if path.stem not in NOT_RECIPES)
DENSE = {"fp8_all", "fp8_dense", "int8_dense"}
EXPERTS = 4 * 8 * 2
"""Layers, experts, matrices (w1 and w3 are served as one)."""
WEIGHT_ONLY = {"mxfp4", "nvfp4"}
QUANTIZE = """
import sys
from pathlib import Path
import yaml
from pipeline.quant import Recipe, engine
key, source, target = sys.argv[1:]
settings = yaml.safe_load(Path(f"conf/quant/{key}.yaml").read_text())["schemes"][key]
engine.requantize(Path(source), Path(target), Recipe.from_params(settings))
"""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
PARTS = ("weight_scale", "weight_shape", "weight_global_scale")


@pytest.fixture(scope="module")
def quant_python() -> str:
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    from pipeline.env_facts import python_of

    python = Path(python_of("quant"))
    if not python.exists():
        pytest.skip("needs the quant environment: `python3 -m pipeline env make quant`")
    return str(python)


def decode(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The text model's weights in float32 by plain formulas, and the scheme of each quantized matrix."""
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= load_file(path)
    values, schemes = {}, {}
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if not name.startswith(PREFIX) or kind in PARTS:
            continue
        if f"{module}.weight_scale" in stored:
            name = f"{module}.weight"
            scale = stored[f"{module}.weight_scale"]
            numbers, scheme = codes(tensor, scale)
            schemes[name.removeprefix(PREFIX)] = scheme
            tensor = numbers * spread(scale, numbers.shape)
            if scheme == "nvfp4":
                tensor = tensor / stored[f"{module}.weight_global_scale"]
        values[name.removeprefix(PREFIX)] = tensor.float()
    return values, schemes


def codes(tensor: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, str]:
    """What a stored matrix holds before its scales, and the name of its scheme in formats.py."""
    if tensor.dtype == torch.uint8:
        nibbles = torch.stack([tensor & 15, tensor >> 4], -1).flatten(-2).long()
        numbers = E2M1[nibbles & 7] * (1 - 2 * (nibbles >> 3))
        return numbers, "mxfp4" if scale.dtype == torch.uint8 else "nvfp4"
    if tensor.dtype == torch.int32:  # eight to a word, offset by 8
        numbers = ((tensor.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15).flatten(-2).float() - 8
        return numbers, f"w4a16_g{numbers.shape[1] // scale.shape[1]}"
    if tensor.dtype == torch.int8:
        return tensor.float(), "int8_channel"
    return tensor.float(), "fp8_channel" if scale.shape == (tensor.shape[0], 1) else "fp8_block"


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """One scale a weight; E8M0 bytes are exponents."""
    scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    for axis, size in enumerate(shape):
        scale = scale.repeat_interleave(size // scale.shape[axis], axis)
    return scale


def unquantized(quantized: Path, directory: Path, values: dict[str, torch.Tensor], schemes: dict[str, str]) -> Path:
    """The checkpoint in ``quantized`` without its quantization: ``values`` for the matrices, all else as it is there."""
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "goldens", "training"))
    config = json.loads((TINY / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    stored: dict[str, torch.Tensor] = {}
    for path in quantized.glob("*.safetensors"):
        stored |= load_file(path)
    plain = {name: tensor for name, tensor in stored.items() if f"{name.rpartition('.')[0]}.weight_scale" not in stored}
    save_file(plain | {PREFIX + name: values[name].bfloat16() for name in schemes}, directory / "model.safetensors")
    return directory


def logits(engine) -> torch.Tensor:
    """Of all the committed prompts, one after the other."""
    goldens = load_file(TINY / "goldens" / "logits.safetensors")
    prompts = [goldens[name].tolist() for name in sorted(goldens) if name.startswith("ids_")]
    return torch.cat([engine.logits(ids)[0] for ids in prompts])


@pytest.mark.parametrize("key", KEYS)
def test_it_is_served_as_what_it_decodes_to(key, quant_python, tmp_path):
    """Matrix by matrix, then the logits: against a reference in float32; against vLLM itself on the decoded weights where
    vLLM's kernel (INT4 on CPU) computes in bfloat16 only, so that what bfloat16 does to the rest is on both sides.
    """
    command = [quant_python, "-c", QUANTIZE, key, TINY, tmp_path / key]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, check=True, cwd=REPOSITORY, env=environment, capture_output=True)
    values, schemes = decode(tmp_path / key)
    in_float32 = not key.startswith("w4a16")
    dtype = torch.float32 if in_float32 else torch.bfloat16
    with running(tmp_path / key, dtype=str(dtype).removeprefix("torch.")) as engine:
        got = logits(engine)
        worst, count = worst_layer(engine, values, schemes.get, dtype)
    assert worst < (1e-3 if in_float32 else 0.01)
    assert count > EXPERTS if key in DENSE else count == EXPERTS
    if in_float32:
        own = reference_of(values, schemes.get)
        own.c = json.loads((TINY / "config.json").read_text())["text_config"]
        goldens = load_file(TINY / "goldens" / "logits.safetensors")
        want = torch.cat([own(goldens[name].tolist()) for name in sorted(goldens) if name.startswith("ids_")])
    else:
        with running(unquantized(tmp_path / key, tmp_path / "unquantized", values, schemes), dtype="bfloat16") as engine:
            want = logits(engine)
    kl, agreement = divergence(got, want)
    print(f"{key}: KL {kl:.1e}, top-1 {agreement:.3f}, largest difference {(got - want).abs().max():.1e}")
    assert kl <= 1e-4 and agreement >= 0.99
    if set(schemes.values()) <= WEIGHT_ONLY and in_float32:
        assert (got - want).abs().max() <= 1e-4
