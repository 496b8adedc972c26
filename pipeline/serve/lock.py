"""One measured run at a time on a machine, whoever started it: ``dvc queue start -j 2`` must not spoil a bench."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

WAIT_MESSAGE_S = 30.0
_held: list[int] = []


def lock_path() -> Path:
    """The lock file: one a user, in the machine's temporary directory."""
    return Path(tempfile.gettempdir()) / f"k3q-measure-{os.getuid()}.lock"


@contextlib.contextmanager
def measuring(what: str, poll_s: float = 0.2) -> Iterator[int]:
    """Hold the machine-wide lock; waits for as long as it takes and says for whom.  Yields its file descriptor.

    Re-entrant within one process.  A child that inherits the descriptor keeps the lock after this process has died: the
    watchdog does, so that the next run starts only when the last server is really gone.
    """
    if _held:
        yield _held[0]
        return
    descriptor = os.open(lock_path(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _wait(descriptor, what, poll_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{what} (pid {os.getpid()})".encode(), 0)
        _held.append(descriptor)
        try:
            yield descriptor
        finally:
            _held.clear()
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, what: str, poll_s: float) -> None:
    told = float("-inf")
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - told >= WAIT_MESSAGE_S:
                holder = os.pread(descriptor, 300, 0).decode(errors="replace") or "a run that is ending"
                print(f"{what}: waiting for the machine; it is measuring: {holder}", file=sys.stderr, flush=True)
                told = time.monotonic()
            time.sleep(poll_s)
