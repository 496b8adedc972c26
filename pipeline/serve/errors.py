"""What can go wrong with a server.  Each error carries the end of the server's own log."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import Invalid, Refused
from pipeline.serve.logs import cause, last_lines


class ServerError(Invalid):
    """The server failed; what was measured on it cannot be trusted.  The message ends with the log's last lines."""

    def __init__(self, message: str, log_path: Path | None = None) -> None:
        self.log_path = log_path
        tail = last_lines(log_path) if log_path else ""
        if why := cause(tail):
            message = f"{message}\nthe log's end tells why: {why}"
        super().__init__(f"{message}\n--- the last lines of {log_path}:\n{tail}" if tail else message)


class NotReady(ServerError):
    """It did not come up in time, ended while starting, or answers health checks but generates nothing."""


class WrongModel(ServerError):
    """Something answers on the port, but serves another model than the one asked for."""


class ServerDied(ServerError):
    """It was ready and ended, or stopped answering, before it was asked to stop."""


class StillAlive(ServerError):
    """Processes of the server outlived SIGKILL (uninterruptible sleep); their memory may still be held."""


class ForeignGpuUse(Refused):
    """Someone else holds GPU memory.  They are listed, never killed."""
