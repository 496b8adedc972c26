"""tiny-gqa loads with stock transformers and retrieves, scored as tiny-k3 is."""

import sys
from pathlib import Path

import torch

MODELS = Path(__file__).resolve().parents[1] / "models"


def test_it_retrieves_with_stock_transformers(monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(MODELS / "tiny-k3" / "training"))
    import evaluate

    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-gqa", dtype=torch.float32).eval()
    score = evaluate.score(lambda ids, select: model(input_ids=ids, use_cache=False).logits[select], "single", 512, 32, seed=5)
    for name in ("evaluate", "export", "model", "tasks", "config", "mxfp4", "vocabulary"):  # tiny-k3's, not for others' imports
        sys.modules.pop(name, None)
    assert score["accuracy"] >= 0.85
