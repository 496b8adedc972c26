"""The generated data set as lm-eval tasks: one a family, language and length, each with its own score and standard
error.
"""

from __future__ import annotations

from typing import Any

from pipeline.evals.dataset import Item
from pipeline.evals.scoring import score


def task_name(item: Item) -> str:
    """The lm-eval task that holds ``item``."""
    return f"longctx_{item.family}_{item.language}_{item.length}"


def build(items: list[Item]) -> list:
    """lm-eval task objects for ``items``; the prompt reaches the model as it stands, whatever the family."""
    from lm_eval.api.task import ConfigurableTask

    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(task_name(item), []).append(item)
    return [ConfigurableTask(config=_config(name, group)) for name, group in groups.items()]


def _config(name: str, group: list[Item]) -> dict[str, Any]:
    by_id = {item.id: item for item in group}
    # A task has one budget; answers in natural language differ by a few tokens, and the largest does for all.
    budget, (until,) = max(item.max_gen_toks for item in group), {item.until for item in group}

    def rows(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list([{"id": item.id, "prompt": item.prompt} for item in group])}

    def process(doc: dict, results: list[str]) -> dict[str, float]:
        result = score(results[0], by_id[doc["id"]])
        return {"correct": float(result.correct), "score": result.score}

    return {
        "task": name,
        "custom_dataset": rows,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": lambda doc: doc["prompt"],
        "doc_to_target": lambda doc: " ".join(by_id[doc["id"]].targets),
        "process_results": process,
        "num_fewshot": 0,
        "generation_kwargs": {"do_sample": False, "temperature": 0.0, "max_gen_toks": budget, "until": list(until)},
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("correct", "score")
        ],
        "metadata": {"version": 1.0},
    }
