"""lm-eval's long-context benchmarks and what of their arguments is overridden for a model that thinks.

As shipped, these tasks starve such a model: budgets of 16 to 128 tokens, stop strings that fire inside the thinking, an
assistant prefix that becomes a turn of its own on a chat endpoint, or log-likelihoods that a chat endpoint does not
give.  What is overridden, and only that, is in :func:`configs`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Refused
from pipeline.evals.settings import EvalSettings

NO_STOP: list[str] = []
CHOICE = re.compile(r"(?i:answer\s*(?:is|:))[\s*:]*\(?([A-D])\b")
LONE_CHOICE = re.compile(r"(?<![A-Za-z])\(?([A-D])\)?(?![A-Za-z])")


@dataclass(frozen=True)
class Benchmark:
    """lm-eval tasks that take the same arguments."""

    folder: str
    """Where lm-eval keeps them: reading only that folder saves indexing some 14,000 other tasks."""
    tasks: tuple[str, ...]
    answer_tokens: int
    metric: str | None
    """The score in [0, 1] of one document; ``None``: the metric is named after the document's length (RULER)."""
    sized: bool = False
    """Generates its own documents of ``eval.lengths`` tokens with the served tokenizer."""
    choices: bool = False
    """Multiple choice by log-likelihood in lm-eval; asked as a question here."""
    subset: str | None = None


TASKS = {
    "ruler": Benchmark(
        "ruler",
        (
            "niah_single_1",
            "niah_multikey_2",
            "niah_multikey_3",
            "niah_multivalue",
            "niah_multiquery",
            "ruler_vt",
            "ruler_cwe",
            "ruler_fwe",
            "ruler_qa_squad",
            "ruler_qa_hotpot",
        ),
        512,
        None,
        sized=True,
    ),
    "longbench2": Benchmark("longbench2", ("longbench2",), 256, "acc", choices=True),
    "graphwalks_128k": Benchmark("graphwalks", ("graphwalks_128k",), 8192, "flexible_f1"),
    "graphwalks_1M": Benchmark("graphwalks", ("graphwalks_1M",), 8192, "flexible_f1"),
    "babilong_32k": Benchmark("babilong", ("babilong_longctx",), 128, "acc", subset="32k"),
    "babilong_128k": Benchmark("babilong", ("babilong_longctx",), 128, "acc", subset="128k"),
}


def configs(name: str, settings: EvalSettings) -> list[dict[str, Any]]:
    """The overrides of every task of benchmark ``name``.  Raises :class:`Refused` for an unknown benchmark."""
    if name not in TASKS:
        raise Refused(f"eval.hub.tasks: no benchmark {name!r}; there are {', '.join(TASKS)}")
    benchmark = TASKS[name]
    override: dict[str, Any] = {
        "generation_kwargs": {
            "do_sample": False,
            "temperature": 0.0,
            "until": NO_STOP,
            "max_gen_toks": settings.thinking_budget_tokens + benchmark.answer_tokens,
        },
    }
    if benchmark.sized:
        from lm_eval.tasks.ruler.common_utils import aggregate_metrics

        override["gen_prefix"] = None  # on a chat endpoint it would be a turn of the assistant, answered by another one
        override["metric_list"] = [
            {"metric": str(length), "aggregation": aggregate_metrics, "higher_is_better": True}
            for length in sorted({4096, *settings.lengths})
        ]
    if benchmark.choices:
        override |= {
            "output_type": "generate_until",
            "process_results": score_choice,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    return [{"task": task} | override for task in benchmark.tasks]


def choice_of(answer: str) -> str | None:
    """The letter chosen: the last one that is called the answer, else the last that stands alone."""
    found = CHOICE.findall(answer) or LONE_CHOICE.findall(answer)
    return found[-1].upper() if found else None


def score_choice(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Accuracy of one multiple-choice document; its answer is a letter or an index."""
    answer = doc["answer"]
    expected = "ABCD"[answer] if isinstance(answer, int) else str(answer).strip().upper()
    return {"acc": float(choice_of(results[0]) == expected)}
