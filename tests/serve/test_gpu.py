"""Foreign holders of GPU memory are listed and stop the run; a stand-in plays nvidia-smi."""

from __future__ import annotations

import os

import pytest

from pipeline.errors import Refused
from pipeline.serve import ServerSettings, gpu, running

GPUS = "0, GPU-a, {used0}\n1, GPU-b, {used1}\n"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def install(apps="", used0=4, used1=4, code=0):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "nvidia-smi"
        script.write_text(
            f"#!/bin/sh\n[ {code} = 0 ] || {{ echo driver mismatch >&2; exit {code}; }}\n"
            f"case $1 in *query-gpu*) printf '{GPUS.format(used0=used0, used1=used1)}';; "
            f"*) printf '{apps}';; esac\n".replace("\n'", "\\n'").replace("4\n1", "4\\n1")
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return install


def test_free_gpus_pass(nvidia_smi):
    nvidia_smi()
    gpu.check_free()


def test_a_holder_is_named_and_lives_on(nvidia_smi, checkpoint, tmp_path):
    nvidia_smi(apps=f"GPU-b, {os.getpid()}, 70000, VLLM::EngineCor\\n", used1=70000)
    with pytest.raises(Refused, match=rf"GPU 1: pid {os.getpid()} \(VLLM::EngineCor\) holds 70000 MiB"):
        with running(
            ServerSettings(model=checkpoint, served_name="x", env="serve-cuda", command=("/bin/false",)),
            tmp_path / "log",
        ):
            pytest.fail("started beside another server")
    assert not (tmp_path / "log").exists()
    gpu.check_free(visible="0")  # the other GPU is free
    with pytest.raises(Refused):
        gpu.check_free(visible="0,GPU-b")


def test_memory_without_a_process_is_somebody_too(nvidia_smi):
    nvidia_smi(used0=50000)
    with pytest.raises(Refused, match="GPU 0: 50000 MiB in use by processes that nvidia-smi cannot name"):
        gpu.check_free()


def test_a_broken_driver_is_not_a_free_gpu(nvidia_smi):
    nvidia_smi(code=9)
    with pytest.raises(Refused, match="driver mismatch"):
        gpu.check_free()


def test_a_gpu_that_cannot_be_read_or_found_is_not_a_free_one(nvidia_smi):
    nvidia_smi(used0="[N/A]")
    with pytest.raises(Refused, match=r"does not tell how much memory of GPU 0 is in use: '\[N/A\]'"):
        gpu.check_free()
    gpu.check_free(visible="1")
    nvidia_smi(apps="GPU-b, 7, 70000, python\\n")
    with pytest.raises(Refused, match="GPU 1: pid 7"):
        gpu.check_free(visible="0, GPU-b")
    for unknown in ("2", "MIG-7c"):
        with pytest.raises(Refused, match=f"names {unknown}, which nvidia-smi does not list"):
            gpu.check_free(visible=f"0,{unknown}")
    gpu.check_free(visible="")
