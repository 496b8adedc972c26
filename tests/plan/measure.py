"""Start engines on dummy weights, one after another, and print each rank's memory report as JSON.  Serve environment.

    python tests/plan/measure.py < CASES.json

``CASES.json`` is a list of ``{"config", "kv", "ranks", "sequences", "tokens", "options"}``; ``config`` is the whole
``config.json``, ``tokens`` a list: the report is asked once for each.  Used by ``test_engine_serve.py``, and by
``record.py`` to write ``measured.json``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

REPORT = "REPORT "


def scales_of_one() -> None:
    """Dummy weights are random small numbers of either sign, and a KV cache's scale must be what no checkpoint gives it: 1.0."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    fill = DummyModelLoader.load_weights

    def load_weights(self, model, model_config):
        fill(self, model, model_config)
        for name, parameter in model.named_parameters():
            if name.endswith((".q_scale", ".k_scale", ".v_scale")):
                parameter.data.fill_(1.0)

    DummyModelLoader.load_weights = load_weights


def measure(case: dict[str, Any]) -> list[list[dict]]:
    """The reports of one engine: for each number of tokens, one a rank."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case["config"]))
        settings = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "kv_cache_dtype": case["kv"],
            "tensor_parallel_size": case["ranks"],
            "max_model_len": 8192,
            "max_num_seqs": case["sequences"],
            "max_num_batched_tokens": max(case["tokens"]),
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "worker_extension_cls": "vllm_k3_cpu.memory_report.MemoryReport",
        }
        engine = LLM(**(settings | case["options"]))
        reports = [engine.collective_rpc("memory_report", args=(tokens,)) for tokens in case["tokens"]]
        engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()
        return reports


def main() -> None:
    os.environ.update(
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        GLOO_SOCKET_IFNAME="lo",
        VLLM_HOST_IP="127.0.0.1",
    )
    scales_of_one()
    for case in json.load(sys.stdin):
        print(REPORT + json.dumps(measure(case)), flush=True)


if __name__ == "__main__":
    main()
