"""Start an engine on dummy weights and print each rank's memory report as JSON.  Runs in the serve environment.

    python tests/plan/measure.py CONFIG.json KV TP SEQUENCES TOKENS [ENGINE OPTIONS AS JSON]

Used by ``test_engine_serve.py``, and by ``record.py`` to write ``measured.json``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

REPORT = "REPORT "


def main(config: str, kv: str, ranks: int, sequences: int, tokens: int, options: dict) -> None:
    os.environ.update(
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        GLOO_SOCKET_IFNAME="lo",
        VLLM_HOST_IP="127.0.0.1",
    )
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(Path(config).read_text())
        settings = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "kv_cache_dtype": kv,
            "tensor_parallel_size": ranks,
            "max_model_len": 8192,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": tokens,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "worker_extension_cls": "vllm_k3_cpu.memory_report.MemoryReport",
        }
        engine = LLM(**(settings | options))
        print(REPORT + json.dumps(engine.collective_rpc("memory_report")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), json.loads(sys.argv[6]) if len(sys.argv) > 6 else {})
