"""lm-eval's API models, with a journal: what was sent, what the server counted, how it ended and how long it took.

lm-eval keeps the text of an answer and drops the rest, retries without telling, and lets one refused request abort a
run. Only the HTTP call is replaced here; building prompts, batching and order stay lm-eval's own.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from pipeline.errors import Invalid
from pipeline.evals.dataset import Item
from pipeline.evals.endpoint import ServerDied, alive
from pipeline.evals.journal import Journal, Record, failed
from pipeline.evals.scoring import visible_answer
from pipeline.evals.settings import EvalSettings

BACKOFF_S, BACKOFF_LIMIT_S = 0.2, 5.0
RETRY_AFTER_LIMIT_S = 60.0
"""Longest that a server is waited for because it asked for it (``Retry-After`` with a 429 or 503)."""
ENDINGS = ("stop", "length")
"""Whole, or cut by the limit.  Of one that ended otherwise (aborted, filtered, a tool call, untold) nobody knows."""


@dataclass
class Transport:
    """Sends one request, whatever happens: an answer, a failure that is kept, or :class:`ServerDied`."""

    base_url: str
    journal: Journal
    deadline_s: float
    retries: int
    failures_in_a_row: int
    concurrency: int
    thinking: bool = False
    known: Mapping[str, Item] | None = None
    """Items by prompt hash; only these may be asked for.  ``None``: any prompt."""
    below: int | None = None
    """Items of this length or more are not sent (the server died at it before): each is an error at once."""
    _failing: int = field(default=0, init=False)
    _dead: bool = field(default=False, init=False)
    _in_flight: set[str] = field(default_factory=set, init=False)
    _suspects: set[str] = field(default_factory=set, init=False)
    """What was in flight when the first of the current run of connections broke."""

    @classmethod
    def of(
        cls, settings: EvalSettings, base_url: str, journal: Journal, known: Mapping[str, Item] | None = None
    ) -> Transport:
        """A transport as the ``eval:`` group wants it."""
        return cls(
            base_url=base_url,
            journal=journal,
            deadline_s=settings.deadline_s,
            retries=settings.retries,
            failures_in_a_row=settings.failures_in_a_row,
            concurrency=settings.concurrency,
            thinking=settings.thinking == "always",
            known=known,
        )

    async def ask(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: dict,
        payload: dict,
        prompt_hash: str,
        sent_tokens: int | None,
    ) -> Record:
        """The record of this prompt, from the journal if an earlier run has it."""
        if self.known is not None and prompt_hash not in self.known:
            raise Invalid("lm-eval asks for a prompt that is not in the data set: the prompt was changed on the way")
        if (done := self.journal.records.get(prompt_hash)) is not None and done.failure is None:
            return done
        if self.below is not None and self.known[prompt_hash].length >= self.below:
            record = failed(prompt_hash, "error", f"not asked: the server died at length {self.below}", 0.0, 0)
            self.journal.add(record)
            return record
        self._in_flight.add(prompt_hash)
        try:
            record = await self._attempts(session, url, headers, payload, prompt_hash, sent_tokens)
        finally:
            self._in_flight.discard(prompt_hash)
        self.journal.add(record)
        self._failing = 0 if record.failure is None else self._failing + 1
        if self._failing >= self.failures_in_a_row:
            raise self._death(
                f"{self.base_url}: {self._failing} requests in a row without an answer, the last one "
                f"{self._describe(prompt_hash)}: {record.message}",
                prompt_hash,
            )
        return record

    def _describe(self, prompt_hash: str) -> str:
        item = (self.known or {}).get(prompt_hash)
        return f"{item.id} ({item.prompt_tokens} tokens)" if item else f"prompt {prompt_hash[:12]}"

    def _death(self, message: str, prompt_hash: str) -> BaseException:
        """The error that ends the run; requests in flight that find out later are merely cancelled.

        Any of the requests in flight may have killed the server; the longest is named.
        """
        if self._dead:
            return asyncio.CancelledError()
        self._dead = True
        suspects = sorted(self._suspects or {prompt_hash}, key=lambda one: (-self._tokens(one), one))
        return ServerDied(
            f"{message}; {len(suspects)} requests were in flight, the longest {self._describe(suspects[0])}", suspects
        )

    def _tokens(self, prompt_hash: str) -> int:
        item = (self.known or {}).get(prompt_hash)
        return item.prompt_tokens if item else 0

    async def _attempts(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: dict,
        payload: dict,
        prompt_hash: str,
        sent_tokens: int | None,
    ) -> Record:
        start = time.monotonic()
        for attempt in range(1, self.retries + 2):
            pause = min(BACKOFF_S * 2 ** (attempt - 1), BACKOFF_LIMIT_S)
            if self._dead:
                raise asyncio.CancelledError
            try:
                async with asyncio.timeout(self.deadline_s):
                    status, body, asked_to_wait_s = await _post(session, url, headers, payload)
                self._suspects.clear()
                if status == 200:
                    record = _record(prompt_hash, body, sent_tokens, time.monotonic() - start, attempt)
                    if record.finish_reason in ENDINGS:
                        return record
                    problem = f"finish_reason {record.finish_reason!r}: nobody knows whether the answer is whole"
                    return failed(prompt_hash, "error", problem, time.monotonic() - start, attempt)
                pause = min(max(pause, asked_to_wait_s), RETRY_AFTER_LIMIT_S)
                problem = f"HTTP {status}: {body[:300].decode(errors='replace')}"
                if status < 500 and status != 429:
                    return failed(prompt_hash, "error", problem, time.monotonic() - start, attempt)
            except TimeoutError:
                problem = f"no answer within {self.deadline_s:g} s"
                return failed(prompt_hash, "stuck", problem, time.monotonic() - start, attempt)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
                problem = f"{type(error).__name__}: {error}"
                self._suspects = self._suspects or set(self._in_flight)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                problem = f"not an OpenAI completion: {type(error).__name__}: {error}"
                return failed(prompt_hash, "error", problem, time.monotonic() - start, attempt)
            if attempt <= self.retries:
                await asyncio.sleep(pause)
        if not await asyncio.to_thread(alive, self.base_url):
            raise self._death(f"{self.base_url}: died ({problem})", prompt_hash)
        return failed(prompt_hash, "error", problem, time.monotonic() - start, self.retries + 1)


async def _post(session: aiohttp.ClientSession, url: str, headers: dict, payload: dict) -> tuple[int, bytes, float]:
    """Status, body and the seconds of ``Retry-After`` (0 without it)."""
    async with session.post(url, json=payload, headers=headers) as response:
        wait = response.headers.get("Retry-After", "")
        return response.status, await response.read(), float(wait) if wait.isdigit() else 0.0


def _record(prompt_hash: str, body: bytes, sent_tokens: int | None, latency_s: float, attempts: int) -> Record:
    """Raises ``ValueError``, ``KeyError``, ``IndexError`` or ``TypeError`` for anything but a completion."""
    answer = json.loads(body)
    if isinstance(answer, dict) and answer.get("error"):
        raise ValueError(f"error inside an HTTP 200: {answer['error']}")
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    message = choice.get("message")
    text = choice["text"] if message is None else message["content"]
    if not isinstance(text, str | None):
        raise TypeError(f"the text is a {type(text).__name__}")
    thinking = None if message is None else message.get("reasoning_content") or message.get("reasoning")
    return Record(
        prompt_hash=prompt_hash,
        text=text,
        finish_reason=choice.get("finish_reason"),
        reasoning=thinking,
        sent_prompt_tokens=sent_tokens,
        server_prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        latency_s=latency_s,
        attempts=attempts,
    )


def prompt_hash_of(context: Any) -> str:
    """The key of a request: SHA-256 of the prompt, or of the user's message where a chat holds nothing else."""
    if isinstance(context, str):
        return hashlib.sha256(context.encode()).hexdigest()
    (text,) = context  # lm-eval's JsonChatStr, a tuple of the turns as JSON
    turns = json.loads(text)
    if len(turns) == 1 and isinstance(turns[0]["content"], str):
        text = turns[0]["content"]
    return hashlib.sha256(text.encode()).hexdigest()


class _Recorded:
    """Overrides lm-eval's one asynchronous HTTP call."""

    transport: Transport

    async def get_batched_requests(self, *args: Any, **kwargs: Any) -> Any:
        # One semaphore an event loop; lm-eval's own cannot be 1, since it would then take its synchronous path.
        self._turn = asyncio.Semaphore(self.transport.concurrency)
        return await super().get_batched_requests(*args, **kwargs)

    async def amodel_call(
        self,
        session: aiohttp.ClientSession,
        sem: asyncio.Semaphore,
        messages: list,
        *,
        generate: bool = True,
        cache_keys: list | None = None,
        ctxlens: list[int] | None = None,
        gen_kwargs: dict | None = None,
        **kwargs: Any,
    ) -> list:
        if not generate:
            return await super().amodel_call(
                session,
                sem,
                messages,
                generate=False,
                cache_keys=cache_keys,
                ctxlens=ctxlens,
                gen_kwargs=gen_kwargs,
                **kwargs,
            )
        context = cache_keys[0][0]
        payload = self._create_payload(
            self.create_message(messages), generate=True, gen_kwargs=copy.deepcopy(gen_kwargs), seed=self._seed
        )
        sent = len(messages[0]) if self.tokenized_requests else None
        async with self._turn:
            record = await self.transport.ask(
                session, self.base_url, self.header, payload, prompt_hash_of(context), sent
            )
        answer = visible_answer(
            record.text, record.finish_reason, thinking=self.transport.thinking, reasoning=record.reasoning
        )
        return [answer or ""]


class RecordedCompletions(_Recorded, LocalCompletionsAPI):
    """``local-completions`` with prompts as token ids, special tokens as the tokenizer adds them."""

    def __init__(
        self,
        transport: Transport,
        *,
        url: str,
        model: str,
        tokenizer_dir: str,
        max_model_len: int,
        trust_remote_code: bool = False,
    ) -> None:
        self.transport = transport
        super().__init__(
            base_url=f"{url}/v1/completions",
            model=model,
            tokenizer=tokenizer_dir,
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            add_bos_token=True,
            trust_remote_code=trust_remote_code,
            **_common(transport, max_model_len),
        )


class RecordedChat(_Recorded, LocalChatCompletion):
    """``local-chat-completions``: the server renders and tokenizes, so no tokenizer is needed here."""

    def __init__(self, transport: Transport, *, url: str, model: str, max_model_len: int) -> None:
        self.transport = transport
        super().__init__(
            base_url=f"{url}/v1/chat/completions",
            model=model,
            tokenizer_backend=None,
            tokenized_requests=False,
            **_common(transport, max_model_len),
        )


def _common(transport: Transport, max_model_len: int) -> dict[str, Any]:
    # lm-eval cuts prompts to max_length - 1 - max_gen_toks on the left; lengths were checked before, so nothing is cut.
    # Deadline and retries are the transport's: lm-eval's own must never be first.
    return {
        "max_length": max_model_len + 1,
        "num_concurrent": max(2, transport.concurrency),
        "max_retries": 1,
        "timeout": int(transport.deadline_s * (transport.retries + 1)) + 3600,
        "seed": 0,
    }
