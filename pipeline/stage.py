"""What every DVC stage script shares: an error becomes one line and an exit code, never half a result."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import EXIT_REFUSED, PipelineError

CODE_FILE = "K3Q_STAGE_CODE"
"""Environment variable: where a stage leaves its exit code, since dvc has one of its own for every failure."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def run(main: Callable[..., None]) -> None:
    """Call ``main(*command-line arguments)`` and leave the process with the matching exit code."""
    try:
        main(*sys.argv[1:])
    except PipelineError as error:
        _leave(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        remedy = "No file is half-written: free space, then give the same command again"
        _leave(f"{where}{error.strerror}.  {remedy}", EXIT_REFUSED)


def _leave(message: str, code: int) -> None:
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr)
    if told := os.environ.get(CODE_FILE):
        Path(told).write_text(str(code))
    sys.exit(code)
