"""The stand-in server is itself checked: a switch that does nothing would make every test that uses it vacuous."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from tests.mock_openai import Behaviour, MockServer


def post(server: MockServer, path: str, body: dict):
    request = urllib.request.Request(
        server.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def complete(server: MockServer, **body) -> dict:
    return json.loads(post(server, "/v1/completions", {"prompt": "a b c", "max_tokens": 4} | body))


def events(text: str) -> list:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def metric(server: MockServer, name: str) -> float:
    with urllib.request.urlopen(server.base_url + "/metrics", timeout=10) as response:
        line = next(line for line in response.read().decode().splitlines() if line.startswith(name + "{"))
    return float(line.rsplit(" ", 1)[1])


def test_a_correct_answer_counts_its_tokens():
    with MockServer() as server:
        answer = complete(server)
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert answer["choices"][0]["finish_reason"] == "length"
        assert metric(server, "vllm:generation_tokens_total") == 4
        assert answer["choices"] == complete(server)["choices"], "greedy: the same prompt, the same answer"


def test_stream_ends_with_usage():
    with MockServer() as server:
        got = events(
            post(
                server,
                "/v1/completions",
                {"prompt": "a b", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
            )
        )
        assert len(got) == 4 and got[-1]["usage"]["completion_tokens"] == 3


def test_echo_scores_the_prompt():
    with MockServer() as server:
        choice = complete(server, echo=True, logprobs=1, max_tokens=1)["choices"][0]
        assert choice["text"].startswith("a b c")
        assert len(choice["logprobs"]["token_logprobs"]) == 4 and choice["logprobs"]["token_logprobs"][0] is None


def test_custom_answers_stop_where_asked():
    with MockServer(answer=lambda prompt, limit: " 12 ; rest") as server:
        choice = complete(server, stop=[";"])["choices"][0]
        assert choice["text"] == " 12 " and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "behaviour, look",
    [
        (Behaviour(wrong_after_tokens=2), lambda a: a["choices"][0]["text"].endswith(" wrong wrong")),
        (Behaviour(repeat_after_request=0), lambda a: a["choices"][0]["text"] == "!!!!"),
        (Behaviour(short_output_tokens=1), lambda a: a["usage"]["completion_tokens"] == 3),
        (Behaviour(prompt_tokens_lower_by=2), lambda a: a["usage"]["prompt_tokens"] == 1),
        (Behaviour(finish_reason="stop"), lambda a: a["choices"][0]["finish_reason"] == "stop"),
        (Behaviour(empty_content=True), lambda a: not a["choices"][0]["text"]),
    ],
)
def test_each_lie_shows(behaviour, look):
    with MockServer() as honest, MockServer(behaviour) as server:
        assert look(complete(server)) and not look(complete(honest))


def test_error_in_band_is_inside_a_200_stream():
    with MockServer(Behaviour(stream_error_after=2)) as server:
        got = events(post(server, "/v1/completions", {"prompt": "a", "max_tokens": 5, "stream": True}))
        assert "error" in got[-1] and len(got) == 3


def test_it_dies_and_stays_dead():
    with MockServer(Behaviour(die_after=1)) as server:
        complete(server)
        for _ in range(2):
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                complete(server)


def test_repeated_prompt_hits_the_prefix_cache_until_reset():
    with MockServer(Behaviour(prefix_hits_on_repeat=True)) as server:
        complete(server)
        assert metric(server, "vllm:prefix_cache_hits_total") == 0
        complete(server)
        assert metric(server, "vllm:prefix_cache_hits_total") == 3
        post(server, "/reset_prefix_cache", {})
        complete(server)
        assert metric(server, "vllm:prefix_cache_hits_total") == 3
