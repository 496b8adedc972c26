"""Serving: one vLLM server at a time, whose life, settings and memory are known.  Standard library only.

::

    with running(ServerSettings(model=checkpoint, served_name="fp8-auto"), log_path) as server:
        server.base_url, server.effective, server.memory_report()

The server runs in its own environment as a subprocess; nothing here imports vllm.
"""

from pipeline.serve.errors import ForeignGpuUse, NotReady, ServerDied, ServerError, StillAlive, WrongModel
from pipeline.serve.lock import measuring
from pipeline.serve.probe import compare_probe
from pipeline.serve.server import Server, running
from pipeline.serve.settings import ServerSettings

__all__ = [
    "ForeignGpuUse",
    "NotReady",
    "Server",
    "ServerDied",
    "ServerError",
    "ServerSettings",
    "StillAlive",
    "WrongModel",
    "compare_probe",
    "measuring",
    "running",
]
