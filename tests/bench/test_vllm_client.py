"""The instruments around vllm's client, without vllm."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from pipeline.bench.client import BenchClient
from pipeline.bench.vllm_client import Instruments
from pipeline.errors import Invalid


@dataclass
class Sample:
    prompt: str
    request_id: str


class Tokenizer:
    def num_special_tokens_to_add(self):
        return 1


class Parser:
    def add_chunk(self, chunk):
        return chunk.decode().split("\n\n")


def instruments(send=None, vocabulary=1024, prompts=128):
    """Instruments around a sampler with ``vocabulary`` different starts, as vllm's random data set has; ends differ."""

    def sample(args, tokenizer):
        draw = random.Random(args.seed)
        starts = [f"prompt {draw.randrange(vocabulary)} ".ljust(60, ".") for _ in range(prompts)]
        return [Sample(f"{start} {args.seed} {index}", f"bench-{index}") for index, start in enumerate(starts)]

    serve = SimpleNamespace(get_samples=sample)
    requests = SimpleNamespace(ASYNC_REQUEST_FUNCS={"openai": send}, StreamedResponseHandler=Parser)
    return Instruments(serve, requests), serve, requests


def test_prompts_of_a_run_are_distinct_and_keep_their_order():
    """128 of 1024 possible prompts: a fresh draw of all of them would repeat one nearly always."""
    made, serve, _ = instruments()
    args = SimpleNamespace(seed=5, dataset_name="random")
    samples = serve.get_samples(args, Tokenizer())
    assert len({sample.prompt[:60] for sample in samples}) == 128, "equal starts would hit the prefix cache"
    assert [sample.request_id for sample in samples] == [f"bench-{index}" for index in range(128)]
    assert args.seed == 5 == made.seed
    again = instruments()[1].get_samples(SimpleNamespace(seed=5, dataset_name="random"), Tokenizer())
    assert again == samples, "the seed decides the prompts"


def test_more_prompts_than_the_vocabulary_has():
    _, serve, _ = instruments(vocabulary=100)
    with pytest.raises(RuntimeError, match="128 distinct random prompts asked for, but the vocabulary gives"):
        serve.get_samples(SimpleNamespace(seed=5, dataset_name="random"), Tokenizer())


def output(**fields):
    return SimpleNamespace(**{"success": False, "ttft": 0.0, "generated_text": "", "error": ""} | fields)


@pytest.mark.parametrize(
    "first, sent",
    [
        (output(success=True), 1),
        (output(error="aiohttp ServerDisconnectedError"), 2),
        (output(error="ServerDisconnectedError", ttft=0.1), 1),  # it had begun to answer: not ours to repeat
        (output(error="HTTP 500"), 1),
    ],
)
def test_only_an_unanswered_request_is_sent_again(first, sent):
    answers = [first, output(success=True), output(success=True)]
    calls = []

    async def send(request, session, pbar):
        calls.append(request)
        return answers[len(calls) - 1]

    made, _, requests = instruments(send)
    request = SimpleNamespace(request_id="bench-0", prompt="text", prompt_len=15, output_len=8)
    asyncio.run(requests.ASYNC_REQUEST_FUNCS["openai"](request, None))
    assert len(calls) == sent and made.retries == sent - 1
    assert made.asked == {"bench-0": 8}


def test_a_prompt_of_token_ids_gets_no_special_tokens_and_a_trace_keeps_its_repeats():
    async def send(request, session, pbar):
        return output(success=True)

    made, serve, requests = instruments(send, vocabulary=2, prompts=6)
    args = SimpleNamespace(seed=5, dataset_name="timed_trace", request_id_prefix="bench-")
    samples = serve.get_samples(args, Tokenizer())
    assert [sample.request_id for sample in samples] == [f"bench-{index}" for index in range(6)]
    for prompt in ([1, 2, 3], "a b c"):
        request = SimpleNamespace(request_id=f"bench-{type(prompt)}", prompt=prompt, prompt_len=3, output_len=8)
        asyncio.run(requests.ASYNC_REQUEST_FUNCS["openai"](request, None))
    assert list(made.prompt_tokens.values()) == [3, 4]


def test_a_client_that_has_ended_between_two_runs_says_so_and_no_broken_pipe(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{\"ready\": true}'\necho killed for its memory >&2\nexit 3\n")
    python.chmod(0o755)
    with BenchClient(python, tmp_path / "log") as client:
        client._process.wait()
        with pytest.raises(Invalid, match="the bench client ended .exit code 3.\nkilled for its memory"):
            client.run(["--num-prompts", "1"], 5.0)


def test_an_error_in_the_stream_is_raised():
    _, _, requests = instruments()
    handler = requests.StreamedResponseHandler()
    assert handler.add_chunk(b'data: {"choices": [{"text": "an \\"error\\" in prose"}]}') != []
    with pytest.raises(RuntimeError, match="in-band stream error: .*EngineDead"):
        handler.add_chunk(b'data: {"error": {"message": "EngineDead"}}')
