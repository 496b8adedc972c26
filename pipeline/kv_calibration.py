"""Scales of an FP8 KV cache, calibrated by llm-compressor: how they are asked for, and how they are made (quant environment).

The cache stores ``k / k_scale`` and ``v / v_scale`` in E4M3, one scale a layer.  Calibration runs the *source* model over documents and
takes the largest key and value that each layer made.  For models that cache keys and values (GQA); MLA caches a latent.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt

from pipeline.errors import Invalid, Refused, Unreadable

FAMILIES = ("single", "multi_key", "multi_query", "frequent_words")
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""``kv_cache_scheme`` of compressed-tensors: E4M3, one static scale a tensor.  The observer is the one that keeps true extremes: the
default averages them, so that the scale would depend on the order of the documents."""


class Calibration(BaseModel):
    """``documents``: a file of JSON lines with a ``text`` each, or None for documents of the evaluation's own grammar, whose ``seed``
    must not be one of the evaluation's.  The first ``count`` documents are used, cut after ``tokens`` tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    documents: str | None
    count: PositiveInt
    tokens: PositiveInt
    seed: int


def texts(model: Path, calibration: Calibration, *, trust_remote_code: bool = False) -> list[str]:
    """The calibration documents.  Raises :class:`Unreadable` for a file without them, :class:`Refused` where they are too few."""
    if calibration.documents is None:
        found = _generated(model, calibration, trust_remote_code)
    else:
        found = _read(Path(calibration.documents))
    if len(found) < calibration.count:
        raise Refused(f"kv calibration: {len(found)} documents, kv.dtypes.*.calibration.count asks for {calibration.count}")
    return found[: calibration.count]


def _read(path: Path) -> list[str]:
    try:
        return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{path}: expected JSON lines with a 'text' each ({type(error).__name__}: {error})") from None


def _generated(model: Path, calibration: Calibration, trust_remote_code: bool) -> list[str]:
    from pipeline.evals import dataset

    each = -(-calibration.count // len(FAMILIES))
    settings = {
        "name": "kv-calibration",
        "lengths": [calibration.tokens],
        "seeds": [calibration.seed],
        "items": dict.fromkeys(FAMILIES, each),
        "trust_remote_code": trust_remote_code,
    }
    with tempfile.TemporaryDirectory() as folder:
        dataset.generate(model, settings, folder)
        items, _ = dataset.load(folder)
    families = [[item.prompt for item in items if item.family == family] for family in FAMILIES]
    return [prompt for group in zip(*families, strict=True) for prompt in group]  # by turns: a cut leaves some of each


def calibrate(model: Path, documents: list[str], tokens: int, *, trust_remote_code: bool = False) -> dict[str, float]:
    """``{"model.layers.0.self_attn.k_scale": ...}``: the scales that llm-compressor's ``oneshot`` finds on ``documents``.

    Loads the whole model in bfloat16.  Raises :class:`Invalid` for a scale that is no positive number.
    """
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=trust_remote_code)
    ids = [tokenizer(text, truncation=True, max_length=tokens)["input_ids"] for text in documents]
    loaded = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    oneshot(
        model=loaded,
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}),
        recipe=[QuantizationModifier(kv_cache_scheme=QuantizationArgs(**SCHEME, observer="static_minmax"))],
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=False,
        max_seq_length=tokens,
        pipeline="basic",
    )
    scales = {
        name: float(value)
        for name, value in loaded.state_dict().items()
        if name.endswith((".k_scale", ".v_scale")) and value.numel() == 1
    }
    wrong = [f"{name} = {scale}" for name, scale in scales.items() if not (math.isfinite(scale) and scale > 0)]
    if wrong or not scales:
        raise Invalid(f"{model}: kv calibration gave {'no scale at all' if not scales else ', '.join(wrong)}")
    return scales


def with_scheme(config: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of a checkpoint that holds scales.  An engine looks for them only where the config says so."""
    declared = config.get("quantization_config") or {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {},
    }
    return config | {"quantization_config": declared | {"kv_cache_scheme": SCHEME}}
