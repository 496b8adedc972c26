"""``python3 -m pipeline plan``: what fits where, from config alone, in well under a second.

Exit codes: 0 fits, 3 refused, 6 the model or the hardware file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace

from pipeline.errors import EXIT_GOOD, EXIT_REFUSED, PipelineError
from pipeline.plan import hardware as machines
from pipeline.plan.alternatives import plan
from pipeline.plan.render import decision_table, plan_text
from pipeline.plan.request import Model, Overrides, load_model
from pipeline.plan.result import PlanResult
from pipeline.plan.schemes import SCHEMES

TABLE_QUANTS = ["native", "fp8", "fp8_channel", "fp8_dense", "int8", "w4a16", "w4a16_g128", "nvfp4"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m pipeline plan", description=__doc__.partition(": ")[2])
    add = parser.add_argument
    add("--model", default="kimi-k3", help="a directory with config.json, or a name under conf/model or models (default %(default)s)")
    add("--hardware", default="b300x8", help=f"a name under conf/hardware: {', '.join(machines.available())} (default %(default)s)")
    add("--quant", default="native", help=f"{', '.join(SCHEMES)} (default %(default)s)")
    add("--kv", default="auto", help="auto, fp8, fp8_e5m2; a state dtype of its own as fp8_state16 (default %(default)s)")
    add("--all-hardware", action="store_true", help="the decision table: every machine, every scheme, Markdown")
    add("--headers", action="store_true", help="also read the shards' headers and compare them with the config")
    add("--json", action="store_true", help="print the result as JSON")
    whole = [
        "max-model-len",
        "max-num-seqs",
        "max-num-batched-tokens",
        "block-size",
        "kv-cache-memory-bytes",
        "tensor-parallel",
        "pipeline-parallel",
        "data-parallel",
        "decode-context-parallel",
    ]
    for name in whole:
        parser.add_argument(f"--{name}", type=count, metavar="N")
    parser.add_argument("--gpu-memory-utilization", type=share, metavar="X")
    parser.add_argument("--engine-version", metavar="V", help="the engine to plan for, if not the hardware file's")
    for name in ("prefix-caching", "expert-parallel", "text-only"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None)
    return parser


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return value


def _table_kv(machine: machines.Hardware) -> str:
    """The KV cache a machine's public recipe uses: fp8 on Blackwell, bf16 elsewhere."""
    return "fp8" if str(machine.flag("kv-cache-dtype", "auto")).startswith("fp8") else "auto"


def _all_hardware(arguments: argparse.Namespace) -> dict[tuple[str, str], PlanResult]:
    model = load_model(arguments.model)
    results = {}
    for name in machines.available():
        machine = machines.load(name)
        if machine.platform != "cpu":
            for quant in TABLE_QUANTS:
                results[name, quant] = plan(model, machine, quant, _table_kv(machine), alternatives=False)
    return results


def _with_headers(result: PlanResult, model: Model) -> PlanResult:
    from pipeline.plan.headers import read_stored  # the checkpoint reader is not needed otherwise

    stored = read_stored(model)
    note = (
        f"headers: {stored.tensors:,} tensors in {stored.shards} shards, {stored.bytes:,} B; "
        f"config implies {stored.expected_bytes:,} B"
    )
    return replace(result, refusals=[*result.refusals, *stored.refusals], warnings=[*result.warnings, note])


def main(argv: list[str]) -> int:
    """Print a plan; return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.all_hardware:
            results = _all_hardware(arguments)
            if arguments.json:
                print(json.dumps([result.to_dict() for result in results.values()], indent=2))
            else:
                print(decision_table(results, TABLE_QUANTS))
            return EXIT_GOOD
        overrides = Overrides(**{entry.name: getattr(arguments, entry.name) for entry in fields(Overrides)})
        model = load_model(arguments.model)
        result = plan(model, arguments.hardware, arguments.quant, arguments.kv, overrides=overrides)
        if arguments.headers:
            result = _with_headers(result, model)
    except PipelineError as error:
        print(f"plan: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(result.to_dict(), indent=2) if arguments.json else plan_text(result))
    return EXIT_REFUSED if result.refused else EXIT_GOOD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
