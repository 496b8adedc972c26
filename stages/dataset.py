"""data/eval: the evaluation prompts, sized with the served tokenizer; metrics/dataset.json: what they are."""

from pipeline import params, stage
from pipeline.evals import dataset
from pipeline.evals.settings import parse
from pipeline.files import write_json


def main() -> None:
    settings = parse(params.load("eval"))
    write_json("metrics/dataset.json", dataset.generate(params.load("model")["path"], settings, "data/eval"))


if __name__ == "__main__":
    stage.run(main)
