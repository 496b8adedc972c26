"""A small accuracy probe beside every point: a setting that is fast and wrong must not win.

https://github.com/vllm-project/vllm/issues/42426: one block size answered "!!!!!!"; speed alone did not show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline.errors import Invalid
from pipeline.evals.dataset import Item
from pipeline.evals.outcomes import classify
from pipeline.serve import Server, http

PARALLEL = 4
TIMEOUT_S = 300.0


def choose(items: Sequence[Item], families: Sequence[str], count: int) -> list[Item]:
    """The first ``count`` items of each family, shortest first.  Raises :class:`Invalid` when a family has too few."""
    chosen = []
    for family in families:
        mine = sorted((item for item in items if item.family == family), key=lambda item: (item.length, item.id))
        if len(mine) < count:
            raise Invalid(f"the data set has {len(mine)} items of family {family!r}, the probe asks for {count}")
        chosen += mine[:count]
    return chosen


def probe(server: Server, items: Sequence[Item]) -> dict[str, Any] | None:
    """Greedy answers to ``items``: ``accuracy``, ``items``, ``degenerate``, ``answers``.  ``None`` without items."""
    if not items:
        return None
    with ThreadPoolExecutor(PARALLEL) as pool:
        answers = list(pool.map(lambda item: _ask(server, item), items))
    outcomes = [classify(item, text, reason) for item, (text, reason) in zip(items, answers)]
    return {
        "items": len(items),
        "accuracy": sum(outcome.score.correct for outcome in outcomes) / len(items),
        "degenerate": sum(outcome.kind in ("degenerate", "empty") for outcome in outcomes),
        "answers": [text for text, _ in answers],
    }


def _ask(server: Server, item: Item) -> tuple[str, str | None]:
    body = {
        "model": server.model,
        "prompt": item.prompt,
        "max_tokens": item.max_gen_toks,
        "stop": list(item.until) or None,
        "temperature": 0.0,
        "seed": 0,
    }
    try:
        choice = http.request_json(f"{server.base_url}/v1/completions", body, TIMEOUT_S)["choices"][0]
    except (http.RequestFailed, KeyError, IndexError, TypeError) as error:
        server.check("answering the accuracy probe")
        raise Invalid(f"accuracy probe, item {item.id}: {error}") from None
    return choice.get("text") or "", choice.get("finish_reason")


def agreement(one: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    """Share of equal answers of two probes."""
    if not one or not other:
        return None
    return sum(a == b for a, b in zip(one["answers"], other["answers"])) / len(one["answers"])
