"""dvc.yaml, params.yaml and conf/ say the same thing, and each stage depends on exactly the code that it runs."""

import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline import config
from tests.imports import REPOSITORY, imported_modules, transitive, wanted_deps

STAGES = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
CONF = REPOSITORY / "conf"
CHOICES = [
    f"{file.parent.relative_to(CONF)}={file.stem}"
    for file in sorted(CONF.glob("**/*.yaml"))
    if file.parent != CONF and file.parts[len(CONF.parts)] != "tuning"
]


def committed(path: str) -> str:
    """The committed text: a narrowed in-place `dvc exp run` rewrites the working copy of params.yaml."""
    done = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else (REPOSITORY / path).read_text()


def test_params_yaml_is_what_conf_composes_to():
    assert committed("params.yaml") == config.compose(), "run `python3 -m pipeline config`"


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_conf_composes_and_is_valid(choice):
    config.check(yaml.safe_load(config.compose([choice])))


def test_a_choice_that_does_not_exist_is_refused_with_its_name():
    with pytest.raises(config.Refused, match="quant/fp7") as refused:
        config.compose(["quant=fp7"])
    assert "w4a16_gptq" in str(refused.value) and "file://" not in str(refused.value)


def test_a_wrong_value_is_told_by_its_key_and_without_the_parsers_own_words():
    params = yaml.safe_load(config.compose())
    params["serve"] |= {"allow_untested": "maybe", "misspelt": 1}
    with pytest.raises(config.Refused) as refused:
        config.check(params)
    assert "serve.misspelt: no such key (got 1)" in str(refused.value)
    assert "serve.allow_untested: " in str(refused.value) and "pydantic" not in str(refused.value)


@pytest.mark.parametrize("group", ["model", "hardware", "kv", "eval", "bench", "gates"])
def test_an_unknown_key_in_any_group_is_an_error(group):
    params = yaml.safe_load(config.compose())
    params[group]["misspelt"] = 1
    with pytest.raises(config.PipelineError, match="misspelt"):
        config.check(params)


@pytest.mark.parametrize("name", STAGES)
def test_the_modules_in_deps_are_those_that_the_stage_imports(name):
    listed = sorted(dep for dep in STAGES[name]["deps"] if dep.endswith(".py"))
    assert listed == wanted_deps(f"stages/{name}.py"), "run `python tests/imports.py`"


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_runs_in_an_environment_and_names_no_machine(name):
    command = STAGES[name]["cmd"]
    assert command.startswith("python3 -m pipeline env run ") and f" -m stages.{name}" in command
    assert not any(mark in command for mark in ("/", "srun", "CUDA", "localhost"))


def test_dvc_never_hashes_the_released_weights_only_their_manifest():
    """A no-op `dvc repro` over 1.5 TB must not take a quarter of an hour."""
    for name, stage in STAGES.items():
        data = [dep for dep in stage["deps"] if not dep.endswith(".py")]
        assert not [dep for dep in data if dep.startswith("models") or "model.path" in dep], name
    assert "metrics/source.json" in STAGES["quantize"]["deps"] and "model.path" in STAGES["quantize"]["params"]


def test_the_data_set_is_a_stage_of_its_own_that_knows_no_variant_and_is_never_made_by_another():
    stage = STAGES["dataset"]
    assert "matrix" not in stage and stage["params"] == ["model.path", "eval"] and "data/eval" in stage["outs"]
    code = {path.parts[1] for path in transitive(Path("stages/dataset.py"))}
    assert not code & {"serve", "quant", "bench"}
    assert all("data/eval" in STAGES[name]["deps"] for name in ("evaluate", "noise"))


def test_only_small_files_are_copied_into_dvcs_cache():
    """Twice the disk, or minutes of checkout: bytes of a big checkpoint lie under data/checkpoints, which no stage tracks."""
    outs = {name: stage.get("outs", []) + stage.get("metrics", []) for name, stage in STAGES.items()}
    cached = {(name, out) for name, each in outs.items() for out in each if isinstance(out, str)}
    assert cached == {
        ("dataset", "data/eval"),
        ("evaluate", "data/samples/${item.quant}-${item.kv}"),
        ("kv", "data/kv/${item.quant}-${item.kv}"),  # scales, an index and a config; the weights stay where they are
    }
    flat = [path for each in outs.values() for out in each for path in ([out] if isinstance(out, str) else out)]
    assert not [path for path in flat if path.startswith("data/checkpoints")]


def test_re_quantizing_does_not_depend_on_serving_evaluating_or_reporting():
    code = {path.parts[1] for path in transitive(Path("stages/quantize.py"))}
    assert not code & {"serve", "evals", "bench", "report", "plan", "stats"}


def test_modules_below_the_stages_do_not_know_dvc():
    for file in sorted((REPOSITORY / "pipeline").rglob("*.py")):
        relative = file.relative_to(REPOSITORY)
        assert not any(name.startswith("stages") for name in imported_modules(relative)), relative
