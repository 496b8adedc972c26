"""Servers for the tests: the stand-in as a subprocess, through the same command line as vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pipeline.serve import ServerSettings

SOCKETS = b"VLLM_RPC_BASE_PATH="
MOCK = Path(__file__).resolve().parents[1] / "mock_openai.py"


def sockets_of(pid):
    """The folder for its sockets that a server was started with."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return Path(next(entry for entry in variables if entry.startswith(SOCKETS)).removeprefix(SOCKETS).decode())


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path_factory, monkeypatch):
    """The machine-wide lock lives in the temporary directory: tests must not wait for a real measured run."""
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"\0" * 1000)
    return folder


@pytest.fixture
def mock_settings(checkpoint, tmp_path):
    """``mock_settings(behaviour fields..., _setting=...)`` -> settings of a stand-in server; pids in tmp_path/pids."""

    def make(**fields):
        chosen = {name[1:]: fields.pop(name) for name in list(fields) if name.startswith("_")}
        command = (sys.executable, str(MOCK), "--behaviour", json.dumps(fields), "--pid-file", str(tmp_path / "pids"))
        defaults = {"start_allowance_s": 60.0, "heartbeat_s": 0.2, "stop_grace_s": 3.0}
        return ServerSettings(model=checkpoint, served_name="tiny", command=command, **(defaults | chosen))

    return make
