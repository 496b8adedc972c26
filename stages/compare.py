"""metrics/variants/<variant>.json: one row of the table; metrics/comparisons/<variant>.json: its verdict against native."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import params, stage
from pipeline.bench import key
from pipeline.evals.baseline import reference
from pipeline.evals.compare import compare, noise
from pipeline.evals.fidelity import FILE, compare_logprobs
from pipeline.evals.runs import SAMPLES
from pipeline.files import read_json, write_json
from pipeline.plan import hardware
from pipeline.plan.predict import compare as compare_memory
from pipeline.plan.predict import predicted
from pipeline.report.memory import by_rank
from pipeline.report.row import build_row
from pipeline.variant import Variant

PAIRS = Path("metrics/pairs")
REFERENCE = Variant("native", "auto")
AGAIN = PAIRS / "native-auto-again"


def main(name: str) -> None:
    variant, model, gates = Variant.parse(name), params.load("model"), params.load("gates")
    native, ours = (PAIRS / each for each in (REFERENCE.name, name))
    itself = noise(native / SAMPLES, AGAIN / SAMPLES, gates)
    if variant == REFERENCE:
        comparison = reference(ours / SAMPLES, model["reference_scores"], gates)
        comparison["noise"] = itself | {"fidelity": distance(native, AGAIN)}
    else:
        comparison = compare(native / SAMPLES, ours / SAMPLES, gates, fidelity=distance(native, ours), noise=itself)
    reference_bench, bench = (read_json(f"metrics/bench/{each}.json", finite=True) for each in (REFERENCE.name, name))
    if variant != REFERENCE:
        comparison["speed"] = key.compare(reference_bench, bench) | {"unlike": key.unlike(reference_bench, bench)}
    machine = hardware.parse(params.load("hardware"), "params.yaml, hardware")
    recipe = params.load("quant")["schemes"][variant.quant]
    expected = predicted(model["path"], machine, variant.quant, variant.kv, recipe=recipe)
    figures = compare_memory(expected, bench["memory"])
    comparison["memory"] = [asdict(figure) for figure in figures]
    comparison["memory_parts"] = by_rank(expected, bench["memory"])
    comparison["memory_findings"] = [str(figure) for figure in figures if figure.beyond]
    row = build_row(
        read_json(f"metrics/evals/{name}.json", finite=True),
        bench,
        read_json(f"metrics/kv/{name}.json"),
        read_json(f"metrics/quantize/{variant.quant}.json"),
        comparison,
    )
    write_json(f"metrics/comparisons/{name}.json", comparison)
    write_json(f"metrics/variants/{name}.json", row)


def distance(native: Path, other: Path) -> dict[str, Any] | None:
    """Fidelity of one run's log-probabilities to native's; ``None`` where none were recorded."""
    if not all((folder / FILE).exists() for folder in (native, other)):
        return None
    buckets = tuple(params.load("eval")["fidelity"]["position_buckets"])
    return compare_logprobs(native / FILE, other / FILE, buckets)


if __name__ == "__main__":
    stage.run(main)
