"""Lint rules that read bytes: scales and floats that are NaN, infinite, zero or negative, and comparison with a base.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline import files
from pipeline.checkpoint import layout, numbers
from pipeline.checkpoint.finding import WARNING, Finding
from pipeline.checkpoint.headers import Tensor
from pipeline.checkpoint.reading import Checkpoint
from pipeline.checkpoint.rules_stored import EXPONENTS, SCALE_DTYPES
from pipeline.checkpoint.table import Table
from pipeline.errors import Unreadable

CHUNK_BYTES = 1 << 24
PROVENANCE = "requantization.json"
AGAIN = "requantize it, and look at its source"

_FLOATS = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2")
# Also ModelOpt's weight_scale_2, DeepSeek's weight_scale_inv, GPTQ's scales, gpt-oss's gate_up_proj_scales.
SCALE = re.compile(r"(?:^|_)scales?(?:_inv|_2)?$")
# Below, kernels that flush subnormal numbers to zero see 0.
SMALLEST_NORMAL = {"F32": 2.0**-126, "BF16": 2.0**-126, "F64": 2.0**-126}
GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")


def values_of(dtype: str, data: bytes) -> np.ndarray:
    """Stored numbers, decoded exactly; bytes of other dtypes as they are."""
    match dtype:
        case "BF16":
            return numbers.bf16_values(np.frombuffer(data, np.uint16))
        case "F8_E4M3":
            return numbers.e4m3_values(np.frombuffer(data, np.uint8))
        case "F8_E5M2":  # the upper half of an fp16
            return (np.frombuffer(data, np.uint8).astype(np.uint16) << 8).view(np.float16)
        case "F16" | "F32" | "F64":
            return np.frombuffer(data, {"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype])
        case _:
            return np.frombuffer(data, np.uint8)


def chunks_of(checkpoint: Checkpoint, shard: str, tensor: Tensor) -> Iterator[bytes]:
    with open(checkpoint.directory / shard, "rb") as stream:
        stream.seek(tensor.start)
        left = tensor.size_bytes
        while left and (data := stream.read(min(CHUNK_BYTES, left))):
            left -= len(data)
            yield data


def values(table: Table) -> Iterator[Finding]:
    """No NaN or infinity in any float tensor, no zero or negative scale, no E8M0 255, power-of-two scales where
    promised.
    """
    checkpoint = table.checkpoint
    pow2 = _promises_pow2(checkpoint.directory)
    for shard, header in checkpoint.headers.items():
        for tensor in header.tensors.values():
            is_scale = bool(SCALE.search(tensor.parameter))
            group = table.group_of.get(tensor.module)
            if tensor.dtype in EXPONENTS:
                stored = EXPONENTS if group is None else SCALE_DTYPES.get(group.format or "", ())
                if is_scale and (tensor.dtype == "F8_E8M0" or stored == EXPONENTS):
                    chunks = chunks_of(checkpoint, shard, tensor)
                    bad = sum(int((np.frombuffer(data, np.uint8) == numbers.E8M0_NAN).sum()) for data in chunks)
                    if bad:
                        yield Finding(
                            "e8m0-nan",
                            shard,
                            tensor.name,
                            f"{bad} of {tensor.size_bytes} exponents are 255, which is NaN",
                            "fetch the shard again, or repair its source",
                        )
            elif tensor.dtype in _FLOATS:
                yield from _floats(checkpoint, shard, tensor, is_scale, pow2 and tensor.parameter == "weight_scale")
        yield from _shape_tensors(table, shard)


def _floats(checkpoint: Checkpoint, shard: str, tensor: Tensor, is_scale: bool, pow2: bool) -> Iterator[Finding]:
    count = nan = infinite = zero = negative = tiny = uneven = 0
    smallest = SMALLEST_NORMAL.get(tensor.dtype, 0.0)
    for data in chunks_of(checkpoint, shard, tensor):
        x = values_of(tensor.dtype, data)
        count += x.size
        nan += int(np.isnan(x).sum())
        infinite += int(np.isinf(x).sum())
        if is_scale:
            zero += int((x == 0).sum())
            negative += int((x < 0).sum())
            tiny += int(((x != 0) & (np.abs(x) < smallest)).sum())
            if pow2:
                uneven += int((np.abs(np.frexp(x)[0]) != 0.5).sum())
    place = (shard, tensor.name)
    for bad, what in ((nan, "NaN"), (infinite, "infinite")):
        if bad:
            yield Finding(
                "scale-not-finite" if is_scale else "not-finite", *place, f"{bad} of {count} values are {what}", AGAIN
            )
    if zero:
        yield Finding("scale-zero", *place, f"{zero} of {count} scales are 0: 1/0 at run time", AGAIN)
    if negative:
        yield Finding("scale-negative", *place, f"{negative} of {count} scales are negative", AGAIN)
    if tiny:
        yield Finding(
            "scale-subnormal", *place,
            f"{tiny} of {count} scales are below 2^-126: a kernel that flushes subnormal numbers takes them for 0",
            AGAIN, WARNING,
        )  # fmt: skip
    if uneven and not (nan or infinite or zero):
        yield Finding(
            "scale-not-pow2",
            *place,
            f"{uneven} of {count} scales are no powers of two, which the recipe promised (UE8M0 rounding on Blackwell "
            "would change the weights)",
            AGAIN,
        )


def _promises_pow2(directory: Path) -> bool:
    if not (directory / PROVENANCE).exists():
        return False
    try:
        recipe = files.read_json(directory / PROVENANCE)["recipe"]
        return recipe["scale"] == "pow2" and recipe["format"].startswith("fp8")
    except (Unreadable, KeyError, TypeError, AttributeError):
        return False


def _shape_tensors(table: Table, shard: str) -> Iterator[Finding]:
    for tensor in table.checkpoint.headers[shard].tensors.values():
        if tensor.parameter != "weight_shape":
            continue
        if (tensor.dtype, tensor.shape) != ("I64", (2,)):
            message = f"{tensor.dtype} {list(tensor.shape)}, two I64 numbers are needed"
            yield Finding("weight-shape", shard, tensor.name, message, AGAIN)
            continue
        packed = table.modules[tensor.module].get("weight_packed")
        group = table.group_of.get(tensor.module)
        if packed is None or group is None or len(packed.shape) != 2:
            continue
        said = np.frombuffer(table.checkpoint.read(tensor.name), np.int64).tolist()
        per_word = 32 // (group.num_bits or 4)
        if said[:1] != [packed.shape[0]] or -(-said[-1] // per_word) != packed.shape[1]:
            yield Finding(
                "weight-shape",
                shard,
                tensor.name,
                f"says {said}, the packed weight is {list(packed.shape)} words of {per_word}",
                AGAIN,
            )


def global_scales(table: Table) -> Iterator[Finding]:
    """NVFP4: matrices that are multiplied together share one global scale."""
    for parameter in GLOBAL_SCALES:
        holders = [m for m, stored in table.modules.items() if parameter in stored and stored[parameter].size_bytes]
        for members in layout.sets_among(holders, layout.SHARED_GLOBAL_SCALE):
            scales = {}
            for module in members:
                tensor = table.modules[module][parameter]
                scales[module] = float(values_of(tensor.dtype, table.checkpoint.read(tensor.name)).reshape(-1)[0])
            if len(set(scales.values())) > 1:
                name = f"{members[-1]}.{parameter}"
                each = ", ".join(f"{module.rpartition('.')[2]} {value:g}" for module, value in scales.items())
                yield Finding(
                    "global-scale-differs",
                    table.shard(name),
                    name,
                    f"an engine uses one global scale for these, they have {each}",
                    "requantize the set together",
                )
