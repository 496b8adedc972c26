"""``python3 -m pipeline repro``: every environment, then ``dvc repro``, then the table."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline import env
from pipeline.params import load
from pipeline.stage import EXIT_CODE_FILE

REPOSITORY = Path(__file__).resolve().parents[1]
DVC = (sys.executable, "-m", "dvc")


def main(argv: list[str]) -> int:
    """Make the environments that the parameters name, run ``dvc repro argv``, print the comparison table.

    Returns :func:`dvc_repro`'s exit code: a failed stage is never hidden behind a table of the stages that went well.
    """
    os.chdir(REPOSITORY)
    if set(argv) & {"-h", "--help"}:
        print("usage: python3 -m pipeline repro [arguments of dvc repro]\n\nMakes the environments, runs these, prints the table:\n")
        return dvc_repro(["--help"])
    for name in ("core", "quant", load("hardware")["server_env"]):
        env.ensure(name)
    code = dvc_repro(argv)
    if code == 0:
        subprocess.run([*DVC, "metrics", "show", "--md", "metrics/variants"])
        print("\nThe report: metrics/report.md   The change against a branch: python3 -m pipeline diff main")
    return code


def dvc_repro(arguments: Sequence[str]) -> int:
    """``dvc repro arguments``; the exit code of the stage that failed where it has one of its own, else dvc's."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "exit_code"
        code = subprocess.run([*DVC, "repro", *arguments], env=os.environ | {EXIT_CODE_FILE: str(told)}).returncode
        return int(told.read_text()) if code and told.exists() else code
