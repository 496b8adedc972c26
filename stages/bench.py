"""metrics/bench/<variant>.json: throughput, latency and memory of one variant, served."""

import shutil
import sys
import time
from pathlib import Path

BEGAN = time.monotonic()

from pipeline import params, stage, store  # noqa: E402
from pipeline.bench.runner import bench  # noqa: E402
from pipeline.bench.settings import BenchSettings  # noqa: E402
from pipeline.bench.summary import overhead  # noqa: E402
from pipeline.files import read_json, write_json  # noqa: E402
from pipeline.plan import hardware  # noqa: E402
from pipeline.serve.server import running  # noqa: E402
from pipeline.serving import server_settings  # noqa: E402
from pipeline.variant import Variant  # noqa: E402


def main(name: str) -> None:
    variant, model = Variant.parse(name), params.load("model")
    machine = hardware.parse(params.load("hardware"), "params.yaml, hardware")
    kv = read_json(f"metrics/kv/{name}.json")
    request = server_settings(
        machine, model["name"], store.resolve(variant.quant), kv["setting"], trust_remote_code=model["trust_remote_code"]
    )
    runs = Path(".cache/bench") / name  # kept by a killed bench for the next one; a finished bench starts afresh
    with running(request, Path("data/logs") / f"bench-{name}.log") as server:
        result = bench(
            server,
            BenchSettings.from_params(params.load("bench")),
            runs,
            hardware=read_json("metrics/hardware.json"),
            software=read_json("metrics/software.json"),
            devices=machine.layout.ranks,
            price_usd_per_hour=machine.price_usd_per_hour,
            platform=machine.platform,
        )
    result["overhead"] = overhead(time.monotonic() - BEGAN, result["load"]["load_s"], result["client_s"])
    write_json(f"metrics/bench/{name}.json", result)
    shutil.rmtree(runs)
    print(f"{name}: {result['status']}, {result['output_tok_s']:.0f} output tok/s", file=sys.stderr)


if __name__ == "__main__":
    stage.run(main)
