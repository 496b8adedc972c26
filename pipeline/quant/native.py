"""``native``: the source itself, checked and hashed, under the target's name without a second copy of its bytes."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.checkpoint import Checkpoint, manifest
from pipeline.checkpoint.reading import MANIFEST
from pipeline.errors import Refused
from pipeline.quant import planning, scope
from pipeline.quant.damage import Damage, summarize
from pipeline.quant.recipe import Recipe

FICLONE = 0x40049409


def link(source: Path, target: Path, source_manifest: dict[str, Any] | None = None) -> dict[str, Any]:
    """Make ``target`` a checked copy of ``source`` by reflink, hard link or symbolic link, whichever the file system
    allows.

    Raises :class:`Refused` where the source is not whole, holds NaN scales or differs from ``source_manifest``.
    """
    started = time.monotonic()
    checkpoint = Checkpoint.open(source)
    planning.check_whole(checkpoint)
    packed = []
    if any(tensor.parameter == "weight_packed" for tensor in checkpoint.tensors().values()):
        try:
            packed = [module for module in scope.modules_of(checkpoint).values() if module.mxfp4]
        except Refused:
            packed = []  # another format: `verify` knows it, there is nothing to decode here
    planning.scan_exponents(checkpoint, packed)
    built = manifest.build(source)
    if source_manifest is not None:
        found = [item for item in manifest.check(source, source_manifest) if item.rule != "manifest-extra"]
        if found:
            raise Refused(f"{source}: differs from its manifest\n" + "\n".join(f"  {item}" for item in found))
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    means = set()
    for entry in built["files"]:
        destination = partial / entry["name"]
        destination.parent.mkdir(parents=True, exist_ok=True)
        means.add(_link(source / entry["name"], destination))
    files.write_json(partial / MANIFEST, built)
    if target.exists():
        shutil.rmtree(target)
    os.replace(partial, target)
    rows = (
        (module.kind, planning.layout.layer_of(module.name), Damage(scope.parameters(module), 0, 0.0, 0.0, None))
        for module in packed
    )
    shards = [entry for entry in built["files"] if entry["name"] in checkpoint.headers]
    return {
        "status": "valid",
        "reason": None,
        "recipe": Recipe("native").to_dict(),
        "recipe_sha256": Recipe("native").sha256,
        "source": {"files": shards},
        "damage": summarize(rows),
        "files": built["files"],
        "run": {
            "seconds": time.monotonic() - started,
            "workers": 1,
            "source_bytes": sum(entry["size_bytes"] for entry in shards),
            "target_bytes": 0,
            "shards_done": len(shards),
            "shards_resumed": 0,
            "linked_by": sorted(means),
        },
    }


def _link(source: Path, target: Path) -> str:
    try:
        with open(source, "rb") as reading, open(target, "wb") as writing:
            fcntl.ioctl(writing, FICLONE, reading.fileno())
        return "reflink"
    except OSError:
        target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
        return "hard link"
    except OSError:
        target.symlink_to(source.resolve())
        return "symbolic link"
