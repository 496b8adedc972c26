"""How many tokens of a shared prefix are served from the prefix cache, by prefix length.

Hybrid models align their blocks to the recurrent state's page, so that hits come in large steps only and may vanish at
a boundary (https://github.com/vllm-project/vllm/issues/50235, https://github.com/vllm-project/recipes/pull/861).  One
average hit rate hides both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    generator = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [generator.randrange(RESERVED_IDS, vocab_size) for _ in range(count)]

    found = []
    for length in lengths:
        server.reset_prefix_cache()
        prefix, first, second = ids(length), ids(tail_len), ids(tail_len)
        second[0] = RESERVED_IDS + (first[0] + 1 - RESERVED_IDS) % (
            vocab_size - RESERVED_IDS
        )  # unlike from the first token on
        _send(server, prefix + first)
        before = server.settled_metrics()
        _send(server, prefix + second)
        after = server.settled_metrics()
        if HITS not in after or after.get(QUERIES, 0) <= before.get(QUERIES, 0):
            raise Invalid(f"{server.base_url}: counts no prefix-cache queries; is prefix caching on?")
        hits = int(after[HITS] - before.get(HITS, 0))
        found.append({"prefix_tokens": length, "hit_tokens": hits, "hit_rate": hits / length})
    return found


def _send(server: Server, prompt: list[int]) -> None:
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
    try:
        http.request_json(f"{server.base_url}/v1/completions", body, timeout_s=600.0)
    except http.RequestFailed as error:
        raise Invalid(f"prefix probe of {len(prompt)} tokens: {error}") from None
