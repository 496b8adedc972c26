"""``python3 -m pipeline repro``: every environment, then ``dvc repro``, then the table."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pipeline import env
from pipeline.params import load
from pipeline.stage import CODE_FILE

REPOSITORY = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    """Make the environments that the parameters name, run ``dvc repro argv``, print the comparison table.

    A failed stage is never hidden behind a table of the stages that went well.
    """
    os.chdir(REPOSITORY)
    for name in ("core", "quant", load("hardware")["server_env"]):
        env.ensure(name)
    code = dvc_repro(argv)
    if code == 0:
        subprocess.run([sys.executable, "-m", "dvc", "metrics", "show", "--md", "metrics/variants"])
        print("\nThe report: metrics/report.md   The change against a branch: python3 -m pipeline diff main")
    return code


def dvc_repro(argv: list[str]) -> int:
    """``dvc repro argv``; the exit code of the stage that failed, where it left one, else dvc's own."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "code"
        environment = os.environ | {CODE_FILE: str(told)}
        code = subprocess.run([sys.executable, "-m", "dvc", "repro", *argv], env=environment).returncode
        return int(told.read_text()) if code and told.exists() else code
