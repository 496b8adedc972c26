"""Greedy probes: does it generate at all, and do two servers generate the same?"""

from __future__ import annotations

from typing import Any

from pipeline.errors import Invalid
from pipeline.serve import http

PROBE_PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
READY_TOKENS = 4


def generate(base_url: str, model: str, prompt: str | list[int], max_tokens: int, timeout_s: float = 120.0) -> dict:
    """One greedy completion of exactly ``max_tokens`` tokens; the first choice, with ``token_ids``, and the usage."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "seed": 0,
        "return_token_ids": True,
    }
    answer = http.request_json(f"{base_url}/v1/completions", body, timeout_s)
    if not isinstance(answer, dict) or answer.get("error") or not answer.get("choices"):
        raise http.RequestFailed(f"{base_url}: answered 200 without a completion: {str(answer)[:300]}", 200)
    return answer["choices"][0] | {"usage": answer.get("usage") or {}}


def ready_generation(base_url: str, model: str, timeout_s: float) -> None:
    """A real short generation; health is not readiness.  Raises :class:`~pipeline.serve.http.RequestFailed`."""
    choice = generate(base_url, model, "1", READY_TOKENS, timeout_s)
    if not choice["usage"].get("completion_tokens"):
        raise http.RequestFailed(f"{base_url}: the probe generated no token: {str(choice)[:300]}", 200)


def compare_probe(
    base_url: str,
    other_url: str,
    model: str,
    other_model: str | None = None,
    *,
    prompt: str | list[int] = PROBE_PROMPT,
    max_tokens: int = 64,
) -> dict[str, Any]:
    """Send one greedy probe to two servers (direct, and disaggregated prefill/decode) and compare token ids.

    A disaggregated pair that loses or misplaces the recurrent state answers fluently and wrongly
    (https://github.com/vllm-project/vllm/issues/52627); equal token ids are the cheapest proof that it does not.
    Returns ``{status, reason, equal, first_difference, tokens, other_tokens}``: ``first_difference`` is the index of
    the first unlike token, ``None`` when equal.  Raises :class:`Invalid` when a server answers fewer tokens or no ids.
    """
    answers = []
    for url, name in ((base_url, model), (other_url, other_model or model)):
        try:
            ids = generate(url, name, prompt, max_tokens).get("token_ids")
        except http.RequestFailed as error:
            raise Invalid(f"probe: {error}") from None
        if not ids or len(ids) != max_tokens:
            raise Invalid(
                f"probe: {url} returned {len(ids or [])} token ids, asked for {max_tokens}; nothing to compare"
            )
        answers.append(ids)
    first = next((index for index, (a, b) in enumerate(zip(*answers)) if a != b), None)
    return {
        "status": "valid" if first is None else "invalid",
        "reason": None
        if first is None
        else f"outputs differ from token {first} on: {answers[0][first]} and {answers[1][first]}",
        "equal": first is None,
        "first_difference": first,
        "tokens": answers[0],
        "other_tokens": answers[1],
    }
