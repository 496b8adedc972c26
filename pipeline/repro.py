"""``python3 -m pipeline repro``: every environment, then ``dvc repro``, then the table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pipeline import env
from pipeline.params import load

REPOSITORY = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    """Make the environments that the parameters name, run ``dvc repro argv``, print the comparison table.

    Returns dvc's exit code: a failed stage is never hidden behind a table of the stages that went well.
    """
    os.chdir(REPOSITORY)
    for name in ("core", "quant", load("hardware")["server_env"]):
        env.ensure(name)
    dvc = [sys.executable, "-m", "dvc"]
    code = subprocess.run([*dvc, "repro", *argv]).returncode
    if code == 0:
        subprocess.run([*dvc, "metrics", "show", "--md", "metrics/variants"])
        print("\nThe report: metrics/report.md   The change against a branch: dvc metrics diff main --md")
    return code
