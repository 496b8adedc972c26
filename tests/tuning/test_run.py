"""A whole tuning run: what coincides, what is kept, what is refused, what is said."""

from __future__ import annotations

import csv
import dataclasses
import io
import re

import pytest

from pipeline.errors import Invalid
from pipeline.serve import ServerDied
from pipeline.tuning import report
from tests.mock_openai import Behaviour, MockServer
from tests.tuning.conftest import ITEMS, SETTINGS


def by_seqs(settings):
    """Faster with more sequences, up to 32."""
    return {8: 80.0, 16: 100.0, 32: 130.0}[settings.max_num_seqs]


def test_a_run(tuning, tmp_path):
    result, client = tuning.tune(by_seqs)
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [
        "baseline", "block_size=64", "block_size=128", "max_num_seqs=8", "max_num_seqs=32",
    ]  # fmt: skip
    assert rows["block_size=64"]["coincides_with"] == rows["block_size=128"]["coincides_with"] == "baseline"
    assert rows["max_num_seqs=8"]["high_pct"] < 0 < rows["max_num_seqs=32"]["low_pct"]
    assert rows["max_num_seqs=32"]["difference_pct"] == pytest.approx(30, abs=1)
    assert rows["baseline"]["accuracy"] == 1.0 and rows["max_num_seqs=32"]["same_answers_as_baseline"] == 1.0
    assert rows["baseline"]["block_size"] == 256 and rows["baseline"]["waste_tokens"] == 256 - 24
    assert rows["baseline"]["waste_bytes"] == 232 * 576 and rows["baseline"]["kv_share"] == pytest.approx(8 / 15)
    assert [hit["prefix_tokens"] for hit in rows["baseline"]["prefix_hits"]] == [230, 255, 256, 257]
    assert rows["baseline"]["parallel_hits"] == {
        "prompt_tokens": 640, "answers": 4, "query_tokens": 640, "hit_tokens": 0, "possible_tokens": 3 * 640,
    }  # fmt: skip
    assert rows["max_num_seqs=8"]["prefix_hits"] is rows["max_num_seqs=8"]["parallel_hits"] is None
    assert result["knees"]["max_num_seqs"]["status"] == "still_rising"
    found = result["recommendation"]
    assert found["moved"] == {"max_num_seqs": 32} and found["verdict"] == "beats" and len(found["ratios"]) == 3
    assert [pair["first"] for pair in found["pairs"]] == ["default", "recommended", "default"]
    assert client.timed == 3 * 3 + 2 * 3, "coinciding points are not measured"
    assert len(tuning.started) == 5 + 2

    report.write(result, tmp_path / "out")
    text = (tmp_path / "out" / "ablation.md").read_text()
    assert "**Recommended: max_num_seqs = 32.**" in text and "beats the default by" in text
    assert "same engine as baseline" in text and "0 of 1920" in text
    table = list(csv.DictReader(io.StringIO((tmp_path / "out" / "ablation.csv").read_text())))
    assert float(table[4]["difference_pct"]) == pytest.approx(30, abs=1) and table[1]["difference_pct"] == ""
    first = (tmp_path / "out" / "pareto.svg").read_text()
    assert "max_num_seqs=32" in first and first == report.pareto_svg(result)
    assert (tmp_path / "out" / "knees.svg").read_text().startswith("<?xml")


def test_a_killed_run_goes_on_at_its_point_and_repeats_nothing(tuning):
    with pytest.raises(ServerDied):
        tuning.tune(by_seqs, dies_at=3 + 3 + 2)  # in the last point, after its first repeat
    done = len(tuning.started)
    result, client = tuning.tune(by_seqs)
    assert client.timed == 2 + 6, "the two missing repeats, and the pairs"
    assert len(tuning.started) - done == 1 + 2, "one server for the point that was cut, two for the pairs"
    again, client = tuning.tune(by_seqs)
    assert client.timed == 0 and again["recommendation"] == result["recommendation"]
    assert len(tuning.started) - done == 1 + 2, "nothing is left to serve"


def test_a_disturbed_point_is_measured_once_more_and_again_by_the_next_run(tuning):
    calls = []

    def disturbed(settings):
        calls.append(settings.max_num_seqs)
        return by_seqs(settings) * (1 + calls.count(8) % 3 if settings.max_num_seqs == 8 else 1)

    row = next(row for row in tuning.tune(disturbed)[0]["rows"] if row["name"] == "max_num_seqs=8")
    assert row["status"] == "invalid" and "spread_too_wide" in row["reason"] and row["difference_pct"] is None
    assert sum(settings.max_num_seqs == 8 for settings in tuning.started) == 2
    row = next(row for row in tuning.tune(by_seqs)[0]["rows"] if row["name"] == "max_num_seqs=8")
    assert row["status"] == "valid"


def test_another_probe_or_workload_measures_again(tuning):
    tuning.tune(by_seqs)
    _, client = tuning.tune(by_seqs, items=ITEMS)
    assert client.timed >= 9
    _, client = tuning.tune(by_seqs, dataclasses.replace(SETTINGS, bench=dataclasses.replace(SETTINGS.bench, seed=5)))
    assert client.timed >= 9


def test_nothing_beats_the_default_rests_on_a_fresh_run(tuning):
    result, _ = tuning.tune(lambda settings: 100.0)
    found = result["recommendation"]
    assert found["verdict"] == "nothing_beats_the_default" and len(found["ratios"]) == 3
    assert "**Keep the default.**" in report.markdown(result)


def test_a_setting_that_the_engine_refuses_is_a_row_not_the_end(tuning):
    result, _ = tuning.tune(by_seqs, refuse=lambda settings: settings.max_num_seqs == 8)
    row = next(row for row in result["rows"] if row["name"] == "max_num_seqs=8")
    assert row["status"] == "invalid" and "Invalid prefix_match_unit=7" in row["reason"]
    assert row["difference_pct"] is None and "max_num_seqs=8: invalid" in report.markdown(result)


def test_a_baseline_that_cannot_be_trusted_ends_the_run(tuning):
    with pytest.raises(Invalid, match="the baseline is invalid: .*prefix_hits"):
        tuning.tune(by_seqs, prefix_hits_per_request=1)


def test_a_fast_setting_that_answers_wrongly_is_not_recommended(tuning, monkeypatch):
    from pipeline.tuning import measure

    original = measure.probe

    def wrong_at_32(server, items):
        return original(server, items) | ({"accuracy": 0.0} if server.settings.max_num_seqs == 32 else {})

    monkeypatch.setattr(measure, "probe", wrong_at_32)
    found = tuning.tune(by_seqs)[0]["recommendation"]
    assert found["moved"] == {"max_num_seqs": 8} and found["verdict"] == "nothing_beats_the_default"


def test_fresh_servers_for_each_run_of_a_pair(tuning):
    settings = dataclasses.replace(SETTINGS, axes={"max_num_seqs": [32]}, pair_servers="alternate")
    result, _ = tuning.tune(by_seqs, settings)
    assert result["recommendation"]["verdict"] == "beats" and len(tuning.started) == 2 + 6


def test_another_quantization_with_emulated_kernels_gets_no_percentage(tuning):
    settings = dataclasses.replace(SETTINGS, axes={"quant": ["int8"]})
    result, _ = tuning.tune(by_seqs, settings)
    row = result["rows"][1]
    assert row["status"] == "not_comparable" and "emulated" in row["reason"] and row["difference_pct"] is None
    assert result["recommendation"]["verdict"] == "untested"
    assert re.search(r"quant=int8 \|.*not comparable", report.markdown(result))


def test_a_setting_whose_effect_the_engine_does_not_report_is_measured(tuning):
    """The stand-in says nothing of its prefix-hit alignment: silence is not coincidence."""
    settings = dataclasses.replace(SETTINGS, axes={"prefix_match_unit": [64]})
    row = tuning.tune(by_seqs, settings)[0]["rows"][1]
    assert row["coincides_with"] is None and row["difference_pct"] is not None


def test_the_probe_sees_answers_that_degenerate():
    from types import SimpleNamespace

    from pipeline.tuning.probe import choose, probe

    with MockServer(Behaviour(repeat_after_request=0)) as server:
        found = probe(SimpleNamespace(base_url=server.base_url, model="mock", check=lambda doing: None), [
            dataclasses.replace(item, max_gen_toks=40) for item in ITEMS
        ])
    assert found["accuracy"] == 0 and found["degenerate"] == 4
    with pytest.raises(Invalid, match="4 items of family 'single', the probe asks for 9"):
        choose(ITEMS, ["single"], 9)
