"""metrics/evals/<variant>.json: long-context accuracy of one variant, served; its samples beside it."""

import sys
from pathlib import Path

from pipeline import params, stage, store
from pipeline.evals import runner
from pipeline.evals.settings import parse
from pipeline.files import read_json, sha256_json, write_json
from pipeline.plan import hardware
from pipeline.serve.server import running
from pipeline.serving import check_scales, server_settings
from pipeline.variant import Variant


def main(name: str) -> None:
    variant, model = Variant.parse(name), params.load("model")
    machine = hardware.parse(params.load("hardware"), "params.yaml, hardware")
    kv, software = read_json(f"metrics/kv/{name}.json"), read_json("metrics/software.json")
    checkpoint = store.served(variant.quant, name)
    request = server_settings(
        machine, model["name"], checkpoint, kv["setting"], trust_remote_code=model["trust_remote_code"]
    )
    conditions = {
        "checkpoint_sha256": kv["checkpoint_sha256"],
        "kv": kv["setting"],
        "tensor_parallel_size": machine.tensor_parallel,
        "software": sha256_json(software),
    }
    settings, samples = parse(params.load("eval")), Path("data/samples") / name
    with running(request, Path("data/logs") / f"evaluate-{name}.log") as server:
        check_scales(kv["label"], server.effective["kv_scales"])
        result = runner.evaluate(
            server.base_url,
            server.model,
            model["path"],
            Path("data/eval"),
            settings,
            samples,
            conditions=conditions,
            journal_dir=Path(".cache/journals") / name,
        )
        result["server"] = {"requested": request.requested(), "effective": server.effective, "load_s": server.load_s}
    write_json(f"metrics/evals/{name}.json", result)
    print(f"{name}: {result['status']}, accuracy {result['accuracy']}", file=sys.stderr)


if __name__ == "__main__":
    stage.run(main)
