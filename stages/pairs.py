"""metrics/pairs/<variant>.*: what a comparison needs of one run, without the texts.  native-auto's are kept in git, so that
a single variant can be compared with them anywhere; any other's are remade from data/samples in a moment."""

import json
import shutil
from pathlib import Path

from pipeline import stage
from pipeline.evals.runs import NEEDED, load_run
from pipeline.files import atomic_open, write_text


def main(name: str) -> None:
    source, target = Path("data/samples") / name, Path("metrics/pairs")
    run = load_run(source / "samples.jsonl")
    rows = [run.header, *({key: row[key] for key in sorted(NEEDED)} for row in run.rows)]
    write_text(target / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with open(source / "logprobs.jsonl.gz", "rb") as stream, atomic_open(target / f"{name}.logprobs.jsonl.gz") as copy:
        shutil.copyfileobj(stream, copy)


if __name__ == "__main__":
    stage.run(main)
