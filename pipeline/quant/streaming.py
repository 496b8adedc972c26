"""One shard, streamed: read once in file order, hashed on the way, converted, hashed and written once in file order."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.checkpoint.headers import Tensor
from pipeline.errors import Refused
from pipeline.checkpoint import numbers
from pipeline.quant.damage import NOTHING, Damage
from pipeline.quant.nvfp4 import Nvfp4Scheme
from pipeline.quant.planning import Convert, Copy, ShardPlan, rows_of, scheme_of
from pipeline.quant.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.quant.calibrated.run import Calibrated

# About the size of a core's second-level cache: a chunk is converted, hashed and written while it is there.
CHUNK_BYTES = 1 << 20
CHUNK_WEIGHTS = 1 << 20


class Reader:
    """Reads ranges of one file and hashes the whole of it in order, each byte once."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by finish() or with the process
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._progress = progress
        self._scratch = np.empty(CHUNK_BYTES, np.uint8)

    def read_into(self, start: int, buffer: np.ndarray) -> None:
        """Fill ``buffer`` (uint8) from byte ``start``."""
        if start > self._hashed:
            self._hash_up_to(start)
        self._fill(start, buffer)
        if start == self._hashed:  # else it was hashed on the way to something behind it
            self._digest.update(buffer)
            self._hashed += buffer.size
            self._progress(buffer.size)

    def finish(self) -> str:
        """Hash what was not read, close, and return the file's SHA-256."""
        self._hash_up_to(os.fstat(self._file.fileno()).st_size)
        self._file.close()
        return self._digest.hexdigest()

    def _hash_up_to(self, end: int) -> None:
        while self._hashed < end:
            part = self._scratch[: min(CHUNK_BYTES, end - self._hashed)]
            self._fill(self._hashed, part)
            self._digest.update(part)
            self._hashed += part.size
            self._progress(part.size)

    def _fill(self, start: int, buffer: np.ndarray) -> None:
        view = memoryview(buffer)
        while view:
            count = os.preadv(self._file.fileno(), [view], start)
            if not count:
                raise Refused(f"{self.path}: ends at byte {start}, {len(view)} bytes early; fetch it again")
            view, start = view[count:], start + count


class Writer:
    """Writes one file in order under a temporary name, hashing it; :meth:`commit` gives it its name."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.expected = path, size
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file = open(self._temporary, "wb", buffering=0)  # noqa: SIM115 - closed by commit() or with the process
        _reserve(self._file.fileno(), size, path)
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> None:
        """Append ``data`` (bytes or a contiguous array)."""
        view = memoryview(data).cast("B") if isinstance(data, bytes) else memoryview(data.reshape(-1).view(np.uint8))
        self._digest.update(view)
        self.size += len(view)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise Refused(
                f"{self.path}: {error.strerror} within its {self.expected / 1e9:.2f} GB; free some space and run "
                "again, finished shards are kept"
            ) from None

    def commit(self) -> str:
        """Close, rename into place and return the file's SHA-256."""
        self._file.close()
        os.replace(self._temporary, self.path)
        return self._digest.hexdigest()


def _reserve(descriptor: int, size: int, path: Path) -> None:
    """Take the file's blocks at once: faster than growing it, and a full disk is noticed before the work.

    Linux ``fallocate`` itself, not ``posix_fallocate``, which writes into every block where a file system cannot
    reserve.
    """
    with contextlib.suppress(AttributeError):
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        if fallocate(descriptor, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) and ctypes.get_errno() == errno.ENOSPC:
            raise Refused(f"{path}: no space left for its {size / 1e9:.2f} GB; free some or choose another target")


def convert_shard(
    source: Path, target: Path, shard: ShardPlan, recipe: Recipe, progress: Callable[[int], None] = lambda count: None,
    calibrated: Calibrated | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write ``target/shard.name``; returns its size and hashes, and the damage of each module.

    ``calibrated`` gives the values of a calibrated recipe, which are else computed here.

    Raises :class:`Refused` naming tensor and shard where the source's weights are NaN or infinite.
    """
    reader = Reader(source / shard.name, progress)
    writer = Writer(target / shard.name, shard.target_bytes)
    writer.write(shard.header)
    held: dict[str, bytes] = {}
    damage: dict[str, Damage] = {}
    buffers = Buffers()
    for step in shard.steps:
        if isinstance(step, Copy):
            if calibrated is not None and step.tensor.name in calibrated.replaced:
                held[step.tensor.name] = calibrated.replaced[step.tensor.name]
            if step.tensor.name not in shard.late:
                _put(reader, writer, step.tensor, held, buffers)
        else:
            try:
                damage[step.module.name] = _convert(
                    reader, writer, source, step, shard, recipe, held, buffers, calibrated
                )
            except Refused as error:
                raise Refused(f"{step.module.name} ({source / shard.name}): {error}") from None
    copies = {step.tensor.name: step.tensor for step in shard.steps if isinstance(step, Copy)}
    for name in shard.late:
        if name in copies:
            _put(reader, writer, copies[name], held, buffers)
        else:
            writer.write(held.pop(name))
    if writer.size != shard.target_bytes:
        raise AssertionError(f"{shard.name}: wrote {writer.size} bytes, planned {shard.target_bytes}")
    source_sha256 = reader.finish()
    return {
        "source_sha256": source_sha256,
        "target_sha256": writer.commit(),
        "target_bytes": writer.size,
        "damage": damage,
    }


class Buffers:
    """Named byte buffers that grow and are used again: pages are touched once, not once a tensor."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, size: int) -> np.ndarray:
        """A uint8 array of ``size`` bytes, aligned to 8; what the name held before is gone."""
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty((size + 7) // 8, np.uint64).view(np.uint8)
        return self._buffers[name][:size]


def _put(reader: Reader, writer: Writer, tensor: Tensor, held: dict[str, bytes], buffers: Buffers) -> None:
    """A tensor as it is, or what a calibrated recipe made of it."""
    if tensor.name in held:
        writer.write(held.pop(tensor.name))
    else:
        _copy(reader, writer, tensor, buffers)


def _copy(reader: Reader, writer: Writer, tensor: Tensor, buffers: Buffers) -> None:
    for start in range(tensor.start, tensor.end, CHUNK_BYTES):
        part = buffers.take("copy", min(CHUNK_BYTES, tensor.end - start))
        reader.read_into(start, part)
        writer.write(part)


def _convert(
    reader: Reader, writer: Writer, source: Path, step: Convert, shard: ShardPlan, recipe: Recipe,
    held: dict[str, bytes], buffers: Buffers, calibrated: Calibrated | None,
) -> Damage:  # fmt: skip
    scheme = scheme_of(recipe, step)
    module = step.module
    names = [name for name, _, _ in scheme.outputs(module.name, module.shape, module.dtype)]
    late = set(shard.late)

    def emit(name: str, data: np.ndarray) -> None:
        if name in late:
            held[name] = held.get(name, b"") + data.tobytes()
        else:
            writer.write(data)

    scales, total = [], NOTHING
    load = _mxfp4_rows(reader, source, step, shard, buffers) if module.mxfp4 else _float_rows(reader, step, buffers)
    chunks = rows_of(step, scheme, CHUNK_WEIGHTS) if calibrated is None else [(0, module.shape[0])]
    for start, end in chunks:
        rows = load(start, end)
        if calibrated is not None:
            converted = calibrated.convert(module, numbers.mxfp4_values(*rows) if module.mxfp4 else rows)
            if module.mxfp4:
                converted = replace(converted, damage=replace(converted.damage, spread=scheme.spread_of(*rows)))
        elif isinstance(scheme, Nvfp4Scheme):
            converted = scheme.from_mxfp4(*rows, base=step.base)
        elif module.mxfp4:
            converted = scheme.from_mxfp4(*rows, out=buffers.take("out", (end - start) * module.shape[1]))
        else:
            converted = scheme.from_float(rows, module.dtype)
        emit(names[0], converted.weight)
        scales.append(converted.scale)
        total += converted.damage
    scale = np.concatenate(scales)
    extra = {"base": step.base} if isinstance(scheme, Nvfp4Scheme) else {}
    for name, data in zip(names[1:], scheme.extras(module.shape, scale, module.dtype, **extra), strict=True):
        emit(name, np.ascontiguousarray(data))
    return total


def _mxfp4_rows(
    reader: Reader, source: Path, step: Convert, shard: ShardPlan, buffers: Buffers
) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
    rows, columns = step.module.shape
    packed = buffers.take("packed", rows * columns // 2)
    exponents = buffers.take("exponents", rows * columns // 32)
    reader.read_into(step.weight.start, packed)
    if step.scale_shard == shard.name:
        reader.read_into(step.scale.start, exponents)
    else:
        with open(source / step.scale_shard, "rb") as stream:
            stream.seek(step.scale.start)
            if stream.readinto(exponents) != exponents.size:
                raise Refused(f"{step.scale.name}: {step.scale_shard} ends early; fetch it again")
    packed, exponents = packed.reshape(rows, -1), exponents.reshape(rows, -1)
    return lambda start, end: (packed[start:end], exponents[start:end])


def _float_rows(reader: Reader, step: Convert, buffers: Buffers) -> Callable[[int, int], np.ndarray]:
    columns = step.module.shape[1]
    dtype = {"BF16": np.dtype(np.uint16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}[step.module.dtype]

    def load(start: int, end: int) -> np.ndarray:
        width = columns * dtype.itemsize
        raw = buffers.take("rows", (end - start) * width)
        reader.read_into(step.weight.start + start * width, raw)
        values = raw.view(dtype).reshape(end - start, columns)
        return numbers.bf16_values(values) if step.module.dtype == "BF16" else values.astype(np.float32)

    return load
