"""How full the KV cache gets."""

from __future__ import annotations

import threading
from typing import Any

from pipeline.errors import Invalid
from pipeline.serve import Server

KV_SAMPLE_S = 0.25
KV_USE = "vllm:kv_cache_usage_perc"


class KvUse:
    """Highest share of the KV cache in use, sampled in the warm-up: a sample in a timed run would disturb it."""

    def __init__(self, server: Server) -> None:
        self.highest: float | None = None
        self._server, self._done = server, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> KvUse:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(KV_SAMPLE_S):
            try:
                use = self._server.metrics().get(KV_USE)
            except Invalid:
                return
            if use is not None:
                self.highest = use if self.highest is None else max(self.highest, use)
