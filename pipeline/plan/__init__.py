"""Memory and capacity from config alone: what fits, how many sequences at which length, and what will not load and why."""

from __future__ import annotations

from pipeline.plan.alternatives import plan
from pipeline.plan.result import PlanResult, Refusal

__all__ = ["PlanResult", "Refusal", "plan"]
