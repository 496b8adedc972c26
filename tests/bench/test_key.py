"""What may be compared: unlike conditions never give a percentage."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pipeline.bench import BenchSettings, comparability, compare
from pipeline.bench.judge import judge
from pipeline.bench.settings import Load, parse
from pipeline.errors import Refused
from pipeline.serve import ServerSettings

HARDWARE, SOFTWARE = {"cpu": "x", "count": 2}, {"vllm": "0.32.0"}
SERVER = ServerSettings(model="/models/native", served_name="native-auto", max_num_seqs=8)


def result(
    run,
    tok_s=100.0,
    settings=BenchSettings(input_len=16, output_len=8),
    server=SERVER,
    hardware=HARDWARE,
    software=SOFTWARE,
    **changes,
):
    runs = {Load("concurrency", 1): [run(tok_s=tok_s)] * 3, Load("concurrency", 8): [run(tok_s=2 * tok_s)] * 3}
    return (
        judge(runs, settings)
        | {"comparability": comparability(settings, server, hardware, software), "checkpoint_id": "a", "emulated": []}
        | changes
    )


def test_variants_compare(run):
    fp8 = dataclasses.replace(SERVER, model="/models/fp8", served_name="fp8-fp8", kv_cache_dtype="fp8")
    found = compare(result(run), result(run, 150, server=fp8, checkpoint_id="b"))
    assert found["status"] == "valid" and found["ratios"]["output_tok_s"] == 1.5


def test_variants_of_one_model_compare_and_two_models_do_not(run, tmp_path):
    servers = {}
    for name, config in {
        "native": {"hidden_size": 128, "text_config": {"layers": 5, "quantization_config": {"format": "mxfp4"}}},
        "fp8": {"hidden_size": 128, "text_config": {"layers": 5}, "quantization_config": {"format": "float"}},
        "other": {"hidden_size": 256, "text_config": {"layers": 5}},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        servers[name] = dataclasses.replace(SERVER, model=tmp_path / name)
    native, fp8, other = (result(run, server=server) for server in servers.values())
    assert compare(native, fp8)["status"] == "valid"
    assert "model differ" in compare(native, other)["reason"]


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"hardware": HARDWARE | {"count": 4}}, "hardware"),
        ({"software": {"vllm": "0.33.0"}}, "software"),
        ({"settings": BenchSettings(input_len=16, output_len=8, seed=1)}, "workload"),
        ({"settings": BenchSettings(input_len=16, output_len=8, cache="warm")}, "workload"),
        ({"server": dataclasses.replace(SERVER, max_num_seqs=16)}, "server"),
        ({"server": dataclasses.replace(SERVER, environment={"OMP_NUM_THREADS": "2"})}, "server"),
        ({"hardware": None}, "fingerprint"),
        ({"status": "invalid", "reason": "prefix_hits"}, "prefix_hits"),
        ({"spec_decode_accept_length": 3.29}, "accept length"),
        ({"emulated": ["mxfp4"], "checkpoint_id": "b"}, "mxfp4"),
    ],
)
def test_unlike_results_give_no_ratio(run, changes, told):
    for pair in ((result(run), result(run, **changes)), (result(run, **changes), result(run))):
        found = compare(*pair)
        assert found["status"] == "not_comparable" and found["ratios"] is None and told in found["reason"]


def test_emulated_speed_compares_within_one_checkpoint(run):
    emulated = result(run, emulated=["mxfp4"])
    assert compare(emulated, emulated)["status"] == "valid"


def test_break_even_instead_of_one_number(run):
    base, other = result(run), result(run)
    other["per_concurrency"]["1"]["output_tok_s"] = 50.0
    assert compare(base, other)["break_even_concurrency"] == 8
    other["per_concurrency"]["8"]["output_tok_s"] = 50.0
    assert compare(base, other)["break_even_concurrency"] is None
    assert compare(base, base)["break_even_concurrency"] == 1


@pytest.mark.parametrize(
    "params",
    [
        {"input_length": 5},
        {"dataset": "dreams"},
        {"dataset": "shared_prefix"},
        {"dataset": "shared_prefix", "prefix_len": 64},
        {"prefix_len": 64},
        {"trace": "x.jsonl"},
        {"request_rate": [0]},
        {"request_rate": [2, 2]},
        {"range_ratio": 1.0},
        {"trace_time_scale": 0},
        {"concurrency": [1.5]},
        {"concurrency": []},
        {"concurrency": [2, 2]},
        {"repeats": 0},
        {"output_len": 1},
        {"cache": "lukewarm"},
        {"repeats": 9},
        {"trace_requests": 0},
        {"client_timeout_s": 0},
    ],
)
def test_wrong_parameters_are_refused(params):
    with pytest.raises(ValueError):
        BenchSettings.from_params(params)


@pytest.mark.parametrize(
    "params",
    [
        {"repeats": "3"},
        {"output_len": 32.5},
        {"concurrency": 8},
        {"concurrency": [1.5]},
        {"seed": True},
        {"max_spread": float("nan")},
        {"max_spread": None},
        {"slo_ttft_ms": "fast"},
        {"misspelt": 1},
        None,
        ["group"],
    ],
)
def test_a_value_of_another_type_is_refused_with_its_key(params):
    """A NaN threshold is never exceeded: it would switch its guard off."""
    name = next(iter(params)) if params else "group"
    with pytest.raises(Refused, match=f"params.yaml, group bench: .*{name}"):
        parse(params)


def test_parameters_from_yaml():
    assert BenchSettings.from_params({"concurrency": [1, 4]}).concurrency == (1, 4)
