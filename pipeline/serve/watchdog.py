"""A small process that owns a server, so that no death of anybody leaves the server behind.  Standard library only.

Run as a script; it imports nothing of this package.  Order of events:

1. It reads one JSON line on stdin: ``{"command", "log", "watch": [[pid, ticks]...], "grace_s", "orphan_grace_s",
   "sockets"}``.
2. It starts the command in a session of its own (stdin closed, output to the log) and prints ``{"started": pid}``.
3. It waits for: the server's end; end of file or a line on stdin (the stage is gone, or asks to stop); the death of a
   watched process.  DVC runs a stage through ``sh -c``, and killing dvc leaves the shell and the stage running: hence
   dvc's own pid is watched, not only the parent.
4. SIGTERM to the server's group and whatever else descends from it, SIGKILL after the grace; then it prints
   ``{"exited": code or -signal, "survivors": [pids]}``, removes the folder ``sockets`` and ends.

It is a *subreaper*: orphans of the server become its children, also those that left the process group, so nothing can
escape.  If the watchdog itself is killed, the server's first process gets SIGKILL from the kernel, and the stage (which
sees the pipe close) ends the rest of the group.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_WAIT_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """One line of ``/proc/<pid>/stat``.  ``start_ticks`` tells a process from a later one with the same pid."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int


def read_process(pid: int) -> Process | None:
    """The process, or ``None`` when it is gone (a zombie counts as gone: it holds nothing)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().decode(errors="replace").rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZXx":
        return None
    return Process(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def processes() -> list[Process]:
    """Every live process that this one can see."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None]


def family(group: int, ancestor: int | None = None) -> list[int]:
    """Live pids of a process group and its session, and all descendants of ``ancestor`` (itself left out)."""
    everyone = processes()
    chosen = {process.pid for process in everyone if group in (process.group, process.session)}
    reached = {ancestor}
    while ancestor is not None:
        more = {process.pid for process in everyone if process.parent in reached} - reached
        if not more:
            break
        reached |= more
    return sorted((chosen | reached) - {ancestor, None, os.getpid()})


def send(signal_number: int, group: int, pids: list[int]) -> None:
    """Signal the group, then every pid that is not in it."""
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        pass
    for pid in pids:
        process = read_process(pid)
        if process is not None and process.group != group:
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                pass


def end_family(group: int, grace_s: float, ancestor: int | None = None, hurry=lambda: None) -> list[int]:
    """SIGTERM, wait, SIGKILL, wait; returns the pids that live on (none, unless one hangs in the kernel).

    ``hurry()`` may return a shorter deadline (monotonic seconds) while waiting.
    """
    deadline = time.monotonic() + grace_s
    left = family(group, ancestor)
    if left:
        send(signal.SIGTERM, group, left)
    while left and time.monotonic() < min(deadline, hurry() or deadline):
        time.sleep(0.05)
        left = family(group, ancestor)
    deadline = time.monotonic() + KILL_WAIT_S
    while left and time.monotonic() < deadline:
        send(signal.SIGKILL, group, left)
        time.sleep(0.05)
        left = family(group, ancestor)
    return left


_ended: dict[int, int] = {}


def reap() -> None:
    """Collect ended children, adopted ones included; their exit codes stay in ``_ended``."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _ended[pid] = os.waitstatus_to_exitcode(status)


def _before_exec() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _open_watched(watch: list[list[int]]) -> list[int] | None:
    """pidfds of the processes to watch; ``None`` when one of them is already gone."""
    descriptors = []
    for pid, start_ticks in watch:
        try:
            descriptors.append(os.pidfd_open(pid))
        except ProcessLookupError:
            return None
        process = read_process(pid)
        if process is None or process.start_ticks != start_ticks:
            return None
    return descriptors


def _say(message: dict) -> None:
    try:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    except OSError:
        pass


def main() -> int:
    order = json.loads(sys.stdin.readline())
    try:
        return guard(order)
    finally:
        shutil.rmtree(order["sockets"], ignore_errors=True)


def guard(order: dict) -> int:
    """Steps 2 to 4; the process's exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append("SIGTERM"))
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    watched = _open_watched(order["watch"])
    if watched is None:
        return 0
    with open(order["log"], "ab", buffering=0) as log:
        try:
            server = subprocess.Popen(
                order["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_before_exec,
            )
        except OSError as error:
            _say({"failed": f"{order['command'][0]}: {error.strerror}"})
            return 1
    _say({"started": server.pid})
    server_fd = os.pidfd_open(server.pid)
    orphan_deadline: list[float] = []

    def orphaned(timeout_s: float = 0.0) -> bool:
        """Is the stage, or a process it depends on, gone?"""
        ready = select.select([sys.stdin, *watched], [], [], timeout_s)[0]
        return any(fd in ready for fd in watched) or (sys.stdin in ready and not os.read(0, 4096))

    def hurry() -> float | None:
        if not orphan_deadline and orphaned():
            orphan_deadline.append(time.monotonic() + order["orphan_grace_s"])
        return orphan_deadline[0] if orphan_deadline else None

    while not asked:
        ready = select.select([sys.stdin, server_fd, *watched], [], [], 0.5)[0]
        reap()
        if ready:
            break
    # The long grace is for an orderly stop alone; what a dead server or a dead stage left behind has nothing to finish.
    stopping = sys.stdin in ready and bool(os.read(0, 4096)) and server_fd not in ready
    survivors = end_family(server.pid, order["grace_s" if stopping else "orphan_grace_s"], os.getpid(), hurry)
    reap()
    _say({"exited": _ended.get(server.pid), "survivors": survivors})
    return 0


if __name__ == "__main__":
    sys.exit(main())
