"""Across processes: two tensor parallel ranks answer as one, and the HTTP server serves, scores prompts and reports."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from conftest import MEMORY_REPORT, prompt, running

RANKS = """
import json, sys
import torch
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    checkpoint, ids, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    llm = LLM(checkpoint, dtype="float32", tensor_parallel_size=2, max_model_len=2048, kv_cache_memory_bytes=32 << 20,
              max_num_seqs=4, max_num_batched_tokens=2048, logprobs_mode="raw_logits", max_logprobs=-1,
              worker_extension_cls=sys.argv[4])
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=-1, logprobs=-1,
                              detokenize=False)
    o = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]
    rows = [[row[t].logprob for t in range(len(row))] for row in [*o.prompt_logprobs[1:], *o.outputs[0].logprobs]]
    json.dump({"logits": rows, "memory": llm.collective_rpc("memory_report")}, open(out, "w"))
"""


def test_two_ranks_equal_one(native, tmp_path):
    ids, script, out = prompt(100, seed=10), tmp_path / "ranks.py", tmp_path / "out.json"
    script.write_text(RANKS)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, script, native[0], json.dumps(ids), out, MEMORY_REPORT], env=environment, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads(out.read_text())
    with running(native[0]) as engine:
        one, whole = engine.logits(ids, new_tokens=6)[0], engine.memory()
    torch.testing.assert_close(torch.tensor(two["logits"]), one, atol=1e-4, rtol=0)
    assert [report["rank"] for report in two["memory"]] == [0, 1]
    for report in two["memory"]:
        assert report["kv_bytes_per_token"] == whole["kv_bytes_per_token"]  # the latent is replicated
        assert report["state_bytes_per_sequence"] == whole["state_bytes_per_sequence"] // 2  # the state is sharded
        assert whole["weight_bytes"] / 2 < report["weight_bytes"] < whole["weight_bytes"]


@pytest.fixture(scope="module")
def server(native, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", native[0], "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "4",
        "--kv-cache-memory-bytes", str(32 << 20), "--worker-extension-cls", MEMORY_REPORT,
    ]  # fmt: skip
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }  # fmt: skip
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
    try:
        _wait_until_ready(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_ready(process, port: int, log) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_completions_score_their_prompt(server):
    body = {"model": "tiny", "prompt": prompt(40), "max_tokens": 3, "temperature": 0, "prompt_logprobs": 0}
    choice = post(f"{server}/v1/completions", body)["choices"][0]
    assert len(choice["prompt_logprobs"]) == 40
    assert all(next(iter(row.values()))["logprob"] < 0 for row in choice["prompt_logprobs"][1:])


def test_memory_report_over_http(server):
    report = post(f"{server}/collective_rpc", {"method": "memory_report"})["results"][0]
    assert report["kv_block_size"] == 256 and report["emulated"] == ["mxfp4"] and report["unavailable"] == {}
    scales = post(f"{server}/collective_rpc", {"method": "kv_scales"})["results"][0]
    assert len(scales["layers"]) == 2
