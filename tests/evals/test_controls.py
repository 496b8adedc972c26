"""From a server that does harm to a verdict: the whole way, with servers that break in the ways that servers do."""

import json

import pytest

from pipeline.errors import Refused
from pipeline.evals import runner
from pipeline.evals.compare import compare
from pipeline.evals.gate_cli import EXIT_CODES
from pipeline.evals.runs import SAMPLES
from pipeline.evals.settings import GateSettings
from tests.evals.support import TOKENIZER, Answers, make, right, run, settings
from tests.mock_openai import Behaviour, MockServer

GATES = GateSettings(bootstrap_resamples=500, min_gateable_families=4)
SHORT = ("single", "multi_key", "multi_value")
RAW = settings(
    lengths=[256, 384], items={family: 12 for family in SHORT} | {"ordered_recall": 20}, recall_items=64, concurrency=8
)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    run(folder, RAW, out="out")
    return folder / "out" / SAMPLES


def against(native, tmp_path, gates=GATES, **arguments):
    result, _, _ = run(tmp_path, RAW, **arguments)
    return result, compare(native, tmp_path / "out" / SAMPLES, gates)


def test_a_good_server_against_itself_passes(native, tmp_path):
    _, block = against(native, tmp_path)
    assert block["verdict"] == "pass" and block["long_output"]["n"] == 40


def test_answers_that_rot_with_output_length_fail_through_the_long_output_bucket_alone(native, tmp_path):
    """The first 20 values of every list are right, then order is lost; every short answer is right."""

    def rot(item):
        if item.family in SHORT:
            return right(item)
        return f" {' '.join([*item.targets[:20], *reversed(item.targets[20:])])} {item.terminator}"

    gates = GATES.model_copy(update={"accuracy_margin": 0.6, "length_margin": 0.6})
    result, block = against(native, tmp_path, gates, rule=rot)
    assert result["status"] == "valid"
    assert result["by_generated_tokens"]["0-8"]["accuracy"] == 1.0
    assert result["by_generated_tokens"]["32-128"]["accuracy"] == 0.0
    found = {place: cell["found"] for place, cell in result["by_output_position"].items()}
    assert found["0-16"] == 1.0 and found["48-64"] < 0.1
    assert all(block["by_family"][family]["variant"] == 1.0 for family in SHORT)
    failing = [name for name in ("overall", "long_output", "late_values") if block[name]["verdict"] == "fail"]
    assert failing == ["long_output", "late_values"]  # lists are 40 of 112 items: all together are inside their margin
    assert {cell["verdict"] for cell in block["by_length"].values()} == {"pass"}
    assert block["verdict"] == "fail" and EXIT_CODES[block["verdict"]] == 3
    assert [block["by_generated_tokens"][bucket]["variant"] for bucket in ("0-8", "32-128")] == [1, 0]


def test_one_token_repeated_after_item_40_is_invalid_and_not_40_percent(native, tmp_path):
    def rot(item):
        return right(item) if item.family in SHORT else " " + " ".join([*item.targets[:40], *["kumu"] * 30])

    result, block = against(native, tmp_path, rule=rot)
    assert result["status"] == block["status"] == block["verdict"] == "invalid"
    assert "40 of 40 ordered_recall answers cannot be scored" in block["reason"] and "overall" not in block
    assert EXIT_CODES[block["verdict"]] == 5


@pytest.mark.parametrize(
    "behaviour, word", [({"repeat_after_request": 40}, "degenerate"), ({"empty_content": True}, "empty")]
)
def test_a_server_that_stops_making_sense_is_invalid_and_no_bad_model(native, tmp_path, behaviour, word):
    """`!!!!` from request 40 on, or content that is null."""
    _, block = against(native, tmp_path, behaviour=behaviour)
    assert block["verdict"] == "invalid" and word in block["reason"]


def test_only_long_prompts_are_cut_and_the_run_is_invalid(native, tmp_path):
    """The server's count of the probe, a short prompt, is right; the answers are right as well."""
    result, block = against(native, tmp_path, behaviour={"cut_above_prompt_tokens": 300})
    assert result["accuracy"] == 1.0 and result["status"] == "invalid"
    assert "56 prompts did not arrive as meant" in result["reason"] and "the server counted 300" in result["reason"]
    assert block["verdict"] == "invalid"


def test_32k_on_a_server_of_16k_is_refused_before_the_first_request(tmp_path):
    raw = settings(lengths=[32768], items={"single": 1})
    items = make(tmp_path / "data", raw)
    assert abs(items[0].prompt_tokens - 32768) <= 0.02 * 32768
    with MockServer(Behaviour(tokenizer=str(TOKENIZER), max_model_len=16384), answer=Answers(items)) as server:
        with pytest.raises(Refused, match=r"at most 16384 tokens; 1 items of lengths \[32768\] need up to 3277"):
            runner.evaluate(server.base_url, server.model, TOKENIZER, tmp_path / "data", raw, tmp_path / "out")
        assert server.state.requests == []


def test_thinking_that_nobody_planned_for_is_invalid(tmp_path):
    """eval.thinking is never, and the model thinks all the same: budgets and stop strings were made for another."""
    raw = settings(items={"single": 3}, lengths=[1024], depths=[0.5], languages=["en"], endpoint="chat", stop=False)
    result, _, _ = run(tmp_path, raw, rule=lambda item: f"<think>hm</think>{item.targets[0]}")
    assert result["status"] == "invalid" and "answers hold thinking" in result["reason"]
    assert "eval.thinking is never" in result["reason"]


def test_the_script_of_question_and_answer_is_told_apart(tmp_path):
    raw = settings(items={"single": 12, "multi_query": 12}, lengths=[384])
    result, rows, _ = run(tmp_path, raw, rule=lambda item: " nope ;")
    assert {row["script"] for row in rows} == {"latin", "cyrillic", "mixed"}
    asked = {item.id: item.prompt.rpartition("?")[2] for item in make(tmp_path / "data", raw)}
    for row in rows:
        cyrillic = any("а" <= letter <= "я" for letter in asked[row["id"]])
        latin = any("a" <= letter <= "z" for letter in asked[row["id"]])
        assert row["script"] == ("mixed" if cyrillic and latin else "cyrillic" if cyrillic else "latin")
    items = {"single": 2, "ordered_recall": 2}
    natural = settings(items=items, lengths=[1024], depths=[0.5], languages=["en", "zh"], recall_items=8)
    result, rows, _ = run(tmp_path / "natural", natural, rule=lambda item: ", ".join(item.targets))
    assert {(row["language"], row["script"]) for row in rows} == {("en", "latin"), ("zh", "cjk")}
    assert {name: cell["accuracy"] for name, cell in result["by_script"].items()} == {"cjk": 1.0, "latin": 1.0}
    assert json.loads((tmp_path / "natural/out/accuracy.json").read_text())["by_script"]["cjk"]["n"] == 2
