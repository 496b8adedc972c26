"""What every DVC stage script shares: an error becomes one line and an exit code, never half a result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import PipelineError


def run(main: Callable[..., None]) -> None:
    """Call ``main(*command-line arguments)`` and leave the process with the matching exit code."""
    try:
        main(*sys.argv[1:])
    except PipelineError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
