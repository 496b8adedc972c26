"""Requantization of real Kimi K3 expert shapes: this pipeline against llm-compressor's `model_free_ptq`, one core each.

    python3 -m pipeline env run quant -- benchmarks/requantize.py [--experts 8] [--repeats 5] [--schemes fp8,int8]
    [--memory]

The input is a checkpoint in K3's layout with `--experts` experts of 3584 x 3072 in MXFP4 (33 M weights each),
Gaussian with log-normal row and column scales, so that group exponents spread as in trained weights.  For each
scheme, alternating ours and theirs `--repeats` times, each in a fresh process pinned to one core, page cache warm,
imports and compilation not timed:

- **cast**: the arithmetic alone, from tensors in memory to tensors in memory (theirs: dequantize and quantize; ours:
  look-up, with every changed weight counted);
- **job**: the whole run from directory to directory (ours also hashes every byte read and written and measures the
  damage).

`mparam_s` is our job's speed; ratios are theirs / ours of the medians; `ratio_cp` is our job's time over that of `cp`
of the output. The `_cpu` ratios compare CPU seconds instead of wall seconds, for a machine that does other work
meanwhile. `workers2_ratio`: one worker's time over two workers' (eight shards, four times the experts, as many cores
as there are); beside it `workers2_machine`, what two processes of arithmetic alone gain on the same two cores at that
time, which no engine can exceed (2 on an idle machine), and `workers2_cpu`, the CPU seconds of two workers over those
of one: 1 where they do not hinder each other. `--memory` adds the peak RSS for a 1 GB and an 8 GB checkpoint.  The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

SHAPES = (("w1", 3072, 3584), ("w3", 3072, 3584), ("w2", 3584, 3072))
WEIGHTS_PER_EXPERT = sum(rows * columns for _, rows, columns in SHAPES)
MODULE = "language_model.model.layers.1.block_sparse_moe.experts.{}.{}"
# our recipe, and the preset and group size that the reference takes for the same format
SCHEMES = {
    "fp8": ({"format": "fp8_block"}, "FP8_BLOCK", None),
    "fp8_channel": ({"format": "fp8_channel"}, "FP8_DYNAMIC", None),
    "int8": ({"format": "int8_channel"}, "W8A8", None),
    "w4a16": ({"format": "w4a16", "group_size": 32}, "W4A16", 32),
    "w4a16_g128": ({"format": "w4a16", "group_size": 128}, "W4A16", 128),
}


# -- input -------------------------------------------------------------------------------------------------------------


def encoded(rows: int, columns: int, seed: int):
    """One matrix in MXFP4: packed codes and E8M0 exponents, by the OCP rule (shared exponent = floor(log2 amax) - 2).
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, columns), np.float32) * np.float32(0.02)
    weight *= np.exp(0.5 * rng.standard_normal((rows, 1), np.float32))
    weight *= np.exp(0.5 * rng.standard_normal((1, columns), np.float32))
    groups = weight.reshape(rows, columns // 32, 32)
    exponent = np.frexp(np.abs(groups).max(-1))[1] - 3
    scaled = np.abs(groups) * np.ldexp(np.float32(1), -exponent)[..., None]
    codes = np.searchsorted(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32), scaled).astype(np.uint8)
    codes = (codes | ((groups < 0).astype(np.uint8) << 3)).reshape(rows, columns)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), (exponent + 127).astype(np.uint8)


def write_source(directory: Path, experts: int, shards: int) -> Path:
    """A K3-layout checkpoint of ``experts`` experts in ``shards`` files; rows are permuted from one matrix a shape."""
    import numpy as np

    from pipeline.checkpoint.headers import build_header

    directory.mkdir(parents=True)
    matrices = {name: encoded(rows, columns, seed) for seed, (name, rows, columns) in enumerate(SHAPES)}
    rng, weight_map = np.random.default_rng(9), {}
    for number in range(shards):
        mine = range(number * experts // shards, (number + 1) * experts // shards)
        entries = [
            (f"{MODULE.format(expert, name)}.{parameter}", "U8", (rows, columns // divisor))
            for expert in mine
            for name, rows, columns in SHAPES
            for parameter, divisor in (("weight_packed", 2), ("weight_scale", 32))
        ]
        shard = f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
        with open(directory / shard, "wb") as stream:
            stream.write(build_header(entries)[0])
            for _ in mine:
                for name, rows, _ in SHAPES:
                    order = rng.permutation(rows)
                    for data in matrices[name]:
                        stream.write(data[order].tobytes())
        weight_map |= {name: shard for name, _, _ in entries}
    index = {"metadata": {"total_size": experts * WEIGHTS_PER_EXPERT * 17 // 32}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True,
               "dynamic": False, "scale_dtype": "torch.uint8"}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "mxfp4-pack-quantized"}
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": [],
                    "quantization_status": "compressed", "config_groups": {"group_0": group}}  # fmt: skip
    text = {"model_type": "kimi_linear", "dtype": "bfloat16", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": text}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


# -- one measurement, in a process of its own --------------------------------------------------------------------------


class Timer:
    """Wall and CPU seconds since it was made: on a machine that others use too, CPU seconds compare better."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), sum(os.times()[:4])

    def stop(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self.wall, "cpu_s": sum(os.times()[:4]) - self.cpu}


def our_cast(source: Path, recipe: dict) -> dict[str, float]:
    """Re-encode all experts from memory to memory."""
    import numpy as np

    from pipeline.checkpoint import Checkpoint
    from pipeline.quant import Recipe, schemes

    scheme = schemes.of_recipe(Recipe.from_params(recipe))
    checkpoint = Checkpoint.open(source)
    inputs = []
    for name in checkpoint.weight_map:
        if name.endswith("weight_packed"):
            rows, half = checkpoint.tensor(name).shape
            scale = name.replace("packed", "scale")
            inputs.append([np.frombuffer(checkpoint.read(n), np.uint8).reshape(rows, -1).copy() for n in (name, scale)])
    outs = [np.zeros(packed.size * 2, np.uint8) for packed, _ in inputs[:3]]
    scheme.from_mxfp4(*inputs[0], out=outs[0])
    timer = Timer()
    for number, (packed, exponents) in enumerate(inputs):
        scheme.from_mxfp4(packed, exponents, out=outs[number % 3])
    return timer.stop()


def their_cast(source: Path, preset: str, group_size: int | None) -> dict[str, float]:
    """The same by llm-compressor's converters, expert by expert."""
    dequantizer, quantizer = _stock(source, preset, group_size)
    import torch
    from safetensors import safe_open

    experts: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                experts.setdefault(name.rpartition(".w")[0], {})[name] = shard.get_tensor(name).clone()
    first, *rest = experts.values()
    quantizer.process(dequantizer.process(dict(first)))
    timer = Timer()
    for tensors in (first, *rest):
        quantizer.process(dequantizer.process(dict(tensors)))
    return timer.stop()


def _stock(source: Path, preset: str, group_size: int | None):
    import torch
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
    from llmcompressor.entrypoints.model_free.validate import validate_config

    torch.set_num_threads(1)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group_size:
        scheme.weights.group_size = group_size
    return CompressedTensorsDequantizer(source), ModelFreePtqConverter(validate_config(None, scheme, []))


def our_job(source: Path, target: Path, recipe: dict, workers: int) -> dict[str, float]:
    """A whole run."""
    import numpy as np

    from pipeline.quant import Recipe, engine, schemes

    made = Recipe.from_params(recipe)
    schemes.of_recipe(made).from_mxfp4(np.zeros((128, 64), np.uint8), np.full((128, 4), 120, np.uint8))
    timer = Timer()
    engine.requantize(source, target, made, workers=workers)
    return timer.stop()


def their_job(source: Path, target: Path, preset: str, group_size: int | None) -> dict[str, float]:
    """The same by ``model_free_ptq``."""
    dequantizer, _ = _stock(source, preset, group_size)
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor import model_free_ptq

    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group_size:
        scheme.weights.group_size = group_size
    timer = Timer()
    model_free_ptq(source, target, scheme=scheme, ignore=[], max_workers=1, device="cpu", converter=dequantizer)
    return timer.stop()


def child(task: dict) -> None:
    """Do one measurement and print it."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores if task.get("workers", 1) > 1 else cores[:1])
    source, target = Path(task["source"]), Path(task["target"])
    recipe, preset, group_size = SCHEMES[task["scheme"]]
    times = {
        "our cast": lambda: our_cast(source, recipe),
        "their cast": lambda: their_cast(source, preset, group_size),
        "our job": lambda: our_job(source, target, recipe, task.get("workers", 1)),
        "their job": lambda: their_job(source, target, preset, group_size),
    }[task["what"]]()
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps(times | {"peak_rss_mb": peak / 1024}))


def measure(what: str, scheme: str, source: Path, target: Path, workers: int = 1) -> dict:
    """Run one measurement in a fresh process; the target is removed before."""
    shutil.rmtree(target, ignore_errors=True)
    task = {"what": what, "scheme": scheme, "source": str(source), "target": str(target), "workers": workers}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(task)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{what} {scheme} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def copy_seconds(directory: Path, copy: Path) -> float:
    """Seconds of ``cp -r`` of a directory."""
    shutil.rmtree(copy, ignore_errors=True)
    started = time.perf_counter()
    core = str(min(os.sched_getaffinity(0)))
    subprocess.run(["taskset", "-c", core, "cp", "-r", "--reflink=never", directory, copy], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(copy)
    return seconds


# -- all of it ---------------------------------------------------------------------------------------------------------


def compare(scheme: str, folder: Path, source: Path, weights: int, repeats: int) -> dict:
    """Alternating repeats of one scheme."""
    runs: dict[str, list[dict]] = {}
    copies = []
    for number in range(repeats):
        for what in ("our cast", "their cast", "our job", "their job"):
            runs.setdefault(what, []).append(measure(what, scheme, source, folder / "target"))
            if what == "our job":
                copies.append(copy_seconds(folder / "target", folder / "copy"))
        shown = ", ".join(f"{what} {results[-1]['seconds']:.2f} s" for what, results in runs.items())
        print(f"{scheme} {number + 1}/{repeats}: {shown}, cp {copies[-1]:.2f} s", flush=True)
    median = {what: statistics.median(run["seconds"] for run in results) for what, results in runs.items()}
    cpu = {what: statistics.median(run["cpu_s"] for run in results) for what, results in runs.items()}
    return {
        "mparam_s": round(weights / median["our job"] / 1e6, 1),
        "cast_mparam_s": round(weights / median["our cast"] / 1e6, 1),
        "reference_mparam_s": round(weights / median["their job"] / 1e6, 1),
        "ratio_cast": round(median["their cast"] / median["our cast"], 1),
        "ratio_job": round(median["their job"] / median["our job"], 1),
        "ratio_cast_cpu": round(cpu["their cast"] / cpu["our cast"], 1),
        "ratio_job_cpu": round(cpu["their job"] / cpu["our job"], 1),
        "peak_rss_mb": round(max(run["peak_rss_mb"] for run in runs["our job"]), 1),
        "reference_peak_rss_mb": round(max(run["peak_rss_mb"] for run in runs["their job"]), 1),
        "ratio_cp": round(median["our job"] / statistics.median(copies), 2),
    }


def workers_ratio(folder: Path, experts: int, repeats: int) -> dict[str, float]:
    """One worker's time over two workers', on eight shards: long enough that starting processes does not show."""
    source = write_source(folder / "larger", 4 * experts, 8)
    runs: dict[int, list[dict]] = {1: [], 2: []}
    machine = []
    for number in range(repeats):
        for workers in runs:
            runs[workers].append(measure("our job", "fp8", source, folder / "target", workers))
        machine.append(machine_ratio())
        shown = ", ".join(f"{workers} in {found[-1]['seconds']:.2f} s" for workers, found in runs.items())
        print(f"workers {number + 1}/{repeats}: {shown}; the machine gains {machine[-1]:.2f}", flush=True)
    shutil.rmtree(source)
    wall, cpu = (
        {workers: statistics.median(run[key] for run in found) for workers, found in runs.items()}
        for key in ("seconds", "cpu_s")
    )
    return {
        "workers2_ratio": round(wall[1] / wall[2], 2),
        "workers2_cpu": round(cpu[2] / cpu[1], 2),
        "workers2_machine": round(statistics.median(machine), 2),
    }


def machine_ratio() -> float:
    """How much more two processes hash than one, out of the cache and so out of everything but the two cores."""
    code = "import hashlib, time; d = bytes(1 << 16); t = time.perf_counter()\n" \
           "for _ in range(12000): hashlib.sha256(d).digest()\nprint(time.perf_counter() - t)"  # fmt: skip

    def seconds(count: int) -> float:
        command = [sys.executable, "-c", code]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        return max(float(process.communicate()[0]) for process in running)

    return 2 * seconds(1) / seconds(2)


def memory(folder: Path) -> dict[str, float]:
    """Peak RSS of our job for checkpoints of about 1 GB and 8 GB, in shards of 1 GB."""
    peaks = {}
    for gigabytes in (1, 8):
        source = write_source(
            folder / f"{gigabytes}gb", round(gigabytes * 1e9 / (WEIGHTS_PER_EXPERT * 17 / 32)), gigabytes
        )
        peaks[f"peak_rss_{gigabytes}gb_mb"] = round(
            measure("our job", "fp8", source, folder / "target")["peak_rss_mb"], 1
        )
        shutil.rmtree(source)
    return peaks


def main() -> None:
    """Parse arguments, measure, print; the last line is the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--schemes", default=",".join(SCHEMES), help=f"of {', '.join(SCHEMES)}")
    parser.add_argument("--memory", action="store_true", help="also the peak RSS for 1 GB and 8 GB (writes 25 GB)")
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary directory)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(json.loads(arguments.child))
    wanted = arguments.schemes.split(",")
    if unknown := sorted(set(wanted) - SCHEMES.keys()):
        parser.error(f"unknown schemes {', '.join(unknown)}; known: {', '.join(SCHEMES)}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source = write_source(folder / "source", arguments.experts, min(4, arguments.experts))
        weights = arguments.experts * WEIGHTS_PER_EXPERT
        result: dict = {scheme: compare(scheme, folder, source, weights, arguments.repeats) for scheme in wanted}
        result |= workers_ratio(folder, arguments.experts, arguments.repeats)
        result |= {"cores": len(os.sched_getaffinity(0)), "weights": weights, "repeats": arguments.repeats}
        shutil.rmtree(source)
        if arguments.memory:
            result |= memory(folder)
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
