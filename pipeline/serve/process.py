"""Starts and stops a server's process group: the stage's side of :mod:`pipeline.serve.watchdog`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.serve import watchdog
from pipeline.serve.errors import NotReady, StillAlive

ORPHAN_GRACE_S = 4.0
"""SIGTERM to SIGKILL when the stage or dvc was killed: the promise is 10 s in all."""
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where vLLM puts the sockets between its processes; killed, it leaves them behind."""
SOCKET_PATH_BYTES = 107
_DVC = re.compile(r"(^|/)dvc(\.exe)?$")


def free_port() -> int:
    """A loopback port that was free a moment ago; :func:`listens` checks who took it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def socket_folder() -> str:
    """A new folder for one server's sockets, removed with the server.

    In the temporary directory; in /tmp where that lies too deep for the path of a Unix socket.
    """
    place = tempfile.gettempdir()
    longest = os.path.join(place, "k3q-ipc-12345678", str(uuid.uuid4()))
    return tempfile.mkdtemp(prefix="k3q-ipc-", dir=place if len(os.fsencode(longest)) <= SOCKET_PATH_BYTES else "/tmp")


def age_s() -> float:
    """Seconds since this process began, by a clock that nobody sets."""
    began = watchdog.read_process(os.getpid()).start_ticks / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def guardians() -> list[list[int]]:
    """``[pid, start ticks]`` of this process and of its ancestors up to the outermost dvc or ``-m pipeline`` process.

    Killing any of them means that nobody wants the result any more.  Without such an ancestor: this process alone.
    """
    chain, needed = [], 1
    process = watchdog.read_process(os.getpid())
    while process is not None and process.pid > 1:
        chain.append([process.pid, process.start_ticks])
        if _is_driver(process.pid):
            needed = len(chain)
        process = watchdog.read_process(process.parent)
    return chain[:needed]


def still_wanted(chain: list[list[int]]) -> bool:
    """Whether every process of an earlier :func:`guardians` lives: the result has somebody to go to."""
    now = [(watchdog.read_process(pid), ticks) for pid, ticks in chain]
    return all(process is not None and process.start_ticks == ticks for process, ticks in now)


def _is_driver(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return False
    module = next((after for word, after in zip(words, words[1:]) if word == "-m"), "")
    return any(_DVC.search(word) for word in words[:2]) or module in ("dvc", "pipeline")


class ServerProcess:
    """A running server's process group.  ``group`` is its process-group and session id."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        grace_s: float,
        keep_open: Sequence[int] = (),
    ) -> None:
        """Start ``command``.  ``keep_open``: descriptors that the watchdog holds for as long as the group lives.

        Raises :class:`NotReady` when the command cannot be started.
        """
        self.log_path, self._grace_s, self._end = log_path, grace_s, None
        self._buffer = b""
        self._sockets = socket_folder()
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment) | {SOCKETS: self._sockets},
            start_new_session=True,
            pass_fds=list(keep_open),
        )
        order = {
            "command": list(command),
            "log": str(log_path),
            "watch": guardians(),
            "grace_s": grace_s,
            "orphan_grace_s": ORPHAN_GRACE_S,
            "sockets": self._sockets,
        }
        self._watchdog.stdin.write(json.dumps(order).encode() + b"\n")
        self._watchdog.stdin.flush()
        message = self._receive(timeout_s=30.0) or {"failed": "the watchdog did not start"}
        if "started" not in message:
            self._close()
            raise NotReady(f"cannot start the server: {message.get('failed', message)}", log_path)
        self.group: int = message["started"]

    def _receive(self, timeout_s: float) -> dict | None:
        """The watchdog's next message; ``None`` after ``timeout_s`` or when it is gone."""
        deadline = time.monotonic() + timeout_s
        descriptor = self._watchdog.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(descriptor, 4096)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def ended(self) -> str | None:
        """``None`` while the server's first process lives, else how it ended (for a message)."""
        if self._end is None:
            if watchdog.read_process(self.group) is not None and self._watchdog.poll() is None:
                return None
            # The watchdog ends what is left of the group before it tells the exit code.
            self._end = self._receive(timeout_s=self._grace_s + watchdog.KILL_WAIT_S) or {"exited": None}
        code = self._end.get("exited")
        if code is None:
            return "ended (exit code unknown: its watchdog was killed)"
        if code == -signal.SIGKILL:
            return "was killed by signal 9 (by the kernel when memory ran out, unless somebody did)"
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def stop(self) -> None:
        """End the whole group.  Raises :class:`StillAlive` when something outlives SIGKILL."""
        if self._watchdog.poll() is None and self._end is None:
            with contextlib.suppress(OSError):
                self._watchdog.stdin.write(b"stop\n")
                self._watchdog.stdin.flush()
            self._end = self._receive(timeout_s=self._grace_s + watchdog.KILL_WAIT_S + 5.0)
        # Not a matter of trust: look, also when the watchdog was killed or said that all is well.
        left = watchdog.family(self.group) and watchdog.end_family(self.group, 1.0)
        self._close()
        if left:
            raise StillAlive(
                f"processes {left} of the server's group {self.group} outlived SIGKILL; they may still hold "
                "memory and the GPU",
                self.log_path,
            )

    def _close(self) -> None:
        for stream in (self._watchdog.stdin, self._watchdog.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._watchdog.wait(timeout=self._grace_s + watchdog.KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)  # a watchdog that was killed left it

    def listens(self, port: int) -> bool:
        """Does the group itself listen on ``port``?  A foreign server that took the port answers health checks too."""
        inodes = _listening_inodes(port)
        for pid in watchdog.family(self.group, self._watchdog.pid):
            with contextlib.suppress(OSError):
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        if os.readlink(f"/proc/{pid}/fd/{name}") in inodes:
                            return True
        return False


def _listening_inodes(port: int) -> set[str]:
    """``socket:[inode]`` of the sockets that listen on ``port`` (``/proc/net/tcp``, state 0A)."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
