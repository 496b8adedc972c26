"""Who holds GPU memory before we start.  Lists and stops; killing other people's processes is not ours to do."""

from __future__ import annotations

import shutil
import subprocess

from pipeline.serve.errors import ForeignGpuUse

UNEXPLAINED_MIB = 1024
"""Memory that no listed process explains: another container's process, which nvidia-smi cannot name from here."""


def check_free(visible: str | None = None) -> None:
    """Raise :class:`ForeignGpuUse` when a visible GPU is in use.  ``visible`` is ``CUDA_VISIBLE_DEVICES``.

    Does nothing where there is no ``nvidia-smi``.  A GPU whose state cannot be read is an error, not a free GPU.
    """
    if shutil.which("nvidia-smi") is None:
        return
    gpus = [line.split(", ") for line in _query("--query-gpu=index,uuid,memory.used")]
    wanted = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    if unknown := [name for name in wanted or () if not any(_named(name, index, uuid) for index, uuid, _ in gpus)]:
        raise ForeignGpuUse(
            f"CUDA_VISIBLE_DEVICES names {', '.join(unknown)}, which nvidia-smi does not list: cannot tell whether "
            "it is free"
        )
    chosen = {
        uuid: (index, _mib(used, index))
        for index, uuid, used in gpus
        if wanted is None or any(_named(name, index, uuid) for name in wanted)
    }
    lines, explained = [], set()
    for line in _query("--query-compute-apps=gpu_uuid,pid,used_memory,process_name"):
        uuid, pid, used, name = line.split(", ", 3)
        if uuid in chosen:
            explained.add(uuid)
            lines.append(f"GPU {chosen[uuid][0]}: pid {pid} ({name}) holds {used} MiB")
    lines += [
        f"GPU {index}: {used:.0f} MiB in use by processes that nvidia-smi cannot name (another container?)"
        for uuid, (index, used) in chosen.items()
        if uuid not in explained and used > UNEXPLAINED_MIB
    ]
    if lines:
        raise ForeignGpuUse(
            "the GPUs are not free; end these processes or choose others with CUDA_VISIBLE_DEVICES:\n  "
            + "\n  ".join(lines)
        )


def _named(name: str, index: str, uuid: str) -> bool:
    """Does an entry of CUDA_VISIBLE_DEVICES mean this GPU?  CUDA takes indexes and the beginnings of uuids."""
    return name == index or uuid.startswith(name)


def _mib(used: str, index: str) -> float:
    try:
        return float(used)
    except ValueError:
        raise ForeignGpuUse(f"nvidia-smi does not tell how much memory of GPU {index} is in use: {used!r}") from None


def _query(query: str) -> list[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ForeignGpuUse("nvidia-smi did not answer within 60 s: the driver hangs, no server can start") from None
    if result.returncode:
        raise ForeignGpuUse(
            f"nvidia-smi failed ({result.stderr.strip() or result.stdout.strip()}): cannot tell whether "
            "the GPUs are free"
        )
    return [line for line in result.stdout.splitlines() if line.strip()]
