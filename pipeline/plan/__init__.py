"""Memory and capacity from config alone: what fits, how many sequences at which length, and what will not load and
why."""

from __future__ import annotations

from pipeline.plan.alternatives import plan
from pipeline.plan.predict import Comparison, compare, compare_predicted, predicted
from pipeline.plan.request import Overrides
from pipeline.plan.result import PlanResult, Refusal

__all__ = [
    "Comparison",
    "Overrides",
    "PlanResult",
    "Refusal",
    "compare",
    "compare_predicted",
    "plan",
    "predicted",
]
