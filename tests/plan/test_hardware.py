"""Hardware files: a strict schema, one unit, and a reason for every flag."""

from __future__ import annotations

import copy

import pytest
import yaml

from pipeline.errors import Unreadable
from pipeline.plan import hardware

NAMES = (
    "b200x16",
    "b300x16",
    "b300x8",
    "cpu",
    "gb200x16",
    "gb300x16",
    "gb300x8",
    "h100x32",
    "h200x16",
    "mi355x8",
)


@pytest.fixture
def data():
    return yaml.safe_load((hardware.DIRECTORY / "b300x8.yaml").read_text())


def test_all_machines_are_there():
    assert hardware.available() == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_reads_and_is_named_as_its_file(name):
    machine = hardware.load(name)
    assert machine.name == name
    assert machine.platform == "cpu" or machine.layout.ranks == machine.devices
    assert machine.price_usd_per_hour is None
    for setting in [*machine.flags.values(), *machine.environment.values(), *machine.workspaces.values()]:
        assert len(setting.why) > 15 and setting.seen_on
    # Usable and marketed are the same memory told in two ways: never more than 8 % apart.
    assert 0.92 < machine.memory.usable_bytes / machine.memory.marketed_bytes < 1.08


def test_usable_bytes_are_what_the_driver_reports():
    mebibytes = {"h100x32": 81559, "h200x16": 143771, "b200x16": 183359, "b300x8": 275040, "gb300x8": 284208}
    assert {name: hardware.load(name).memory.usable_bytes >> 20 for name in mebibytes} == mebibytes


def change(data, path, value):
    data = copy.deepcopy(data)
    *parents, last = path.split(".")
    target = data
    for parent in parents:
        target = target[parent]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("flagz", {}, "unknown key flagz"),
        ("memory.gigabytes", 288, "unknown key memory.gigabytes"),
        ("flags.load-format.note", "x", "unknown key flags.load-format.note"),
        ("platform", None, "missing key platform"),
        ("memory", 288, "memory: expected a mapping"),
        ("memory.usable_bytes", 2.88e11, "memory.usable_bytes: expected a positive number of bytes"),
        ("memory.usable_source", " ", "memory.usable_source is empty"),
        ("flags.load-format.why", None, "missing key flags.load-format.why"),
        ("flags.load-format.why", "", "flags.load-format.why is empty"),
        ("flags.load-format.seen_on", None, "missing key flags.load-format.seen_on"),
        ("flags.load-format", "fastsafetensors", "flags.load-format: expected a mapping with value, why, seen_on"),
        ("environment.VLLM_USE_RUST_FRONTEND.seen_on", "", "environment.VLLM_USE_RUST_FRONTEND.seen_on is empty"),
        ("flags.--max-num-seqs", {"value": 1, "why": "because", "seen_on": "x"}, "without dashes in front"),
        ("flags.max_num_seqs", {"value": 1, "why": "because", "seen_on": "x"}, "without dashes in front"),
        ("platform", "gpu", "platform: 'gpu' is not one of cpu, cuda, rocm"),
        ("server_env", "serve", "server_env: 'serve'"),
        ("tensor_parallel", 0, "tensor_parallel: expected a positive integer"),
        ("tensor_parallel", True, "tensor_parallel: expected a positive integer"),
        ("tensor_parallel", 4, "TP4 is 4 ranks, but there are 1 x 8 = 8 devices"),
        (
            "workspaces.x",
            {"bytes": "many", "why": "y", "seen_on": "z"},
            "workspaces.x.bytes: expected a positive number",
        ),
    ],
)
def test_a_wrong_file_is_refused_and_the_key_named(data, path, value, said):
    with pytest.raises(Unreadable) as caught:
        hardware.parse(change(data, path, value), "b300x8.yaml")
    assert said in str(caught.value) and "b300x8.yaml" in str(caught.value)


def test_all_problems_are_told_at_once(data):
    broken = change(change(data, "flagz", {}), "platform", "gpu")
    with pytest.raises(Unreadable, match="unknown key flagz; .*platform: 'gpu'"):
        hardware.parse(broken, "x")


def test_unreadable_files(tmp_path):
    with pytest.raises(Unreadable, match="no such hardware file; there are: b200x16"):
        hardware.load("b300x9")
    (tmp_path / "odd.yaml").write_text("a: [")
    with pytest.raises(Unreadable, match="not valid YAML"):
        hardware.load(str(tmp_path / "odd.yaml"))
    (tmp_path / "odd.yaml").write_text("- a\n")
    with pytest.raises(Unreadable, match="expected a mapping"):
        hardware.load(str(tmp_path / "odd.yaml"))


def test_serve_arguments():
    machine = hardware.load("b300x8")
    arguments = machine.serve_arguments(without=("kv-cache-dtype",))
    text = " ".join(arguments)
    assert "--trust-remote-code --tool-call-parser kimi_k3 --reasoning-parser kimi_k3" in text
    assert "--load-format fastsafetensors --no-enable-flashinfer-autotune --max-model-len 1048576" in text
    assert '--attention-config {"use_prefill_query_quantization": true, "mla_prefill_backend": "flashinfer"}' in text
    assert "--enable-prefix-caching --gpu-memory-utilization 0.95" in text and "kv-cache-dtype" not in text


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "h200x16",
            {
                "gpu-memory-utilization": 0.97,
                "max-num-seqs": 5,
                "max-model-len": 32768,
                "max-num-batched-tokens": 4096,
                "moe-backend": "marlin",
                "attention-backend": "FLASHMLA",
                "data-parallel-size-local": 1,
            },
        ),
        ("b200x16", {"gpu-memory-utilization": 0.90, "max-num-batched-tokens": 8192, "kv-cache-dtype": "fp8"}),
        ("b300x8", {"gpu-memory-utilization": 0.95, "max-model-len": 1048576, "kv-cache-dtype": "fp8"}),
        ("mi355x8", {"max-num-seqs": 128, "max-num-batched-tokens": 4096}),
    ],
)
def test_the_public_recipes(name, flags):
    machine = hardware.load(name)
    assert {flag: machine.flag(flag) for flag in flags} == flags


def test_hopper_has_no_fp8_cache_in_its_recipe():
    assert hardware.load("h200x16").flag("kv-cache-dtype") is None


def test_cpu_is_what_the_main_job_runs_on():
    machine = hardware.load("cpu")
    assert (machine.server_env, machine.layout.label(), machine.flag("max-model-len")) == ("serve-cpu", "TP1", 8192)
    assert (machine.flag("max-num-seqs"), machine.flag("max-num-batched-tokens")) == (16, 2048)
    assert "70 s" in machine.flags["enforce-eager"].why
    assert machine.environment_variables()["OMP_NUM_THREADS"] == "1"
