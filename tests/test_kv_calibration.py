"""What calibrated KV scales are made from, and where they are refused."""

import json
from pathlib import Path

import pytest

from pipeline import kv_calibration
from pipeline.errors import Refused, Unreadable
from pipeline.groups import Kv
from pipeline.k3 import kv_cache_scheme
from pipeline.kv_calibration import Calibration
from pipeline.plan.alternatives import plan
from pipeline.plan.cache import is_calibrated, kv_key
from tests.plan import configs

MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny-k3"  # its tokenizer and lexicon
SETTING = {"documents": None, "count": 10, "tokens": 256, "seed": 1000}


def setting(key, **changes):
    return {"dtypes": {key: {"cache_dtype": "fp8", "state_dtype": "auto"} | changes}}


def test_the_key_says_that_scales_are_calibrated():
    assert kv_key("fp8_calibrated") == ("fp8", "auto") and is_calibrated("fp8_calibrated")
    assert kv_key("fp8_calibrated_state16") == ("fp8", "bfloat16") and is_calibrated("fp8_calibrated_state16")
    assert not is_calibrated("fp8") and not is_calibrated("auto")
    Kv.model_validate(setting("fp8_calibrated", calibration=SETTING))
    Kv.model_validate(setting("fp8"))


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (setting("fp8", calibration=SETTING), "no other has one"),
        (setting("fp8_calibrated"), "ends in _calibrated has a calibration"),
        (setting("fp8_calibrated", calibration=SETTING | {"samples": 3}), "samples"),
        (setting("fp8_e5m2_calibrated", cache_dtype="fp8_e5m2", calibration=SETTING), "E4M3"),
        (setting("auto_calibrated", cache_dtype="auto", calibration=SETTING), "E4M3"),
    ],
)
def test_a_key_and_a_setting_that_disagree_are_errors(raw, says):
    with pytest.raises(ValueError, match=says):
        Kv.model_validate(raw)


def test_a_latent_cache_is_refused_calibrated_scales_and_a_grouped_query_model_is_not():
    refused = plan(configs.k3(), "cpu", "native", "fp8_calibrated")
    assert [refusal.rule for refusal in refused.refusals] == ["kv_scales"] and "never used" in refused.refusals[0].message
    assert plan(configs.k3(), "cpu", "native", "fp8").kv_label == "scale_1.0"
    planned = plan(configs.TINY_GQA, "cpu", "native", "fp8_calibrated")
    assert planned.kv_label == "calibrated" and not planned.refused
    assert plan(configs.TINY_GQA, "cpu", "native", "fp8").kv_label == "scale_1.0"


def test_generated_documents_are_reproducible_and_not_the_evaluations():
    calibration = Calibration(**SETTING)
    first = kv_calibration.texts(MODEL, calibration)
    assert len(set(first)) == 10 and first == kv_calibration.texts(MODEL, calibration)
    assert not set(first) & set(kv_calibration.texts(MODEL, Calibration(**SETTING | {"seed": 0})))


def test_documents_of_a_file(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(3)))
    calibration = Calibration(**SETTING | {"documents": str(path), "count": 2})
    assert kv_calibration.texts(MODEL, calibration) == ["document 0", "document 1"]
    with pytest.raises(Refused, match="3 documents, kv.dtypes.*count asks for 10"):
        kv_calibration.texts(MODEL, Calibration(**SETTING | {"documents": str(path)}))
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(Unreadable, match="JSON lines with a 'text'"):
        kv_calibration.texts(MODEL, calibration)
    with pytest.raises(Unreadable, match="absent.jsonl"):
        kv_calibration.texts(MODEL, Calibration(**SETTING | {"documents": str(tmp_path / "absent.jsonl")}))


def test_the_scheme_joins_a_quantization_config_or_makes_one():
    made = kv_calibration.with_scheme({"model_type": "qwen3"})
    assert kv_cache_scheme(made)["num_bits"] == 8 and made["quantization_config"]["config_groups"] == {}
    quantized = {"model_type": "qwen3", "quantization_config": {"format": "int-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None}}
    joined = kv_calibration.with_scheme(quantized)["quantization_config"]
    assert joined["format"] == "int-quantized" and joined["ignore"] == ["lm_head"] and joined["kv_cache_scheme"]["type"] == "float"
    assert quantized["quantization_config"]["kv_cache_scheme"] is None
