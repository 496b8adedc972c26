"""Reading ``config.json``: where the text half is, and which quantization the checkpoint says it has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Refused, Unreadable
from pipeline.files import read_json

# Compressed-tensors container formats (compressed_tensors/config/base.py, CompressionFormat) -> what one weight is
# stored as.
KNOWN_FORMATS = {
    "dense": "bfloat16",
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
    "float-quantized": "float8",
    "int-quantized": "int8",
    "pack-quantized": "int4",
    "naive-quantized": "int8",
    "mixed-precision": "mixed",
}
# ``quant_method`` values of other quantizers: named so that the message can say what the weights are.
OTHER_METHODS = {"fp8": "float8", "gptq": "int4", "awq": "int4", "mxfp4": "mxfp4", "modelopt": "nvfp4"}


@dataclass(frozen=True)
class SourceFormat:
    """What the source checkpoint stores.  ``weights`` is one of the values of :data:`KNOWN_FORMATS`."""

    weights: str
    name: str
    where: str

    @property
    def is_quantized(self) -> bool:
        return self.weights not in ("bfloat16", "float16", "float32")


def read_config(path: Path | str) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint directory (or of the file itself).

    Raises :class:`Unreadable` where the file is missing, is not JSON, or describes no model.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    config = read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise Unreadable(f"{path}: expected a JSON object that describes a model")
    if "model_type" not in text_config(config) and "architectures" not in config:
        raise Unreadable(f"{path}: neither 'model_type' nor 'architectures': this is not a model's config.json")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text half: ``text_config`` where the model is multimodal, else the whole."""
    return config.get("text_config") or config


def declared_quantizations(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every ``quantization_config`` in the file, with where it stands.  More than one is a contradiction waiting to
    happen."""
    found = []
    if config.get("quantization_config"):
        found.append(("quantization_config", config["quantization_config"]))
    if "text_config" in config and text_config(config).get("quantization_config"):
        found.append(("text_config.quantization_config", text_config(config)["quantization_config"]))
    return found


def source_format(config: dict[str, Any]) -> SourceFormat:
    """The weight format a config declares; bf16 where it declares none.

    Raises :class:`Refused` for a format this pipeline does not know (a guessed format loads as garbage:
    https://github.com/ml-explore/mlx-lm/issues/1865) and for two configs that contradict each other.
    """
    declared = declared_quantizations(config)
    if not declared:
        dtype = text_config(config).get("dtype") or text_config(config).get("torch_dtype") or "bfloat16"
        return SourceFormat(dtype, "dense", "dtype")
    names = {where: quantization.get("format") or quantization.get("quant_method") for where, quantization in declared}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{where} says {name!r}" for where, name in names.items())
        raise Refused(f"config.json holds contradicting quantization configs: {listed}; remove the stale one")
    where, quantization = declared[0]
    name = quantization.get("format") or quantization.get("quant_method")
    weights = KNOWN_FORMATS.get(name) or OTHER_METHODS.get(name)
    if weights is None:
        known = ", ".join(sorted({*KNOWN_FORMATS, *OTHER_METHODS}))
        raise Refused(f"{where}.format is {name!r}, which is not a known weight format; known: {known}")
    return SourceFormat(weights, name, where)


def kv_cache_scheme(config: dict[str, Any]) -> dict[str, Any] | None:
    """The ``kv_cache_scheme`` of the declared quantization, if any."""
    for _, quantization in declared_quantizations(config):
        if quantization.get("kv_cache_scheme"):
            return quantization["kv_cache_scheme"]
    return None
