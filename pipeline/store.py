"""Where a checkpoint's bytes are.  ``checkpoints/<quant>/`` is what DVC tracks; it holds either the checkpoint itself or,
for ``native`` and for anything too big to copy into DVC's cache, a ``location.json`` that points at it.

``data/kv/<variant>/`` is what one KV setting adds to a checkpoint (an *overlay*: scales in a shard of their own, an index, a config);
no weight is copied for it.  What a server loads is then a folder of links, :func:`served`.

A pointed-at checkpoint lives under a name derived from its content's recipe (:func:`content_addressed`), so a narrowed run, which
removes other variants' outputs from the workspace, never deletes one.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

from pipeline.checkpoint.headers import build_header
from pipeline.checkpoint.reading import CONFIG, INDEX, LOCATION, Checkpoint
from pipeline.errors import Invalid, Unreadable
from pipeline.files import atomic_open, read_json, write_json

CHECKPOINTS = Path("checkpoints")
STORE = Path("data/checkpoints")
OVERLAYS = Path("data/kv")
OVERLAY = "overlay.json"
SCALES = "kv_scales.safetensors"
SERVED = Path(".cache/served")
GIB = 1 << 30


def tracked(quant: str) -> Path:
    """The folder that DVC tracks for one quantization."""
    return CHECKPOINTS / quant


def content_addressed(source_sha256: str, recipe_sha256: str) -> Path:
    """The folder of a checkpoint kept outside DVC's cache: the same source and recipe always give the same one."""
    return STORE / f"{source_sha256[:16]}-{recipe_sha256[:16]}"


def point(quant: str, location: Path, manifest: dict[str, Any]) -> None:
    """Make ``checkpoints/<quant>/`` a pointer to ``location`` whose files must be those of ``manifest``."""
    write_json(tracked(quant) / LOCATION, {"path": str(location), "files": manifest["files"]})


def resolve(quant: str) -> Path:
    """The folder that holds the shards of ``quant``.

    Sizes of a pointed-at checkpoint are compared with its manifest here (hashes: ``pipeline verify --hashes``).
    Raises :class:`Unreadable` when there is none, :class:`Invalid` when files are missing or of another size.
    """
    folder = tracked(quant)
    if not folder.is_dir():
        raise Unreadable(f"{folder}: no such checkpoint; `dvc repro quantize@{quant}` makes it, `dvc checkout` restores it")
    if not (folder / LOCATION).exists():
        return folder
    pointer = read_json(folder / LOCATION)
    location = Path(pointer["path"])
    wrong = [
        f"{location / entry['name']}: {size_of(location / entry['name'])} bytes, manifest says {entry['size_bytes']}"
        for entry in pointer["files"]
        if size_of(location / entry["name"]) != entry["size_bytes"]
    ]
    if wrong:
        raise Invalid("\n".join([f"{folder / LOCATION}: the checkpoint it points at has changed; run quantize again", *wrong]))
    return location


def size_of(path: Path) -> int | None:
    """Bytes of a file, None where there is none."""
    return path.stat().st_size if path.is_file() else None


def overlay(variant: str) -> Path:
    """The folder that DVC tracks for one variant's KV scales; it says ``{"calibrated": false}`` where there are none."""
    return OVERLAYS / variant


def clear_overlay(variant: str) -> None:
    """Make the variant's overlay an empty one: it is served from the checkpoint of its quantization as that stands."""
    shutil.rmtree(overlay(variant), ignore_errors=True)
    write_json(overlay(variant) / OVERLAY, {"calibrated": False})


def write_overlay(variant: str, checkpoint: Checkpoint, config: dict[str, Any], scales: dict[str, float]) -> None:
    """Write ``scales`` (tensor name -> value, stored as F32 [1]) as a shard beside those of ``checkpoint``, with the index that lists
    both and ``config`` as the new config.json."""
    clear_overlay(variant)
    folder = overlay(variant)
    header, tensors = build_header((name, "F32", (1,)) for name in sorted(scales))
    with atomic_open(folder / SCALES) as stream:
        stream.write(header)
        for tensor in tensors:
            stream.write(struct.pack("<f", scales[tensor.name]))
    stored = sum(tensor.size_bytes for tensor in checkpoint.tensors().values())
    weight_map = checkpoint.weight_map | dict.fromkeys(sorted(scales), SCALES)
    write_json(folder / INDEX, {"metadata": {"total_size": stored + 4 * len(scales)}, "weight_map": weight_map})
    write_json(folder / CONFIG, config)
    write_json(folder / OVERLAY, {"calibrated": True})


def served(quant: str, variant: str) -> Path:
    """The folder that a server of ``variant`` loads: that of ``quant`` itself, or links to its files and to the variant's overlay.

    Raises as :func:`resolve`, and :class:`Unreadable` where the overlay is missing or half there.
    """
    base, added = resolve(quant), overlay(variant)
    if not read_json(added / OVERLAY)["calibrated"]:
        return base
    if missing := [name for name in (SCALES, INDEX, CONFIG) if not (added / name).exists()]:
        raise Unreadable(f"{added}: lacks {missing[0]}; `dvc repro kv@{variant}` makes it, `dvc checkout` restores it")
    folder = SERVED / variant
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chosen = {path.name: path for path in sorted(base.iterdir()) if path.is_file() and path.name != LOCATION}
    chosen |= {name: added / name for name in (SCALES, INDEX, CONFIG)}
    for name, path in chosen.items():
        (folder / name).symlink_to(path.resolve())
    return folder
