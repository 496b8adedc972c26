"""metrics/verify/<quant>.json: every lint finding of one checkpoint; an error among them stops the variant here."""

from pathlib import Path

from pipeline import params, stage, store
from pipeline.checkpoint.lint import lint
from pipeline.files import read_json, write_json


def main(quant: str) -> None:
    raise NotImplementedError


if __name__ == "__main__":
    stage.run(main)
