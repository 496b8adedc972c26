"""The list of a checkpoint's files with sizes and SHA-256: what DVC tracks instead of terabytes, and what `--hashes`
checks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.checkpoint.finding import Finding
from pipeline.checkpoint.reading import MANIFEST
from pipeline.errors import Unreadable


def listed_files(directory: Path | str) -> list[str]:
    """The files that make up a checkpoint, sorted: everything but hidden files and the manifest itself."""
    directory = Path(directory)
    if not directory.is_dir():
        raise Unreadable(f"{directory}: no such directory")
    names = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(
        str(name) for name in names if str(name) != MANIFEST and not any(part.startswith(".") for part in name.parts)
    )


def build(directory: Path | str, known: dict[str, str] | None = None) -> dict[str, Any]:
    """``{"files": [{"name", "size_bytes", "sha256"}]}``; ``known`` holds hashes that were computed while writing."""
    directory = Path(directory)
    known = known or {}
    return {
        "files": [
            {
                "name": name,
                "size_bytes": (directory / name).stat().st_size,
                "sha256": known.get(name) or files.sha256_file(directory / name),
            }
            for name in listed_files(directory)
        ]
    }


def entries(manifest: Any) -> dict[str, dict[str, Any]]:
    """Manifest entries by file name.  Raises :class:`Unreadable` for anything that is not a manifest."""
    try:
        return {entry["name"]: {"size_bytes": int(entry["size_bytes"]), "sha256": str(entry["sha256"])}
                for entry in manifest["files"]}  # fmt: skip
    except (TypeError, KeyError, ValueError):
        raise Unreadable("not a manifest: expected {'files': [{'name', 'size_bytes', 'sha256'}]}") from None


def check(directory: Path | str, manifest: dict[str, Any]) -> list[Finding]:
    """Compare a directory with a manifest: files missing, added, of another size, of another content."""
    directory = Path(directory)
    wanted, present = entries(manifest), listed_files(directory)
    found = []
    again = "fetch or write the file again"
    for name in sorted(wanted.keys() - set(present)):
        message = f"in the manifest ({wanted[name]['size_bytes']} bytes), not on disk"
        found.append(Finding("manifest-missing", name, "", message, again))
    for name in present:
        if name not in wanted:
            remedy = "remove it, or write the manifest again"
            found.append(Finding("manifest-extra", name, "", "on disk, not in the manifest", remedy))
            continue
        size = (directory / name).stat().st_size
        if size != wanted[name]["size_bytes"]:
            message = f"{size} bytes, the manifest says {wanted[name]['size_bytes']}"
            found.append(Finding("manifest-size", name, "", message, again))
        elif (digest := files.sha256_file(directory / name)) != wanted[name]["sha256"]:
            message = f"sha256 {digest}, the manifest says {wanted[name]['sha256']}"
            found.append(Finding("manifest-hash", name, "", message, again))
    return found


def same_file(left: Path, right: Path) -> bool:
    """Whether two files hold the same bytes (without reading where they are one file)."""
    if left.samefile(right):
        return True
    if left.stat().st_size != right.stat().st_size:
        return False
    with open(left, "rb") as one, open(right, "rb") as other:
        while chunk := one.read(1 << 22):
            if chunk != other.read(1 << 22):
                return False
    return True
