"""The runner against servers that lie, break and die: what was sent is what was meant, and nothing is lost."""

import json
import subprocess
import sys
import time

import pytest

from pipeline.errors import Invalid, Refused
from pipeline.evals import runner
from pipeline.evals.endpoint import ServerDied
from tests.evals.support import TOKENIZER, Answers, make, right, run, samples, settings
from tests.mock_openai import Behaviour, MockServer


def test_a_good_server(tmp_path):
    result, rows, state = run(tmp_path)
    assert (result["status"], result["accuracy"], result["n"]) == ("valid", 1.0, 30)
    assert result["by_length"]["256"]["n"] == 15 and result["by_family"]["ordered_recall"]["n"] == 6
    assert set(result["by_depth"]) == {"0", "0.5", "1"}
    assert result["by_output_position"]["48-64"] == {"found": 1.0, "n": 96}
    for row in rows:
        assert row["sent_prompt_tokens"] == row["server_prompt_tokens"] == row["length"]
    probe, *sent = state.requests
    assert isinstance(probe["prompt"], str)
    assert all(request["prompt"][0][0] == 1 and request["prompt"][0][1] != 1 for request in sent)  # BOS, once
    assert {request["temperature"] for request in sent} == {0.0}
    assert not list((tmp_path / "out").glob("requests-*"))
    assert json.loads((tmp_path / "out/accuracy.json").read_text()) == result


def test_a_proxy_of_the_callers_is_not_asked(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert run(tmp_path)[0]["status"] == "valid"


def test_accuracy_counts_wrong_answers_where_they_are(tmp_path):
    result, rows, _ = run(tmp_path, rule=lambda item: right(item) if item.length == 256 else " nope ;")
    assert result["by_length"]["256"]["accuracy"] == 1.0 and result["by_length"]["384"]["accuracy"] == 0.0
    assert result["accuracy"] == 0.5 and result["status"] == "valid"
    assert result["accuracy_stderr"] == pytest.approx((0.25 / 29) ** 0.5)
    assert sum(row["outcome"] == "incorrect" for row in rows) == 15


def test_longer_than_the_server_serves_is_refused_before_the_first_request(tmp_path):
    make(tmp_path / "data", settings())
    with MockServer(Behaviour(tokenizer=str(TOKENIZER), max_model_len=300)) as server:
        with pytest.raises(Refused, match=r"at most 300 tokens; \d+ items of lengths \[256, 384\]"):
            runner.evaluate(server.base_url, server.model, TOKENIZER, tmp_path / "data", settings(), tmp_path / "out")
        assert server.state.requests == []


def test_an_unknown_limit_is_refused_and_may_be_given(tmp_path):
    make(tmp_path / "data", settings())
    with MockServer(Behaviour(tokenizer=str(TOKENIZER), max_model_len=0)) as server:
        with pytest.raises(Refused, match="max_model_len"):
            runner.evaluate(server.base_url, server.model, TOKENIZER, tmp_path / "data", settings(), tmp_path / "out")
    result, _, _ = run(tmp_path, settings(max_model_len=2048), behaviour={"max_model_len": 0})
    assert result["status"] == "valid"


def test_the_wrong_model_is_refused(tmp_path):
    make(tmp_path / "data", settings())
    with MockServer(Behaviour(tokenizer=str(TOKENIZER))) as server:
        with pytest.raises(Refused, match="serves .*mock.*, not 'other'"):
            runner.evaluate(server.base_url, "other", TOKENIZER, tmp_path / "data", settings(), tmp_path / "out")


def test_a_data_set_of_other_settings_is_refused(tmp_path):
    make(tmp_path / "data", settings())
    with MockServer(Behaviour(tokenizer=str(TOKENIZER))) as server:
        with pytest.raises(Refused, match="other settings"):
            runner.evaluate(
                server.base_url, server.model, TOKENIZER, tmp_path / "data", settings(seeds=[7]), tmp_path / "out"
            )


def test_a_server_that_cuts_prompts_is_invalid_at_the_first_one(tmp_path):
    with pytest.raises(Invalid, match=r"counts 216 tokens in .*says 256"):
        run(tmp_path, behaviour={"prompt_tokens_lower_by": 40})


def test_a_server_with_another_tokenizer_is_invalid(tmp_path):
    with pytest.raises(Invalid, match="another tokenizer"):
        run(tmp_path, behaviour={"tokenizer": None})


def test_long_prompts_cut_on_the_way_make_the_run_invalid(tmp_path, monkeypatch):
    """lm-eval's left truncation, provoked: the text of every answer is right, and still nothing counts."""
    from pipeline.evals import client

    def cutting(transport, limit):
        return client_common(transport, limit) | {"max_length": 320}

    client_common = client._common
    monkeypatch.setattr(client, "_common", cutting)
    raw = settings(items={"single": 3})
    items = make(tmp_path / "data", raw)
    by_question = {tuple(item.prompt.split()[-3:]): item for item in items}
    with MockServer(
        Behaviour(tokenizer=str(TOKENIZER)), answer=lambda prompt, n: right(by_question[tuple(prompt.split()[-3:])])
    ) as server:
        result = runner.evaluate(server.base_url, server.model, TOKENIZER, tmp_path / "data", raw, tmp_path / "out")
    assert result["accuracy"] == 1.0
    assert result["status"] == "invalid" and "3 prompts did not arrive as meant" in result["reason"]
    assert "384 tokens, 311 were sent" in result["reason"]


def test_one_token_repeated_after_item_40_of_a_list_is_invalid_not_a_low_score(tmp_path):
    def rot(item):
        if item.family != "ordered_recall":
            return right(item)
        return " " + " ".join([*item.targets[:40], *["kumu"] * 30])

    result, _, _ = run(tmp_path, settings(items={"single": 12, "ordered_recall": 4}), rule=rot)
    assert result["outcomes"]["degenerate"] == 8
    assert result["status"] == "invalid" and "8 of 8 ordered_recall answers cannot be scored" in result["reason"]


def test_one_token_repeated_after_request_k(tmp_path):
    result, _, _ = run(tmp_path, behaviour={"repeat_after_request": 12})
    assert result["outcomes"]["degenerate"] >= 18
    assert result["status"] == "invalid" and "degenerate" in result["reason"]


def test_a_server_that_gives_the_prompt_back_is_invalid_not_a_bad_model(tmp_path):
    def echo(item):
        return item.prompt

    result, rows, _ = run(tmp_path, settings(items={"single": 6, "multi_key": 6}, stop=False), rule=echo)
    assert {row["outcome"] for row in rows} == {"degenerate"} and result["status"] == "invalid"
    assert run(tmp_path, out="honest")[0]["repetition_rate"] == 0, "a right answer is no echo, a list neither"


def test_empty_content_is_unscored_with_both_bounds(tmp_path):
    result, _, _ = run(tmp_path, behaviour={"empty_content": True})
    assert result["outcomes"]["empty"] == 30 and result["status"] == "invalid"
    assert result["accuracy_unscored_wrong"] == 0.0 and result["accuracy_unscored_left_out"] is None


def test_a_slow_request_is_stuck_and_the_others_count(tmp_path):
    result, rows, _ = run(tmp_path, settings(deadline_s=1.0), behaviour={"slow_requests": {"5": 3.0}})
    assert result["outcomes"]["stuck"] == 1 and result["outcomes"]["correct"] == 29
    assert [row["message"] for row in rows if row["outcome"] == "stuck"] == ["no answer within 1 s"]
    assert result["status"] == "invalid" and "stuck" in result["reason"]  # 1 of 30 is above 1 %


def test_dropped_connections_are_tried_again_and_counted(tmp_path):
    result, _, _ = run(tmp_path, behaviour={"drop_requests": (3, 4)})
    assert result["status"] == "valid" and result["accuracy"] == 1.0 and result["requests_retried"] == 2


def test_a_dead_server_stops_the_run_and_the_next_run_continues(tmp_path):
    raw = settings()
    items = make(tmp_path / "data", raw)
    arguments = dict(conditions={"checkpoint": "abc"}, journal_dir=tmp_path / "journal")
    with MockServer(Behaviour(tokenizer=str(TOKENIZER), die_after=12), answer=Answers(items)) as server:
        with pytest.raises(
            ServerDied, match=r"died .*requests were in flight, the longest (single|multi_key)-\S+ \(384 tokens\)"
        ) as death:
            runner.evaluate(
                server.base_url, server.model, TOKENIZER, tmp_path / "data", raw, tmp_path / "out", **arguments
            )
    done = death.value.result["items_answered"]
    assert 0 < done <= 11 and death.value.exit_code == 5
    written = json.loads((tmp_path / "out/accuracy.json").read_text())
    assert written["status"] == "invalid" and f"{done} of 30 items answered" in written["reason"]
    assert written["server_died_at_length"] == 384
    result, _, state = run(tmp_path, raw, **arguments)
    assert result["requests_resumed"] == done and result["status"] == "valid" and result["accuracy"] == 1.0
    assert len(state.requests) == 1 + 30 - done
    other, _, state = run(tmp_path, raw, conditions={"checkpoint": "other"}, journal_dir=tmp_path / "journal")
    assert other["requests_resumed"] == 0


def test_a_server_that_only_looks_alive_stops_the_run(tmp_path):
    raw = settings(failures_in_a_row=5, retries=0)
    make(tmp_path / "data", raw)
    with MockServer(
        Behaviour(tokenizer=str(TOKENIZER), generation_fails_after=10), answer=Answers(make(tmp_path / "data", raw))
    ) as server:
        with pytest.raises(ServerDied, match="5 requests in a row without an answer.*HTTP 500"):
            runner.evaluate(server.base_url, server.model, TOKENIZER, tmp_path / "data", raw, tmp_path / "out")
        assert len(server.state.requests) <= 20


def test_a_killed_run_continues_at_the_request(tmp_path):
    raw = settings(concurrency=2)
    items = make(tmp_path / "data", raw)
    journal = tmp_path / "journal"
    with MockServer(Behaviour(tokenizer=str(TOKENIZER), first_token_s=0.05), answer=Answers(items)) as server:
        call = (
            f"from pipeline.evals import runner; runner.evaluate({server.base_url!r}, "
            f"{server.model!r}, {str(TOKENIZER)!r}, "
            f"{str(tmp_path / 'data')!r}, {raw!r}, {str(tmp_path / 'out')!r}, conditions={{'checkpoint': 'a'}}, "
            f"journal_dir={str(journal)!r})"
        )
        child = subprocess.Popen([sys.executable, "-c", call], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until = time.monotonic() + 30
        while len(server.state.requests) < 10 and time.monotonic() < wait_until:
            time.sleep(0.02)
        child.kill()
        child.wait()
        before = len(server.state.requests)
    assert 10 <= before < 31 and not (tmp_path / "out/accuracy.json").exists()
    (path,) = journal.glob("requests-*.jsonl")
    with open(path, "a") as stream:
        stream.write('{"prompt_hash": "half a li')  # what a kill in the middle of a write leaves
    result, _, state = run(tmp_path, raw, conditions={"checkpoint": "a"}, journal_dir=journal)
    assert result["requests_resumed"] >= before - 4 and result["accuracy"] == 1.0 and result["n"] == 30
    assert len(state.requests) == 1 + 30 - result["requests_resumed"]


def test_stdin_is_closed_while_lm_eval_runs():
    with runner.closed_stdin():
        with pytest.raises(EOFError):
            input()


def test_chat_needs_no_tokenizer_here_and_counts_template_tokens(tmp_path, monkeypatch):
    """The client of a chat endpoint must not load a tokenizer (K3 ships tiktoken and remote code)."""
    raw = settings(endpoint="chat", lengths=[768], recall_items=8)
    make(tmp_path / "data", raw)
    import transformers

    def no_tokenizer(*_, **__):
        raise AssertionError("a tokenizer was loaded")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", no_tokenizer)
    items = runner.dataset.load(tmp_path / "data")[0]
    with MockServer(Behaviour(tokenizer=str(TOKENIZER)), answer=Answers(items)) as server:
        result = runner.evaluate(server.base_url, server.model, TOKENIZER, tmp_path / "data", raw, tmp_path / "out")
    assert result["accuracy"] == 1.0 and result["status"] == "valid"
    assert all(list(request["messages"][0]) == ["role", "content"] for request in server.state.requests)
    assert all(row["sent_prompt_tokens"] is None for row in samples(tmp_path / "out"))


def test_natural_language_through_the_runner(tmp_path):
    raw = settings(
        items={"single": 4, "qa": 4, "multi_value": 4}, languages=["en", "zh"], lengths=[1024], depths=[0.2, 0.8]
    )
    result, rows, _ = run(tmp_path, raw, rule=lambda item: f"It is {', '.join(reversed(item.targets))}, of course.")
    assert result["accuracy"] == 1.0 and result["by_language"]["zh"]["n"] == 6


def test_a_model_that_thinks_gets_no_stop_string_and_a_budget(tmp_path):
    """The template opened the tag, so only its end shows; one answer in six is cut while still thinking."""
    raw = settings(
        endpoint="chat",
        thinking="always",
        thinking_budget_tokens=200,
        stop=False,
        lengths=[768],
        recall_items=8,
        items={"single": 3, "multi_key": 3},
        thresholds={"unfinished": 0.2},
    )
    items = make(tmp_path / "data", raw)

    def think(item):
        if item is items[0]:
            return f"perhaps {right(item)} " + "or not " * 2 + " ".join(f"w{i}" for i in range(400))
        return f"hm ; [ ] </think>{right(item)}"

    with MockServer(Behaviour(tokenizer=str(TOKENIZER)), answer=Answers(items, think)) as server:
        result = runner.evaluate(server.base_url, server.model, TOKENIZER, tmp_path / "data", raw, tmp_path / "out")
        assert all(request["stop"] == [] and request["max_tokens"] == 208 for request in server.state.requests)
    assert result["outcomes"]["unfinished"] == 1 and result["outcomes"]["correct"] == 5 and result["status"] == "valid"
    assert result["accuracy_unscored_wrong"] == pytest.approx(5 / 6) and result["accuracy_unscored_left_out"] == 1.0
    assert [row["score"] for row in samples(tmp_path / "out") if row["outcome"] == "unfinished"] == [0.0]
