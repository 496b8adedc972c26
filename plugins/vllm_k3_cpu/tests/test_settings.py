"""What the user set for K3 survives vLLM's CPU platform."""

import os
from types import SimpleNamespace

import pytest

from vllm_k3_cpu import settings


def test_settings_are_restored_even_when_the_platform_raises(monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    asked = {
        "cache_config": {"block_size": 64, "enable_prefix_caching": True, "mamba_ssm_cache_dtype": "bfloat16"},
        "scheduler_config": {"enable_chunked_prefill": True, "max_num_batched_tokens": 512},
        "parallel_config": {"distributed_executor_backend": "uni"},
    }
    config = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in asked.items()})
    with pytest.raises(RuntimeError, match="platform"), settings._KeptSettings(config):
        config.cache_config.__dict__.update(block_size=16, enable_prefix_caching=False, mamba_ssm_cache_dtype="float32")
        config.scheduler_config.__dict__.update(enable_chunked_prefill=False, max_num_batched_tokens=1)
        config.parallel_config.distributed_executor_backend = "mp"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        raise RuntimeError("platform")
    assert {name: vars(getattr(config, name)) for name in asked} == asked
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


def test_other_models_are_left_to_the_platform():
    assert settings.is_k3(SimpleNamespace(architectures=["KimiK3ForConditionalGeneration"]))
    assert not settings.is_k3(SimpleNamespace(architectures=["LlamaForCausalLM"]))
    assert not settings.is_k3(None)
