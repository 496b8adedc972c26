"""What a bench measures and what makes a measurement untrustworthy.  All thresholds are parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

SEED_STRIDE = 1_000_003
"""Seeds of two points differ by multiples of this prime: fresh prompts for each, also when a seed is bumped by one."""


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
    """Prompts of the untimed run before, times the concurrency."""
    min_prompts: int = 4
    """Prompts of any run, timed or not, at least: at concurrency 1 the two numbers above are too few."""
    repeats: int = 3
    max_repeats: int = 5
    """A concurrency whose repeats do not agree is measured again, up to so often; every repeat counts."""
    seed: int = 0
    min_repeats: int = 3
    max_spread: float = 0.15
    """Largest interquartile range / median of output tokens/s over the repeats of one concurrency."""
    min_itl_ms: float = 0.05
    """A median inter-token latency below this is no decoding step but a burst of chunks."""
    max_coalesced: float = 0.1
    """Largest share of output tokens that may arrive in one chunk with another."""
    cache: str = "cold"
    """``cold``: the prefix cache is reset before each run and must not hit.  ``warm``: hits belong to the workload."""
    client_timeout_s: float = 3600.0
    """Longest time of one timed run."""

    def __post_init__(self) -> None:
        if self.workload != "random":
            raise ValueError(f"workload {self.workload!r}: only 'random' is known")
        if self.cache not in ("cold", "warm"):
            raise ValueError(f"cache {self.cache!r}: 'cold' or 'warm'")
        if not self.concurrency or min(self.concurrency) < 1 or len(set(self.concurrency)) != len(self.concurrency):
            raise ValueError(f"concurrency {list(self.concurrency)}: needs distinct numbers of at least 1")
        for name in (
            "input_len",
            "output_len",
            "num_prompts_per_concurrency",
            "warmup_prompts_per_concurrency",
            "min_prompts",
            "repeats",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        if self.max_repeats < self.repeats:
            raise ValueError(f"max_repeats: {self.max_repeats} is less than repeats, {self.repeats}")
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

    def prompts(self, concurrency: int) -> int:
        """Prompts of one timed run."""
        return max(self.min_prompts, self.num_prompts_per_concurrency * concurrency)

    def warmup_prompts(self, concurrency: int) -> int:
        """Prompts of the untimed run before the first timed one."""
        return max(self.min_prompts, self.warmup_prompts_per_concurrency * concurrency)

    def point_seed(self, repeat: int, concurrency: int) -> int:
        """Seed of one run's random prompts: another one for every run of a bench."""
        index = repeat * len(self.concurrency) + self.concurrency.index(concurrency) + 1
        return (self.seed * 1000 + index) * SEED_STRIDE % 2**31

    def workload_key(self) -> dict[str, Any]:
        """The part that must be equal for two results to be comparable (thresholds and the time-out are not)."""
        names = (
            "workload",
            "input_len",
            "output_len",
            "concurrency",
            "num_prompts_per_concurrency",
            "min_prompts",
            "seed",
            "cache",
        )
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name in names
        }
