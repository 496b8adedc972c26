"""What else measures speed, each once and short: the benchmarks, a replayed trace, a shared prefix, a tuning run.

    python3 -m pipeline env run core -- .ci/check_speed.py [--keep FOLDER]

Runs in core, in a copy of this tree.  That they work is checked, never how fast anything is.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from workspace import copy, run

SERVED = ("quant=native", "kv=auto")
MOVED = {"block_size": [64], "max_num_seqs": [4]}
LEFT_OUT = ("prefix_match_unit", "kv", "max_num_batched_tokens", "long_prefill_token_threshold", "quant")
TUNING = (
    *(f"tuning.axes.{axis}={values}" for axis, values in MOVED.items()),
    *(f"~tuning.axes.{axis}" for axis in LEFT_OUT),
    "tuning.pairs=3",
)


def benchmark(target: Path, env: str, script: str, *arguments: str) -> dict:
    """The last line that a script of benchmarks/ prints."""
    command = [sys.executable, "-m", "pipeline", "env", "run", env, "--", f"benchmarks/{script}", *arguments]
    return json.loads(run(target, *command, read=True).splitlines()[-1])


def expect(what: str, condition: object, seen: object) -> None:
    if not condition:
        sys.exit(f"{what}: NOT so; seen {seen}")
    print(f"{what}: yes", flush=True)


def bench(target: Path, *choices: str) -> dict:
    """metrics/bench/native-auto.json of a choice of conf/bench."""
    run(target, sys.executable, "-m", "pipeline", "config", *SERVED, *choices)
    run(target, sys.executable, "-m", "dvc", "repro", "bench@native-auto")
    return json.loads((target / "metrics/bench/native-auto.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="make the copy here and leave it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        target = (arguments.keep or Path(scratch) / "copy").absolute()
        target.mkdir(parents=True, exist_ok=True)
        copy(target)

        found = benchmark(target, "quant", "requantize.py", "--experts", "2", "--repeats", "1", "--schemes", "fp8,w4a16")
        expect("benchmarks/requantize.py compares both schemes", {"fp8", "w4a16", "workers2_ratio"} <= found.keys(), found)
        found = benchmark(target, "core", "fidelity.py", "--pairs", "1", "--waves", "4")
        expect("benchmarks/fidelity.py compares a pair", found["pairs"] == 1 and found["output_tok_s_ratio"] > 0, found)

        found = bench(target, "bench=replay", "bench.repeats=3")
        told = {name: found.get(name) for name in ("status", "reason", "trace_facts")}
        # Late sends are the machine's doing: the check is that the trace was replayed and judged.
        expect("a trace is replayed", found["trace"] and set(found["reason_codes"]) <= {"late_sends", "spread_too_wide"}, told)
        found = bench(target, "bench/workload=shared_prefix", "bench.concurrency=[4]", "bench.max_spread=2")
        told = {name: found.get(name) for name in ("status", "reason", "prefix_hit_rate")}
        expect("a shared prefix is shared", found["prefix_hit_rate"] > 0.3, told)

        run(target, sys.executable, "-m", "pipeline", "config", *TUNING)
        run(target, sys.executable, "-m", "pipeline", "tune")
        found = json.loads((target / "tuning/ablation.json").read_text())
        rows = {row["name"]: row for row in found["rows"]}
        same = rows["block_size=64"]["coincides_with"]
        expect("block sizes that the engine rounds to one are told", same == "baseline", same)
        expect("a moved setting is measured", rows["max_num_seqs=4"]["output_tok_s"], rows["max_num_seqs=4"])
        found = found["recommendation"]
        expect("the candidate met the default in three pairs", len(found["pairs"]) == 3, found["statement"])


if __name__ == "__main__":
    main()
