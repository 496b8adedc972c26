"""The bench client's process, seen from the stage."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.bench import vllm_client
from pipeline.errors import Invalid
from pipeline.serve.logs import last_lines
from pipeline.serve.settings import clean_environment

IMPORT_TIMEOUT_S = 300.0


class BenchClient:
    """``vllm bench serve`` in a process of the serving environment; a context manager.  It logs to ``log_path``."""

    def __init__(self, python: Path, log_path: Path) -> None:
        self._python, self._log_path, self._buffer = python, log_path, b""
        self.busy_s = 0.0
        """Seconds in which this process waited for the client: its imports, and every run."""

    def __enter__(self) -> BenchClient:
        environment = clean_environment(os.environ) | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_PLUGINS": "",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # vllm seeds the prompts of a trace with hash(): the same trace, the same prompts
        }
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                [str(self._python), vllm_client.__file__],
                stdin=subprocess.PIPE,
                stderr=log,
                stdout=subprocess.PIPE,
                env=environment,
            )
        try:
            self._receive(IMPORT_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, and something was still unsent
            # End of input ends the client; if this process is killed, that happens by itself.
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def run(self, arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """One ``vllm bench serve`` with ``arguments``; ``{"ok": ..., ...}``.

        Raises :class:`Invalid` when the client itself ends or does not answer in time.
        """
        with contextlib.suppress(OSError):  # it has ended: what is received says how
            self._process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
            self._process.stdin.flush()
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        began = time.monotonic()
        try:
            return self._wait(began + timeout_s, timeout_s)
        finally:
            self.busy_s += time.monotonic() - began

    def _wait(self, deadline: float, timeout_s: float) -> dict[str, Any]:
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Invalid(f"the bench client did not answer within {timeout_s:.0f} s\n{last_lines(self._log_path)}")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise Invalid(
                    f"the bench client ended (exit code {self._process.wait()})\n{last_lines(self._log_path)}"
                )
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)
