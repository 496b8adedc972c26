"""Every file of conf/quant on the tiny model: planned and admitted, quantized, verified against its source."""

import json
from pathlib import Path

import pytest
import yaml

from pipeline.checkpoint.finding import ERROR
from pipeline.checkpoint.lint import lint
from pipeline.plan import hardware
from pipeline.plan.alternatives import plan
from pipeline.quant import Recipe, engine

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "models" / "tiny-k3"
CONF = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((REPOSITORY / "conf/quant").glob("*.yaml"))}
SCHEMES = {key: conf["schemes"][key] for key, conf in CONF.items() if "schemes" in conf}
MACHINE = hardware.parse(yaml.safe_load((REPOSITORY / "conf/hardware/cpu.yaml").read_text()), "conf/hardware/cpu.yaml")
CALIBRATED = ("w4a16_gptq", "w4a16_awq", "int8_sq")
DAMAGED = ("fp8_dense", "fp8_all", "int8_dense", "w4a16", "w4a16_g128", "fp8_amax", "fp8_channel_amax", "int8_amax")


def test_each_file_holds_the_scheme_of_its_name_and_nothing_else():
    assert {key: list(conf["schemes"]) for key, conf in CONF.items() if "schemes" in conf} == {k: [k] for k in SCHEMES}
    assert set(CONF["all"]["defaults"]) - {"_self_"} <= SCHEMES.keys()


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("key", SCHEMES)
def test_it_is_planned(key, kv):
    result = plan(TINY, MACHINE, key, kv, recipe=SCHEMES[key])
    assert not result.refusals
    assert result.verdict in ("yes", "emulated"), "its row is missing from pipeline/plan/compatibility.yaml"


@pytest.mark.parametrize("key", [key for key in SCHEMES if key not in CALIBRATED])
def test_it_is_quantized_and_verified(key, tmp_path):
    report = engine.requantize(TINY, tmp_path / key, Recipe.from_params(SCHEMES[key]))
    found = [item for item in lint(tmp_path / key, base=TINY, manifest=report) if item.severity == ERROR]
    assert not found, "\n".join(map(str, found))
    total = report["damage"]["total"]
    assert (total["exact_fraction"] < 1) == (key in DAMAGED), total
    if key != "native":
        planned = plan(TINY, MACHINE, key, "auto", recipe=SCHEMES[key])
        groups = json.loads((tmp_path / key / "config.json").read_text())["quantization_config"]["config_groups"]
        assert planned.verdict and len(groups) == (2 if key.endswith("_dense") else 1)
