"""Safetensors headers, read and written without numpy or torch.

A file is: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, the tensors'
bytes back to back (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
LONGEST_HEADER_BYTES = 100_000_000  # the reference library's own limit: a longer header loads nowhere
ALIGNMENT_BYTES = 8
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class HeaderError(Exception):
    """The file is not a whole safetensors file; the message says what is wrong, with numbers."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor on disk.  ``start`` and ``end`` are byte offsets in the file (not in its data part)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    @property
    def module(self) -> str:
        """``model.norm`` of ``model.norm.weight``: what quantization targets and ignore patterns are matched against.
        """
        return self.name.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        """``weight`` of ``model.norm.weight``."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Header:
    """A parsed header: tensors in the order of their bytes, the free-form metadata, and where the data begins."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    data_start: int
    size_bytes: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a dense tensor.  Raises ``KeyError`` for a dtype that safetensors does not have."""
    return math.prod(shape) * ITEM_BITS[dtype] // 8


def read_header(path: Path | str) -> Header:
    """Parse one file's header and check it against the file's size.  Raises :class:`HeaderError`."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise HeaderError(f"{size} bytes, too short to hold a header length")
            if LFS_POINTER.startswith(prefix):
                raise HeaderError(f"a Git LFS pointer of {size} bytes, not the file itself: `git lfs pull` fetches it")
            length = int.from_bytes(prefix, "little")
            if length > size - 8:
                raise HeaderError(f"header claims {length} bytes, the file has {size}")
            if length > LONGEST_HEADER_BYTES:
                raise HeaderError(f"header of {length} bytes, no reader takes more than {LONGEST_HEADER_BYTES}")
            raw = stream.read(length)
    except OSError as error:
        raise HeaderError(error.strerror or str(error)) from None
    try:
        entries = json.loads(raw.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"header is not valid JSON ({error})") from None
    if not isinstance(entries, dict) or not raw.startswith(b"{"):
        raise HeaderError("header is not a JSON object that begins with its first byte")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("__metadata__ is no mapping of text to text, and readers refuse it")
    data_start = 8 + length
    tensors = sorted(
        (_tensor(name, entry, data_start) for name, entry in entries.items()), key=lambda t: (t.start, t.end)
    )
    _check_layout(tensors, data_start, size)
    return Header({tensor.name: tensor for tensor in tensors}, metadata, data_start, size)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice!r} appears twice")
    return entries


def _tensor(name: str, entry: Any, data_start: int) -> Tensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
            raise ValueError
        known = dtype in ITEM_BITS
    except (TypeError, KeyError, ValueError):
        raise HeaderError(f"{name}: malformed entry {entry!r}") from None
    if not known:
        raise HeaderError(f"{name}: unknown dtype {dtype!r}")
    if math.prod(shape) * ITEM_BITS[dtype] % 8:
        raise HeaderError(f"{name}: {dtype} {list(shape)} does not fill whole bytes")
    if tensor_bytes(dtype, shape) != end - start:
        raise HeaderError(f"{name}: {dtype} {list(shape)} needs {tensor_bytes(dtype, shape)} bytes, has {end - start}")
    return Tensor(name, dtype, shape, data_start + start, data_start + end)


def _check_layout(tensors: list[Tensor], data_start: int, size: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            kind = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            raise HeaderError(f"{tensor.name}: starts at byte {tensor.start}, expected {position}: {kind}")
        position = tensor.end
    if position != size:
        kind = "truncated" if position > size else "trailing bytes"
        raise HeaderError(f"tensors end at byte {position}, the file has {size}: {kind}")


def build_header(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[Tensor]]:
    """Header bytes for tensors ``(name, dtype, shape)`` laid out in the given order, and where each will lie.

    Raises ``ValueError`` where a tensor would start at an offset that is not a multiple of its item size: readers view
    the bytes in place.
    """
    entries = list(entries)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in entries:
        if position % max(1, ITEM_BITS[dtype] // 8):
            raise ValueError(f"{name}: {dtype} at byte {position} would be misaligned")
        end = position + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % ALIGNMENT_BYTES)
    start = 8 + len(raw)
    tensors = [
        Tensor(name, dtype, tuple(shape), *(start + offset for offset in header[name]["data_offsets"]))
        for name, dtype, shape in entries
    ]
    return len(raw).to_bytes(8, "little") + raw, tensors
