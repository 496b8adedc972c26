"""Kimi K3 (text) on vLLM's CPU platform: an out-of-tree plugin, entry-point group ``vllm.general_plugins``.

vLLM calls `register` in every process it starts (API server, engine core, workers).  The model is imported where it is
built, and `vllm_k3_cpu.memory_report` only where a server names it as worker extension.
"""


def register() -> None:
    """Entry point: add the K3 architectures on the CPU platform, do nothing on any other."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from . import registration

    registration.register()
