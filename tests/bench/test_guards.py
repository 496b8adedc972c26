"""Each guard fires on its own fault, and only on it."""

from __future__ import annotations

import pytest

from pipeline.bench import BenchSettings, guards
from pipeline.bench.judge import judge
from pipeline.bench.settings import Load

SETTINGS = BenchSettings(input_len=16, output_len=8)
C1, C8 = Load("concurrency", 1), Load("concurrency", 8)


def codes(run, settings=SETTINGS):
    return [reason.code for reason in guards.check_run(run, settings)]


def test_a_correct_run_passes(run):
    assert codes(run()) == []


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"hits": 16}, "prefix_hits"),
        ({"failed": 1, "completed": 3, "errors": ["", "ClientPayloadError", "", ""]}, "requests_failed"),
        ({"completed": 3}, "requests_failed"),
        ({"failed": 1, "completed": 3, "errors": ["in-band stream error: EngineDead", "", "", ""]}, "stream_error"),
        (
            {
                "output_lens": [8, 8, 8, 5],
                "itls": [[0.01] * 7] * 3 + [[0.01] * 4],
                "after": {
                    "vllm:generation_tokens_total": 79.0,
                    "vllm:prompt_tokens_total": 154.0,
                    "vllm:prompt_tokens_created": 1e9,
                    "vllm:prefix_cache_hits_total": 7.0,
                },
            },
            "short_outputs",
        ),
        ({"prompt_tokens_sent": [16, 16, 16, 17]}, "prompt_tokens_disagree"),
        ({"prompt_tokens_sent": [16, 16, 16]}, "prompt_tokens_disagree"),
        (
            {
                "before": {
                    "vllm:generation_tokens_total": 49.0,
                    "vllm:prompt_tokens_total": 90.0,
                    "vllm:prompt_tokens_created": 1e9,
                    "vllm:prefix_cache_hits_total": 7.0,
                }
            },
            "token_counts_disagree",
        ),
        ({"after": {"vllm:prompt_tokens_total": 154.0, "vllm:prompt_tokens_created": 1e9}}, "no_server_counters"),
        ({"itl_s": 3e-6}, "insane_itl"),
        ({"itls": [[0.02] * 3] * 4}, "coalesced_chunks"),
        ({"server_after": (10, 2)}, "server_restarted"),
        ({"output_tokens_asked": [8, 8, 8, 9]}, "short_outputs"),
        ({"planned_s": [0, 1, 2, 3], "start_times": [50, 51.2, 52.3, 53.4]}, "late_sends"),
        ({"planned_s": [0, 1, 2, 3]}, "late_sends"),
    ],
)
def test_each_fault_has_its_code(run, changes, code):
    assert codes(run(**changes)) == [code]


def test_a_server_that_does_not_count_prefix_hits_proves_no_cold_run(run):
    """A renamed counter must not switch the guard off."""
    after = {name: value for name, value in run().after.items() if "prefix" not in name}
    (reason,) = guards.check_run(run(after=after), SETTINGS)
    assert reason.code == "no_server_counters" and "vllm:prefix_cache_hits_total" in reason.detail
    assert codes(run(after=after), BenchSettings(input_len=16, output_len=8, cache="warm")) == []


def test_counters_that_go_back_are_a_restart(run):
    after = {name: value - 60 for name, value in run().after.items() if "created" not in name}
    assert "server_restarted" in codes(run(after=after | {"vllm:prompt_tokens_created": 1e9}))


def test_a_trace_that_is_sent_on_time_passes(run):
    assert codes(run(planned_s=[0, 1, 2, 3], start_times=[50, 51.01, 52.02, 53.9])) == []


def test_hits_belong_to_a_workload_that_shares_and_to_no_other(run):
    shared = BenchSettings(input_len=16, output_len=8, trace="x.jsonl", cache="shared")
    assert codes(run(hits=16, load="trace"), shared) == []
    assert codes(run(hits=16, load="c8"), shared) == ["prefix_hits"], "unrelated prompts beside the trace stay cold"
    prefix = BenchSettings(input_len=16, output_len=8, dataset="shared_prefix", prefix_len=64, cache="shared")
    assert codes(run(hits=16, load="c8"), prefix) == []


def test_hits_are_welcome_in_a_warm_run(run):
    warm = BenchSettings(input_len=16, output_len=8, cache="warm")
    assert codes(run(hits=16), warm) == []


@pytest.mark.parametrize(
    "throughputs, code",
    [
        ([100, 101, 99], None),
        ([100, 101], "too_few_repeats"),
        ([100, 150, 60], "spread_too_wide"),
        ([40, 100, 101], "first_repeat_outlier"),
        ([100, 101, 40, 99, 102], None),  # one disturbed repeat of five: seen in min, not in the quartiles
    ],
)
def test_repeats_must_agree(throughputs, code):
    assert [reason.code for reason in guards.check_repeats(throughputs, SETTINGS)] == ([code] if code else [])


def test_thresholds_are_parameters():
    loose = BenchSettings(max_spread=0.9, min_repeats=1)
    assert guards.check_repeats([100, 150, 60], loose) == [] and guards.check_repeats([1], loose) == []


def test_one_bad_run_makes_the_result_invalid_and_stays_visible(run):
    good = [run(repeat=index) for index in range(3)]
    result = judge({C1: good, C8: [*good[:2], run(repeat=2, hits=5, tok_s=110)]}, SETTINGS)
    assert result["status"] == "invalid" and result["reason_codes"] == ["prefix_hits"]
    assert "c8 r2: prefix_hits: 5 of 64 prompt tokens" in result["reason"]
    assert result["per_concurrency"]["1"]["status"] == "valid" and result["output_tok_s"] == 100


def test_the_headline_is_the_median_at_the_highest_concurrency(run):
    runs = {C8: [run(tok_s=value) for value in (100, 130, 101)], C1: [run(tok_s=20) for _ in range(3)]}
    result = judge(runs, BenchSettings(input_len=16, output_len=8, max_spread=1.0))
    assert result["status"] == "valid" and result["reason"] is None
    assert result["concurrency"] == 8 and result["output_tok_s"] == 101
    assert result["per_concurrency"]["8"]["output_tok_s_max"] == 130


def test_preemptions_are_counted(run):
    after = run().after | {"vllm:num_preemptions_total": 3.0}
    assert judge({C1: [run(after=after)] * 3}, SETTINGS)["preemptions"] == 9
    del after["vllm:num_preemptions_total"]
    assert judge({C1: [run(after=after)] * 3}, SETTINGS)["preemptions"] is None, "not told is not none"
