"""The repository's calibrated recipes, made in the quantization environment, are served as what they decode to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import divergence, running
from reference import Reference
from safetensors.torch import load_file
from test_formats import reference_of, worst_layer

REPOSITORY = Path(__file__).resolve().parents[3]
TINY = REPOSITORY / "models" / "tiny-k3"
PREFIX = "language_model."
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


@pytest.fixture(scope="module")
def quant_python() -> str:
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    from pipeline.env_facts import python_of

    python = Path(python_of("quant"))
    if not python.exists():
        pytest.skip("needs the quant environment: `python3 -m pipeline env make quant`")
    return str(python)


def values_of(directory: Path) -> dict[str, torch.Tensor]:
    """The text model's weights in float32, decoded from the file by plain formulas."""
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= load_file(path)
    values = {}
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if not name.startswith(PREFIX) or kind in ("weight_scale", "weight_shape"):
            continue
        if f"{module}.weight_scale" in stored:
            tensor = decoded(tensor, stored[f"{module}.weight_scale"])
            name = f"{module}.weight"
        values[name.removeprefix(PREFIX)] = tensor.float()
    return values


def decoded(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.uint8:  # MXFP4
        codes = torch.stack([tensor & 15, tensor >> 4], -1).flatten(-2).long()
        numbers, scale = E2M1[codes & 7] * (1 - 2 * (codes >> 3)), torch.exp2(scale.float() - 127)
    elif tensor.dtype == torch.int32:  # eight to a word, offset by 8
        numbers = ((tensor.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15).flatten(-2).float() - 8
    else:
        numbers = tensor.float()
    return numbers * scale.float().repeat_interleave(numbers.shape[1] // scale.shape[1], 1)


@pytest.mark.parametrize("key", ["w4a16_gptq", "w4a16_awq", "int8_sq"])
def test_it_is_served_as_what_it_decodes_to(key, quant_python, tmp_path):
    command = [quant_python, "-c", QUANTIZE, key, TINY, tmp_path / key]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, check=True, cwd=REPOSITORY, env=environment, capture_output=True)
    config = json.loads((TINY / "config.json").read_text())["text_config"]
    values = values_of(tmp_path / key)
    ids = torch.randint(3, config["vocab_size"], (100,), generator=torch.Generator().manual_seed(3)).tolist()

    def schemes(name):
        if ".experts." in name:
            return "int8_channel" if key == "int8_sq" else "w4a16_g32"
        return None

    # vLLM's INT4 kernel on CPU computes in bfloat16 only: there each expert matrix is compared, and the logits coarsely.
    exact = key == "int8_sq"
    dtype = torch.float32 if exact else torch.bfloat16
    with running(tmp_path / key, dtype=str(dtype).removeprefix("torch.")) as engine:
        got = engine.logits(ids)[0]
        worst, count = worst_layer(engine, values, schemes, dtype)
    assert worst < (1e-3 if exact else 0.01) and count == 4 * 8 * 2
    own = reference_of(values, schemes)
    own.c = config
    kl, agreement = divergence(got, own(ids))
    # In bfloat16 the whole model rounds, and random tokens leave near ties: KL of 1e-3 with nothing wrong.
    assert kl <= (1e-4 if exact else 5e-3) and (agreement >= 0.99 or not exact)
    native = Reference(config, values_of(TINY))(ids)
    assert divergence(got, native)[0] < 0.01, "what is served has little to do with the source"
