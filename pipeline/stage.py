"""What every DVC stage script shares: an error becomes one line and an exit code, never half a result."""

from __future__ import annotations

import sys
from collections.abc import Callable

from pipeline.errors import PipelineError


def run(main: Callable[..., None]) -> None:
    """Call ``main(*command-line arguments)`` and leave the process with the matching exit code."""
    try:
        main(*sys.argv[1:])
    except PipelineError as error:
        print(f"{main.__module__}: {error}" if main.__module__ != "__main__" else f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
