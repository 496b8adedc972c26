"""Resume: which shards, and which whole targets, an earlier run has finished and still hold."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.checkpoint import manifest
from pipeline.checkpoint.manifest import same_file
from pipeline.checkpoint.reading import CONFIG, MANIFEST
from pipeline.errors import Unreadable
from pipeline.quant.config import PROVENANCE
from pipeline.quant.damage import Damage
from pipeline.quant.planning import Plan, ShardPlan
from pipeline.quant.recipe import Recipe

RECORDS, OUTPUT, LOCK = "records", "checkpoint", "lock"  # inside the work directory


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def stamp_of(path: Path) -> dict[str, int]:
    """Size and modification time: when they have not changed, a file is taken for the same."""
    stat = path.stat()
    return {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def finished_target(plan: Plan, target: Path, expected: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The report of a target that an earlier run finished from the same bytes by the same recipe and plan, else
    ``None``.
    """
    try:
        provenance = files.read_json(target / PROVENANCE)
        built = files.read_json(target / MANIFEST)
        if provenance["recipe_sha256"] != plan.recipe.sha256:
            return None
        sources = manifest.entries(provenance["source"])
        sizes = {name: entry["size_bytes"] for name, entry in manifest.entries(built).items()}
        if sizes != {name: (target / name).stat().st_size for name in manifest.listed_files(target)}:
            return None
        for shard in plan.shards:
            with open(target / shard.name, "rb") as stream:
                if stream.read(len(shard.header)) != shard.header:
                    return None
            known = expected.get(shard.name) or {"sha256": files.sha256_file(plan.source / shard.name)}
            if sources[shard.name]["sha256"] != known["sha256"]:
                return None
        if sources.keys() != {shard.name for shard in plan.shards} or files.read_json(target / CONFIG) != plan.config:
            return None
        if not all(same_file(plan.source / name, target / name) for name in plan.auxiliary):
            return None
    except (Unreadable, OSError, KeyError, TypeError):
        return None
    return {"status": "valid", "reason": None} | provenance | built


def finished_shard(plan: Plan, shard: ShardPlan, work: Path) -> dict[str, Any] | None:
    """The record of a finished shard, if it still holds: same recipe, same plan, same source bytes, output in place."""
    path, output, source = work / RECORDS / f"{shard.name}.json", work / OUTPUT / shard.name, plan.source / shard.name
    if not path.exists() or not output.exists():
        return None
    try:
        return _checked(files.read_json(path), plan, shard, output, source)
    except (Unreadable, KeyError, TypeError):  # a record that did not reach the disk, or of another version
        return None


def _checked(record: Any, plan: Plan, shard: ShardPlan, output: Path, source: Path) -> dict[str, Any] | None:
    if record["recipe_sha256"] != plan.recipe.sha256 or record["plan_sha256"] != shard.sha256:
        return None
    stamp = stamp_of(source)
    touched = {key: record["source"][key] for key in stamp} != stamp
    if touched and files.sha256_file(source) != record["source"]["sha256"]:
        return None
    if output.stat().st_size != record["target"]["size_bytes"]:
        return None
    # What was written before a power failure may not have reached the disk, whatever its size says.
    if record["boot_id"] != _boot_id() and files.sha256_file(output) != record["target"]["sha256"]:
        return None
    return record


def write(
    work: Path, shard: ShardPlan, recipe: Recipe, source_stamp: dict[str, int], result: dict[str, Any]
) -> dict[str, Any]:
    """Put a shard that :func:`~pipeline.quant.streaming.convert_shard` has written on record.

    The worker itself does so, before it takes another shard: a kill loses no more than what is in flight.
    """
    record = {
        "recipe_sha256": recipe.sha256,
        "plan_sha256": shard.sha256,
        "boot_id": _boot_id(),
        "source": source_stamp | {"sha256": result["source_sha256"]},
        "target": {"size_bytes": result["target_bytes"], "sha256": result["target_sha256"]},
        "damage": {module: asdict(damage) for module, damage in result["damage"].items()},
    }
    files.write_json(work / RECORDS / f"{shard.name}.json", record)
    return record


def damage_of(record: dict[str, Any]) -> dict[str, Damage]:
    """The damage of each module, as it was recorded."""
    return {module: Damage(**damage) for module, damage in record["damage"].items()}
