"""The planner against an engine started now, on dummy weights: two starts, what is recorded covers the rest.

One start is K3 with two ranks and an FP8 cache, the other a grouped-query model.
"""

from __future__ import annotations

import sys

import pytest

from pipeline.plan.predict import compare, predicted
from pipeline.plan.request import Overrides
from tests.plan.record import config_of, measure

ENGINES = [
    ("k3", "native", "fp8", 2, 16, [2048], {"max_model_len": 4096}),
    ("gqa", "native", "fp8", 1, 8, [1024], {"block_size": 64}),
]


@pytest.mark.parametrize("engine", ENGINES, ids=["k3-tp2", "gqa"])
def test_prediction_holds_on_a_running_engine(engine):
    model, quant, kv, ranks, sequences, (tokens,), options = engine
    (record,) = measure(sys.executable, [engine])
    reports = record["reports"]
    overrides = Overrides(
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel=ranks,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        max_model_len=options.get("max_model_len", 8192),
        block_size=options.get("block_size"),
    )
    rows = compare(predicted(config_of(model, quant), "cpu", quant, kv, overrides=overrides), reports)
    assert {row.rank for row in rows} == set(range(ranks))
    assert [str(row) for row in rows if row.beyond or row.measured is None] == []
    exact = {row.key: (row.predicted, row.measured) for row in rows if row.key.startswith(("kv_", "state_"))}
    assert all(expected == told for expected, told in exact.values()), exact
    assert reports[0]["emulated"] == (["mxfp4"] if model == "k3" else [])
