"""Where a checkpoint's bytes are.  ``checkpoints/<quant>/`` is what DVC tracks; it holds either the checkpoint itself or,
for ``native`` and for anything too big to copy into DVC's cache, a ``location.json`` that points at it.

A pointed-at checkpoint lives under a name derived from its content's recipe (:func:`content_addressed`), so a narrowed run, which
removes other variants' outputs from the workspace, never deletes one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import Invalid, Unreadable
from pipeline.files import read_json, write_json

CHECKPOINTS = Path("checkpoints")
STORE = Path("data/checkpoints")
LOCATION = "location.json"
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
