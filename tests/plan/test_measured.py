"""The planner against engines that were run: ``measured.json`` holds their memory reports (see ``record.py``)."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from pipeline.k3 import model_facts
from pipeline.plan import activation_cpu as cpu
from pipeline.plan.predict import compare, compare_predicted, predicted
from pipeline.plan.request import Overrides
from pipeline.plan.layout import Layout
from pipeline.plan.predict import COMPARED
from tests.plan import configs
from tests.plan.record import config_of

RECORDS = json.loads((Path(__file__).parent / "measured.json").read_text())["records"]
SETTINGS = {
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "enable_prefix_caching": "prefix_caching",
}


def name(record):
    options = "".join(f" {key}={value}" for key, value in record["options"].items())
    variant = f"{record['model']} {record['quant']}-{record['kv']} TP{record['ranks']}"
    return f"{variant} {record['sequences']}x{record['tokens']}{options}"


def prediction(record):
    options = dict(record["options"])
    state = {"bfloat16": "_state16"}.get(options.pop("mamba_ssm_cache_dtype", None), "")
    overrides = Overrides(
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel=record["ranks"],
        max_num_seqs=record["sequences"],
        max_num_batched_tokens=record["tokens"],
        **{SETTINGS[key]: value for key, value in options.items()},
    )
    # The source is native; a variant is planned before it exists.
    config = config_of(record["model"], "native")
    return predicted(config, "cpu", record["quant"], record["kv"] + state, overrides=overrides)


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_within_tolerance(record):
    rows = compare(prediction(record), record["reports"])
    assert [str(row) for row in rows if row.beyond] == []
    assert {row.key for row in rows} >= {key for key in COMPARED if not key.startswith("state_")}


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_cache_figures_are_exact(record):
    """Blocks, pages, tokens and states are integers that the engine derives from shapes: 2 % would hide a wrong
    formula."""
    for expected, report in zip(prediction(record), record["reports"], strict=True):
        exact = [key for key in COMPARED if key.startswith(("kv_", "state_"))]
        assert {key: expected[key] for key in exact} == {key: report[key] for key in exact}


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_weights_by_dtype(record):
    for expected, report in zip(prediction(record), record["reports"], strict=True):
        assert expected["weight_bytes"] == pytest.approx(report["weight_bytes"], rel=0.001)
        # Cache scales (up to 84 B of float32) and fused weight_shape entries are not told apart.
        told = {dtype: size for dtype, size in report["weight_bytes_by_dtype"].items() if size > 4096}
        planned = {dtype: size for dtype, size in expected["weight_bytes_by_dtype"].items() if size > 4096}
        assert planned == pytest.approx(told, rel=0.001, abs=96)


def test_the_eight_variants_and_gqa_at_both_degrees_were_measured():
    keys = ("model", "quant", "kv", "ranks")
    ran = {tuple(record[key] for key in keys) for record in RECORDS if not record["options"]}
    for ranks in (1, 2):
        assert {("k3", q, kv, ranks) for q in ("native", "fp8", "int8", "w4a16") for kv in ("auto", "fp8")} <= ran
        assert {("gqa", "native", kv, ranks) for kv in ("auto", "fp8", "fp8_e5m2")} <= ran
        assert {("tiny-gqa", q, "auto", ranks) for q in ("native", "fp8", "int8", "w4a16")} <= ran
        assert ("tiny-gqa", "native", "fp8", ranks) in ran
    assert {("tiny-gqa", q, "fp8", 1) for q in ("native", "fp8", "int8", "w4a16")} <= ran


def test_the_activation_model_is_fitted_on_two_points_only():
    facts = model_facts(configs.TINY_K3)
    assert len(cpu.POINTS) == 2
    fitted = cpu.fit(facts, Layout(), cpu.POINTS, grouped=True)
    assert fitted.hidden_copies == pytest.approx(cpu.FIT.hidden_copies, rel=1e-3)
    assert fitted.kda_copies == pytest.approx(cpu.FIT.kda_copies, rel=1e-3)
    points = {
        (record["tokens"], record["sequences"]): record["reports"][0]["activation_peak_bytes"]
        for record in RECORDS
        if (record["model"], record["quant"], record["kv"], record["ranks"]) == ("k3", "native", "auto", 1)
        and not record["options"]
    }
    assert cpu.POINTS.items() <= points.items()
    unseen = points.keys() - cpu.POINTS.keys()
    assert len(unseen) >= 3


def test_a_fit_needs_points_that_tell_the_sites_apart():
    with pytest.raises(ValueError, match="different numbers of sequences"):
        cpu.fit(model_facts(configs.TINY_K3), Layout(), {(2048, 4): 1, (1024, 4): 2}, grouped=True)


def test_the_largest_site_moves_with_the_batch():
    def site(sequences, tokens=2048, quant="native"):
        overrides = Overrides(max_num_seqs=sequences, max_num_batched_tokens=tokens)
        return predicted(configs.k3(), "cpu", quant, overrides=overrides)[0]["activation_largest_site"]

    assert site(1) == "KDA, chunked delta rule"
    assert site(16) == "routed experts" and site(16, quant="int8") == "gated MLP"


RECORD = next(record for record in RECORDS if record["model"] == "k3" and record["ranks"] == 2)


@pytest.mark.parametrize(
    ("key", "factor", "found"),
    [
        ("weight_bytes", 1.03, True),
        ("weight_bytes", 1.01, False),
        ("kv_num_blocks", 0.97, True),
        ("kv_capacity_tokens", 2, True),
        ("kv_block_size", 2, True),
        ("state_page_bytes_padded", 0.9, True),
        ("activation_peak_bytes", 1.3, True),
        ("activation_peak_bytes", 1.1, False),
        ("activation_peak_bytes", 0.7, True),
    ],
)
def test_a_server_that_says_otherwise_is_found(key, factor, found):
    reports = copy.deepcopy(RECORD["reports"])
    reports[1][key] = reports[1][key] * factor
    findings = compare_predicted(prediction(RECORD), reports)
    assert [(finding.rank, finding.key) for finding in findings] == ([(1, key)] if found else [])
    if found:
        assert f"rank 1 {key}: predicted" in str(findings[0]) and "tolerance" in str(findings[0])


def test_a_figure_that_could_not_be_read_is_told_with_its_reason():
    reports = copy.deepcopy(RECORD["reports"])
    reports[0]["activation_peak_bytes"] = None
    reports[0]["unavailable"] = {"activation_peak_bytes": "the dummy run failed"}
    rows = [row for row in compare(prediction(RECORD), reports) if row.rank == 0 and row.key == "activation_peak_bytes"]
    assert "not measured (the dummy run failed)" in str(rows[0]) and not rows[0].beyond
    assert compare_predicted(prediction(RECORD), reports) == []


def test_ranks_that_only_one_side_knows():
    assert [str(f) for f in compare_predicted(prediction(RECORD), RECORD["reports"][:1])] == [
        "rank 1 rank: predicted 1, not measured (the server reported nothing for it)"
    ]
    extra = copy.deepcopy(RECORD["reports"]) + [RECORD["reports"][0] | {"rank": 2}]
    assert [finding.rank for finding in compare_predicted(prediction(RECORD), extra)] == [2]
