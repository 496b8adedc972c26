"""What may be varied: one axis at a time, known names, sound numbers."""

from __future__ import annotations

import pytest
import yaml

from pipeline import config
from pipeline.errors import Refused
from pipeline.tuning.settings import Point, TuningSettings, expand, parse
from tests.imports import REPOSITORY, wanted_deps

BASELINE = {"max_num_seqs": 16, "long_prefill_token_threshold": None, "kv": "auto", "quant": "native"}


def test_the_baseline_comes_first_and_its_own_values_are_not_measured_again():
    settings = TuningSettings.from_params(
        {
            "axes": {
                "quant": ["native", "int8"],
                "max_num_seqs": [8, 16, 32],
                "long_prefill_token_threshold": [0, 256],
            },
            "points": [{"max_num_seqs": 8}, {"kv": "fp8"}],
        }
    )
    assert [point.name for point in expand(settings, BASELINE)] == [
        "baseline",
        "kv=fp8",
        "max_num_seqs=8",
        "max_num_seqs=32",
        "long_prefill_token_threshold=256",
        "quant=int8",
    ]


@pytest.mark.parametrize("point", [{"max_num_seqs": 8, "block_size": 64}, {}, {"temperature": 1}])
def test_a_point_that_moves_two_axes_or_none_is_refused_with_exit_3(point):
    with pytest.raises(Refused, match="tuning.points") as error:
        TuningSettings.from_params({"points": [point]})
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    "params",
    [
        {"axes": {"temperature": [1]}},
        {"baseline": {"quant": "int8"}},
        {"objective": "beauty"},
        {"pairs": 2},
        {"confidence": 1.0},
        {"pair_servers": "both"},
        {"objective": "goodput_requests_s"},
        {"bench": {"repeats": 1, "min_repeats": 1}},
        {"bench": {"repeats": 2, "min_repeats": 3}},
        {"misspelt": 1},
        {"variant": "native"},
    ],
)
def test_wrong_parameters_are_refused(params):
    with pytest.raises(ValueError):
        TuningSettings.from_params(params)


def test_tuning_params_are_what_conf_composes_to():
    written = (REPOSITORY / "tuning" / "params.yaml").read_text()
    assert written == config.compose(name="tune"), "run `python3 -m pipeline config`"


@pytest.mark.parametrize("file", sorted((REPOSITORY / "conf" / "tuning").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_choice_is_valid(file):
    parse(yaml.safe_load(config.compose([f"tuning={file.stem}"], "tune"))["tuning"], file)


def test_two_axes_on_the_command_line_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match="moves 2 axes"):
        config.main(["tuning.points=[{block_size: 64, max_num_seqs: 8}]"])
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_the_pipeline_of_its_own_depends_on_what_its_stage_imports_and_the_root_does_not_run_it():
    stage = yaml.safe_load((REPOSITORY / "tuning" / "dvc.yaml").read_text())["stages"]["tune"]
    listed = sorted(dep for dep in stage["deps"] if dep.endswith(".py"))
    assert listed == wanted_deps("stages/tune.py"), "run `python tests/imports.py`"
    assert stage["wdir"] == ".." and "tune" not in yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]


def test_points_are_values():
    assert Point("kv", "fp8") == Point("kv", "fp8") and Point().name == "baseline"
