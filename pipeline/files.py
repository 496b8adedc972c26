"""Files that are either whole or absent, and JSON that every reader can parse.  Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import Unreadable

CHUNK_BYTES = 1 << 22


@contextlib.contextmanager
def atomic_open(path: Path | str) -> Iterator[BinaryIO]:
    """Open a temporary neighbour of ``path`` for writing bytes; it takes the name only when the block ends well.

    A killed process leaves at most a ``.NAME.*.tmp`` file, never something that looks finished.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        # mkstemp makes 0600; a result is as readable as any file that the user's umask makes.
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(descriptor, 0o666 & ~umask)
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say which file
        raise


def write_text(path: Path | str, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with atomic_open(path) as stream:
        stream.write(text.encode())


def write_json(path: Path | str, value: Any) -> None:
    """Write ``value`` as sorted, indented JSON, atomically.

    Raises ``ValueError`` for NaN and infinity: JSON has neither, and DVC would emit a bare ``NaN`` that breaks readers.
    Write ``null`` and a reason instead.
    """
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path | str, *, finite: bool = False) -> Any:
    """Parse one JSON file.  Raises :class:`Unreadable` naming the file and the place where parsing stopped.

    ``finite``: refuse NaN and infinity as well, which JSON has not and Python reads.  A comparison with NaN is never
    true, so that a guard would pass it; no stage of ours writes one.
    """
    try:
        return json.loads(Path(path).read_bytes(), parse_constant=_no_number if finite else None)
    except FileNotFoundError:
        raise Unreadable(f"{path}: no such file") from None
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise Unreadable(f"{path}: not valid JSON ({error})") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def sha256_file(path: Path | str) -> str:
    """Hex SHA-256 of a file, in constant memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form: the same value gives the same key on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
