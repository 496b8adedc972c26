"""What a bench measures and what makes a measurement untrustworthy.  All thresholds are parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.errors import Refused, Unreadable
from pipeline.files import sha256_file

SEED_STRIDE = 1_000_003
"""Seeds of two points differ by multiples of this prime: fresh prompts for each, also when a seed is bumped by one."""
DATASETS = ("random", "shared_prefix")
CACHES = ("cold", "shared", "warm")
SLO = {"ttft": "slo_ttft_ms", "tpot": "slo_tpot_ms", "e2el": "slo_e2el_ms"}
"""vllm's name of a latency in ``--goodput`` -> ours."""
LISTS = ("concurrency", "request_rate")
EXACTLY = ConfigDict(strict=True, allow_inf_nan=False)
"""No text where a number belongs, and no NaN: no figure is ever above it, so that it would switch a guard off."""


@dataclass(frozen=True)
class Load:
    """How the requests of one point arrive.

    ``concurrency``: a closed loop, ``value`` requests in flight.  ``request_rate``: an open loop, ``value``
    requests/s as a Poisson process whatever the server does.  ``trace``: an open loop at the times of the trace file;
    ``value`` is 0.
    """

    kind: str
    value: float = 0.0

    @property
    def name(self) -> str:
        """For file names and messages: ``c8``, ``q2.5``, ``trace``."""
        return "trace" if self.kind == "trace" else f"{'c' if self.kind == 'concurrency' else 'q'}{self.value:g}"

    @property
    def open_loop(self) -> bool:
        return self.kind != "concurrency"


def headline(loads: Iterable[Load]) -> Load:
    """The highest concurrency, else the highest request rate, else the trace."""
    by_kind = {load.kind: load for load in sorted(loads, key=lambda load: load.value)}
    return next(by_kind[kind] for kind in ("concurrency", "request_rate", "trace") if kind in by_kind)


@dataclass(frozen=True)
class BenchSettings:
    """One workload at several loads.  Lengths are in tokens."""

    workload: str = "short"
    """Name of the workload, one of conf/bench/workload."""
    dataset: str = "random"
    """``random``: unrelated prompts.  ``shared_prefix``: ``num_prefixes`` prefixes of ``prefix_len`` in turn, each with
    continuations of ``input_len``."""
    input_len: int = 256
    output_len: int = 32
    range_ratio: float = 0.0
    """Lengths are uniform in length * (1 - r) .. length * (1 + r); ``random`` only."""
    prefix_len: int = 0
    num_prefixes: int = 1
    concurrency: tuple[int, ...] = (1, 8)
    num_prompts_per_concurrency: int = 4
    """Prompts of a timed run, times the concurrency."""
    warmup_prompts_per_concurrency: int = 1
    """Prompts of the untimed run before, times the concurrency."""
    request_rate: tuple[float, ...] = ()
    """Requests/s of the open-loop points."""
    num_prompts_per_rate: int = 32
    """Prompts of a timed open-loop run."""
    warmup_prompts_per_rate: int = 8
    trace: str | None = None
    """A trace file to replay (:mod:`pipeline.bench.trace`): its times and lengths, prompts synthesized to them."""
    trace_time_scale: float = 1.0
    """Arrival times are multiplied by this: 0.5 is twice the rate."""
    trace_length_scale: float = 1.0
    """Prompt and output lengths, and the length of a shared block, are multiplied by this."""
    trace_block_tokens: int = 512
    """Tokens that one shared-prefix id of the trace stands for (Mooncake: 512)."""
    trace_requests: int | None = None
    """Only the first so many requests."""
    min_prompts: int = 4
    """Prompts of any run, timed or not, at least: at concurrency 1 the numbers above are too few."""
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_e2el_ms: float | None = None
    """Latency limits; goodput counts the requests that keep all of those given."""
    repeats: int = 3
    max_repeats: int = 5
    """A point whose repeats do not agree is measured again, up to so often; every repeat counts."""
    seed: int = 0
    min_repeats: int = 3
    max_spread: float = 0.15
    """Largest interquartile range / median of output tokens/s over the repeats of one point."""
    min_itl_ms: float = 0.05
    """A median inter-token latency below this is no decoding step but a burst of chunks."""
    max_coalesced: float = 0.1
    """Largest share of output tokens that may arrive in one chunk with another."""
    max_late_ms: float = 100.0
    """Most that the median request of a trace may be sent later than the trace says: beyond it the loop is not open."""
    cache: str = "cold"
    """``cold``: the prefix cache is reset before each run and must not hit.  ``shared``: it is reset, and hits within
    a run belong to the workload (unrelated prompts must still not hit).  ``warm``: it is never reset."""
    client_timeout_s: float = 3600.0
    """Longest time of one timed run."""

    def __post_init__(self) -> None:
        for name, known in (("dataset", DATASETS), ("cache", CACHES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: one of {', '.join(known)}")
        if not self.loads:
            raise ValueError("nothing to measure: concurrency, request_rate and trace are all empty")
        for name in LISTS:
            values = getattr(self, name)
            if len(set(values)) != len(values) or any(value <= 0 for value in values):
                raise ValueError(f"{name} {list(values)}: needs distinct numbers above 0")
        if any(value < 1 or value != int(value) for value in self.concurrency):
            raise ValueError(f"concurrency {list(self.concurrency)}: needs distinct numbers of at least 1")
        for name in (
            "input_len",
            "output_len",
            "num_prefixes",
            "num_prompts_per_concurrency",
            "warmup_prompts_per_concurrency",
            "num_prompts_per_rate",
            "warmup_prompts_per_rate",
            "trace_block_tokens",
            "min_prompts",
            "repeats",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        if self.trace_requests is not None and self.trace_requests < 1:
            raise ValueError(f"trace_requests: {self.trace_requests} is less than 1; null takes the whole trace")
        for name in ("trace_time_scale", "trace_length_scale", "client_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio: {self.range_ratio} is not in [0, 1)")
        if self.max_repeats < self.repeats:
            raise ValueError(f"max_repeats: {self.max_repeats} is less than repeats, {self.repeats}")
        if self.output_len < 2:
            raise ValueError("output_len: time per output token needs at least 2 tokens")
        self._check_sharing()

    def _check_sharing(self) -> None:
        if (self.dataset == "shared_prefix") != (self.prefix_len >= 1):
            raise ValueError(f"prefix_len: {self.prefix_len} does not go with dataset {self.dataset!r}")
        shares = self.trace is not None or self.dataset == "shared_prefix"
        if shares and self.cache == "cold":
            raise ValueError("cache: the workload shares prefixes, so that a cold cache is impossible; use 'shared'")

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> BenchSettings:
        """From the ``bench`` group of params.yaml.  Raises ``ValueError`` naming an unknown key or a wrong value."""
        if not isinstance(params, Mapping):
            raise ValueError(f"{params!r:.80} is no group of keys and values")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(params) - known):
            raise ValueError(f"unknown keys {unknown}; known are {sorted(known)}")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
        types = get_type_hints(cls)
        for name, value in values.items():
            try:
                TypeAdapter(types[name], config=EXACTLY).validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{name} {value!r:.80}: {error.errors()[0]['msg']}") from None
        return cls(**values)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request of the closed loops and rates, its answer and one special token included."""
        lengths = self.prefix_len + self.input_len + self.output_len
        return 1 + math.floor(lengths * (1 + self.range_ratio))

    @property
    def loads(self) -> list[Load]:
        """The points, in the order measured."""
        closed = [Load("concurrency", value) for value in self.concurrency]
        return [
            *closed,
            *(Load("request_rate", value) for value in self.request_rate),
            *([Load("trace")] if self.trace else []),
        ]

    @property
    def headline(self) -> Load:
        """The point whose figures stand for the bench."""
        return headline(self.loads)

    def prompts(self, load: Load) -> int:
        """Prompts of one timed run; of a trace, at most so many (0: all of its requests)."""
        if load.kind == "trace":
            return self.trace_requests or 0
        if load.kind == "request_rate":
            return max(self.min_prompts, self.num_prompts_per_rate)
        return max(self.min_prompts, self.num_prompts_per_concurrency * int(load.value))

    def warmup_prompts(self, load: Load) -> int:
        """Prompts of the untimed run before the first timed one."""
        if load.open_loop:
            return max(self.min_prompts, self.warmup_prompts_per_rate)
        return max(self.min_prompts, self.warmup_prompts_per_concurrency * int(load.value))

    def point_seed(self, repeat: int, load: Load) -> int:
        """Seed of one run's random prompts: another one for every run of a bench."""
        index = repeat * len(self.loads) + self.loads.index(load) + 1
        return (self.seed * 1000 + index) * SEED_STRIDE % 2**31

    @property
    def slo(self) -> dict[str, float]:
        """The latency limits that are set, in ms, by vllm's names."""
        return {theirs: getattr(self, ours) for theirs, ours in SLO.items() if getattr(self, ours) is not None}

    def workload_key(self) -> dict[str, Any]:
        """The part that must be equal for two results to be comparable (thresholds and the time-out are not).

        A trace counts by its content.  Raises :class:`Unreadable` when the trace file is missing.
        """
        left_out = (
            "repeats",
            "max_repeats",
            "min_repeats",
            "max_spread",
            "min_itl_ms",
            "max_coalesced",
            "max_late_ms",
            "client_timeout_s",
            "warmup_prompts_per_concurrency",
            "warmup_prompts_per_rate",
            "trace",
        )
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        for name in LISTS:
            values[name] = list(values[name])
        if self.trace and not Path(self.trace).is_file():
            raise Unreadable(f"{self.trace}: no such trace file (bench.trace)")
        return values | {"trace_sha256": sha256_file(self.trace) if self.trace else None}


def parse(raw: Any) -> BenchSettings:
    """The ``bench`` group.  Raises :class:`Refused` naming each wrong key and value."""
    try:
        return BenchSettings.from_params(raw)
    except ValueError as error:
        raise Refused(f"params.yaml, group bench: {error}") from None
