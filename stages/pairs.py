"""metrics/pairs/<variant>/: what a comparison needs of one run, without the texts.  native-auto's is kept in git, so that a
single variant can be compared with it anywhere; any other's is remade from data/samples in a moment."""

from pathlib import Path

from pipeline import stage
from pipeline.evals.pairs import keep


def main(name: str) -> None:
    keep(Path("data/samples") / name, Path("metrics/pairs") / name)


if __name__ == "__main__":
    stage.run(main)
