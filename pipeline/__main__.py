"""The command line: ``python3 -m pipeline COMMAND``.

This file is standard library only.  A command runs in the environment it needs: the process replaces itself with that
environment's Python, which is made first where it is missing.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from pipeline import env
from pipeline.errors import PipelineError

# command -> (environment, module with main(argv) -> exit code, what it does)
COMMANDS = {
    "repro": ("core", "pipeline.repro", "make everything and print the comparison table (arguments go to `dvc repro`)"),
    "test": ("core", "pipeline.testing", "run the tests, each in the environment it needs (arguments go to pytest)"),
    "plan": ("core", "pipeline.plan.cli", "does it fit, what refuses to run, and what would run instead"),
    "verify": ("core", "pipeline.checkpoint.cli", "lint a checkpoint, ours or a stranger's"),
    "tune": ("core", "pipeline.tuning.cli", "find the server settings: one at a time, then the winner in pairs"),
    "gate": ("core", "pipeline.evals.gate_cli", "may these variants be shipped?"),
    "report": ("core", "pipeline.report.cli", "write the comparison table and its pictures again"),
    "diff": ("core", "pipeline.report.diff", "what changed since a revision, where both sides were measured alike"),
    "config": ("core", "pipeline.config", "compose conf/ into params.yaml"),
    "env": (None, "pipeline.env", "list, make, run and remove the environments"),
}
REPOSITORY = Path(__file__).resolve().parents[1]
CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell tells it


def usage() -> str:
    """The help text: one line a command."""
    lines = [f"  {name:8} {description}" for name, (_, _, description) in COMMANDS.items()]
    return "usage: python3 -m pipeline COMMAND [arguments]\n\n" + "\n".join(lines) + "\n\nCOMMAND --help tells more."


def main(argv: list[str]) -> int:
    """Run one command; 2 for a wrong command line, else the command's own exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    command, *arguments = argv
    if command not in COMMANDS:
        print(f"pipeline: no command {command!r}\n\n{usage()}", file=sys.stderr)
        return 2
    environment, module, _ = COMMANDS[command]
    try:
        if environment is not None:
            python = env.ensure(environment)
            if Path(sys.executable).absolute() != Path(python).absolute():
                os.environ["PYTHONPATH"] = os.pathsep.join(
                    [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
                )
                os.execv(python, [str(python), "-m", "pipeline", *argv])
        code = importlib.import_module(module).main(arguments)
        sys.stdout.flush()  # here, where a closed pipe is caught
        return code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except PipelineError as error:
        print(f"pipeline {command}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
