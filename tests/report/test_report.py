import csv
import io
from pathlib import Path

import pytest

from pipeline.errors import Unreadable
from pipeline.evals.baseline import reference
from pipeline.evals.compare import compare, noise
from pipeline.evals.runs import Run
from pipeline.files import read_json, write_json
from pipeline.report.build import build, build_pictures, read_comparisons, read_rows
from pipeline.report.figures import EMULATED, INVALID, color
from pipeline.report.row import TRACE, build_row
from pipeline.report.table import as_csv, headline, markdown

MEMORY = ("weight_bytes", "kv_bytes_per_token", "kv_capacity_tokens", "state_bytes_per_sequence", "activation_peak_bytes")
ROW = {
    "status": "valid",
    "reason": None,
    "verdict": "pass",
    "accuracy": 0.9583333,
    "kl_to_native": 0.0004,
    "output_tok_s": 123.4,
    "ttft_ms_p50": 56.7,
    "weight_bytes": 6 << 20,
    "kv_bytes_per_token": 576,
    "kv_capacity_tokens": 65536,
    "state_bytes_per_sequence": 210432,
    "activation_peak_bytes": None,
}


@pytest.fixture
def rows():
    return {"fp8-auto": ROW | {"status": "invalid", "reason": "3 prompts were shortened"}, "native-auto": ROW}


def test_native_comes_first_and_an_unread_figure_is_a_dash(rows):
    lines = markdown(rows).splitlines()
    assert lines[2].startswith("| native-auto | valid | pass | 0.958 | 4.0e-04 | 123 | 57 | 6.00 MiB | 576 B | 65,536 |")
    assert lines[3].startswith("| fp8-auto | invalid")
    assert lines[2].endswith("| — |")


def test_csv_is_unrounded_and_an_unread_figure_is_empty(rows):
    first = list(csv.DictReader(io.StringIO(as_csv(rows))))[0]
    assert first["variant"] == "native-auto" and float(first["accuracy"]) == ROW["accuracy"]
    assert first["activation_peak_bytes"] == ""


def test_headline_names_are_unique_and_counts_invalid(rows):
    flat = headline(rows)
    assert flat["fp8_auto_accuracy"] == ROW["accuracy"] and flat["invalid"] == 1 and flat["variants"] == 2
    assert all(not isinstance(value, dict) for value in flat.values())


def test_the_report_says_why_a_run_is_not_compared(tmp_path, rows):
    build(rows, tmp_path)
    assert "fp8-auto: invalid, 3 prompts were shortened" in (tmp_path / "report.md").read_text()
    assert read_json(tmp_path / "headline.json")["variants"] == 2


def test_the_picture_is_the_same_for_the_same_rows(tmp_path, rows):
    build(rows, tmp_path)
    first = (tmp_path / "comparison.svg").read_bytes()
    build(rows, tmp_path)
    assert (tmp_path / "comparison.svg").read_bytes() == first
    assert b"not measured" in first


def test_emulated_speed_is_told_apart_in_the_picture_and_accuracy_is_not(rows):
    emulated = ROW | {"speed": "emulated"}
    assert color("output_tok_s", emulated) == EMULATED != color("output_tok_s", ROW)
    assert color("accuracy", emulated) == color("accuracy", ROW)
    assert color("accuracy", rows["fp8-auto"]) == INVALID
    assert "123 (emulated)" in markdown({"fp8-auto": emulated})


def test_a_disturbed_bench_spoils_its_own_figures_only(tmp_path, rows):
    disturbed = ROW | {"speed": "invalid", "speed_reason": "c8: spread_too_wide"}
    assert color("output_tok_s", disturbed) == INVALID != color("accuracy", disturbed)
    build({"native-auto": disturbed}, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "123 (invalid)" in text and "its speed is invalid, c8: spread_too_wide" in text and "| valid |" in text


def test_a_row_takes_its_status_from_the_evaluation():
    bench = {"status": "invalid", "reason": "c1: insane_itl", "speed_label": "emulated", "output_tok_s": 1.0, "ttft_ms_p50": 1.0,
             "tpot_ms_p50": 1.0, "memory_summary": dict.fromkeys(MEMORY, 1), "load": {"load_s": 1.0}}
    evaluation = {"status": "valid", "reason": None, "accuracy": 0.9, "accuracy_stderr": 0.01, "n": 10}
    row = build_row(evaluation, bench, {"label": "scale_1.0"}, {"damage": None}, {"verdict": "pass", "memory_findings": []})
    assert (row["status"], row["speed"], row["speed_reason"]) == ("valid", "invalid", "c1: insane_itl")


def test_the_report_tells_accuracy_by_answer_length_script_noise_and_what_could_not_be_scored(tmp_path, rows):
    def sample(index: int, right: bool) -> dict:
        listed = index % 2 == 0
        row = dict.fromkeys(("id", "cluster", "prompt_hash"), str(index)) | {"length": 512, "depth": 0.5, "hits": [1]}
        row |= {"outcome": "correct" if right else "degenerate", "repeats": not right}
        family, tokens, script = ("ordered_recall", 65, "cyrillic") if listed else ("single", 9, "latin")
        return row | {"family": family, "generated_tokens": tokens, "script": script}

    header = {"status": "valid", "dataset_key": "k", "conditions": {}}
    native = Run(header, tuple(sample(index, True) for index in range(80)))
    rotten = Run(header, tuple(sample(index, index % 8 != 0) for index in range(80)))
    floors = noise(native, native, {})
    comparisons = {
        "native-auto": reference(native, None, {}) | {"noise": floors},
        "fp8-auto": compare(native, rotten, {"required_families": [], "min_gateable_families": 1}, noise=floors),
        "int8-auto": {"status": "invalid", "verdict": "invalid", "reason": "stuck"},
    }
    place = {"kl": 0.002}
    comparisons["fp8-auto"]["fidelity"] = {"status": "valid", "by_position": {"0-256": place, "1024-4096": place | {"kl": 0.03}}}
    comparisons["fp8-auto"]["fidelity"] |= {"answers": None, "top1_decided": 0.875, "perplexity_variant": 9.5}
    for name, block in comparisons.items():
        write_json(tmp_path / "comparisons" / f"{name}.json", block)
    build(rows, tmp_path, read_comparisons(tmp_path / "comparisons"))
    text = (tmp_path / "report.md").read_text()
    assert "native asked twice lost 0 and won 0 of 80 gated answers" in text
    assert "| fp8-auto | fail | 1.000 | 0.875 | -0.125 |" in text and "| 10 | 0 | 0.002 | above |" in text
    assert "| variant | 8-32 (n 40) | 32-128 (n 40) |" in text and "| fp8-auto | 1.000 | 0.750 |" in text
    assert "| variant | cyrillic (n 40) | latin (n 40) |" in text and "| fp8-auto | 0.750 | 1.000 |" in text
    assert "| fp8-auto | 0.875 | 1.000 | 12.5% | 12.5% |" in text
    assert "| int8-auto | invalid | — |" in text
    assert "| variant | 0-256 | 1024-4096 | answers | first choice kept | perplexity |" in text
    assert "| fp8-auto | 2.0e-03 | 3.0e-02 | — | 87.5% | 9.500 |" in text
    for picture in ("heat_maps.svg", "accuracy_by_length.svg", "flips.svg"):
        assert f"]({picture})" in text
    build(rows, tmp_path)
    assert "Accuracy against native" not in (tmp_path / "report.md").read_text()


def test_the_picture_by_length_needs_no_answers_only_what_git_keeps_of_every_variant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(Path("metrics/evals/native-auto.json"), {"by_length": {"512": {"n": 20, "accuracy": 0.95}}})
    build_pictures({"native-auto": {}, "fp8-auto": {}}, {}, tmp_path / "metrics")
    picture = (tmp_path / "metrics/accuracy_by_length.svg").read_text()
    assert ">native-auto<" in picture and "fp8-auto" not in picture
    assert (tmp_path / "metrics/flips.svg").exists() and (tmp_path / "metrics/heat_maps.svg").exists()


def test_no_rows_is_an_error_and_not_an_empty_table(tmp_path):
    with pytest.raises(Unreadable):
        read_rows(tmp_path)
    write_json(tmp_path / "native-auto.json", ROW)
    assert list(read_rows(tmp_path)) == ["native-auto"]


def test_a_replayed_trace_leads_the_report_and_is_absent_where_none_was_replayed(tmp_path, rows):
    build(rows, tmp_path)
    assert "Real traffic" not in (tmp_path / "report.md").read_text()
    trace = {f"trace_{name}": 0.5 for name in TRACE} | {"trace_status": "valid", "trace_goodput_requests_s": 1.75}
    rows["native-auto"] = ROW | trace | {"speed": "emulated"}
    build(rows, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text.index("Real traffic") < text.index("synthetic load") < text.index("| native-auto | valid")
    assert "| native-auto | 1.75 (emulated) | 50% |" in text and text.count("| fp8-auto |") == 1
