"""Facts of an architecture, read from ``config.json`` alone: layers, shapes, fused sets, sharding.  No weight is
opened.

Standard library only: the planner answers in well under a second.
"""

from __future__ import annotations

from pipeline.k3.config import (
    SourceFormat,
    declared_quantizations,
    kv_cache_scheme,
    read_config,
    source_format,
    text_config,
)
from pipeline.k3.facts import LayerKind, ModelFacts, ignore_patterns_without_match, model_facts
from pipeline.k3.tensors import Role, Shard, Tensor

__all__ = [
    "LayerKind",
    "ModelFacts",
    "Role",
    "Shard",
    "SourceFormat",
    "Tensor",
    "declared_quantizations",
    "ignore_patterns_without_match",
    "kv_cache_scheme",
    "model_facts",
    "read_config",
    "source_format",
    "text_config",
]
