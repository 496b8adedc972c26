"""What a tuning run varies, and around what.  Exactly one axis moves in a point; anything else is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pipeline import params
from pipeline.bench.settings import BenchSettings
from pipeline.errors import Refused
from pipeline.variant import Variant

SERVER_AXES = (
    "block_size",
    "prefix_match_unit",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
)
"""Axes that are a field of ServerSettings, in the order in which a deployment decides them; then cache and weights."""
AXES = (*SERVER_AXES[:2], "kv", *SERVER_AXES[2:], "quant")
UNDER_TEST = (*SERVER_AXES, "kv_cache_dtype", "state_dtype")
"""Server settings that the comparability key leaves out: points of one run compare with one another."""
OBJECTIVES = ("output_tok_s", "total_tok_s", "request_throughput", "goodput_requests_s")
PAIRINGS = ("together", "alternate")
ENGINE_DEFAULTS = {"long_prefill_token_threshold": 0}


@dataclass(frozen=True)
class Point:
    """The baseline with one axis moved; ``axis`` is None for the baseline itself."""

    axis: str | None = None
    value: Any = None

    @property
    def name(self) -> str:
        return "baseline" if self.axis is None else f"{self.axis}={self.value}"


@dataclass(frozen=True)
class TuningSettings:
    """The ``tuning`` group of tuning/params.yaml."""

    variant: str = "native-auto"
    """Weights and cache of the baseline."""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the baseline that differ from the hardware file's, by axis."""
    baseline_name: str = "default"
    axes: Mapping[str, list] = field(default_factory=dict)
    """Axis -> values to try.  The baseline's own value is a point of every axis and is measured once."""
    points: tuple[Mapping[str, Any], ...] = ()
    """Further points, each a mapping of one axis to its value."""
    bench: BenchSettings = field(default_factory=BenchSettings)
    objective: str = "output_tok_s"
    """Figure that is to be as large as possible; of the workload's headline point."""
    knee_tolerance: float = 0.05
    """The knee is the smallest setting whose median is within this of the best."""
    confidence: float = 0.95
    """Of every interval of a difference."""
    probe_families: tuple[str, ...] = ("single", "multi_key", "multi_value")
    probe_items: int = 4
    """Questions of each family that every point must answer; 0: no probe."""
    max_accuracy_loss: float = 0.1
    """A point whose probe falls by more than this against the baseline's is not recommended."""
    pairs: int = 6
    """Pairs of runs, recommendation and default in alternating order."""
    pair_servers: str = "together"
    """``together``: both servers are up, one idle.  ``alternate``: each run starts its server afresh (one GPU)."""

    def __post_init__(self) -> None:
        Variant.parse(self.variant)
        for name, known in (("objective", OBJECTIVES), ("pair_servers", PAIRINGS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: one of {', '.join(known)}")
        for where, names in (("axes", self.axes), ("baseline", self.baseline)):
            if unknown := sorted(set(names) - set(AXES if where == "axes" else SERVER_AXES)):
                raise ValueError(f"{where}: {unknown} cannot be varied; known are {', '.join(AXES)}")
        if self.pairs < 3:
            raise ValueError(f"pairs: {self.pairs} is less than 3: no interval")
        if not 0 < self.confidence < 1 or not 0 <= self.knee_tolerance < 1:
            raise ValueError("confidence must lie in (0, 1) and knee_tolerance in [0, 1)")
        if self.bench.repeats < 2:
            raise ValueError("bench.repeats: a difference needs at least 2 repeats for its interval")
        if self.bench.repeats < self.bench.min_repeats:
            raise ValueError(
                f"bench.repeats {self.bench.repeats} is below bench.min_repeats {self.bench.min_repeats}: every point "
                "would be invalid"
            )
        if self.objective == "goodput_requests_s" and not self.bench.slo:
            raise ValueError("objective goodput_requests_s: bench has no slo_..._ms")

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> TuningSettings:
        """From the ``tuning`` group.  Raises ``ValueError`` naming a wrong key or value, :class:`Refused` for a point
        that moves no or several axes."""
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(params) - known):
            raise ValueError(f"unknown keys {unknown}; known are {sorted(known)}")
        values = dict(params)
        for name in ("points", "probe_families"):
            if name in values:
                values[name] = tuple(values[name])
        if "bench" in values:
            values["bench"] = BenchSettings.from_params(values["bench"])
        settings = cls(**values)
        for point in settings.points:
            one_axis(point)
        return settings


def one_axis(moved: Mapping[str, Any]) -> Point:
    """The point that a mapping of axes to values describes.  Raises :class:`Refused` unless exactly one axis moves."""
    if unknown := sorted(set(moved) - set(AXES)):
        raise Refused(f"tuning.points: {unknown} cannot be varied; known are {', '.join(AXES)}")
    if len(moved) != 1:
        raise Refused(
            f"tuning.points: {dict(moved)} moves {len(moved)} axes; an ablation moves exactly one, else no difference "
            "can be put down to a setting.  Write one point for each, or change tuning.baseline"
        )
    [(axis, value)] = moved.items()
    return Point(axis, value)


def expand(settings: TuningSettings, baseline: Mapping[str, Any]) -> list[Point]:
    """Baseline first, then every point in the order of the axes; values that are the baseline's own appear once.

    ``baseline``: its value on each axis.  Raises :class:`Refused` as :func:`one_axis` does.
    """
    points = {Point(): None}
    wanted = [Point(axis, value) for axis in AXES for value in settings.axes.get(axis, [])]
    wanted += [one_axis(point) for point in settings.points]
    for point in wanted:
        own = baseline.get(point.axis)
        if point.value != (ENGINE_DEFAULTS.get(point.axis) if own is None else own):
            points[point] = None
    return sorted(points, key=lambda point: -1 if point.axis is None else AXES.index(point.axis))


def in_order(axes: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping by axis in the order of the deployment: files keep no order."""
    return {axis: axes[axis] for axis in AXES if axis in axes}


def parse(raw: Mapping[str, Any], where: object) -> TuningSettings:
    """The ``tuning`` group, checked.  Raises :class:`Refused` naming ``where``, for a point that moves two axes too."""
    try:
        return TuningSettings.from_params(raw)
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{where}: {error}") from None


def read(path: Path) -> TuningSettings:
    """:func:`parse` of a parameter file."""
    return parse(params.load("tuning", path), path)
