"""The compatibility table is data, and every row of it has a reason and a source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipeline.errors import Unreadable
from pipeline.plan import compatibility
from pipeline.plan.compatibility import Combination, engine_too_old, lookup
from pipeline.plan.schemes import SCHEMES

MEASURED = json.loads((Path(__file__).parent / "measured.json").read_text())


def cell(model="k3", quant="native", kv="auto", platform="cuda", architecture="blackwell_ultra", **more):
    return Combination(model, quant, kv, more.pop("state", "auto"), platform, architecture, **more)


def test_every_row_can_be_reached():
    """A row behind a more general one would be dead: flip its verdict, and something must change."""
    rows = yaml.safe_load(compatibility.TABLE.read_text())["rows"]
    for i, row in enumerate(rows):
        given = {name: row[name] for name in row if name in compatibility.FIELDS}
        values = {name: value[0] if isinstance(value, list) else value for name, value in given.items()}
        values = {name: 2 if value == "many" else value for name, value in values.items()}
        combination = replace(cell(platform="cuda", architecture="x"), **values)
        first = next(j for j, other in enumerate(rows) if compatibility._matches(other, combination))
        assert first == i, (row, rows[first])


@pytest.mark.parametrize(
    ("combination", "verdict"),
    [
        (cell(), "yes"),
        (cell(kv="fp8", architecture="hopper"), "no"),
        (cell(kv="fp8"), "yes"),
        (cell(model="gqa", kv="fp8", architecture="hopper"), "yes"),
        (cell(kv="fp8_e5m2"), "no"),
        (cell(state="float16"), "no"),
        (cell(platform="cpu", architecture="x86_64"), "emulated"),
        (cell(platform="cpu", architecture="x86_64", quant="int8"), "yes"),
        (cell(platform="cpu", architecture="x86_64", pipeline_parallel=2), "no"),
        (cell(model="gqa", platform="cpu", kv="nvfp4"), "no"),
        (cell(model="gdn", platform="cpu"), "untested"),
        (cell(quant="fp8"), "untested"),
        (cell(quant="nvfp4"), "yes"),
        (cell(quant="nvfp4", architecture="hopper"), "untested"),
    ],
)
def test_verdicts(combination, verdict):
    assert lookup(combination).verdict == verdict


def test_cpu_rows_that_claim_a_run_were_run():
    """Each scheme the table calls yes or emulated for K3 on CPU is in the recorded measurements; the calibrated ones
    share the container of a scheme that is."""
    ran = {record["quant"] for record in MEASURED["records"] if record["model"] == "k3"}
    for key, scheme in SCHEMES.items():
        if lookup(cell(quant=key, platform="cpu", architecture="x86_64")).verdict in ("yes", "emulated"):
            assert key in ran or scheme.calibrated, key


def test_cpu_rows_of_grouped_queries_that_claim_a_run_were_run():
    ran = {record["quant"] for record in MEASURED["records"] if record["model"] == "tiny-gqa"}
    claimed = {
        key for key in SCHEMES if lookup(cell("gqa", key, platform="cpu", architecture="x86_64")).verdict in ("yes", "emulated")
    }
    assert claimed - {"bf16", "fp8_all", "fp8_dense"} == ran  # native holds bf16; without experts all three fp8 are one


def test_emulated_is_what_the_engine_said():
    for record in MEASURED["records"]:
        model = "k3" if record["model"] == "k3" else "gqa"  # by family
        combination = cell(model, record["quant"], record["kv"], "cpu", "x86_64")
        for report in record["reports"]:
            assert (lookup(combination).verdict == "emulated") == bool(report["emulated"]), record


def test_engine_versions_compare_as_numbers():
    assert engine_too_old(cell(), "0.9.2") and not engine_too_old(cell(), "0.27.1")
    assert not engine_too_old(cell(), "0.100.0+cu130")
    assert engine_too_old(cell(platform="cpu"), "0.31.9")
    assert not engine_too_old(cell(model="gqa", platform="cpu"), "0.10.0")


def test_a_row_without_a_source_is_refused(monkeypatch, tmp_path):
    unsourced, odd = {"verdict": "yes", "reason": "x"}, {"verdict": "maybe", "reason": "x", "source": "y"}
    for row in (unsourced, odd, {"colour": 1}):
        table = tmp_path / "table.yaml"
        table.write_text(yaml.safe_dump({"rows": [row], "engine_minimum": []}))
        monkeypatch.setattr(compatibility, "TABLE", table)
        compatibility._table.cache_clear()
        with pytest.raises(Unreadable, match="no verdict, reason or source"):
            lookup(cell())
    compatibility._table.cache_clear()
