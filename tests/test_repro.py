"""`pipeline repro` and `pipeline tune` end with the exit code of the stage that failed, not with dvc's 255."""

import subprocess
import sys

import pytest

from pipeline.repro import dvc_repro
from tests.imports import REPOSITORY

STAGE = """
import sys
sys.path.insert(0, {repository!r})
from pipeline import stage
from pipeline.errors import Invalid, Refused

def main():
    {body}

stage.run(main)
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A directory with dvc in it; returns how to put one stage there."""
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], check=True)

    def write(body: str) -> None:
        (tmp_path / "only.py").write_text(STAGE.format(repository=str(REPOSITORY), body=body))
        (tmp_path / "dvc.yaml").write_text(f"stages:\n  only:\n    cmd: {sys.executable} only.py\n")

    return write


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("raise Refused('no')", 3),
        ("raise Invalid('not to be trusted')", 5),
        ("raise ValueError('a bug is not a verdict')", 255),
    ],
)
def test_the_exit_code_is_the_stages(workspace, body, code):
    workspace(body)
    assert dvc_repro([]) == code


def test_a_code_of_an_earlier_run_is_forgotten(workspace, monkeypatch, tmp_path):
    monkeypatch.setenv("K3Q_EXIT_CODE_FILE", str(tmp_path / "old"))
    (tmp_path / "old").write_text("5")
    workspace("raise ValueError('a bug')")
    assert dvc_repro([]) == 255
