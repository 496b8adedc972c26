"""The plugin takes the K3 architectures on CPU beside the pinned vLLM, and nothing else."""

import pytest
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.registry import ModelRegistry, _ModelInfo
from vllm.platforms import current_platform

import vllm_k3_cpu
from vllm_k3_cpu import model, registration


@pytest.fixture
def clean_registry(monkeypatch):
    """The registry with vLLM's own entries and unpatched methods; restored afterwards."""
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.setattr(type(ModelRegistry), "inspect_model_cls", type(ModelRegistry).inspect_model_cls)
    for architecture in registration.ARCHITECTURES:
        ModelRegistry.models[architecture] = "vllm's own"


@pytest.mark.parametrize("architecture", registration.ARCHITECTURES)
def test_stated_interface_is_that_of_the_class(architecture):
    assert registration.interface(architecture) == _ModelInfo.from_model_cls(getattr(model, architecture))


def test_takes_the_architectures_beside_the_pinned_vllm(clean_registry):
    vllm_k3_cpu.register()
    for architecture in registration.ARCHITECTURES:
        assert ModelRegistry.models[architecture].load_model_cls() is getattr(model, architecture)
    assert "KimiK3ForConditionalGeneration" not in MODELS_CONFIG_MAP


def test_another_platform_is_left_alone(clean_registry, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    vllm_k3_cpu.register()
    assert ModelRegistry.models["KimiLinearForCausalLM"] == "vllm's own"


def test_another_vllm_refuses_k3_naming_both_versions(clean_registry, monkeypatch, native):
    from vllm import LLM

    monkeypatch.setattr("vllm.__version__", "0.33.1+cpu")
    vllm_k3_cpu.register()
    with pytest.raises(registration.UnsupportedVllm, match=r"0\.32\.0.*0\.33\.1"):
        LLM(str(native[0]))
    assert ModelRegistry.models["KimiLinearForCausalLM"] == "vllm's own"


def test_another_vllm_still_runs_other_models(clean_registry, monkeypatch):
    monkeypatch.setattr(type(ModelRegistry), "inspect_model_cls", lambda self, architectures, config: "inspected")
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    vllm_k3_cpu.register()
    assert ModelRegistry.inspect_model_cls(["LlamaForCausalLM"], None) == "inspected"
