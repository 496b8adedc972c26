"""The positive control: weights rounded to 2 bits and served must be caught by the very evaluation that passes the others.

Experts alone are not enough: this model retrieves with its attention, and when only its experts have 2 bits, 60 items lose nothing (.983
and .983, McNemar p 1, KL 5e-4 nats a token).  So the dense layers are rounded as well: .983 becomes .667, p 4e-6, KL .16.

Real servers, real evaluation; only the number of items is small.  Without this an evaluation that sees nothing would look like one
that finds no harm.
"""

import subprocess
from pathlib import Path

import pytest

from pipeline.env_facts import python_of
from pipeline.evals import dataset, runner
from pipeline.evals.compare import compare
from pipeline.evals.fidelity import FILE, compare_logprobs
from pipeline.evals.runs import load_run
from pipeline.plan import hardware
from pipeline.serve.server import running
from pipeline.serving import server_settings

MODEL = Path("models/tiny-k3")
ITEMS = {
    "name": "control",
    "lengths": [512],
    "depths": [0.0, 0.5, 1.0],
    "seeds": [0],
    "languages": ["auto"],
    "items": {"multi_key": 24, "multi_query": 24, "frequent_words": 12},
    "stop": True,
    "concurrency": 16,
}
GATES = {"min_gateable_families": 1, "required_families": []}
QUANTIZE = """
import sys
from pathlib import Path
from pipeline.quant.engine import requantize
from pipeline.quant.recipe import Recipe
requantize(Path(sys.argv[1]), Path(sys.argv[2]), Recipe(format="w2_control", scope="dense_too"))
"""


def evaluate(checkpoint: Path, data: Path, folder: Path) -> Path:
    settings = server_settings(hardware.load("cpu"), "tiny-k3", checkpoint, {"cache_dtype": "auto", "state_dtype": "auto"})
    with running(settings, folder / "server.log") as server:
        runner.evaluate(server.base_url, server.model, MODEL, data, ITEMS, folder)
    return folder / runner.SAMPLES


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("control")
    subprocess.run([python_of("quant"), "-c", QUANTIZE, MODEL, folder / "w2"], check=True)
    dataset.generate(MODEL, ITEMS, folder / "data")
    checkpoints = {"native": MODEL, "w2": folder / "w2"}
    return {name: evaluate(path, folder / "data", folder / f"{name}-out") for name, path in checkpoints.items()}


def test_two_bit_weights_fail_the_gate_on_a_run_that_is_valid(samples):
    assert load_run(samples["w2"]).header["status"] == "valid"  # every answer is there and wrong: harm, no broken run
    records = [path.with_name(FILE) for path in (samples["native"], samples["w2"])]
    result = compare(samples["native"], samples["w2"], GATES, fidelity=compare_logprobs(*records))
    assert result["verdict"] == "fail", result
    overall = result["overall"]
    assert overall["mcnemar_p"] < 0.01 and overall["upper"] < -0.1
    assert [alarm for alarm in result["alarms"] if "KL divergence" in alarm]


def test_native_against_itself_does_not(samples):
    result = compare(samples["native"], samples["native"], GATES)
    assert result["verdict"] in ("pass", "inconclusive") and result["overall"]["difference"] == 0
