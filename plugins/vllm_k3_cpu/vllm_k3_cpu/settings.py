"""Engine settings for K3 on CPU: what `CpuPlatform.check_and_update_config` may not take away.

For every MLA model on a CPU without AMX that function forces block size 16, no chunked prefill and no prefix caching,
the limits of its C++ decode kernel, which this plugin does not use; on AVX512-BF16 machines it also resets the
recurrent state to float32.  The user's values are restored, and what K3 on CPU cannot do is refused by name.
"""

from __future__ import annotations

import os

from . import kv_cache
from .registration import ARCHITECTURES

_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def install() -> None:
    """Wrap `CpuPlatform.check_and_update_config` once a process."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if getattr(original, "keeps_k3_settings", False):
        return

    def check_and_update_config(cls, vllm_config):
        if is_k3(vllm_config.model_config):
            _check_k3(vllm_config)
            with _KeptSettings(vllm_config):
                original(cls, vllm_config)
            _run_eagerly(vllm_config)
        else:
            original(cls, vllm_config)

    check_and_update_config.keeps_k3_settings = True
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def is_k3(model_config) -> bool:
    return model_config is not None and bool(set(model_config.architectures or ()) & set(ARCHITECTURES))


def _check_k3(vllm_config) -> None:
    import torch

    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    kv_cache.require_supported(cache.cache_dtype, cache.kv_cache_dtype_skip_layers)
    asked = {
        "pipeline": parallel.pipeline_parallel_size > 1,
        "decode context": parallel.decode_context_parallel_size > 1,
        "expert": parallel.enable_expert_parallel,
    }
    if any(asked.values()):
        names = ", ".join(name for name, is_asked in asked.items() if is_asked)
        raise ValueError(f"Kimi K3 on CPU runs with tensor and data parallelism only, not {names} parallelism.")
    if vllm_config.speculative_config is not None:
        raise ValueError("Kimi K3 on CPU does not support speculative decoding: drop --speculative-config.")
    if model.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"Kimi K3 on CPU computes in bfloat16 or float32, not {model.dtype}: pass --dtype bfloat16.")


class _KeptSettings:
    """Restore the user's cache and scheduler settings, and how processes are made, after the platform's changes.

    One rank needs no worker process of its own beside the engine core (vLLM makes one so that it can set OpenMP's
    environment; here the user's ``OMP_NUM_THREADS`` holds), and ``VLLM_WORKER_MULTIPROC_METHOD`` stays what the user
    set.
    """

    def __init__(self, vllm_config):
        self.fields = [
            (vllm_config.cache_config, ("block_size", "enable_prefix_caching", "mamba_ssm_cache_dtype")),
            (vllm_config.scheduler_config, ("enable_chunked_prefill", "max_num_batched_tokens")),
            (vllm_config.parallel_config, ("distributed_executor_backend",)),
        ]

    def __enter__(self):
        self.values = [(config, name, getattr(config, name)) for config, names in self.fields for name in names]
        self.start_method = os.environ.get(_START_METHOD)

    def __exit__(self, *failure):
        if self.start_method is not None:
            os.environ[_START_METHOD] = self.start_method
        for config, name, value in self.values:
            setattr(config, name, value)


def _run_eagerly(vllm_config) -> None:
    """The model has no compiled part: skip the compiler's start-up, keep vLLM's C++ operators."""
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    if compilation.mode != CompilationMode.NONE:
        compilation.mode = CompilationMode.NONE
        compilation.custom_ops = [op for op in compilation.custom_ops if op != "none"] + ["all"]
