"""llm-compressor's own data-free path, run on a fixture."""

from __future__ import annotations

from pathlib import Path

from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor import model_free_ptq

from tests.checkpoint.fixtures import COMPLETE_IGNORE

# What the released ignore list forgets: without it the dequantizer looks for packed weights there.
NOT_PACKED = [
    "re:.*_res_proj$", r"re:.*routed_expert_(down|up)_proj$", r"re:.*\.gate$", "re:.*norm$", "re:.*embed_tokens$"
]


def quantize(source: Path, target: Path, preset: str, group_size: int | None = None, packed: bool = True) -> Path:
    """``model_free_ptq`` of the experts with a preset scheme."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group_size:
        scheme.weights.group_size = group_size
    converter = CompressedTensorsDequantizer(source, ignore=NOT_PACKED) if packed else None
    model_free_ptq(
        source, target, scheme=scheme, ignore=[*COMPLETE_IGNORE, "re:.*norm.*"], max_workers=1, device="cpu",
        converter=converter,
    )  # fmt: skip
    return target
