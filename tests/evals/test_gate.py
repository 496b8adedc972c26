"""The baseline check and the gate's exit codes."""

import json

import pytest

from pipeline.errors import Unreadable
from pipeline.evals import gate_cli
from pipeline.evals.baseline import check, reference, scores_of
from pipeline.evals.compare import compare, noise
from pipeline.evals.runs import Run
from tests.evals.test_compare import GATES, HEADER, noisy, run, sample


def of(family: str, right: int, n: int, length: int = 512) -> Run:
    return Run(HEADER, tuple(sample(family, length, i, i < right) for i in range(n)))


def scores(score: float, n: int | None, family: str = "single") -> dict:
    return {"command": "python evaluate.py", "families": {family: {"512": {"score": score, "n": n}}}}


@pytest.mark.parametrize(
    "right, n, score, reference_n, verdict",
    [
        (182, 198, 0.935, None, "pass"),  # 91.9 against 93.5: a model
        (26, 97, 0.46, None, "fail"),  # 27 against 46: a harness
        (26, 97, 0.46, 97, "pass"),  # 27 against 46, but either may be off by ten points
        (54, 200, 0.46, 200, "fail"),
        (3, 10, 0.46, None, "pass"),  # ten items cannot tell
        (85, 100, 0.95, 100, "pass"),
        (60, 100, 0.95, 100, "fail"),
        (100, 100, 0.5, 100, "pass"),  # better than published is no fault
        (0, 40, 1.0, 100, "fail"),
    ],
)
def test_baseline_against_its_reference(right, n, score, reference_n, verdict):
    assert check(of("single", right, n), scores(score, reference_n), GATES)["verdict"] == verdict


def test_many_small_cells_add_up():
    """Twelve items a cell show nothing alone; all together do."""
    expected = {
        "scores": {
            f: {str(n): {"score": 0.9, "n": 100} for n in (512, 1024, 2048, 4096)}
            for f in ("single", "multi_key", "multi_value")
        }
    }
    result = check(run(lambda f, n, i: i % 3 != 0, per_cell=12), expected, GATES)
    assert result["verdict"] == "fail" and result["cells"]["all"]["verdict"] == "fail"
    assert result["cells"]["single 512"]["verdict"] == "pass"


def test_a_list_right_to_95_percent_is_not_exactly_right():
    row = sample("ordered_recall", 512, 0, True) | {"hits": [1] * 62 + [0] * 2}
    result = check(Run(HEADER, (row,)), {"ordered": {"512": {"accuracy": 0.9, "n": 50}}}, GATES)
    assert result["cells"]["ordered_recall 512"]["native"] == 0.0


def test_reference_files_of_other_shapes():
    assert scores_of({"tracking": {"512": {"accuracy": 0.8, "n": 5, "item_accuracy": 1}}, "seed": 3}) == {
        "variable_tracking": {512: (0.8, 5)}
    }
    for wrong in ({"single": {"512": {"score": 91.9}}}, {"single": {"512": 0.9}}, {"command": "x"}):
        with pytest.raises(Unreadable):
            scores_of(wrong)
    assert check(of("single", 5, 5), scores(0.9, 9, "qa"), GATES)["verdict"] == "unchecked"


@pytest.fixture
def metrics(tmp_path):
    folder = tmp_path / "comparisons"
    folder.mkdir()

    def write(**blocks):
        for name, block in blocks.items():
            (folder / f"{name.replace('__', '-')}.json").write_text(json.dumps(block))
        return ["--metrics", str(folder)]

    return write


NATIVE = reference(of("single", 95, 100), scores(0.95, 100), GATES)
BROKEN = reference(of("single", 40, 100), scores(0.95, 100), GATES)
PASS, FAIL = compare(run(), run(), GATES), compare(run(), run(noisy(0.6, 3)), GATES)
OPEN = compare(run(per_cell=1), run(per_cell=1), GATES)
INVALID = compare(run(), run(status="invalid", reason="stuck"), GATES)


@pytest.mark.parametrize(
    "blocks, code, words",
    [
        ({"fp8__auto": PASS}, 0, "gate: pass"),
        ({"fp8__auto": PASS, "w4a16__auto": FAIL}, 3, "w4a16-auto   fail"),
        ({"fp8__auto": PASS, "w4a16__auto": OPEN}, 4, "inconclusive"),
        ({"fp8__auto": PASS, "w4a16__auto": INVALID}, 5, "because the variant run is invalid: stuck"),
        ({"fp8__auto": FAIL, "w4a16__auto": INVALID, "int8__auto": OPEN}, 3, "gate: fail"),
        ({"fp8__auto": OPEN, "w4a16__auto": INVALID}, 5, "gate: invalid"),
        ({"fp8__auto": None}, 5, "holds no comparison"),
    ],
)
def test_exit_codes(metrics, capsys, blocks, code, words):
    assert gate_cli.main(metrics(native__auto=NATIVE, **blocks)) == code
    assert words in capsys.readouterr().out


def test_a_broken_baseline_judges_nobody(metrics, capsys):
    assert gate_cli.main(metrics(native__auto=BROKEN, fp8__auto=PASS, w4a16__auto=FAIL)) == 5
    out = capsys.readouterr().out
    assert "does not reach its reference scores" in out and "not_judged" in out and "fp8-auto    pass" not in out


def test_no_baseline_judges_nobody(metrics, capsys):
    broken = reference(Run(HEADER | {"status": "invalid", "reason": "dead"}, ()), None, GATES)
    assert gate_cli.main(metrics(native__auto=broken, fp8__auto=PASS)) == 5
    assert "no valid baseline" in capsys.readouterr().out


def test_one_variant_alone_and_json(metrics, capsys):
    arguments = metrics(native__auto=NATIVE, fp8__auto=PASS, w4a16__auto=FAIL)
    assert gate_cli.main([*arguments, "--json", "fp8-auto"]) == 0
    decision = json.loads(capsys.readouterr().out)
    assert decision["verdict"] == "pass" and list(decision["variants"]) == ["fp8-auto"]
    assert decision["baseline"]["native-auto"]["verdict"] == "pass"
    with pytest.raises(Unreadable, match="not compared: nvfp4-auto"):
        gate_cli.main([*arguments, "nvfp4-auto"])


def test_the_gate_says_what_is_noise(metrics, capsys):
    native, again = run(noisy(0.98, 1)), run(noisy(0.98, 2))
    floors = noise(native, again, GATES)
    variant = compare(native, run(noisy(0.98, 5)), GATES, noise=floors)
    cell = floors["cells"]["overall"]
    arguments = metrics(native__auto=NATIVE | {"noise": floors}, fp8__auto=variant)
    gate_cli.main(arguments)
    out = capsys.readouterr().out
    assert f"A/A native-auto against itself: {cell['right_to_wrong']} lost, {cell['wrong_to_right']} won of 400" in out
    assert f"within the noise of {cell['floor']:.3f}" in out
    gate_cli.main([*arguments, "--json"])
    decision = json.loads(capsys.readouterr().out)
    assert decision["noise"]["native-auto"]["floor"] == cell["floor"]
    assert decision["variants"]["fp8-auto"]["within_noise"] is True
    absent = {"status": "not_comparable", "reason": "gates.noise_concurrency is null", "floor": None, "cells": {}}
    gate_cli.main(metrics(native__auto=NATIVE | {"noise": absent}, fp8__auto=PASS))
    assert "no noise floor, gates.noise_concurrency is null" in capsys.readouterr().out


def test_nothing_to_judge_is_unreadable(tmp_path):
    with pytest.raises(Unreadable, match="no variant was compared"):
        gate_cli.main(["--metrics", str(tmp_path)])
