"""metrics/plan/<quant>.json: what config.json alone says of one quantization under every KV setting; refuses what cannot run."""

import sys

from pipeline import params, stage
from pipeline.errors import Refused
from pipeline.files import write_json, write_text
from pipeline.plan import hardware
from pipeline.plan.alternatives import plan
from pipeline.plan.render import plan_text


def main(quant: str) -> None:
    machine = hardware.parse(params.load("hardware"), "params.yaml, hardware")
    recipe = params.load("quant")["schemes"][quant]
    results = {kv: plan(params.load("model")["path"], machine, quant, kv, recipe=recipe) for kv in params.load("kv")["dtypes"]}
    for kv, result in results.items():
        print(f"== {quant}-{kv}\n{plan_text(result)}\n", file=sys.stderr)
    refused = {kv: result for kv, result in results.items() if result.refused}
    if refused:
        raise Refused("; ".join(f"{quant}-{kv}: {refusal.message}" for kv in refused for refusal in refused[kv].refusals))
    write_json(f"metrics/plan/{quant}.json", {kv: result.to_dict() for kv, result in results.items()})
    write_text(f"metrics/plan/{quant}.admitted", "admitted\n")


if __name__ == "__main__":
    stage.run(main)
