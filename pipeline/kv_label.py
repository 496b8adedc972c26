"""Whether the scales of a KV cache were calibrated, told from the checkpoint itself and never from its config's promise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.k3.facts import model_facts

UNQUANTIZED = ("auto", "bfloat16", "float16")
SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def label(cache_dtype: str, config: dict[str, Any], tensors: Iterable[str]) -> tuple[str, str]:
    """(label, why) of a cache of ``cache_dtype``: ``unquantized``, ``self_scaled``, ``calibrated`` or ``scale_1.0``.

    A ``kv_cache_scheme`` in the config writes no scales by itself, so only tensors count.
    """
    if cache_dtype in UNQUANTIZED:
        return "unquantized", "the cache has the model's own dtype"
    if "per_token" in cache_dtype or cache_dtype == "fp8_ds_mla":
        return "self_scaled", f"{cache_dtype} computes a scale for every token"
    if model_facts(config).uses_mla:
        return "scale_1.0", "MLA caches the latent, and vLLM reads no scale for it: calibrated scales would never be used"
    scales = sum(name.endswith(SCALES) for name in tensors)
    if scales:
        return "calibrated", f"the checkpoint holds {scales} scales"
    return "scale_1.0", "uncalibrated: the checkpoint holds no k_scale or v_scale, so vLLM uses 1.0"
