"""What a bench measures and what makes a measurement untrustworthy.  All thresholds are parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

SEED_STRIDE = 1_000_003
"""Seeds of two points differ by multiples of this prime: fresh random prompts for each, also when a seed is bumped by one."""


@dataclass(frozen=True)
class BenchSettings:
    """One workload at several concurrencies.  Lengths are in tokens."""

    workload: str = "random"
    input_len: int = 256
    output_len: int = 32
    concurrency: tuple[int, ...] = (1, 8)
    num_prompts_per_concurrency: int = 4
    """Prompts of a timed run, times the concurrency."""
    warmup_prompts_per_concurrency: int = 1
    """Prompts of the untimed run before, times the concurrency; at least one."""
    repeats: int = 3
    seed: int = 0
    min_repeats: int = 3
    max_spread: float = 0.25
    """Largest (max - min) / median of output tokens/s over the repeats of one concurrency."""
    min_itl_ms: float = 0.05
    """A median inter-token latency below this is no decoding step but a burst of chunks."""
    max_coalesced: float = 0.1
    """Largest share of output tokens that may arrive in one chunk with another."""
    cache: str = "cold"
    """``cold``: the prefix cache is reset before each run and must not hit.  ``warm``: hits are part of the workload."""
    client_timeout_s: float = 3600.0
    """Longest time of one timed run."""

    def __post_init__(self) -> None:
        if self.workload != "random":
            raise ValueError(f"workload {self.workload!r}: only 'random' is known")
        if self.cache not in ("cold", "warm"):
            raise ValueError(f"cache {self.cache!r}: 'cold' or 'warm'")
        if not self.concurrency or min(self.concurrency) < 1 or len(set(self.concurrency)) != len(self.concurrency):
            raise ValueError(f"concurrency {list(self.concurrency)}: needs distinct numbers of at least 1")
        for name in ("input_len", "output_len", "num_prompts_per_concurrency", "warmup_prompts_per_concurrency", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        if self.output_len < 2:
            raise ValueError("output_len: time per output token needs at least 2 tokens")

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> BenchSettings:
        """From the ``bench`` group of params.yaml.  Raises ``ValueError`` naming an unknown key or a wrong value."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(params) - known):
            raise ValueError(f"unknown keys {unknown}; known are {sorted(known)}")
        values = dict(params)
        if "concurrency" in values:
            values["concurrency"] = tuple(values["concurrency"])
        return cls(**values)

    def workload_key(self) -> dict[str, Any]:
        """The part that must be equal for two results to be comparable (thresholds and the time-out are not)."""
        names = ("workload", "input_len", "output_len", "concurrency", "num_prompts_per_concurrency", "repeats", "seed", "cache")
        return {name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(self).items() if name in names}
