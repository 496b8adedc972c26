"""Everything that can be decided, and refused, before a byte is written: what each shard becomes, in which order, how
large.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import files
from pipeline.checkpoint import Checkpoint, layout
from pipeline.checkpoint.headers import ITEM_BITS, Tensor, build_header, tensor_bytes
from pipeline.checkpoint.reading import INDEX, MANIFEST
from pipeline.errors import Refused
from pipeline.quant import config, nvfp4, schemes, scope
from pipeline.checkpoint.numbers import E8M0_BIAS, E8M0_NAN
from pipeline.quant.recipe import Recipe
from pipeline.quant.scope import Module


@dataclass(frozen=True)
class Copy:
    """Carry a tensor's bytes as they are."""

    tensor: Tensor


@dataclass(frozen=True)
class Convert:
    """Re-encode a module.  ``scale_shard`` is where the E8M0 exponents lie (MXFP4), ``base`` the NVFP4 set's
    exponent.
    """

    module: Module
    weight: Tensor
    scale: Tensor | None
    scale_shard: str | None
    fallback: bool
    base: int | None


@dataclass(frozen=True)
class ShardPlan:
    """One shard's work.  ``header`` and ``outputs`` say where each output tensor goes; ``late`` ones are written
    last.
    """

    name: str
    source_bytes: int
    steps: tuple[Copy | Convert, ...]
    header: bytes
    outputs: dict[str, Tensor]
    late: tuple[str, ...]

    @property
    def target_bytes(self) -> int:
        return max((tensor.end for tensor in self.outputs.values()), default=len(self.header))

    @property
    def sha256(self) -> str:
        """Key of the shard's plan: what goes where and by which scheme.  With the source's bytes it decides the
        output's.
        """
        steps = [
            ["copy", step.tensor.name]
            if isinstance(step, Copy)
            else ["convert", step.module.name, step.fallback, step.base, step.module.dtype]
            for step in self.steps
        ]
        return files.sha256_json([self.header.decode("latin-1"), steps])


@dataclass(frozen=True)
class Plan:
    """A whole requantization: shards, the new config.json, the new index and the files that are carried along."""

    recipe: Recipe
    source: Path
    shards: tuple[ShardPlan, ...]
    config: dict[str, Any]
    index: dict[str, Any]
    auxiliary: tuple[str, ...]
    kinds: dict[str, tuple[str, int | None]] = field(default_factory=dict)

    @property
    def target_bytes(self) -> int:
        return sum(shard.target_bytes for shard in self.shards)


def scheme_of(recipe: Recipe, step: Convert) -> schemes.Scheme:
    """The scheme that a step converts with."""
    return schemes.fallback(recipe) if step.fallback else schemes.of_recipe(recipe)


def check_whole(checkpoint: Checkpoint) -> None:
    """Raise :class:`Refused` listing every way in which shards and index disagree."""
    where = str(checkpoint.directory)
    problems = [f"{name}: {reason}" for name, reason in checkpoint.broken.items()]
    index = checkpoint.index
    if index is None and len(checkpoint.headers) > 1:
        problems.append(f"{len(checkpoint.headers)} shards and no {INDEX}")
    for shard in sorted(set((index or {}).values()) - checkpoint.headers.keys() - checkpoint.broken.keys()):
        problems.append(f"{shard}: in the index, not on disk")
    for tensor, shard in (index or {}).items():
        if shard in checkpoint.headers and tensor not in checkpoint.headers[shard].tensors:
            problems.append(f"{tensor}: the index says {shard}, which does not hold it")
    owners: dict[str, str] = {}
    for shard, header in checkpoint.headers.items():
        for tensor in header.tensors:
            if tensor in owners:
                problems.append(f"{tensor}: in both {owners[tensor]} and {shard}")
            elif index is not None and tensor not in index:
                problems.append(f"{tensor}: in {shard}, not in the index")
            owners[tensor] = shard
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:20])
        raise Refused(f"{where}: {len(problems)} faults; `python3 -m pipeline verify {where}` lists all\n{listed}")


def scan_exponents(checkpoint: Checkpoint, modules: list[Module]) -> dict[str, tuple[int, int]]:
    """Read the E8M0 exponents of MXFP4 modules: (lowest, highest) of each, bias removed.

    Raises :class:`Refused` naming tensor, shard and count where one is 255, which is NaN.
    """
    ranges, bad = {}, []
    by_shard: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        if module.mxfp4:
            by_shard[checkpoint.weight_map[module.tensors[1]]].append(module)
    for shard, members in by_shard.items():
        with open(checkpoint.directory / shard, "rb", buffering=0) as stream:
            for module in members:
                scale = checkpoint.headers[shard].tensors[module.tensors[1]]
                stream.seek(scale.start)
                data = np.frombuffer(_read_exactly(stream, scale.size_bytes), np.uint8)
                low, high = int(data.min()), int(data.max())
                if high == E8M0_NAN:
                    count = int((data == E8M0_NAN).sum())
                    bad.append(
                        f"{scale.name} ({shard}): {count} of {data.size} exponents are 255, which is NaN in E8M0"
                    )
                ranges[module.name] = (low - E8M0_BIAS, high - E8M0_BIAS)
    if bad:
        raise Refused(
            f"{checkpoint.directory}: {len(bad)} scale tensors hold NaN; fetch those shards again\n"
            + "\n".join(f"  {line}" for line in bad[:20])
        )
    return ranges


def _read_exactly(stream: Any, size: int) -> bytes:
    parts = []
    while size:
        part = stream.read(size)
        if not part:
            raise Refused(f"{stream.name}: ends {size} bytes early; fetch it again")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def nvfp4_bases(checkpoint: Checkpoint, modules: list[Module], ranges: dict[str, tuple[int, int]]) -> dict[str, int]:
    """The exponent that NVFP4's top scale stands for, one for all matrices that share a global scale.

    At least ``nvfp4.LOWEST_BASE``: all-zero matrices often carry exponents of 2^-127, whose global scale is no number.
    """
    names = {module.name: module for module in modules}
    groups = [list(group) for group in layout.sets_among(names, layout.SHARED_GLOBAL_SCALE)]
    grouped = {name for group in groups for name in group}
    bases = {}
    for group in groups + [[name] for name in names if name not in grouped]:
        low, high = min(ranges[name][0] for name in group), max(ranges[name][1] for name in group)
        if high - low > nvfp4.EXACT_SPREAD:  # all-zero groups may carry any exponent: leave them out of account
            highest = [value for name in group if (value := _highest_of_nonzero(checkpoint, names[name])) is not None]
            high = max(highest, default=high)
        bases |= dict.fromkeys(group, max(high, nvfp4.LOWEST_BASE))
    return bases


def _highest_of_nonzero(checkpoint: Checkpoint, module: Module) -> int | None:
    packed = np.frombuffer(checkpoint.read(module.tensors[0]), np.uint8).reshape(-1, 16)
    exponents = np.frombuffer(checkpoint.read(module.tensors[1]), np.uint8)
    full = (packed & 0x77).any(axis=1)
    return int(exponents[full].max()) - E8M0_BIAS if full.any() else None


def plan(source: Path | str, recipe: Recipe) -> Plan:
    """Plan a requantization.  Raises :class:`Refused` (or ``Unreadable``) for everything that could not end well."""
    checkpoint = Checkpoint.open(source)
    check_whole(checkpoint)
    modules = scope.modules_of(checkpoint)
    chosen = scope.select(checkpoint, modules, recipe)
    ranges = scan_exponents(checkpoint, [module for module in modules.values() if module.mxfp4])
    if recipe.format == "nvfp4":
        floats = [module for module in chosen if not module.mxfp4]
        if floats:
            first = floats[0]
            raise Refused(
                f"{first.name} ({first.shard}) and {len(floats) - 1} more are {first.dtype}: "
                "nvfp4 takes MXFP4 weights only; use scope experts"
            )
    bases = nvfp4_bases(checkpoint, chosen, ranges) if recipe.format == "nvfp4" else {}
    fallbacks = _families_that_do_not_divide(recipe, chosen)
    converts = {
        module.name: Convert(
            module,
            checkpoint.tensor(module.tensors[0]),
            checkpoint.tensor(module.tensors[1]) if module.mxfp4 else None,
            checkpoint.weight_map[module.tensors[1]] if module.mxfp4 else None,
            module.family in fallbacks,
            bases.get(module.name),
        )
        for module in chosen
    }
    for step in converts.values():
        scheme_of(recipe, step).check(step.module.name, step.module.shape)
    _check_names(checkpoint, recipe, converts)
    shards = tuple(_plan_shard(name, checkpoint, recipe, converts) for name in checkpoint.headers)
    new_config = config.build(checkpoint, recipe, modules, converts)
    weight_map = {name: shard.name for shard in shards for name in shard.outputs}
    total = sum(tensor.size_bytes for shard in shards for tensor in shard.outputs.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    auxiliary = tuple(name for name in checkpoint.auxiliary if name not in (MANIFEST, config.PROVENANCE))
    kinds = {name: (module.kind, layout.layer_of(name)) for name, module in modules.items()}
    return Plan(recipe, Path(source), shards, new_config, index, auxiliary, kinds)


def _check_names(checkpoint: Checkpoint, recipe: Recipe, converts: dict[str, Convert]) -> None:
    """No tensor is written twice: a source may hold scales of an older quantization beside its float weights."""
    replaced, made = set(), set()
    for step in converts.values():
        replaced |= {tensor.name for tensor in (step.weight, step.scale) if tensor is not None}
        outputs = scheme_of(recipe, step).outputs(step.module.name, step.module.shape, step.module.dtype)
        made |= {name for name, _, _ in outputs}
    if twice := sorted(made & (checkpoint.tensors().keys() - replaced)):
        listed = ", ".join(f"{name} ({checkpoint.weight_map[name]})" for name in twice[:5])
        raise Refused(
            f"{checkpoint.directory}: {len(twice)} tensors have names that the output needs: {listed}; they are left "
            "over from another quantization, remove them"
        )


def _families_that_do_not_divide(recipe: Recipe, chosen: list[Module]) -> set[str]:
    """Families of which a member does not fit the recipe's scheme but all fit its fallback."""
    preferred, other = schemes.of_recipe(recipe), schemes.fallback(recipe)
    if other is preferred:
        return set()
    families = set()
    for module in chosen:
        try:
            preferred.check(module.name, module.shape)
        except Refused:
            other.check(module.name, module.shape)
            families.add(module.family)
    return families


def _plan_shard(name: str, checkpoint: Checkpoint, recipe: Recipe, converts: dict[str, Convert]) -> ShardPlan:
    header = checkpoint.headers[name]
    consumed = {step.scale.name for step in converts.values() if step.scale is not None}
    steps: list[Copy | Convert] = []
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    for tensor in header.tensors.values():
        step = converts.get(tensor.module)
        if step is not None and tensor.name == step.weight.name:
            steps.append(step)
            entries += scheme_of(recipe, step).outputs(step.module.name, step.module.shape, step.module.dtype)
        elif tensor.name not in consumed:
            steps.append(Copy(tensor))
            entries.append((tensor.name, tensor.dtype, tensor.shape))
    # Sizes that are multiples of 8 keep every tensor aligned in whatever order; the rest goes last, widest items first.
    late = sorted(
        (entry for entry in entries if tensor_bytes(entry[1], entry[2]) % 8), key=lambda entry: -ITEM_BITS[entry[1]]
    )
    late_names = {entry[0] for entry in late}
    raw, tensors = build_header([entry for entry in entries if entry[0] not in late_names] + late)
    outputs = {tensor.name: tensor for tensor in tensors}
    return ShardPlan(name, header.size_bytes, tuple(steps), raw, outputs, tuple(entry[0] for entry in late))


def rows_of(step: Convert, scheme: schemes.Scheme, chunk_weights: int) -> Iterator[tuple[int, int]]:
    """Row ranges of whole regions, each about ``chunk_weights`` weights."""
    rows = step.module.shape[0]
    columns = math.prod(step.module.shape[1:])
    height = max(1, chunk_weights // max(1, columns * scheme.region_rows)) * scheme.region_rows
    for start in range(0, rows, height):
        yield start, min(start + height, rows)
