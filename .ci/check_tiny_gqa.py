"""The pipeline beyond K3: `model=tiny-gqa` through every stage, in a copy of this tree, so that nothing here changes.

    python3 -m pipeline env run core -- .ci/check_tiny_gqa.py [variant ...] [--keep FOLDER] [--full]

Runs in core.  By default native-auto and fp8-fp8_calibrated, with a short evaluation; the copy uses this tree's environments.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from workspace import copy, run

VARIANTS = ("native-auto", "fp8-fp8_calibrated")
SHORT = (
    "eval.lengths=[512]",
    "~eval.items.ordered_recall",
    "eval.fidelity.prompts_per_length=2",
    "bench.input_len=128",
    "bench.output_len=16",
    "bench.repeats=3",
)


def problems(target: Path, variants: list[str]) -> list[str]:
    """What is wrong with the rows, in words."""
    found = []
    for name in variants:
        row = json.loads((target / f"metrics/variants/{name}.json").read_text())
        comparison = json.loads((target / f"metrics/comparisons/{name}.json").read_text())
        cache = name.rpartition("-")[2]
        if row["status"] != "valid":
            found.append(f"{name}: {row['status']}, {row['reason']}")
        label = {"auto": "unquantized", "fp8_calibrated": "calibrated"}.get(cache, "scale_1.0")
        if row["kv_scales"] != label:
            found.append(f"{name}: the KV scales are {row['kv_scales']}, not {label}")
        found += [f"{name}: {finding}" for finding in comparison["memory_findings"]]
        found += [f"{name}: {key} is {row.get(key)!r}" for key in ("accuracy", "output_tok_s", "weight_bytes") if not row.get(key)]
        if row["state_bytes_per_sequence"]:
            found.append(f"{name}: this model has no recurrent state, the row says {row['state_bytes_per_sequence']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--keep", type=Path, help="make the copy here and leave it")
    parser.add_argument("--full", action="store_true", help="the evaluation and bench of the parameters, not the short ones")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        target = (arguments.keep or Path(scratch) / "copy").absolute()
        target.mkdir(parents=True, exist_ok=True)
        copy(target)
        python = sys.executable
        run(target, python, "-m", "pipeline", "config", "model=tiny-gqa", "kv=gqa", *(() if arguments.full else SHORT))
        run(target, python, "-m", "dvc", "repro", *(f"compare@{name}" for name in arguments.variants))
        run(target, python, "-m", "pipeline", "report")
        if bad := problems(target, arguments.variants):
            sys.exit("\n".join(bad))
    print(f"tiny-gqa: {', '.join(arguments.variants)}: rows valid, scales as labelled, memory as planned")


if __name__ == "__main__":
    main()
