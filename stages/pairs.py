"""metrics/pairs/<variant>/: what a comparison needs of one run, without the texts.  native-auto's is kept in git, so that a
single variant can be compared with it anywhere; any other's is remade from data/samples in a moment."""

import json
import shutil
from pathlib import Path

from pipeline import stage
from pipeline.evals.fidelity import FILE
from pipeline.evals.runs import NEEDED, SAMPLES, load_run
from pipeline.files import write_text


def main(name: str) -> None:
    source, target = Path("data/samples") / name, Path("metrics/pairs") / name
    run = load_run(source / SAMPLES)
    rows = [run.header, *({key: row[key] for key in sorted(NEEDED)} for row in run.rows)]
    write_text(target / SAMPLES, "".join(json.dumps(row) + "\n" for row in rows))
    if (source / FILE).exists():  # benchmarks asked over a chat endpoint have none
        shutil.copyfile(source / FILE, target / FILE)


if __name__ == "__main__":
    stage.run(main)
