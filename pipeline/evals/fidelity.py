"""How far a variant's distributions are from native's, over the same tokens: KL, top-1 agreement, perplexity by
position.

The server is asked for the log-probabilities of prompt tokens (vLLM's ``prompt_logprobs``): its k likeliest tokens at
every place.  The text is a prompt of the data set followed by its *right answer*, so both servers score the same
continuation and the places where an answer is generated are among those compared.

From k tokens the whole distribution is not known.  The tokens that both sides report are kept apart and everything
else is one more bucket; merging outcomes never raises a divergence, so the KL told is a lower bound, exact when k is
the vocabulary.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.errors import Invalid, Unreadable
from pipeline.evals import dataset, endpoint
from pipeline.evals.accuracy import bucket
from pipeline.evals.dataset import Item
from pipeline.evals.settings import EvalSettings, parse
from pipeline.evals.tokens import ServedTokenizer
from pipeline.files import atomic_open

FILE = "logprobs.jsonl.gz"
DECIMALS = 5
DECIDED = math.log(0.5)
LEAST_MASS = 1e-6  # below what the rounding of the record leaves


def chosen(items: list[Item], per_length: int) -> list[Item]:
    """``per_length`` items of each length, families in turn, those with the longest answers first."""
    picked: list[Item] = []
    for length in sorted({item.length for item in items}):
        families: dict[str, list[Item]] = {}
        for item in items:
            if item.length == length:
                families.setdefault(item.family, []).append(item)
        queues = sorted(families.values(), key=lambda group: (-len(group[0].targets), group[0].family))
        turns = [group[turn] for turn in range(max(map(len, queues))) for group in queues if turn < len(group)]
        picked += turns[:per_length]
    return picked


def record(
    base_url: str,
    model: str,
    tokenizer_dir: Path | str,
    dataset_dir: Path | str,
    settings: EvalSettings | dict,
    out_path: Path | str,
    *,
    conditions: dict[str, Any] | None = None,
) -> Path:
    """Write one gzipped JSON line a prompt: token ids, their log-probabilities, the top k of every place.

    Raises :class:`Invalid` when the server returns none, other tokens than were sent, or what is no number;
    :class:`~pipeline.evals.endpoint.ServerDied` when it is gone.
    """
    settings, out_path, url = parse(settings), Path(out_path), endpoint.root(base_url)
    items, meta = dataset.load(dataset_dir)
    tokenizer = ServedTokenizer(tokenizer_dir, trust_remote_code=settings.trust_remote_code)
    picked = chosen(items, settings.fidelity.prompts_per_length)

    def ask(item: Item) -> dict[str, Any]:
        prompt = tokenizer.encode(item.prompt)
        answer = tokenizer.encode(_answer_text(item))
        ids = prompt + answer[tokenizer.bos_count(answer) or 0 :]
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": settings.fidelity.top_k,
        }
        try:
            choice = endpoint.call(f"{url}/v1/completions", body, settings.deadline_s)["choices"][0]
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            if not endpoint.alive(url):
                raise endpoint.ServerDied(
                    f"{url}: died over the log-probabilities of {item.id} ({error})", [item.prompt_hash]
                ) from None
            raise Invalid(
                f"{url}: no log-probabilities for {item.id} ({error}); is --max-logprobs below "
                f"{settings.fidelity.top_k}?"
            ) from None
        return {"prompt_hash": item.prompt_hash, "id": item.id, "prompt_tokens": len(prompt)} | _row(
            choice.get("prompt_logprobs"), ids, settings.fidelity.top_k, item.id
        )

    with ThreadPoolExecutor(max_workers=min(4, settings.concurrency)) as pool:
        rows = list(pool.map(ask, picked))
    header = {
        "kind": "logprobs",
        "k": settings.fidelity.top_k,
        "model": model,
        "dataset_key": meta["key"],
        "conditions": conditions or {},
    }
    with atomic_open(out_path) as stream, gzip.GzipFile("", "wb", 6, stream, mtime=0) as packed:
        for row in (header, *rows):
            packed.write(json.dumps(row).encode() + b"\n")
    return out_path


def _answer_text(item: Item) -> str:
    words = [*item.targets, *([item.terminator] if item.terminator else [])]
    return (" " if item.language != "zh" else "") + " ".join(words)


def _row(places: list[dict | None] | None, ids: list[int], k: int, name: str) -> dict[str, Any]:
    """Log-probability of each token (null for the first) and the top k as (ids, log-probabilities)."""
    if not places or len(places) != len(ids):
        raise Invalid(f"{name}: {len(ids)} tokens were sent, log-probabilities came for {len(places or [])}")
    logprobs: list[float | None] = [None]
    tops: list[list] = [[[], []]]
    for place, (found, token) in enumerate(zip(places[1:], ids[1:], strict=True), 1):
        values = {int(key): _finite(entry, place, name) for key, entry in (found or {}).items()}
        if token not in values:
            raise Invalid(
                f"{name}: the log-probability of token {token} at place {place} is missing: the prompt was changed"
            )
        best = sorted(values.items(), key=lambda pair: -pair[1])[:k]
        logprobs.append(round(values[token], DECIMALS))
        tops.append([[token for token, _ in best], [round(value, DECIMALS) for _, value in best]])
    return {"ids": ids, "logprobs": logprobs, "top": tops}


def _finite(entry: Any, place: int, name: str) -> float:
    value = entry.get("logprob") if isinstance(entry, dict) else None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Invalid(f"{name}: a log-probability at place {place} is {value}: the server computes what is no number")
    return value


def read(path: Path | str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, rows) of a recorded file.  Raises :class:`Unreadable`."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            header, *rows = [json.loads(line) for line in stream]
    except (OSError, EOFError, ValueError) as error:
        raise Unreadable(f"{path}: {error or 'empty'}") from None
    if header.get("kind") != "logprobs":
        raise Unreadable(f"{path}: is no record of log-probabilities")
    return header, rows


def compare_logprobs(
    native_path: Path | str,
    variant_path: Path | str,
    buckets: tuple[int, ...] = (256, 1024, 4096, 16384),
) -> dict[str, Any]:
    """KL(native || variant) in nats a token, top-1 agreement and both perplexities: in all, by position, on answers
    alone.

    Where native itself wavers between tokens (random filler), a different first choice means nothing, so agreement is
    also told for the places where native gives its first choice at least half (``top1_decided``). ``kl_stderr``
    treats prompts, not tokens, as independent.  Files of different data sets, prompts or k are ``not_comparable``.
    """
    (native, ours), (variant, theirs) = read(native_path), read(variant_path)
    others = {row["prompt_hash"]: row for row in theirs}
    for key in ("dataset_key", "k"):
        if native.get(key) != variant.get(key):
            return _unlike(f"{key}: {native.get(key)} and {variant.get(key)}")
    if others.keys() != {row["prompt_hash"] for row in ours} or not ours:
        return _unlike(f"{len(ours)} and {len(theirs)} prompts, not the same")
    cells: dict[str, list[tuple]] = {}
    answers, everything, by_prompt = [], [], []
    for row in ours:
        other = others[row["prompt_hash"]]
        if row["ids"] != other["ids"]:
            return _unlike(f"{row['id']}: different tokens")
        places = list(_places(row, other))
        by_prompt.append(sum(place[1] for place in places) / len(places))
        for place in places:
            everything.append(place)
            cells.setdefault(bucket(place[0], buckets), []).append(place)
            if place[0] >= row["prompt_tokens"]:
                answers.append(place)
    spread = _stderr(by_prompt)
    total = _mean(everything)
    return {
        "status": "valid",
        "reason": None,
        "k": native["k"],
        "prompts": len(ours),
        "positions": total["n"],
        "kl_mean": total["kl"],
        "kl_stderr": spread,
        "top1_agreement": total["top1"],
        "top1_decided": total["top1_decided"],
        "decided_share": total["decided_share"],
        "perplexity_native": total["perplexity_native"],
        "perplexity_variant": total["perplexity_variant"],
        "tail_mass_mean": sum(place[5] for place in everything) / len(everything),
        "answers": _mean(answers) if answers else None,
        "by_position": {name: _mean(group) for name, group in cells.items()},
    }


def _unlike(reason: str) -> dict[str, Any]:
    return {"status": "not_comparable", "reason": f"log-probabilities: {reason}"}


def _places(row: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[int, float, bool, float, float, float, bool]]:
    """Of each place: position, KL, same first choice, native's and the variant's log-probability of the token,
    native's mass in the joint bucket, native decided.
    """
    for at in range(1, len(row["ids"])):
        p, q = (dict(zip(*side["top"][at], strict=True)) for side in (row, other))
        divergence, tail = bucketed_kl(p, q)
        first, decided = row["top"][at][0][0], row["top"][at][1][0] >= DECIDED
        yield at, divergence, first == other["top"][at][0][0], row["logprobs"][at], other["logprobs"][at], tail, decided


def bucketed_kl(p: dict[int, float], q: dict[int, float]) -> tuple[float, float]:
    """(KL(p || q) over the tokens both name plus one bucket for the rest, p's mass in that bucket), from
    log-probabilities.
    """
    common = p.keys() & q.keys()
    rest_p = max(0.0, 1.0 - sum(math.exp(p[token]) for token in common))
    rest_q = max(LEAST_MASS, 1.0 - sum(math.exp(q[token]) for token in common))
    divergence = sum(math.exp(p[token]) * (p[token] - q[token]) for token in common)
    if rest_p > LEAST_MASS:
        divergence += rest_p * math.log(rest_p / rest_q)
    return max(0.0, divergence), rest_p


def _mean(places: list[tuple]) -> dict[str, Any]:
    n, decided = len(places), [place for place in places if place[6]]
    return {
        "n": n,
        "kl": sum(place[1] for place in places) / n,
        "top1": sum(place[2] for place in places) / n,
        "top1_decided": sum(place[2] for place in decided) / len(decided) if decided else None,
        "decided_share": len(decided) / n,
        "perplexity_native": math.exp(-sum(place[3] for place in places) / n),
        "perplexity_variant": math.exp(-sum(place[4] for place in places) / n),
    }


def _stderr(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
