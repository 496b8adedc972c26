"""Runs lm-eval's own long-context benchmarks over the chat endpoint; their documents come from the Hugging Face hub."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import Refused
from pipeline.evals import endpoint
from pipeline.evals.accuracy import report
from pipeline.evals.endpoint import ServerDied
from pipeline.evals.hub_tasks import TASKS, Benchmark, choice_of, configs
from pipeline.evals.journal import Journal, Record
from pipeline.evals.outcomes import classify_scored, degeneration
from pipeline.evals.scoring import Score, visible_answer
from pipeline.evals.runs import SAMPLES, Run, write_run
from pipeline.evals.settings import EvalSettings, parse
from pipeline.files import sha256_json, write_json


def evaluate(
    base_url: str,
    model: str,
    tokenizer_dir: Path | str,
    settings: EvalSettings | dict,
    out_dir: Path | str,
    *,
    conditions: dict[str, Any] | None = None,
    journal_dir: Path | str | None = None,
    documents: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Run ``settings.hub.tasks`` and write the same files as for generated tasks.

    ``documents(task)`` replaces the hub (tests); it returns what an lm-eval ``custom_dataset`` returns.  Raises as
    :func:`pipeline.evals.runner.evaluate` does.
    """
    settings, out_dir, url = parse(settings), Path(out_dir), endpoint.root(base_url)
    limit = endpoint.max_model_len(url, model, settings.max_model_len)
    for name in settings.hub.tasks:
        _check_room(name, settings, limit, url)
    conditions = dict(conditions or {})
    key = sha256_json(
        settings.model_dump(mode="json", exclude={"concurrency", "deadline_s", "retries", "failures_in_a_row"})
    )
    identity = sha256_json({"hub": key, "model": model, "conditions": conditions, "where": str(out_dir.resolve())})
    journal = Journal(Path(journal_dir or out_dir) / f"requests-{identity[:16]}.jsonl", identity)
    start, finished, rows, results = time.monotonic(), False, [], {}
    try:
        for name in settings.hub.tasks:
            raw = _ask(name, url, model, tokenizer_dir, settings, limit, journal, documents)
            results |= raw["results"]
            rows += [
                row
                for task, samples in raw["samples"].items()
                for row in _rows(TASKS[name], task, samples, journal, settings)
            ]
        result = report(rows, settings.thresholds) | {
            "eval": settings.name,
            "dataset_key": key,
            "conditions": conditions,
            "items_total": len(rows),
            "requests_resumed": journal.resumed,
            "wall_s": round(time.monotonic() - start, 3),
        }
        head = {"kind": "header", "dataset_key": key, "conditions": conditions, "model": model}
        write_run(Run(head | {name: result[name] for name in ("status", "reason")}, tuple(rows)), out_dir / SAMPLES)
        write_json(out_dir / "lm_eval.json", {"results": results})
        write_json(out_dir / "accuracy.json", result)
        finished = result["outcomes"]["error"] == result["outcomes"]["stuck"] == 0
        return result
    except ServerDied as death:
        answered = sum(record.failure is None for record in journal.records.values())
        death.result = report(rows, settings.thresholds) | {
            "status": "invalid",
            "reason": f"{death} ({answered} requests answered)",
            "eval": settings.name,
            "dataset_key": key,
            "conditions": conditions,
        }
        head = {"kind": "header", "dataset_key": key, "conditions": conditions, "model": model}
        head |= {name: death.result[name] for name in ("status", "reason")}
        write_run(Run(head, tuple(rows)), out_dir / SAMPLES)
        write_json(out_dir / "accuracy.json", death.result)
        raise
    finally:
        journal.close(finished=finished)


def _check_room(name: str, settings: EvalSettings, limit: int, url: str) -> None:
    budget = configs(name, settings)[0]["generation_kwargs"]["max_gen_toks"]
    needed = budget + (max(settings.lengths, default=4096) if TASKS[name].sized else 0)
    if needed > limit:
        raise Refused(
            f"{url}: serves at most {limit} tokens; {name} needs {needed} ({budget} of them to think and answer)"
        )


def _ask(
    name: str,
    url: str,
    model: str,
    tokenizer_dir: Path | str,
    settings: EvalSettings,
    limit: int,
    journal: Journal,
    documents: Callable[[str], Any] | None,
) -> dict[str, Any]:
    import lm_eval
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    from pipeline.evals.client import RecordedChat, Transport
    from pipeline.evals.runner import closed_stdin

    benchmark, specs = TASKS[name], configs(name, settings)
    metadata: dict[str, Any] = {"tokenizer": str(tokenizer_dir)}
    if benchmark.sized:
        metadata["max_seq_lengths"] = list(settings.lengths) or [4096]
    elif benchmark.subset:
        metadata["max_seq_lengths"] = benchmark.subset
    if documents is not None:
        specs = [spec | {"custom_dataset": lambda task=spec["task"], **_: documents(task)} for spec in specs]
    transport = Transport.of(settings, url, journal)
    client = RecordedChat(transport, url=url, model=model, max_model_len=limit)
    folder = Path(lm_eval.tasks.__file__).parent / benchmark.folder
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    with closed_stdin():
        # An inline group is lm-eval's way to change fields of tasks that it ships.
        try:
            loaded = manager.load({"group": name, "task": specs})
        except ImportError as error:
            raise Refused(f"{name}: {error}") from None
        return lm_eval.simple_evaluate(
            model=client,
            tasks=list(loaded["tasks"].values()),
            task_manager=manager,
            limit=settings.hub.limit_per_task,
            apply_chat_template=True,
            bootstrap_iters=1,
        )


def _rows(
    benchmark: Benchmark, task: str, samples: list[dict[str, Any]], journal: Journal, settings: EvalSettings
) -> list[dict]:
    from pipeline.evals.client import prompt_hash_of

    rows = []
    for sample in samples:
        prompt_hash = prompt_hash_of(sample["arguments"][0][0])
        metric = benchmark.metric or str(sample["doc"]["max_length"])
        rows.append(
            _row(task, sample, prompt_hash, float(sample[metric]), journal.records[prompt_hash], settings, benchmark)
        )
    return rows


def _row(
    task: str,
    sample: dict[str, Any],
    prompt_hash: str,
    value: float,
    record: Record,
    settings: EvalSettings,
    benchmark: Benchmark,
) -> dict[str, Any]:
    answer = visible_answer(
        record.text, record.finish_reason, thinking=settings.thinking == "always", reasoning=record.reasoning
    )
    readable = choice_of(answer or "") is not None if benchmark.choices else bool((answer or "").strip())
    result = Score(score=value, correct=value >= 1.0, hits=(value >= 1.0,), found=int(readable), complete=readable)
    outcome = classify_scored(
        result,
        answer,
        record.finish_reason,
        repeats=degeneration(record.text or record.reasoning or "") is not None,
        error=record.message if record.failure == "error" else None,
        stuck=record.failure == "stuck",
        reasoning=record.reasoning,
    )
    tokens = record.server_prompt_tokens or 0
    return {
        "id": f"{task}-{sample['doc_id']}",
        "family": task.rpartition("::")[2],
        "language": "en",
        "script": "latin",
        "length": 1 << max(0, tokens - 1).bit_length(),
        "depth": None,
        "seed": 0,
        "cluster": f"{task}-{sample['doc_id']}",
        "prompt_hash": prompt_hash,
        "text": record.text,
        "reasoning": record.reasoning,
        "finish_reason": record.finish_reason,
        "outcome": outcome.kind,
        "score": value,
        "hits": [int(result.correct)],
        "extraction_failed": result.extraction_failed,
        "repeats": outcome.repeats,
        "server_prompt_tokens": record.server_prompt_tokens,
        "generated_tokens": record.completion_tokens,
        "latency_s": round(record.latency_s, 4),
        "attempts": record.attempts,
        "message": record.message,
    }
