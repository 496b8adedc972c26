"""The groups of params.yaml and who parses each; a wrong key or value is found before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat


class Group(BaseModel):
    """A group whose unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Group):
    """Which model, and where its shards are."""

    name: str
    path: str
    repo: str | None
    revision: str | None
    trust_remote_code: bool
    reference_scores: str | None
    cache_below_gib: PositiveFloat


class KvSetting(Group):
    """One KV cache setting: dtype of the attention cache and of the recurrent state."""

    cache_dtype: str
    state_dtype: Literal["auto", "float32", "bfloat16"]
