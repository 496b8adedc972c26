"""A rank's memory in parts: what adds up, what is missing, and what is a finding."""

import copy

from pipeline.report.build import build
from pipeline.report.figures import memory_svg
from pipeline.report.memory import by_rank, findings, parts, table

REPORT = {
    "rank": 0,
    "weight_bytes": 8 << 20,
    "kv_bytes_allocated": 128 << 20,
    "state_block_bytes_per_sequence": 1 << 18,
    "max_num_seqs": 16,
    "activation_peak_bytes": 24 << 20,
    "rss_bytes": 900 << 20,
}


def test_pool_is_tokens_and_states_and_the_parts_of_the_process_add_up():
    made = parts(REPORT)
    assert made["state"] == 4 << 20 and made["kv"] == 124 << 20
    assert made["weights"] + made["kv"] + made["state"] + made["rest"] == REPORT["rss_bytes"]


def test_states_never_take_more_than_the_pool_and_a_model_without_them_has_none():
    assert parts(REPORT | {"max_num_seqs": 4096})["kv"] == 0
    assert parts(REPORT | {"state_block_bytes_per_sequence": 0})["state"] == 0


def test_what_one_side_does_not_say_is_none_and_not_zero():
    made = parts(REPORT | {"activation_peak_bytes": None, "rss_bytes": None, "kv_bytes_allocated": None})
    assert made["activation"] is None and made["rest"] is None and made["kv"] is None


def comparison(**changes):
    return {"memory_parts": by_rank([REPORT | {"rss_bytes": None}], [REPORT | changes]), "memory_findings": []}


def test_the_table_has_both_sides_of_every_rank():
    second = REPORT | {"rank": 1}
    made = {"fp8-auto": {"memory_parts": by_rank([REPORT, second], [REPORT])}}
    lines = table(made).splitlines()
    assert len(lines) == 4 and lines[2].startswith("| fp8-auto | 0 | 8.00 MiB / 8.00 MiB | 124.00 MiB / 124.00 MiB |")
    assert lines[3].startswith("| fp8-auto | 1 | 8.00 MiB / — |")
    assert "| none |" in table({"x": comparison(state_block_bytes_per_sequence=0) | {"memory_parts": by_rank(
        [REPORT | {"state_block_bytes_per_sequence": 0}], [REPORT | {"state_block_bytes_per_sequence": 0}])}})


def test_the_picture_marks_a_finding_and_says_what_is_missing():
    made = {"fp8-auto": comparison(activation_peak_bytes=None), "int8-auto": comparison() | {"memory_findings": ["x"]}}
    picture = memory_svg(made)
    assert "without activation peak" in picture and "int8-auto (!)" in picture and "fp8-auto (!)" not in picture
    assert memory_svg(copy.deepcopy(made)) == picture


def test_a_finding_is_listed_in_the_report_with_its_variant(tmp_path):
    rows = {"fp8-auto": {"status": "valid", "reason": None}}
    gated = {"verdict": "pass", "overall": None}
    build(rows, tmp_path, {"fp8-auto": gated | comparison()})
    assert "agree within 2 %" in (tmp_path / "report.md").read_text()
    bad = comparison() | {"memory_findings": ["rank 0 weight_bytes: predicted 1, measured 2"]}
    build(rows, tmp_path, {"fp8-auto": gated | bad})
    text = (tmp_path / "report.md").read_text()
    assert "- fp8-auto: rank 0 weight_bytes: predicted 1, measured 2" in text and "agree within" not in text
    assert findings({"fp8-auto": bad}) == ["fp8-auto: rank 0 weight_bytes: predicted 1, measured 2"]
