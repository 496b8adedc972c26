"""What the shards hold, from their safetensors headers, against what config.json implies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint import Checkpoint
from pipeline.plan.request import Model
from pipeline.plan.result import Refusal
from pipeline.plan.schemes import SCHEMES, storage_rule
from pipeline.plan.weights import checkpoint_weights

TOLERANCE = 0.005


@dataclass(frozen=True)
class Stored:
    """Totals of a checkpoint's headers."""

    tensors: int
    shards: int
    bytes: int
    by_dtype: dict[str, int]
    expected_bytes: int
    problems: tuple[str, ...]

    @property
    def refusals(self) -> list[Refusal]:
        """Shards that cannot be read or are missing, and a total that the config cannot explain (0.5 %)."""
        found = [Refusal("shards", problem) for problem in self.problems]
        if not self.problems and abs(self.bytes - self.expected_bytes) > TOLERANCE * self.expected_bytes:
            found.append(
                Refusal(
                    "headers",
                    f"the shards hold {self.bytes:,} B in {self.tensors:,} tensors, config.json implies "
                    f"{self.expected_bytes:,} B ({self.bytes / self.expected_bytes:.3f} times): one of them is of "
                    "another model",
                )
            )
        return found


def read_stored(model: Model) -> Stored:
    """Read every header of the model's directory.  Raises :class:`~pipeline.errors.Unreadable` where there are no
    shards.

    A million tensors take some ten seconds; no weight is read.
    """
    checkpoint = Checkpoint.open(model.directory or Path(model.name))
    sizes: Counter[str] = Counter()
    count = 0
    for header in checkpoint.headers.values():
        for tensor in header.tensors.values():
            sizes[tensor.dtype] += tensor.size_bytes
            count += 1
    problems = [f"{name}: {reason}" for name, reason in checkpoint.broken.items()]
    if checkpoint.index is not None:
        missing = sorted(set(checkpoint.index.values()) - set(checkpoint.headers) - set(checkpoint.broken))
        if missing:
            problems.append(f"the index names {len(missing)} shards that are not there: {', '.join(missing[:5])}")
    expected = checkpoint_weights(model.facts, storage_rule(model.config, model.facts, SCHEMES["native"])).total
    return Stored(count, len(checkpoint.headers), sum(sizes.values()), dict(sizes), expected, tuple(problems))
