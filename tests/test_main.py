import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def run(*arguments, code=""):
    command = [sys.executable, "-m", "pipeline", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_help_lists_every_command_and_needs_no_environment():
    from pipeline.__main__ import COMMANDS

    done = run("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_a_wrong_command_line_is_2_and_not_a_verdict(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: python3 -m pipeline" in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["plan", "test"])
def test_help_of_a_command_names_it_and_runs_nothing(command):
    done = run(command, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python3 -m pipeline {command} ")
    assert "in environment" not in done.stdout


def test_a_reader_that_stops_reading_gets_no_traceback():
    command = [sys.executable, "-m", "pipeline", "plan", "--json"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 141


def test_an_error_of_the_pipeline_is_one_line_with_its_exit_code(monkeypatch, capsys):
    from pipeline import __main__ as command_line
    from pipeline import env
    from pipeline.errors import Invalid

    class Broken:
        @staticmethod
        def main(argv):
            raise Invalid("these two cannot be compared")

    monkeypatch.setattr(env, "ensure", lambda name: Path(sys.executable))
    monkeypatch.setattr(command_line.importlib, "import_module", lambda name: Broken)
    assert command_line.main(["gate"]) == 5
    captured = capsys.readouterr()
    assert captured.err == "pipeline gate: these two cannot be compared\n"


def test_the_command_line_imports_nothing_heavy():
    code = "import sys, pipeline.__main__; print(sorted(m.split('.')[0] for m in sys.modules if m[0] != '_'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"numpy", "yaml", "torch", "dvc", "pydantic"} & set(eval(done.stdout))
