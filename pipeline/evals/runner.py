"""Evaluates a served model: lm-eval over the OpenAI endpoint, every request accounted for, every answer classified."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import Invalid
from pipeline.evals import checks, dataset, endpoint, fidelity
from pipeline.evals.accuracy import report
from pipeline.evals.dataset import Item
from pipeline.evals.endpoint import ServerDied
from pipeline.evals.journal import Journal, Record
from pipeline.evals.outcomes import classify
from pipeline.evals.runs import SAMPLES, Run, write_run
from pipeline.evals.script import script_of
from pipeline.evals.settings import EvalSettings, parse
from pipeline.files import sha256_json, write_json

RESULT, LM_EVAL = "accuracy.json", "lm_eval.json"


def evaluate(
    base_url: str,
    model: str,
    tokenizer_dir: Path | str,
    dataset_dir: Path | str,
    settings: EvalSettings | dict,
    out_dir: Path | str,
    *,
    conditions: dict[str, Any] | None = None,
    journal_dir: Path | str | None = None,
    below: int | None = None,
) -> dict[str, Any]:
    """Ask every item of ``dataset_dir``; ``out_dir`` gets ``accuracy.json``, ``samples.jsonl``, ``lm_eval.json`` and,
    where asked for, ``logprobs.jsonl.gz``.

    ``conditions`` says what was served and on what (checkpoint hash, kv dtype, tensor_parallel_size, software ...):
    it is kept with the samples, comparisons demand it equal where it must be, and an interrupted run is resumed only
    under the same conditions.  ``journal_dir`` is where the journal of an interrupted run waits (default ``out_dir``,
    which a DVC stage finds emptied).  ``below``: the length at which the server died before; items that long are not
    asked, and the run is invalid.

    Returns the content of ``accuracy.json``; ``status`` is ``invalid`` when too many answers could not be scored or a
    prompt arrived changed.  Raises :class:`Refused` before the first request for what cannot work, and
    :class:`ServerDied` when the server is gone, with all that was answered kept for the next run.
    """
    settings, out_dir, url = parse(settings), Path(out_dir), endpoint.root(base_url)
    if settings.tasks == "hub":
        from pipeline.evals import hub

        return hub.evaluate(
            url, model, tokenizer_dir, settings, out_dir, conditions=conditions, journal_dir=journal_dir
        )
    items, meta = dataset.load(dataset_dir)
    checks.same_dataset(meta, tokenizer_dir, settings)
    limit = endpoint.max_model_len(url, model, settings.max_model_len)
    checks.lengths_fit(items, limit, url)
    conditions = dict(conditions or {})
    identity = sha256_json(
        {
            "dataset": meta["key"],
            "items": meta["items_sha256"],
            "model": model,
            "conditions": conditions,
            "where": None if conditions else str(out_dir.resolve()),
        }
    )
    journal = Journal(Path(journal_dir or out_dir) / f"requests-{identity[:16]}.jsonl", identity)
    start, finished = time.monotonic(), False
    try:
        if settings.endpoint == "completions":
            checks.probe(url, model, tokenizer_dir, settings, min(items, key=lambda item: item.prompt_tokens))
        try:
            results = _ask_all(url, model, tokenizer_dir, settings, items, limit, journal, below)
            result = _result(settings, meta, items, items, journal, conditions, time.monotonic() - start)
            if below is None:
                result["logprobs"] = _logprobs(url, model, tokenizer_dir, dataset_dir, settings, out_dir, conditions)
        except ServerDied as death:
            done = [item for item in items if _answered(journal, item)]
            death.result = _result(settings, meta, items, done, journal, conditions, time.monotonic() - start) | {
                "status": "invalid",
                "reason": f"{death} ({len(done)} of {len(items)} items answered)",
                "server_died_at_length": max(
                    (item.length for item in items if item.prompt_hash in death.in_flight), default=None
                ),
            }
            write_json(out_dir / RESULT, death.result)
            _write_samples(out_dir, death.result, model, samples_of(done, journal, settings))
            raise
        if below is not None:
            reason = f"the server died at length {below}: nothing that long was asked again"
            reason = "; ".join(filter(None, [reason, result["reason"]]))
            result |= {"status": "invalid", "reason": reason, "server_died_at_length": below}
        samples = samples_of(items, journal, settings)
        checks.scores_agree(results, items, samples)
        _write_samples(out_dir, result, model, samples)
        write_json(out_dir / LM_EVAL, {"results": results["results"], "versions": results["versions"]})
        write_json(out_dir / RESULT, result)
        finished = result["outcomes"]["error"] == result["outcomes"]["stuck"] == 0
        return result
    finally:
        journal.close(finished=finished)


def _write_samples(out_dir: Path, result: dict[str, Any], model: str, samples: list[dict[str, Any]]) -> None:
    header = {"kind": "header", "model": model}
    header |= {key: result[key] for key in ("dataset_key", "conditions", "status", "reason")}
    write_run(Run(header, tuple(samples)), out_dir / SAMPLES)


def _logprobs(
    url: str,
    model: str,
    tokenizer_dir: Path | str,
    dataset_dir: Path | str,
    settings: EvalSettings,
    out_dir: Path,
    conditions: dict[str, Any],
) -> dict[str, Any]:
    """Record log-probabilities beside the samples; a server that gives none costs the fidelity figures, not the
    accuracy.  Raises :class:`ServerDied` for one that is gone.
    """
    if not settings.fidelity.prompts_per_length or settings.endpoint != "completions":
        return {"status": "not_comparable", "reason": "not asked for", "file": None}
    try:
        path = fidelity.record(
            url, model, tokenizer_dir, dataset_dir, settings, out_dir / fidelity.FILE, conditions=conditions
        )
    except Invalid as error:
        return {"status": "not_comparable", "reason": str(error), "file": None}
    return {"status": "valid", "reason": None, "file": path.name}


def _answered(journal: Journal, item: Item) -> bool:
    record = journal.records.get(item.prompt_hash)
    return record is not None and record.failure is None


def _ask_all(
    url: str,
    model: str,
    tokenizer_dir: Path | str,
    settings: EvalSettings,
    items: list[Item],
    limit: int,
    journal: Journal,
    below: int | None,
) -> dict[str, Any]:
    """Run lm-eval over all items; the answers end up in ``journal``, lm-eval's own scores are returned."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from pipeline.evals.client import RecordedChat, RecordedCompletions, Transport
    from pipeline.evals.tasks import build

    by_hash = {item.prompt_hash: item for item in items}
    for name in ("lm_eval.api.task", "transformers.configuration_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)  # remarks on custom data sets and model types, once a task
    transport = Transport.of(settings, url, journal, by_hash)
    transport.below = below
    if settings.endpoint == "chat":
        client = RecordedChat(transport, url=url, model=model, max_model_len=limit)
    else:
        client = RecordedCompletions(
            transport,
            url=url,
            model=model,
            tokenizer_dir=str(tokenizer_dir),
            max_model_len=limit,
            trust_remote_code=settings.trust_remote_code,
        )
    with closed_stdin():
        return lm_eval.simple_evaluate(
            model=client,
            tasks=build(items),
            task_manager=TaskManager(include_defaults=False),
            log_samples=False,
            apply_chat_template=settings.endpoint == "chat",
            bootstrap_iters=1,
        )


@contextlib.contextmanager
def closed_stdin() -> Iterator[None]:
    """Nothing below may wait for an answer typed by a person."""
    before = sys.stdin
    with open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def samples_of(items: list[Item], journal: Journal, settings: EvalSettings) -> list[dict[str, Any]]:
    """One row an item: what was asked (by hash), answered, counted and decided."""
    return [_sample(item, journal.records[item.prompt_hash], settings) for item in items]


def _sample(item: Item, record: Record, settings: EvalSettings) -> dict[str, Any]:
    outcome = classify(
        item,
        record.text,
        record.finish_reason,
        thinking=settings.thinking == "always",
        error=record.message if record.failure == "error" else None,
        stuck=record.failure == "stuck",
        reasoning=record.reasoning,
    )
    return {
        "id": item.id,
        "family": item.family,
        "language": item.language,
        "script": script_of(item),
        "length": item.length,
        "depth": item.depth,
        "seed": item.seed,
        "cluster": item.cluster,
        "prompt_hash": item.prompt_hash,
        "targets": list(item.targets),
        "text": record.text,
        "reasoning": record.reasoning,
        "finish_reason": record.finish_reason,
        "outcome": outcome.kind,
        "score": outcome.score.score,
        "hits": [int(hit) for hit in outcome.score.hits],
        "extraction_failed": outcome.score.extraction_failed,
        "repeats": outcome.repeats,
        "prompt_tokens": item.prompt_tokens,
        "sent_prompt_tokens": record.sent_prompt_tokens,
        "server_prompt_tokens": record.server_prompt_tokens,
        "generated_tokens": record.completion_tokens,
        "latency_s": round(record.latency_s, 4),
        "attempts": record.attempts,
        "message": record.message,
    }


def _result(
    settings: EvalSettings,
    meta: dict[str, Any],
    items: list[Item],
    answered: list[Item],
    journal: Journal,
    conditions: dict[str, Any],
    wall_s: float,
) -> dict[str, Any]:
    samples = samples_of(answered, journal, settings)
    result = report(samples, settings.thresholds)
    changed = [sample for sample in samples if not checks.arrived_whole(sample)]
    reasons = []
    if changed:
        first = changed[0]
        reasons.append(
            f"{len(changed)} prompts did not arrive as meant: {first['id']} has {first['prompt_tokens']} tokens, "
            f"{first['sent_prompt_tokens']} were sent, the server counted {first['server_prompt_tokens']}"
        )
    if settings.thinking == "never" and (thinking := [sample for sample in samples if checks.thinks(sample)]):
        reasons.append(
            f"{len(thinking)} answers hold thinking ({thinking[0]['id']} first) and eval.thinking is never: stop "
            "strings and budgets cut it; set eval.thinking to always, or switch it off in the server"
        )
    if reasons:
        result |= {"status": "invalid", "reason": "; ".join(filter(None, [*reasons, result["reason"]]))}
    return result | {
        "eval": settings.name,
        "dataset_key": meta["key"],
        "conditions": conditions,
        "items_total": len(items),
        "items_answered": len(answered),
        "requests_resumed": journal.resumed,
        "requests_retried": sum(sample["attempts"] > 1 for sample in samples),
        "prompts_changed": len(changed),
        "prompt_tokens_total": sum(sample["server_prompt_tokens"] or 0 for sample in samples),
        "generated_tokens_total": sum(sample["generated_tokens"] or 0 for sample in samples),
        "wall_s": round(wall_s, 3),
    }
