"""One real vLLM server on the tiny model: what it resolves, reports and leaves behind.  Runs in serve-cpu."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from pipeline.bench import BenchSettings, bench, runner
from pipeline.bench.prefix import boundary_lengths, parallel_hits, prefix_hits
from pipeline.serve import ServerDied, ServerSettings, probe, running, watchdog
from tests.serve.conftest import sockets_of

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-k3"
VOCABULARY = 1024
BLOCK = 512  # tokens: the FP8 latent's page reaches the state's page there
REQUESTED_BLOCK = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """FP8 cache: the most that can differ between asked and done."""
    settings = ServerSettings(
        model=MODEL,
        served_name="tiny-fp8",
        kv_cache_dtype="fp8",
        max_model_len=4096,
        max_num_seqs=8,
        block_size=REQUESTED_BLOCK,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=64 << 20,
        extra_args=("--dtype", "bfloat16", "--enforce-eager"),
        environment={"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        command=(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
    )
    with contextlib.suppress(ServerDied):  # the last test kills it
        with running(settings, tmp_path_factory.mktemp("server") / "log") as started:
            yield started


def test_it_serves_what_was_asked_and_says_what_it_did(server):
    assert server.load_s > 1 and server.load["weights_load_s"] is not None and server.load["weights_load_log_line"]
    assert server.effective["block_size"] == BLOCK and server.settings.requested()["block_size"] == REQUESTED_BLOCK
    assert server.effective["kv_cache_dtype"] == "fp8" and server.effective["kv_capacity_tokens"] > 0
    assert server.effective["kv_scales"]["label"] == "uncalibrated (scale 1.0)", "no scales in the checkpoint: say so"
    assert "tokens" in server.effective["log"]["kv_cache_tokens"]["raw"], "a number from the log keeps its line"


def test_it_listens_on_loopback_only(server):
    port = int(server.base_url.rpartition(":")[2])
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert [address for address in listening if int(address.rpartition(":")[2], 16) == port] == [f"0100007F:{port:04X}"]


def test_memory_report(server):
    (rank,) = server.memory_report()
    assert rank["weight_bytes"] > 1e6 and rank["kv_bytes_per_token"] == 288 and rank["kv_block_size"] == BLOCK
    assert rank["state_bytes_per_sequence"] == 3 * 70_144 and rank["activation_peak_bytes"] > 0
    assert server.memory_report()[0]["activation_peak_bytes"] == rank["activation_peak_bytes"], (
        "the same figure every time"
    )


def test_prefix_hits_at_the_edges_of_a_block(server):
    """One token short of a boundary loses everything: the recurrent state is kept only where a prefill chunk ended."""
    found = prefix_hits(server, [*boundary_lengths(BLOCK), *boundary_lengths(BLOCK, 2)], VOCABULARY)
    assert [point["hit_tokens"] for point in found] == [0, BLOCK, BLOCK, 0, 2 * BLOCK, 2 * BLOCK]


def test_answers_to_one_prompt_share_its_whole_blocks(server):
    """Parallel sampling: what all four looked up, and what three of them found."""
    found = parallel_hits(server, 2 * BLOCK + 100, 4, VOCABULARY)
    assert found["query_tokens"] == 4 * (2 * BLOCK + 100)
    assert found["hit_tokens"] == 3 * 2 * BLOCK


@pytest.mark.parametrize("cut", [300, BLOCK, BLOCK + 200, 2 * BLOCK + 1])
def test_a_reused_prefix_answers_as_a_cold_one(server, cut):
    """The recurrent state cannot be rewound to any place: https://github.com/ggml-org/llama.cpp/pull/26185."""
    generator = random.Random(cut)
    prefix, first, second = ([generator.randrange(64, VOCABULARY) for _ in range(count)] for count in (cut, 40, 40))

    def answer(prompt):
        return probe.generate(server.base_url, server.model, prompt, 24)["token_ids"]

    server.reset_prefix_cache()
    cold = answer(prefix + second)
    server.reset_prefix_cache()
    answer(prefix + first)
    before = server.settled_metrics()["vllm:prefix_cache_hits_total"]
    warm = answer(prefix + second)
    reused = server.settled_metrics()["vllm:prefix_cache_hits_total"] - before
    assert warm == cold and reused == cut // BLOCK * BLOCK


def test_a_small_bench(server, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "python_of", lambda name: sys.executable)
    settings = BenchSettings(
        input_len=64,
        output_len=8,
        concurrency=(1, 4),
        num_prompts_per_concurrency=2,
        repeats=1,
        min_repeats=1,
        max_repeats=1,
    )
    result = bench(server, settings, tmp_path, hardware={}, software={})
    assert result["status"] == "valid", result["reason"]
    assert result["effective"]["max_num_seqs"] == 8 and result["effective"]["kernels"]
    assert result["kv_cache_usage_max"] is None or 0 <= result["kv_cache_usage_max"] <= 1
    assert result["memory_summary"]["kv_bytes_per_token"] == 288 and result["host_memory"]["host_pss_bytes"] > 1e8


def test_killing_the_api_server_leaves_no_engine(server):
    """https://github.com/vllm-project/vllm/issues/55510: EngineCore and the workers outlived it and held the memory."""
    family = watchdog.family(server.pid)
    assert len(family) >= 2, "an API server and an engine"
    sockets = sockets_of(server.pid)
    assert any(sockets.iterdir()), "vLLM puts its sockets where it is told to"
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while [pid for pid in family if watchdog.read_process(pid)] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in family if watchdog.read_process(pid)]
    with pytest.raises(ServerDied, match="killed by signal 9"):
        server.check()
    while sockets.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not sockets.exists()
