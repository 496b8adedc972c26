"""metrics/evals/<variant>.json: long-context accuracy of one variant, served; its samples beside it."""

import sys
from pathlib import Path

from pipeline import evaluation, params, stage
from pipeline.evals.settings import parse
from pipeline.files import write_json


def main(name: str) -> None:
    result = evaluation.evaluate(name, parse(params.load("eval")), Path("data/samples") / name)
    write_json(f"metrics/evals/{name}.json", result)
    print(f"{name}: {result['status']}, accuracy {result['accuracy']}", file=sys.stderr)
    if result.get("reason"):
        again = f"`dvc repro --force --single-item evaluate@{name}` asks again what has no answer"
        print(f"{name}: {result['reason']}; {again}", file=sys.stderr)


if __name__ == "__main__":
    stage.run(main)
