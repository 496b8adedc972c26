from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import serving
from pipeline.errors import Invalid, Refused
from pipeline.plan import hardware
from pipeline.serve import ServerSettings
from pipeline.serving import admit, check_dtypes, check_scales, server_settings
from pipeline.variant import Variant
from tests.imports import REPOSITORY

FP8 = {"cache_dtype": "fp8", "state_dtype": "auto"}


def test_the_variant_decides_the_cache_and_the_machine_the_rest():
    settings = server_settings(hardware.load("b300x8"), "kimi-k3", Path("checkpoints/fp8"), FP8 | {"cache_dtype": "auto"})
    assert settings.kv_cache_dtype == "auto"
    assert "--kv-cache-dtype" not in settings.extra_args
    assert settings.tensor_parallel_size == 8 and settings.max_model_len == 1048576
    assert "--load-format" in settings.extra_args and "--no-enable-flashinfer-autotune" in settings.extra_args
    assert settings.environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"


def test_the_main_jobs_machine():
    settings = server_settings(hardware.load("cpu"), "tiny-k3", Path("checkpoints/fp8"), FP8)
    assert settings.env == "serve-cpu" and settings.kv_cache_dtype == "fp8"
    assert "--enforce-eager" in settings.extra_args
    assert settings.max_num_batched_tokens == 2048


@pytest.mark.parametrize("model_allows", [False, True])
def test_remote_code_needs_both_permissions(model_allows):
    machine = hardware.load("b300x8")
    settings = server_settings(machine, "k3", Path("x"), FP8, trust_remote_code=model_allows)
    assert settings.trust_remote_code is model_allows
    silent = replace(machine, flags={})
    assert server_settings(silent, "k3", Path("x"), FP8, trust_remote_code=True).trust_remote_code is False


def test_every_machine_that_can_be_started_gives_settings_and_the_others_say_why():
    for name in hardware.available():
        machine = hardware.load(name)
        if machine.nodes == 1:
            server_settings(machine, "k3", Path("x"), FP8)
        else:
            with pytest.raises(Refused, match="one host only"):
                server_settings(machine, "k3", Path("x"), FP8)


@pytest.mark.parametrize(("flag", "value"), [("max-model-len", "8192"), ("max-num-seqs", 1.5), ("enable-prefix-caching", "false")])
def test_a_flag_of_the_wrong_type_is_refused_with_its_name(flag, value):
    machine = hardware.load("cpu")
    flags = machine.flags | {flag: replace(machine.flags[flag], value=value)}
    with pytest.raises(Refused, match=f"hardware cpu, flags.{flag}: expected .*, not '?{value}"):
        server_settings(replace(machine, flags=flags), "k3", Path("x"), FP8)


def planned(verdict, *refusals):
    warnings = [f"{verdict}: fp8-fp8 on cpu: nobody ran it"] if verdict == "untested" else []
    return {"verdict": verdict, "refusals": [{"message": text} for text in refusals], "warnings": ["another", *warnings]}


def test_an_untested_combination_is_served_only_when_told_so():
    variant = Variant("fp8", "fp8")
    with pytest.raises(Refused, match=r"fp8-fp8 is not served: untested: .* nobody ran it.*serve.allow_untested=true"):
        admit(variant, planned("untested"), allow_untested=False)
    admit(variant, planned("untested"), allow_untested=True)
    for verdict in ("yes", "emulated"):
        admit(variant, planned(verdict), allow_untested=False)


def test_what_the_plan_refuses_is_not_served_whatever_is_allowed():
    with pytest.raises(Refused, match="decodes garbage"):
        admit(Variant("fp8", "fp8"), planned("no", "decodes garbage"), allow_untested=True)


@pytest.mark.parametrize(
    ("label", "told", "fine"),
    [
        ("calibrated", "calibrated", True),
        ("calibrated", "uncalibrated (scale 1.0)", False),
        ("calibrated", "partly calibrated", False),
        ("calibrated", "not applied", False),
        ("scale_1.0", "uncalibrated (scale 1.0)", True),
        ("scale_1.0", "calibrated", False),
        ("unquantized", "not applied", True),
        ("calibrated", None, True),
    ],
)
def test_a_server_is_held_to_the_label_of_its_scales(label, told, fine):
    if fine:
        check_scales(label, {"label": told})
    else:
        with pytest.raises(Invalid, match="workers say"):
            check_scales(label, {"label": told})


@pytest.mark.parametrize(
    ("asked", "told", "fine"),
    [
        ({}, {"kv_cache_dtype": "auto", "state_dtype": "float32"}, True),
        ({}, {}, True),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, True),
        ({"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "auto"}, True),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}, False),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}, False),
        ({}, {"kv_cache_dtype": "fp8"}, False),  # a kv_cache_scheme in the checkpoint, which `auto` obeys
        ({"state_dtype": "bfloat16"}, {"state_dtype": "float32"}, False),
    ],
)
def test_a_server_is_held_to_the_dtypes_it_was_asked_for(asked, told, fine):
    request = ServerSettings(model=Path("x"), served_name="x", **asked)
    if fine:
        check_dtypes(request, told)
    else:
        with pytest.raises(Invalid, match="was asked for in .*, the server says"):
            check_dtypes(request, told)


def test_evaluation_bench_and_tuning_are_served_from_the_folder_that_holds_the_scales(monkeypatch, tmp_path):
    """A tuning point with a calibrated cache would otherwise be served at scale 1.0 under the calibrated name."""
    values = {"model": {"name": "m", "trust_remote_code": False}}
    monkeypatch.setattr(serving.params, "load", values.__getitem__)
    monkeypatch.setattr(serving, "machine", lambda: hardware.load("cpu"))
    monkeypatch.setattr(serving.store, "served", lambda quant, variant: tmp_path / quant / variant)
    settings = serving.variant_settings(Variant("fp8", "fp8_calibrated"), FP8)
    assert settings.model == tmp_path / "fp8" / "fp8-fp8_calibrated" and settings.kv_cache_dtype == "fp8"
    for file in ("pipeline/evaluation.py", "stages/bench.py", "stages/tune.py"):
        text = (REPOSITORY / file).read_text()
        assert "variant_settings" in text and "server_settings" not in text, f"{file} goes its own way to a server"
