"""lm-eval's own tasks with canned documents and recorded answers of a thinking model."""

import json
import sys
import types
from pathlib import Path

import pytest
import yaml

from pipeline.errors import Refused
from pipeline.evals import hub, hub_tasks
from pipeline.evals import settings as settings_module
from tests.mock_openai import Behaviour, MockServer

CONF = Path(__file__).resolve().parents[2] / "conf" / "eval"
HUB = yaml.safe_load((CONF / "hub.yaml").read_text())


def settings(*tasks: str, **changes) -> settings_module.EvalSettings:
    return settings_module.parse(
        HUB | {"hub": {"tasks": tasks}, "concurrency": 2, "thinking_budget_tokens": 1000, "lengths": [4096]} | changes
    )


def documents(task: str):
    """Two documents a task in the form the hub has them, and no network."""
    from datasets import Dataset

    rows = {
        "graphwalks_128k": [
            {"prompt": f"graph {i}. End with Final Answer: [nodes]", "answer_nodes": ["a1", "b2"]} for i in (0, 1)
        ],
        "longbench2_graph": [
            {"context": f"context {i}", "question": "which?", "choices": ["p", "q", "r", "s"], "answer": answer}
            for i, answer in enumerate((1, 2))
        ],
        "niah_single_1": [
            {"input": f"magic text {i}", "outputs": ["1234567"], "gen_prefix": "The number is", "max_length": 4096}
            for i in (0, 1)
        ],
        "babilong_qa1": [{"input": f"facts {i}", "question": "Where is Bo?", "target": "garden"} for i in (0, 1)],
    }[task]
    return {"test": Dataset.from_list(rows), "train": Dataset.from_list(rows), "qa1": Dataset.from_list(rows)}


@pytest.fixture
def one_task(monkeypatch):
    """One task a benchmark, so that canned documents suffice."""

    def only(name: str, task: str):
        benchmark = hub_tasks.TASKS[name]
        monkeypatch.setitem(hub_tasks.TASKS, name, hub_tasks.Benchmark(**benchmark.__dict__ | {"tasks": (task,)}))

    return only


def run(tmp_path, name, answer, behaviour=None, **changes):
    with MockServer(Behaviour(max_model_len=65536, **(behaviour or {})), answer=answer) as server:
        result = hub.evaluate(
            server.base_url,
            server.model,
            tmp_path,
            settings(name, **changes),
            tmp_path / "out",
            conditions={"checkpoint": "a"},
            documents=documents,
        )
        rows = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
        return result, rows[1:], server.state.requests


def test_the_shipped_choices_are_valid_and_know_their_benchmarks():
    for name in ("quick", "full", "long", "hub"):
        parsed = settings_module.parse(yaml.safe_load((CONF / f"{name}.yaml").read_text()))
        assert parsed.name == name
    for name in HUB["hub"]["tasks"]:
        assert hub_tasks.configs(name, settings_module.parse(HUB))
    with pytest.raises(Refused, match="no benchmark 'mrcr'"):
        hub_tasks.configs("mrcr", settings_module.parse(HUB))


def test_graph_walks_with_thinking_in_the_text(tmp_path):
    def answer(prompt, limit):
        wrong = "Final Answer: [c3]" if "graph 1" in prompt else "Final Answer: [a1, b2]"
        return f"<think>First.\n\nThen Final Answer: [a1, b2]</think>So.\n{wrong}"

    result, rows, requests = run(tmp_path, "graphwalks_128k", answer)
    assert [request["stop"] for request in requests] == [[], []]
    assert {request["max_tokens"] for request in requests} == {1000 + 8192}
    assert [row["score"] for row in rows] == [1.0, 0.0]
    assert result["outcomes"]["correct"] == result["outcomes"]["incorrect"] == 1 and result["status"] == "valid"


def test_a_thinking_budget_that_runs_out_is_unfinished_and_makes_the_run_invalid(tmp_path):
    """The raw reasoning holds the right answer; crediting it would be reading tea leaves."""
    result, rows, _ = run(
        tmp_path, "graphwalks_128k", lambda *_: "I think\nFinal Answer: [a1, b2]", behaviour={"finish_reason": "length"}
    )
    assert result["outcomes"]["unfinished"] == 2 and result["accuracy"] == 0.0
    assert [row["score"] for row in rows] == [0.0, 0.0]
    assert result["status"] == "invalid" and "unfinished" in result["reason"]


def test_multiple_choice_is_asked_as_a_question(tmp_path, one_task):
    one_task("longbench2", "longbench2_graph")
    result, rows, requests = run(
        tmp_path,
        "longbench2",
        lambda prompt, _: (
            "<think>A or D?</think>The correct answer is (B)." if "context 0" in prompt else "Hard to say."
        ),
    )
    assert [row["outcome"] for row in rows] == ["correct", "incorrect"]
    assert [row["extraction_failed"] for row in rows] == [False, True]
    assert result["extraction_failure_rate"] == 0.5
    assert all("logprobs" not in request and request["max_tokens"] == 1256 for request in requests)


def test_ruler_without_its_packages_says_what_to_install(tmp_path, one_task, monkeypatch):
    one_task("ruler", "niah_single_1")
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.ruler.prepare_niah", raising=False)
    with pytest.raises(Refused, match=r"ruler: .*pip install"):
        run(tmp_path, "ruler", lambda *_: "")


def test_ruler_has_no_assistant_prefix_on_a_chat_endpoint(tmp_path, one_task, monkeypatch):
    one_task("ruler", "niah_single_1")
    # Its document maker downloads at import; the documents are canned here, so a bare module stands in.
    maker = types.ModuleType("prepare_niah")
    maker.generate_samples = maker.get_haystack = None
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ruler.prepare_niah", maker)
    result, rows, requests = run(tmp_path, "ruler", lambda *_: "<think>hm</think>It is 1234567.")
    assert result["accuracy"] == 1.0 and [row["family"] for row in rows] == ["niah_single_1"] * 2
    assert all([turn["role"] for turn in request["messages"]] == ["user"] for request in requests)


def test_babilong_budget_and_examples(tmp_path, one_task):
    one_task("babilong_128k", "babilong_qa1")
    result, _, requests = run(tmp_path, "babilong_128k", lambda *_: "The most recent location of Bo is garden.")
    assert result["accuracy"] == 1.0
    assert all(request["max_tokens"] == 1128 and request["messages"][-1]["role"] == "user" for request in requests)


def test_a_budget_larger_than_the_server_is_refused_before_the_first_request(tmp_path):
    with MockServer(Behaviour(max_model_len=4096)) as server:
        with pytest.raises(Refused, match="graphwalks_128k needs 9192"):
            hub.evaluate(server.base_url, server.model, tmp_path, settings("graphwalks_128k"), tmp_path / "out")
        assert server.state.requests == []


@pytest.mark.parametrize(
    "answer, letter",
    [
        ("The correct answer is (B).", "B"),
        ("Answer: C", "C"),
        ("**Answer:** (D)", "D"),
        ("B", "B"),
        ("(A)", "A"),
        ("It is not A; the answer is C", "C"),
        ("A great question. I cannot tell.", "A"),
        ("Unclear.", None),
    ],
)
def test_choice(answer, letter):
    assert hub_tasks.choice_of(answer) == letter
