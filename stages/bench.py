"""metrics/bench/<variant>.json: throughput, latency and memory of one variant, served."""

import shutil
import sys
from pathlib import Path

from pipeline import params, stage
from pipeline.bench.runner import bench
from pipeline.bench.settings import parse
from pipeline.bench.summary import overhead
from pipeline.bench.workload import trace_that_fits
from pipeline.files import read_json, write_json
from pipeline.serve.process import age_s
from pipeline.serve.server import running
from pipeline.serving import check_dtypes, check_scales, machine, variant_settings
from pipeline.variant import Variant


def main(name: str) -> None:
    here, kv = machine(), read_json(f"metrics/kv/{name}.json")
    request, settings = variant_settings(Variant.parse(name), kv["setting"]), parse(params.load("bench"))
    trace_that_fits(settings, request.max_model_len)  # loading terabytes first would be a waste
    runs = Path(".cache/bench") / name  # kept by a killed bench for the next one; a finished bench starts afresh
    with running(request, Path("data/logs") / f"bench-{name}.log") as server:
        check_dtypes(request, server.effective)
        check_scales(kv["label"], server.effective["kv_scales"])
        result = bench(
            server,
            settings,
            runs,
            hardware=read_json("metrics/hardware.json"),
            software=read_json("metrics/software.json"),
            checkpoint_sha256=kv.get("checkpoint_sha256"),
            devices=here.layout.ranks,
            price_usd_per_hour=here.price_usd_per_hour,
            platform=here.platform,
        )
    result["overhead"] = overhead(age_s(), result["load"]["load_s"], result["client_s"])
    write_json(f"metrics/bench/{name}.json", result)
    shutil.rmtree(runs)
    print(f"{name}: {result['status']}, {result['output_tok_s']:.0f} output tok/s", file=sys.stderr)


if __name__ == "__main__":
    stage.run(main)
