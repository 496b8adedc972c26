"""What every DVC stage script shares: an error becomes one line and an exit code, never half a result."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import EXIT_REFUSED, PipelineError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
EXIT_CODE_FILE = "K3Q_EXIT_CODE_FILE"
"""Environment variable: a file that gets the failing stage's exit code, which dvc replaces by its own."""


def run(main: Callable[..., None]) -> None:
    """Call ``main(*command-line arguments)`` and leave the process with the matching exit code."""
    try:
        main(*sys.argv[1:])
    except PipelineError as error:
        _end(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        remedy = "No file is half-written: free space, then give the same command again"
        _end(f"{where}{error.strerror}.  {remedy}", EXIT_REFUSED)


def _end(message: str, code: int) -> None:
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr)
    if told := os.environ.get(EXIT_CODE_FILE):
        with contextlib.suppress(OSError):  # a stage on another node may not reach it
            Path(told).write_text(str(code))
    sys.exit(code)
