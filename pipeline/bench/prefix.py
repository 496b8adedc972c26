"""How many tokens of a shared prefix are served from the prefix cache, by prefix length.

Hybrid models align their blocks to the recurrent state's page, so that hits come in large steps only and may vanish at
a boundary (https://github.com/vllm-project/vllm/issues/50235, https://github.com/vllm-project/recipes/pull/861).  One
average hit rate hides both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.bench.guards import HITS, QUERIES
from pipeline.errors import Invalid
from pipeline.serve import Server, http

RESERVED_IDS = 64
"""Ids below this are special tokens or bytes in most vocabularies; random prompts avoid them."""


def boundary_lengths(block_tokens: int, blocks: int = 1) -> list[int]:
    """One token below, at, and above a block boundary."""
    edge = block_tokens * blocks
    return [edge - 1, edge, edge + 1]


def prefix_hits(
    server: Server, lengths: Sequence[int], vocab_size: int, *, tail_len: int = 16, seed: int = 0
) -> list[dict[str, Any]]:
    """For each prefix length (tokens): two prompts that share it and nothing more, on an emptied cache.

    Returns one dict a length: ``prefix_tokens``, ``hit_tokens`` (of the second prompt), ``hit_rate`` (hit / prefix), in
    the order given.  Raises :class:`Invalid` when a request fails or the server has no prefix-cache counters.
    """
    ids = _prompts(vocab_size, seed)
    found = []
    for length in lengths:
        server.reset_prefix_cache()
        prefix, first, second = ids(length), ids(tail_len), ids(tail_len)
        second[0] = RESERVED_IDS + (first[0] + 1 - RESERVED_IDS) % (
            vocab_size - RESERVED_IDS
        )  # unlike from the first token on
        _send(server, prefix + first)
        hits, _ = _hits(server, prefix + second)
        found.append({"prefix_tokens": length, "hit_tokens": hits, "hit_rate": hits / length})
    return found


def parallel_hits(
    server: Server, prompt_tokens: int, answers: int, vocab_size: int, *, seed: int = 0
) -> dict[str, int]:
    """How much of one prompt several answers to it (``n`` of the API) share, on an emptied cache.

    Returns ``prompt_tokens``, ``answers``, ``query_tokens`` (looked up by all answers), ``hit_tokens`` (found) and
    ``possible_tokens``: (answers - 1) x prompt.  Raises as :func:`prefix_hits` does.
    """
    server.reset_prefix_cache()
    hits, queries = _hits(server, _prompts(vocab_size, seed)(prompt_tokens), answers)
    return {
        "prompt_tokens": prompt_tokens,
        "answers": answers,
        "query_tokens": queries,
        "hit_tokens": hits,
        "possible_tokens": (answers - 1) * prompt_tokens,
    }


def _prompts(vocab_size: int, seed: int) -> Callable[[int], list[int]]:
    generator = random.Random(seed)
    return lambda count: [generator.randrange(RESERVED_IDS, vocab_size) for _ in range(count)]


def _hits(server: Server, prompt: list[int], answers: int = 1) -> tuple[int, int]:
    """Tokens found in the prefix cache and tokens looked up, of one request."""
    before = server.settled_metrics()
    _send(server, prompt, answers)
    after = server.settled_metrics()
    queries = int(after.get(QUERIES, 0) - before.get(QUERIES, 0))
    if HITS not in after or queries <= 0:
        raise Invalid(f"{server.base_url}: counts no prefix-cache queries; is prefix caching on?")
    return int(after[HITS] - before.get(HITS, 0)), queries


def _send(server: Server, prompt: list[int], answers: int = 1) -> None:
    # Several greedy answers would be one: the engine refuses them.
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "n": answers, "temperature": float(answers > 1)}
    try:
        http.request_json(f"{server.base_url}/v1/completions", body, timeout_s=600.0)
    except http.RequestFailed as error:
        raise Invalid(f"prefix probe of {len(prompt)} tokens: {error}") from None
