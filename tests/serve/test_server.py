"""A server's life against a stand-in that lies, dies and forks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time

import pytest

from pipeline.errors import Invalid, Refused, Unreadable
from pipeline.serve import NotReady, ServerDied, ServerSettings, WrongModel, http, process, running, watchdog
from tests.serve.conftest import sockets_of


def pids(tmp_path):
    """Pids of the stand-in and its child; none when it was ended before it had begun."""
    path = tmp_path / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def living(numbers):
    return [pid for pid in numbers if watchdog.read_process(pid)]


def complete(server, **body):
    body = {"model": server.model, "prompt": "a b", "max_tokens": 2} | body
    return http.request_json(server.base_url + "/v1/completions", body)


def test_ready_means_that_it_generated(mock_settings, tmp_path):
    with running(mock_settings(), tmp_path / "log") as server:
        assert server.alive and server.load_s > 0
        assert server.metrics()["vllm:generation_tokens_total"] == 4, "the readiness probe is a real generation"
        assert complete(server)["usage"]["completion_tokens"] == 2
        assert server.effective["block_size"] == 256 and server.effective["kv_cache_dtype"] == "auto"
        assert server.load["checkpoint_bytes"] == 1000
    assert not living(pids(tmp_path))


def test_health_is_not_readiness(mock_settings, tmp_path):
    with pytest.raises(NotReady, match="/health says 200, but generation failed") as caught:
        with running(mock_settings(generation_status=500, log_lines=["FP8 KV kernel missing"]), tmp_path / "log"):
            pytest.fail("a server that cannot generate is not ready")
    assert "FP8 KV kernel missing" in str(caught.value), "the log's last lines are in the error"
    assert "500" in str(caught.value)
    assert not living(pids(tmp_path))


def test_another_model_is_refused(mock_settings, tmp_path):
    with pytest.raises(WrongModel, match=r"serves \['other'\], not 'tiny'"):
        with running(mock_settings(model="other"), tmp_path / "log"):
            pytest.fail("another model answered")
    assert not living(pids(tmp_path))


def test_a_stranger_on_our_port_is_noticed(mock_settings, tmp_path, monkeypatch):
    from tests.mock_openai import MockServer

    with MockServer(model="tiny") as stranger:  # right model id, generates well, and is not the server we started
        monkeypatch.setattr("pipeline.serve.server.free_port", lambda: stranger.port)
        with pytest.raises((WrongModel, NotReady)):
            with running(mock_settings(start_delay_s=5), tmp_path / "log"):
                pytest.fail("measured somebody else's server")
        assert not stranger.state.requests


def test_exit_while_starting_shows_the_log(mock_settings, tmp_path):
    with pytest.raises(NotReady, match="exited with code 7 while starting") as caught:
        with running(mock_settings(exit_at_start=7, log_lines=["ValueError: no kernel for W9"]), tmp_path / "log"):
            pass
    assert "no kernel for W9" in str(caught.value)


def test_a_command_that_does_not_exist(mock_settings, checkpoint, tmp_path):
    settings = ServerSettings(model=checkpoint, served_name="tiny", command=("/no/such/python",))
    with pytest.raises(NotReady, match="/no/such/python"):
        with running(settings, tmp_path / "log"):
            pass


def test_a_stale_environment_is_refused_before_anything_starts(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.env_facts.state", lambda name: "stale plugin")
    settings = ServerSettings(model=checkpoint, served_name="tiny")
    with pytest.raises(Refused, match="serve-cpu is stale plugin: `python3 -m pipeline env make serve-cpu`"):
        with running(settings, tmp_path / "log"):
            pytest.fail("a server of another plugin was started")


def test_slow_start_beats_its_heart(mock_settings, tmp_path, capfd):
    with running(mock_settings(start_delay_s=1.0, log_lines=["Loading shard 3 of 96"]), tmp_path / "log"):
        pass
    told = [line for line in capfd.readouterr().err.splitlines() if "loading tiny" in line]
    assert len(told) >= 2 and any("Loading shard 3 of 96" in line for line in told)


def test_the_time_out_follows_the_bytes(checkpoint, mock_settings, tmp_path):
    def timeout(size, rate):
        os.truncate(next(checkpoint.glob("*.safetensors")), size)
        return ServerSettings(model=checkpoint, served_name="x", read_rate_bytes_s=rate).start_timeout_s

    assert timeout(1_000_000_000_000, 1e9) == pytest.approx(1300), "sparse file: 1 TB at 1 GB/s + 300 s"
    assert timeout(1000, 1e9) == pytest.approx(300, abs=0.01)
    slow = mock_settings(start_delay_s=30, _start_allowance_s=0.5, _read_rate_bytes_s=1e4)
    began = time.monotonic()
    with pytest.raises(NotReady, match="not ready after 1 s .*1,000 bytes"):
        with running(slow, tmp_path / "log"):
            pass
    assert time.monotonic() - began < 20, "far from the 30 s that the server would take"
    assert not living(pids(tmp_path))


def test_no_weights_is_said_before_anything_starts(tmp_path):
    with pytest.raises(Unreadable, match="no .*safetensors"):
        with running(ServerSettings(model=tmp_path / "empty", served_name="x"), tmp_path / "log"):
            pass
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("stubborn", [False, True])
def test_stop_ends_the_whole_group(mock_settings, tmp_path, stubborn):
    with running(
        mock_settings(fork_child=True, ignore_sigterm=stubborn, _stop_grace_s=2.0), tmp_path / "log"
    ) as server:
        group = pids(tmp_path)
        assert len(group) == 2 and living(group) == group and server.pid == group[0]
        began = time.monotonic()
    assert not living(group)
    assert (time.monotonic() - began >= 2.0) == stubborn, "SIGKILL only after the grace, and no grace for the obedient"


def test_a_killed_server_takes_its_children_along(mock_settings, tmp_path):
    """kill -9 of the API server: the engine must not live on and hold the GPUs."""
    with pytest.raises(ServerDied, match="killed by signal 9"):
        with running(mock_settings(fork_child=True), tmp_path / "log") as server:
            group = pids(tmp_path)
            os.kill(server.pid, signal.SIGKILL)
            deadline = time.monotonic() + 8
            while living(group) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not living(group)
            server.check("testing")


@pytest.mark.parametrize("killed", [False, True])
def test_the_sockets_of_a_server_go_with_it(mock_settings, tmp_path, killed):
    """Killed, vLLM leaves them in the temporary directory for good."""
    with pytest.raises(ServerDied) if killed else contextlib.nullcontext():
        with running(mock_settings(), tmp_path / "log") as server:
            folder = sockets_of(server.pid)
            (folder / "4d2c-left-behind").touch()
            assert folder.stat().st_mode & 0o777 == 0o700
            if killed:
                os.kill(server.pid, signal.SIGKILL)
    assert not folder.exists()


def test_a_socket_has_room_for_its_path_however_deep_the_temporary_directory(tmp_path, monkeypatch):
    """Linux takes 107 bytes: vLLM would not start."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = process.socket_folder()
    shutil.rmtree(folder)
    assert len(folder) + 1 + 36 <= 107


def test_death_is_told_whatever_the_client_made_of_it(mock_settings, tmp_path):
    with pytest.raises(ServerDied, match="exited with code 1.*RequestFailed"):
        with running(mock_settings(die_after=2), tmp_path / "log") as server:
            complete(server)
            complete(server)
    with pytest.raises(ServerDied, match="before it was asked"):
        with running(mock_settings(die_after=1), tmp_path / "log") as server:
            with pytest.raises(http.RequestFailed):
                complete(server)


def test_alive_and_deaf_is_dead(mock_settings, tmp_path):
    with running(mock_settings(), tmp_path / "log") as server:
        server.check()
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(ServerDied, match="stopped answering"):
            original, http.request = http.request, lambda url, **k: original(url, timeout_s=0.5)
            try:
                server.check()
            finally:
                http.request = original
        os.kill(server.pid, signal.SIGCONT)


def test_memory_report_and_cache_reset(mock_settings, tmp_path):
    with running(mock_settings(memory_report=[{"rank": 0, "weight_bytes": 5}]), tmp_path / "log") as server:
        assert server.memory_report() == [{"rank": 0, "weight_bytes": 5}]
        server.reset_prefix_cache()
    with running(mock_settings(), tmp_path / "log") as server:
        with pytest.raises(Invalid, match="500"):
            server.memory_report()


def test_an_error_of_the_block_passes_through(mock_settings, tmp_path):
    with pytest.raises(KeyError):
        with running(mock_settings(), tmp_path / "log"):
            raise KeyError("mine")
    assert not living(pids(tmp_path))


def test_no_secret_reaches_arguments_environment_or_log(mock_settings, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-sesame")
    monkeypatch.setenv("GITHUB_PAT", "gh-sesame")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "last-server"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with running(mock_settings(_environment={"OMP_NUM_THREADS": "1"}), tmp_path / "log") as server:
        seen = open(f"/proc/{server.pid}/environ", "rb").read() + open(f"/proc/{server.pid}/cmdline", "rb").read()
        assert b"sesame" not in seen and b"proxy=http" not in seen and b"last-server" not in seen
        assert b"VLLM_SERVER_DEV_MODE=1" in seen and b"OMP_NUM_THREADS=1" in seen
        assert os.readlink(f"/proc/{server.pid}/fd/0") == "/dev/null", "a question on stdin must not hang the run"
        assert os.getsid(server.pid) == server.pid != os.getsid(0)
    assert "sesame" not in (tmp_path / "log").read_text()
    with pytest.raises(Refused, match="--api-key"):
        ServerSettings(model=checkpoint, served_name="x", extra_args=("--api-key=sesame",))
    with pytest.raises(Refused, match="HF_TOKEN"):
        ServerSettings(model=checkpoint, served_name="x", environment={"HF_TOKEN": "sesame"})


def test_the_command_line(checkpoint):
    settings = ServerSettings(
        model=checkpoint,
        served_name="fp8-fp8",
        kv_cache_dtype="fp8",
        max_num_seqs=8,
        block_size=64,
        tensor_parallel_size=2,
        extra_args=("--enforce-eager",),
    )
    line = " ".join(settings.arguments(4242))
    for part in (
        "--host 127.0.0.1 --port 4242",
        "--served-model-name fp8-fp8",
        "--kv-cache-dtype fp8",
        "--max-num-seqs 8",
        "--block-size 64",
        "--tensor-parallel-size 2",
        "--enforce-eager",
        "--enable-prefix-caching",
        "--worker-extension-cls vllm_k3_cpu.memory_report.MemoryReport",
    ):
        assert part in line
    assert "--max-model-len" not in line and "--mamba-ssm-cache-dtype" not in line
    json.dumps(settings.requested())
