"""Facts about an OpenAI-compatible server, asked before the first request and when a request fails."""

from __future__ import annotations

import json
from typing import Any

from pipeline.errors import EXIT_INVALID, Refused
from pipeline.serve import http


class ServerDied(Refused):
    """The server is gone.  ``result`` is the run's JSON so far (status ``invalid``), when there is one.

    ``in_flight`` are the prompts it was answering, longest first: a server that dies at a length is a finding.
    """

    exit_code = EXIT_INVALID

    def __init__(self, message: str, in_flight: list[str] | None = None) -> None:
        super().__init__(message)
        self.in_flight = in_flight or []
        self.result: dict[str, Any] | None = None


def root(base_url: str) -> str:
    """The URL without a trailing ``/v1``."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def call(url: str, body: dict | None = None, timeout_s: float = 30.0) -> Any:
    """GET, or POST of JSON; ``None`` for an empty answer.  Raises ``OSError`` for no answer, one that is cut or not a
    200, and ``ValueError`` for one that is not JSON.
    """
    try:
        raw = http.request(url, body, timeout_s)
    except http.RequestFailed as error:
        raise OSError(str(error)) from None
    return json.loads(raw) if raw.strip() else None


def max_model_len(base_url: str, model: str, fallback: int | None) -> int:
    """Largest prompt + output the server accepts for ``model``.

    Raises :class:`Refused` when the server does not serve ``model`` or nobody knows its limit: a client that guesses
    one (lm-eval's default is 2048) cuts long prompts without a word.
    """
    try:
        served = call(f"{root(base_url)}/v1/models")["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerDied(f"{base_url}: no list of models ({error}); is the server up?") from None
    card = next((card for card in served if card.get("id") == model), None)
    if card is None:
        raise Refused(f"{base_url}: serves {[card.get('id') for card in served]}, not {model!r}")
    limit = card.get("max_model_len") or fallback
    if not limit:
        raise Refused(f"{base_url}: does not report max_model_len for {model}; set eval.max_model_len")
    if fallback and fallback > limit:
        raise Refused(f"{base_url}: max_model_len is {limit}, eval.max_model_len says {fallback}")
    return int(limit)


def alive(base_url: str) -> bool:
    """Whether ``/health`` answers (vLLM: 503 once its engine is dead; a server without that path still lives)."""
    try:
        http.request(f"{root(base_url)}/health", timeout_s=10.0)
        return True
    except http.RequestFailed as error:
        return error.status is not None and error.status < 500
