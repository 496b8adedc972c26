"""KV cache element types the K3 attention layer can store.  Anything not tested here is refused, never decoded."""

from __future__ import annotations

import torch

FP8_TYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SUPPORTED = ("auto", "bfloat16", *FP8_TYPES)


def require_supported(kv_cache_dtype: str, skip_layers=()) -> None:
    """Raise `ValueError` for a ``--kv-cache-dtype`` (or per-layer exception) that the MLA layer does not implement."""
    if kv_cache_dtype not in SUPPORTED:
        raise ValueError(
            f"Kimi K3 on CPU: --kv-cache-dtype {kv_cache_dtype} is not implemented by the MLA layer; use one of "
            f"{', '.join(SUPPORTED)}."
        )
    if skip_layers:
        raise ValueError(
            f"Kimi K3 on CPU: --kv-cache-dtype-skip-layers {list(skip_layers)} is not supported: all MLA layers share "
            "one page size with the KDA state."
        )
