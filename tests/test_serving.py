from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import Refused
from pipeline.plan import hardware
from pipeline.serving import server_settings

FP8 = {"cache_dtype": "fp8", "state_dtype": "auto"}


def test_the_variant_decides_the_cache_and_the_machine_the_rest():
    settings = server_settings(hardware.load("b300x8"), "kimi-k3", Path("checkpoints/fp8"), FP8 | {"cache_dtype": "auto"})
    assert settings.kv_cache_dtype == "auto"
    assert "--kv-cache-dtype" not in settings.extra_args
    assert settings.tensor_parallel_size == 8 and settings.max_model_len == 1048576
    assert "--load-format" in settings.extra_args and "--no-enable-flashinfer-autotune" in settings.extra_args
    assert settings.environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"


def test_the_main_jobs_machine():
    settings = server_settings(hardware.load("cpu"), "tiny-k3", Path("checkpoints/fp8"), FP8)
    assert settings.env == "serve-cpu" and settings.kv_cache_dtype == "fp8"
    assert "--enforce-eager" in settings.extra_args
    assert settings.max_num_batched_tokens == 2048


@pytest.mark.parametrize("model_allows", [False, True])
def test_remote_code_needs_both_permissions(model_allows):
    machine = hardware.load("b300x8")
    settings = server_settings(machine, "k3", Path("x"), FP8, trust_remote_code=model_allows)
    assert settings.trust_remote_code is model_allows
    silent = replace(machine, flags={})
    assert server_settings(silent, "k3", Path("x"), FP8, trust_remote_code=True).trust_remote_code is False


def test_every_machine_that_can_be_started_gives_settings_and_the_others_say_why():
    for name in hardware.available():
        machine = hardware.load(name)
        if machine.nodes == 1:
            server_settings(machine, "k3", Path("x"), FP8)
        else:
            with pytest.raises(Refused, match="one host only"):
                server_settings(machine, "k3", Path("x"), FP8)
