"""One side of a comparison, as it is kept: answers without their texts, and the recorded log-probabilities."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.evals.fidelity import FILE
from pipeline.evals.runs import SAMPLES, load_run, without_texts, write_run


def keep(samples: Path, target: Path) -> None:
    """Write of the run in ``samples`` to ``target`` what a comparison needs.  Raises :class:`Unreadable` for an
    unfinished run.
    """
    write_run(without_texts(load_run(samples / SAMPLES)), target / SAMPLES)
    if (samples / FILE).exists():  # benchmarks asked over a chat endpoint have none
        shutil.copyfile(samples / FILE, target / FILE)
