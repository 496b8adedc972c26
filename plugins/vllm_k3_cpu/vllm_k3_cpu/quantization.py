"""Which of K3's layers a checkpoint's quantization config covers.

Native K3 (one compressed-tensors group, ``mxfp4-pack-quantized``): routed experts only, whatever the file's incomplete
ignore list says.  vLLM does the same on GPU by rewriting the quantization method to ``mxfp4``
(`KimiK3ForConditionalGenerationConfig`, vllm/model_executor/models/config.py).  Every other config, mixed groups
included, means exactly what it says and needs a complete ignore list.
"""

from __future__ import annotations

MXFP4_FORMAT = "mxfp4-pack-quantized"


def dense_config(quant_config):
    """Config for every layer that is not a routed expert: None for native K3, else `quant_config` itself."""
    return None if is_native_mxfp4(quant_config) else quant_config


def is_native_mxfp4(quant_config) -> bool:
    if quant_config is None or getattr(quant_config, "quant_format", None) != MXFP4_FORMAT:
        return False
    formats = {scheme.get("format") or MXFP4_FORMAT for scheme in quant_config.target_scheme_map.values()}
    return formats == {MXFP4_FORMAT}
