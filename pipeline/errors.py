"""Errors that carry their exit code: a verdict is never mistaken for a crash.

Exit codes 1 and 2 stay Python's and argparse's own.  A message names the offender (file, tensor, number) and the remedy.
"""

from __future__ import annotations

from typing import Any

EXIT_GOOD = 0
EXIT_REFUSED = 3
EXIT_INCONCLUSIVE = 4
EXIT_INVALID = 5
EXIT_UNREADABLE = 6


class PipelineError(Exception):
    """A failure the user can act on; printed without a traceback.  ``exit_code`` becomes the process's."""

    exit_code = EXIT_REFUSED


class Refused(PipelineError):
    """The request cannot work here (plan), or a check found something (verify, gate)."""

    exit_code = EXIT_REFUSED


class Invalid(PipelineError):
    """A run that cannot be trusted, or two results that cannot be compared.  Invalid is not the same as bad."""

    exit_code = EXIT_INVALID


class Unreadable(PipelineError):
    """An input is missing, truncated or not of the format it claims."""

    exit_code = EXIT_UNREADABLE


def wrong_values(group: str, error: Any) -> Refused:
    """A refusal that names each wrong key and value of a pydantic ``ValidationError``."""
    lines = []
    for one in error.errors():
        key = ".".join([group, *map(str, one["loc"])])
        told = "no such key" if one["type"] == "extra_forbidden" else one["msg"].removeprefix("Value error, ")
        got = f" (got {one['input']!r:.80})" if one["loc"] else ""  # of a rule over several keys it would be the whole group
        lines.append(f"{key}: {told}{got}")
    return Refused("; ".join(lines))
