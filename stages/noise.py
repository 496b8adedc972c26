"""metrics/pairs/native-auto-again/: the baseline's second run, which says what differences mean nothing.

Kept in git as native-auto's own side is.  Where native-auto is not what would be measured here (another machine's committed
answers, a narrowed run without native's checkpoint) nothing is served, and the header says why there is no noise floor.
"""

import shutil
import sys
from pathlib import Path

from pipeline import evaluation, params, stage
from pipeline.errors import PipelineError
from pipeline.evals.pairs import keep
from pipeline.evals.runs import SAMPLES, Run, load_run, write_run
from pipeline.evals.settings import parse, parse_gates

NATIVE = "native-auto"
TARGET = Path("metrics/pairs/native-auto-again")


def main() -> None:
    gates, settings = parse_gates(params.load("gates")), parse(params.load("eval"))
    first = load_run(f"metrics/pairs/{NATIVE}/{SAMPLES}")
    shutil.rmtree(TARGET, ignore_errors=True)
    if (reason := obstacle(first, gates.noise_concurrency)) is not None:
        print(f"noise: not measured: {reason}", file=sys.stderr)
        return write_run(Run(first.header | {"status": "not_comparable", "reason": reason}, ()), TARGET / SAMPLES)
    samples = Path("data/samples") / TARGET.name
    shutil.rmtree(samples, ignore_errors=True)
    again = settings.model_copy(update={"concurrency": gates.noise_concurrency})
    result = evaluation.evaluate(NATIVE, again, samples, label=TARGET.name)
    keep(samples, TARGET)
    print(f"noise: {NATIVE} again: {result['status']}, accuracy {result['accuracy']}", file=sys.stderr)


def obstacle(first: Run, concurrency: int | None) -> str | None:
    """Why a second run would say nothing about ``first``, or cannot be made."""
    if concurrency is None:
        return "gates.noise_concurrency is null"
    if first.header["status"] != "valid":
        return f"the first run is {first.header['status']}: {first.header['reason']}"
    try:
        _, here = evaluation.plan_of(NATIVE)
    except PipelineError as error:
        return str(error)
    there = first.header["conditions"]
    unlike = sorted(key for key in here if here[key] != there.get(key))
    return f"{NATIVE} was measured under another {', '.join(unlike)}" if unlike else None


if __name__ == "__main__":
    stage.run(main)
