"""What every DVC stage script shares: an error becomes one line and an exit code, never half a result."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import EXIT_REFUSED, PipelineError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def run(main: Callable[..., None]) -> None:
    """Call ``main(*command-line arguments)`` and leave the process with the matching exit code."""
    try:
        main(*sys.argv[1:])
    except PipelineError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        remedy = "No file is half-written: free space, then give the same command again"
        print(f"{Path(sys.argv[0]).stem}: {where}{error.strerror}.  {remedy}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
