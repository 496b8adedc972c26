"""A stand-in for an OpenAI-compatible vLLM server, which misbehaves on request.  Standard library only.

In a test, in process::

    with MockServer(Behaviour(stream_error_after=3)) as server:
        requests to server.base_url ...
        server.state.requests  # every generation request body, in order

As a subprocess, in place of ``python -m vllm.entrypoints.openai.api_server`` (unknown options are ignored, so the same
command line works)::

    python tests/mock_openai.py --behaviour '{"die_after": 2}' --port 8001 --served-model-name tiny

The answer to a prompt is, in this order: ``answer(prompt, max_tokens)`` where a callable is given; the entry of
``answers`` (longest key that the prompt ends with); else words ``w0 w1 ...`` that depend on the prompt alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECES = re.compile(r"\s*\S+|\s+$")
VOCABULARY = 50_000


@dataclass(frozen=True)
class Behaviour:
    """What the server does.  The default is a correct server; each switch is one lie or one accident."""

    model: str | None = None
    """Served id; ``None`` = what ``--served-model-name`` asked for.  Set it for the *wrong model id*."""
    start_delay_s: float = 0.0
    """Slow start: nothing listens for so long."""
    generation_status: int = 200
    """500 = ``/health`` is 200 and no generation works."""
    generation_fails_after: int | None = None
    """Generations from this number on answer 500; health stays 200."""
    die_after: int | None = None
    """The process (or in-process server) dies when this many generations were answered, in the middle of the next."""
    die_above_prompt_tokens: int | None = None
    """The server dies of any prompt that is longer: a fault that only long contexts reach."""
    cut_above_prompt_tokens: int | None = None
    """Longer prompts lose their beginning without a word; ``usage.prompt_tokens`` counts what is left."""
    stream_error_after: int | None = None
    """A streamed answer sends so many tokens, then an error object *inside* the 200 stream."""
    stream_error_every: int = 1
    """Only each n-th generation has the stream error."""
    cut_stream_after: int | None = None
    """A streamed answer sends so many tokens, then its connection is reset."""
    stream_usage: bool = True
    """False: a stream ends without the usage that was asked for."""
    drop_idle_s: float | None = None
    """Keep-alive sockets idle for so long are closed without notice."""
    drop_requests: tuple[int, ...] = ()
    """Generations of these numbers (from 0) are cut before any byte of an answer, unprocessed."""
    wrong_after_tokens: int | None = None
    """Tokens of an answer from this index on are wrong: correctness falls with output length."""
    repeat_after_request: int | None = None
    """From this generation on the answer is one token, repeated to the limit."""
    repeated_token: str = "!"
    empty_content: bool = False
    """Text is empty, chat content is ``null``, and the tokens are counted all the same (spent on hidden thinking)."""
    finish_reason: str | None = None
    """Overrides ``finish_reason``, e.g. ``length``."""
    short_output_tokens: int = 0
    """Answers are so many tokens shorter than asked, with ``finish_reason`` stop."""
    prompt_tokens_lower_by: int = 0
    """``usage.prompt_tokens`` is so much lower than what was sent: the prompt was cut without a word."""
    completion_tokens_higher_by: int = 0
    """``usage.completion_tokens`` counts tokens that were never sent."""
    metrics_generation_tokens_higher_by: int = 0
    """The server's own counter of generated tokens disagrees with what it told its clients, per request."""
    prefix_hits_per_request: int = 0
    """Tokens a request adds to the prefix-cache hit counter."""
    prefix_hits_on_repeat: bool = False
    """A prompt seen since the last cache reset counts as hit, as a real prefix cache does."""
    preemptions_per_request: int = 0
    first_token_s: float = 0.0
    token_s: float = 0.0
    slow_requests: dict[str, float] = field(default_factory=dict)
    """Extra seconds before the first token, by generation number: a spread of latencies."""
    coalesce: bool = False
    """The whole answer leaves in one burst after its full time: inter-token latency looks like zero."""
    diverge_at: int | None = None
    """The token at this index of an answer differs from that of another server."""
    fork_child: bool = False
    """Starts a child in the same session that outlives the server unless somebody ends it."""
    ignore_sigterm: bool = False
    """Server and child ignore SIGTERM."""
    max_model_len: int = 16384
    restart_counters_after: int | None = None
    """After this many generations the counters start from zero, as those of a restarted server."""
    memory_report: tuple[dict, ...] = ()
    """What ``/collective_rpc`` ``memory_report`` answers, one dict a rank."""
    cache_config: dict[str, str] = field(
        default_factory=lambda: {"block_size": "256", "num_gpu_blocks": "64", "cache_dtype": "auto"}
    )
    log_lines: tuple[str, ...] = ()
    """Printed at start, as a real server's log."""
    exit_at_start: int | None = None
    """Exit code of a server that dies before it listens."""
    tokenizer: str | None = None
    """A directory with ``tokenizer.json``: token counts and ids are the real ones (needs ``tokenizers``)."""
    answers: dict[str, str] = field(default_factory=dict)


@dataclass
class State:
    """What happened so far; tests read it."""

    requests: list[dict] = field(default_factory=list)
    answered: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    cache_resets: int = 0
    started: float = field(default_factory=time.time)
    seen_prompts: set[str] = field(default_factory=set)


class Tokens:
    """Text to ids and back: a real tokenizer where one is given, else words with stable hashed ids."""

    def __init__(self, directory: str | None) -> None:
        self._real = None
        self._words: dict[int, str] = {}
        if directory:
            from tokenizers import Tokenizer

            self._real = Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))

    def encode(self, text: str, special: bool = True) -> list[int]:
        if self._real:
            return self._real.encode(text, add_special_tokens=special).ids
        return [self._word_id(piece) for piece in PIECES.findall(text)]

    def pieces(self, text: str) -> list[str]:
        """The text cut into tokens, so that joining gives the text back."""
        if not self._real:
            return PIECES.findall(text)
        encoded = self._real.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoded.offsets] + [len(text)]
        return [text[a:b] for a, b in zip(starts, starts[1:])]

    def decode(self, ids: list[int]) -> str:
        if self._real:
            return self._real.decode(ids, skip_special_tokens=False)
        return "".join(self._words.get(token, f" t{token}") for token in ids)

    def _word_id(self, piece: str) -> int:
        number = int.from_bytes(hashlib.sha256(piece.encode()).digest()[:4], "big") % VOCABULARY
        self._words[number] = piece
        return number


def _logprob(token: str, position: int) -> float:
    """A stable value in (-3, 0): the same text always scores the same."""
    return -3.0 * (int.from_bytes(hashlib.sha256(f"{position}{token}".encode()).digest()[:2], "big") / 65536) - 1e-3


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        self.timeout = self.server.behaviour.drop_idle_s
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        try:
            super().finish()
        except OSError:
            pass

    def log_message(self, *_: Any) -> None:
        pass

    def _json(self, value: Any, status: int = 200) -> None:
        self._text(json.dumps(value), status, "application/json")

    def _text(self, text: str, status: int = 200, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            self._text("")
        elif path == "/version":
            self._json({"version": "mock"})
        elif path == "/v1/models":
            self._json(
                {
                    "object": "list",
                    "data": [
                        {
                            "id": self.server.model,
                            "object": "model",
                            "root": self.server.model,
                            "max_model_len": self.server.behaviour.max_model_len,
                        }
                    ],
                }
            )
        elif path == "/metrics":
            self._text(self.server.metrics_text())
        else:
            self._json({"error": {"message": f"no such path {path}"}}, 404)

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else {}
        if path == "/reset_prefix_cache":
            with self.server.lock:
                self.server.state.cache_resets += 1
                self.server.state.seen_prompts.clear()
            self._json({"success": True})
        elif path == "/collective_rpc":
            self._collective_rpc(body)
        elif path == "/tokenize":
            ids = self.server.tokens.encode(body["prompt"], body.get("add_special_tokens", True))
            self._json({"count": len(ids), "tokens": ids, "max_model_len": self.server.behaviour.max_model_len})
        elif path == "/detokenize":
            self._json({"prompt": self.server.tokens.decode(body["tokens"])})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self._generate(body, chat=path.endswith("/chat/completions"))
        else:
            self._json({"error": {"message": f"no such path {path}"}}, 404)

    def _collective_rpc(self, body: dict) -> None:
        if body.get("method") == "memory_report" and self.server.behaviour.memory_report:
            self._json({"results": list(self.server.behaviour.memory_report)})
        else:
            self._json({"error": {"message": f"no method {body.get('method')}"}}, 500)

    # --- generation -------------------------------------------------------------------------------------------------

    def _generate(self, body: dict, chat: bool) -> None:
        server, behaviour = self.server, self.server.behaviour
        with server.lock:
            number = len(server.state.requests)
            server.state.requests.append(body)
        if behaviour.die_after is not None and number >= behaviour.die_after:
            server.die()
            self.close_connection = True
            return
        if behaviour.die_above_prompt_tokens is not None and not chat:
            prompt = body["prompt"]
            ids = prompt if isinstance(prompt, list) else server.tokens.encode(prompt)
            if len(ids[0] if isinstance(ids[0], list) else ids) > behaviour.die_above_prompt_tokens:
                server.die()
                self.close_connection = True
                return
        if number in behaviour.drop_requests:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        failing = behaviour.generation_fails_after is not None and number >= behaviour.generation_fails_after
        if behaviour.generation_status != 200 or failing:
            self._json(
                {"error": {"message": "EngineCore encountered an issue", "code": 500}},
                behaviour.generation_status if behaviour.generation_status != 200 else 500,
            )
            return
        prompt = body.get("prompt", "")
        if chat:
            prompt = "\n".join(str(message.get("content") or "") for message in body["messages"])
        many = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
        prompts = prompt if many else [prompt]
        if body.get("stream"):
            self._stream(body, server.answer(body, prompts[0], number, chat), number, chat)
            return
        answers = [server.answer(body, one, number, chat) for one in prompts]
        time.sleep(max(answer.seconds for answer in answers))
        self._json(server.whole(body, answers, number, chat))

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _event(self, value: dict) -> str:
        return "data: " + json.dumps(value) + "\n\n"

    def _stream(self, body: dict, answer: _Answer, number: int, chat: bool) -> None:
        behaviour = self.server.behaviour
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        frame = self.server.frame(number, chat, "chunk")
        failing = behaviour.stream_error_after is not None and number % behaviour.stream_error_every == 0
        burst = ""
        time.sleep(answer.first_token_s)
        for index, piece in enumerate(answer.pieces):
            if failing and index >= behaviour.stream_error_after:
                break
            if index == behaviour.cut_stream_after:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if index:
                time.sleep(behaviour.token_s)
            last = index == len(answer.pieces) - 1
            shown = "" if behaviour.empty_content else piece
            choice: dict[str, Any] = {
                "index": 0,
                "logprobs": None,
                "finish_reason": answer.finish_reason if last else None,
            }
            choice |= {"delta": {"content": shown}} if chat else {"text": shown}
            if body.get("return_token_ids"):
                choice["token_ids"] = [answer.ids[index]]
            event = self._event(frame | {"choices": [choice]})
            if behaviour.coalesce:
                burst += event
            else:
                self._chunk(event)
        if burst:
            # One write a token, with no time between: what a proxy or a busy front end does to a stream.
            for event in burst.split("\n\n")[:-1]:
                self._chunk(event + "\n\n")
        if failing:
            self._chunk(
                self._event({"error": {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}})
            )
        elif (body.get("stream_options") or {}).get("include_usage") and behaviour.stream_usage:
            self._chunk(self._event(frame | {"choices": [], "usage": answer.usage}))
        self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()


@dataclass(frozen=True)
class _Answer:
    prompt_text: str
    pieces: list[str]
    ids: list[int]
    finish_reason: str
    usage: dict
    first_token_s: float
    seconds: float


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(
        self, behaviour: Behaviour, port: int, model: str, answer: Callable[[str, int], str] | None, in_process: bool
    ) -> None:
        self.behaviour, self.model, self.custom_answer, self.in_process = behaviour, model, answer, in_process
        self.state, self.lock, self.connections = State(), threading.Lock(), set()
        self.tokens = Tokens(behaviour.tokenizer)
        super().__init__(("127.0.0.1", port), Handler)

    def handle_error(self, *_: Any) -> None:
        """A client that went away, or a switch that cut the connection: no traceback in the test's output."""

    def die(self) -> None:
        if not self.in_process:
            os._exit(1)
        threading.Thread(target=self.shutdown, daemon=True).start()
        self.socket.close()
        for connection in list(self.connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def answer(self, body: dict, prompt: str | list[int], number: int, chat: bool) -> _Answer:
        behaviour = self.behaviour
        prompt_ids = prompt if isinstance(prompt, list) else self.tokens.encode(prompt)
        text = self.tokens.decode(prompt) if isinstance(prompt, list) else prompt
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        limit = 16 if limit is None else limit
        pieces, reason = self._pieces(body, text, number, limit)
        if behaviour.wrong_after_tokens is not None:
            pieces = [piece if index < behaviour.wrong_after_tokens else " wrong" for index, piece in enumerate(pieces)]
        if behaviour.diverge_at is not None and behaviour.diverge_at < len(pieces):
            pieces[behaviour.diverge_at] = " other"
        ids = [(self.tokens.encode(piece, special=False) or [0])[0] for piece in pieces]
        counted = len(prompt_ids) - behaviour.prompt_tokens_lower_by
        if behaviour.cut_above_prompt_tokens is not None:
            counted = min(counted, behaviour.cut_above_prompt_tokens)
        usage = {
            "prompt_tokens": max(0, counted),
            "completion_tokens": len(pieces) + behaviour.completion_tokens_higher_by,
        }
        usage["total_tokens"] = sum(usage.values())
        first = behaviour.first_token_s + behaviour.slow_requests.get(str(number), 0.0)
        if behaviour.coalesce:
            first += behaviour.token_s * len(pieces)
        self._count(text, usage, len(prompt_ids))
        return _Answer(
            text, pieces, ids, behaviour.finish_reason or reason, usage, first, first + behaviour.token_s * len(pieces)
        )

    def _pieces(self, body: dict, text: str, number: int, limit: int) -> tuple[list[str], str]:
        behaviour = self.behaviour
        if behaviour.repeat_after_request is not None and number >= behaviour.repeat_after_request:
            return [behaviour.repeated_token] * limit, "length"
        known = [key for key in behaviour.answers if text.endswith(key)]
        if self.custom_answer:
            pieces = self.tokens.pieces(self.custom_answer(text, limit))
        elif known:
            pieces = self.tokens.pieces(behaviour.answers[max(known, key=len)])
        else:
            seed = hashlib.sha256(text.encode()).hexdigest()[:6]
            count = max(0, limit - behaviour.short_output_tokens)
            return [f" {seed}{index}" for index in range(count)], "stop" if count < limit else "length"
        reason = "stop"
        if len(pieces) > limit:
            pieces, reason = pieces[:limit], "length"
        stops = body.get("stop") or []
        whole = "".join(pieces)
        cuts = [whole.index(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop and stop in whole]
        if cuts:
            pieces, reason = self.tokens.pieces(whole[: min(cuts)]), "stop"
        return pieces, reason

    def _count(self, text: str, usage: dict, sent_tokens: int) -> None:
        with self.lock:
            state = self.state
            state.answered += 1
            if self.behaviour.restart_counters_after == state.answered:
                self.state = state = State(requests=state.requests, answered=state.answered, started=time.time())
            state.prompt_tokens += usage["prompt_tokens"]
            state.generation_tokens += usage["completion_tokens"] + self.behaviour.metrics_generation_tokens_higher_by
            state.prefix_queries += sent_tokens
            hit = self.behaviour.prefix_hits_on_repeat and text in state.seen_prompts
            state.prefix_hits += self.behaviour.prefix_hits_per_request + (sent_tokens if hit else 0)
            state.seen_prompts.add(text)
            state.preemptions += self.behaviour.preemptions_per_request

    def frame(self, number: int, chat: bool, kind: str = "") -> dict:
        name = ("chat.completion.chunk" if kind else "chat.completion") if chat else "text_completion"
        return {"id": f"cmpl-{number}", "object": name, "created": int(time.time()), "model": self.model}

    def whole(self, body: dict, answers: list[_Answer], number: int, chat: bool) -> dict:
        choices = []
        for index, answer in enumerate(answers):
            text = None if self.behaviour.empty_content else "".join(answer.pieces)
            choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason, "stop_reason": None}
            if chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = (answer.prompt_text if body.get("echo") else "") + (text or "")
            if body.get("return_token_ids"):
                choice["token_ids"] = answer.ids
            choice["logprobs"] = self._logprobs(body, answer, chat)
            choices.append(choice)
        usage = {key: sum(answer.usage[key] for answer in answers) for key in answers[0].usage}
        return self.frame(number, chat) | {"choices": choices, "usage": usage}

    def _logprobs(self, body: dict, answer: _Answer, chat: bool) -> dict | None:
        top = body.get("top_logprobs") if chat else body.get("logprobs")
        if not (body.get("logprobs") if chat else top is not None):
            return None
        pieces = list(answer.pieces)
        prompt_count = 0
        if body.get("echo") and not chat:
            prompt_pieces = self.tokens.pieces(answer.prompt_text)
            prompt_count = len(prompt_pieces)
            pieces = prompt_pieces + pieces
        scores: list[float | None] = [_logprob(piece, index) for index, piece in enumerate(pieces)]
        if chat:
            return {
                "content": [
                    {
                        "token": piece,
                        "logprob": score,
                        "bytes": list(piece.encode()),
                        "top_logprobs": [{"token": piece, "logprob": score}] * min(1, top or 0),
                    }
                    for piece, score in zip(pieces, scores)
                ]
            }
        if prompt_count:
            scores[0] = None
        offsets = [sum(map(len, pieces[:index])) for index in range(len(pieces))]
        return {
            "tokens": pieces,
            "token_logprobs": scores,
            "text_offset": offsets,
            "top_logprobs": [None if score is None else {piece: score} for piece, score in zip(pieces, scores)],
        }

    def metrics_text(self) -> str:
        with self.lock:
            state = dataclasses.replace(self.state)
        label = f'{{engine="0",model_name="{self.model}"}}'
        values = {
            "vllm:prompt_tokens_total": state.prompt_tokens,
            "vllm:generation_tokens_total": state.generation_tokens,
            "vllm:prefix_cache_queries_total": state.prefix_queries,
            "vllm:prefix_cache_hits_total": state.prefix_hits,
            "vllm:num_preemptions_total": state.preemptions,
            "vllm:kv_cache_usage_perc": 0.0,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:prompt_tokens_created": state.started,
        }
        lines = [
            "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.",
            "# TYPE vllm:prompt_tokens_total counter",
        ]
        lines += [f"{name}{label} {float(value)}" for name, value in values.items()]
        lines.append(
            f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{self.model}"}} '
            f"{float(state.answered)}"
        )
        info = ",".join(f'{key}="{value}"' for key, value in ({"engine": "0"} | self.behaviour.cache_config).items())
        lines.append(f"vllm:cache_config_info{{{info}}} 1.0")
        return "\n".join(lines) + "\n"


class MockServer:
    """The server in a thread of the test.  ``answer(prompt, max_tokens) -> str`` gives the answers."""

    def __init__(
        self, behaviour: Behaviour = Behaviour(), model: str = "mock", answer: Callable[[str, int], str] | None = None
    ) -> None:
        self._server = _Server(behaviour, 0, behaviour.model or model, answer, in_process=True)
        self.model = self._server.model
        self.port = self._server.server_address[1]
        self.base_url = f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> State:
        return self._server.state

    def __enter__(self) -> MockServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.die()


def _fork_child(ignore_sigterm: bool) -> int:
    """A child in the same session, like EngineCore: lives for ten minutes unless ended."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore_sigterm else signal.SIG_DFL)
        time.sleep(600)
        os._exit(0)
    return pid


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--behaviour", default="{}", help="JSON object of Behaviour's fields")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="mock")
    parser.add_argument("--served-model-name")
    parser.add_argument("--pid-file", help="writes the pids of the server and its child here, one a line")
    options, _ = parser.parse_known_args(argv)
    fields = json.loads(options.behaviour)
    for name in ("drop_requests", "memory_report", "log_lines"):
        if name in fields:
            fields[name] = tuple(fields[name])
    behaviour = Behaviour(**fields)
    for line in behaviour.log_lines:
        print(line, flush=True)
    if behaviour.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids = [os.getpid()]
    if behaviour.fork_child:
        pids.append(_fork_child(behaviour.ignore_sigterm))
    if options.pid_file:
        with open(options.pid_file, "w") as stream:
            stream.write("\n".join(map(str, pids)) + "\n")
    if behaviour.exit_at_start is not None:
        return behaviour.exit_at_start
    time.sleep(behaviour.start_delay_s)
    server = _Server(
        behaviour, options.port, behaviour.model or options.served_model_name or options.model, None, False
    )
    print(f"mock server on port {server.server_address[1]}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
