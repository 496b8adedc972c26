import csv
import io
from pathlib import Path

import pytest

from pipeline.bench import key
from pipeline.errors import Unreadable
from pipeline.evals.baseline import reference
from pipeline.evals.compare import compare, noise
from pipeline.evals.runs import Run
from pipeline.files import read_json, write_json
from pipeline.report import accuracy, diff, speed
from pipeline.report.build import build, build_pictures, read_comparisons, read_rows
from pipeline.report.figures import EMULATED, INVALID, color
from pipeline.report.row import TRACE, build_row
from pipeline.report.table import as_csv, headline, markdown
from tests.imports import REPOSITORY

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


BENCH = {"status": "valid", "reason": None, "speed_label": "measured", "output_tok_s": 1.0, "ttft_ms_p50": 1.0, "tpot_ms_p50": 1.0,
         "memory_summary": dict.fromkeys(MEMORY, 1), "load": {"load_s": 1.0}, "checkpoint_id": "a", "emulated": [],
         "per_concurrency": {"1": {"output_tok_s": 1.0}, "8": {"output_tok_s": 6.0}},
         "comparability": {"key": "k", "parts": {"hardware": "two cores", "workload": "short"}}}  # fmt: skip
ELSEWHERE = BENCH | {"comparability": {"key": "l", "parts": {"hardware": "eight cores", "workload": "short"}}}
EVALUATION = {"status": "valid", "reason": None, "accuracy": 0.9, "accuracy_stderr": 0.01, "n": 10,
              "conditions": {"tensor_parallel_size": 2}}  # fmt: skip


def row_of(bench, native=BENCH):
    compared = key.compare(native, bench) | {"unlike": key.unlike(native, bench)}
    comparison = {"verdict": "pass", "reason": None, "memory_findings": [], "speed": compared}
    return build_row(EVALUATION, bench, {"label": "scale_1.0"}, {"damage": None}, comparison), comparison


def test_a_margin_below_the_noise_floor_is_told_in_the_report():
    """https://github.com/vllm-project/vllm/issues/23138: the same model scores differently from batch to batch."""
    block = {"status": "valid", "verdict": "pass", "reason": None, "overall": None}
    block |= {"alarms": ["overall: the margin of 0.020 is below the noise floor of 0.060: it judges noise"]}
    assert "- fp8-auto: alarm, " + block["alarms"][0] in accuracy.section({"fp8-auto": block})


def test_a_row_takes_its_status_from_the_evaluation():
    row, _ = row_of(BENCH | {"status": "invalid", "reason": "c1: insane_itl", "speed_label": "emulated"})
    assert (row["status"], row["speed"], row["speed_reason"]) == ("valid", "invalid", "c1: insane_itl")
    assert row["tensor_parallel_size"] == 2, "accuracy moves with it"


def test_a_speed_measured_elsewhere_is_marked_in_every_table_and_picture_and_never_a_ratio(tmp_path):
    """A narrowed run on another machine stands in one table with the committed rows."""
    row, comparison = row_of(ELSEWHERE)
    reason = "measured under other conditions: hardware differ"
    assert (row["speed"], row["speed_reason"], row["speed_key"]) == ("not_comparable", reason, "l")
    assert color("output_tok_s", row) == INVALID != color("accuracy", row)
    rows = {"native-auto": row_of(BENCH)[0], "int8-auto": row}
    build(rows, tmp_path, {"int8-auto": comparison})
    text = (tmp_path / "report.md").read_text()
    assert "| 1 (not comparable) |" in text and f"its speed is not comparable, {reason}" in text
    assert f"- int8-auto: not comparable, {reason}" in text and "x |" not in text
    assert "int8-auto (not comparable),valid" in (tmp_path / "comparison.csv").read_text()
    assert read_json(tmp_path / "headline.json")["int8_auto_output_tok_s"] is None
    assert read_json(tmp_path / "headline.json")["native_auto_output_tok_s"] == 1.0
    assert "not comparable" in (tmp_path / "comparison.svg").read_text()


def test_emulated_speed_is_marked_where_there_is_no_colour():
    rows = {"fp8-auto": ROW | {"speed": "emulated", "speed_key": "k"}}
    assert headline(rows)["fp8_auto_output_tok_s"] is None
    (line,) = csv.DictReader(io.StringIO(as_csv(rows)))
    assert (line["label"], line["speed"], line["speed_key"]) == ("fp8-auto (emulated)", "emulated", "k")


def test_speed_against_native_comes_with_its_break_even():
    """Weights of 8 bits are slower alone and faster in company: https://github.com/vllm-project/llm-compressor/issues/2549."""
    slow = {"1": {"output_tok_s": 0.5}, "8": {"output_tok_s": 9.0}}
    native, values = BENCH | {"values": {"output_tok_s": [0.8, 1.0, 1.25]}}, {"output_tok_s": [1.0, 1.5, 1.6]}
    faster = row_of(BENCH | {"output_tok_s": 1.5, "per_concurrency": slow, "checkpoint_id": "b", "values": values}, native)[1]
    emulated = row_of(BENCH | {"emulated": ["mxfp4"], "checkpoint_id": "c"})[1]
    lines = speed.section({"int8-auto": faster, "fp8-auto": emulated, "native-auto": {"verdict": "reference"}})
    assert "| int8-auto | 1.50x (0.80 to 2.00) | 1.00x | 1.00x | 8 |" in lines
    assert "| fp8-auto | not comparable | not comparable | not comparable | not comparable |" in lines
    assert any(line.startswith("- fp8-auto: not comparable, kernels of mxfp4 are emulated") for line in lines)
    other_cache = key.compare(BENCH | {"emulated": ["mxfp4"]}, BENCH | {"emulated": ["mxfp4"], "output_tok_s": 2.0})
    assert any("| 2.00x emulated |" in line for line in speed.section({"native-fp8": {"speed": other_cache}})), "and says so"
    assert speed.section({"native-auto": {"verdict": "reference"}}) == []


def test_a_diff_is_told_only_where_both_sides_were_measured_alike():
    evaluation = EVALUATION | {"dataset_key": "d"}
    repeats = {"values": {"output_tok_s": [100.0, 125.0]}}
    before = {"fp8-auto": {"variants": ROW, "evals": evaluation, "bench": BENCH | repeats}}

    def told(**changes):
        changed = ROW | {"accuracy": 0.9, "output_tok_s": 246.8, "weight_bytes": 3 << 20}
        after = {"fp8-auto": {"variants": changed, "evals": evaluation, "bench": BENCH | repeats} | changes}
        return "\n".join(diff.markdown("main", before, after))

    same = told()
    assert "| fp8-auto | accuracy | 0.958 | 0.900 | -0.058 |" in same
    assert "| 123.4 | 246.8 | +100.0% (-20.0% to +25.0%) |" in same
    assert "| weights | 6.00 MiB | 3.00 MiB | -50.0% |" in same and "TTFT" not in same
    elsewhere = told(bench=ELSEWHERE)
    assert "| output tok/s | 123.4 | 246.8 | not comparable |" in elsewhere and "-50.0%" in elsewhere
    assert "- fp8-auto: measured under other conditions: hardware differ" in elsewhere
    others = told(evals=evaluation | {"dataset_key": "e"})
    assert "| accuracy | 0.958 | 0.900 | not comparable |" in others and "accuracy is of other questions" in others
    assert "- int8-auto: only here" in "\n".join(diff.markdown("main", {}, {"int8-auto": {"variants": ROW}}))


def test_the_committed_metrics_can_be_diffed_and_an_unknown_revision_is_named(monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    assert diff.main([]) == 0 and "| variant | figure | HEAD | here | change |" in capsys.readouterr().out
    with pytest.raises(Unreadable, match="no-such-branch"):
        diff.main(["no-such-branch"])


def test_the_report_says_why_a_variant_was_not_compared_with_native(tmp_path, rows):
    block = {"status": "not_comparable", "verdict": "not_comparable", "reason": "different data sets: 1 and 2"}
    build({"fp8-auto": ROW | {"verdict": "not_comparable"}}, tmp_path, {"fp8-auto": block})
    assert "fp8-auto: against native not comparable, different data sets: 1 and 2" in (tmp_path / "report.md").read_text()
    assert color("accuracy", ROW | {"verdict": "not_comparable"}) == INVALID


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
    (tmp_path / "fp8-auto.json").write_text("[]")
    with pytest.raises(Unreadable, match="fp8-auto.json: is no row of the table; `dvc repro compare@fp8-auto`"):
        read_rows(tmp_path)
    (tmp_path / "fp8-auto.json").unlink()
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
