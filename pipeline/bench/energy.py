"""Energy of the machine during a run: counters of NVML (GPUs) or RAPL (CPU packages), or the reason why there are none.

Both count the whole device, not one process: on a shared machine they include the neighbours.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


class Unmeasurable(Exception):
    """No counter can be read; the message says why."""


class EnergyMeter:
    """``read()`` gives joules since some moment; differences of two readings are what counts."""

    def __init__(self, platform: str, powercap: Path = POWERCAP) -> None:
        self.reason: str | None = None
        self.source = {"cuda": "nvml", "cpu": "rapl"}.get(platform)
        self._powercap = powercap
        try:
            self.read_devices()
        except Unmeasurable as error:
            self.reason = str(error)

    def read_devices(self) -> dict[str, tuple[float, float | None]]:
        """``{device: (joules, joules at which its counter starts again)}``.  Raises :class:`Unmeasurable`."""
        if self.source == "nvml":
            return _nvml()
        if self.source == "rapl":
            return _rapl(self._powercap)
        raise Unmeasurable("no energy counter is known for this platform")

    def read(self) -> dict[str, tuple[float, float | None]] | None:
        """One reading; ``None`` when there is none (``reason`` says why)."""
        try:
            return None if self.reason else self.read_devices()
        except Unmeasurable as error:
            self.reason = str(error)
            return None


def spent(before: dict | None, after: dict | None) -> float | None:
    """Joules between two readings, wrapped counters mended; ``None`` when either is missing, devices changed, or no
    counter moved (a virtual machine's may stand still)."""
    if not before or not after or before.keys() != after.keys():
        return None
    total = 0.0
    for device, (end, limit) in after.items():
        difference = end - before[device][0]
        if difference < 0:
            if limit is None:
                return None
            difference += limit
        total += difference
    return total or None


def _rapl(powercap: Path) -> dict[str, tuple[float, float | None]]:
    packages = sorted(path for path in powercap.glob("intel-rapl:*") if path.name.count(":") == 1)
    if not packages:
        raise Unmeasurable(f"{powercap} has no RAPL package (a virtual machine or container hides it)")
    readings = {}
    for package in packages:
        try:
            joules = int((package / "energy_uj").read_text()) / 1e6
            limit = int((package / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError) as error:
            raise Unmeasurable(f"{package.name}/energy_uj cannot be read: {error}") from None
        readings[package.name] = (joules, limit)
    return readings


def _nvml() -> dict[str, tuple[float, float | None]]:
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError as error:
        raise Unmeasurable(f"NVML cannot be loaded: {error}") from None
    if nvml.nvmlInit_v2():
        raise Unmeasurable("NVML cannot be initialized")
    count, readings = ctypes.c_uint(), {}
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        if failed:
            raise Unmeasurable(f"GPU {index} has no energy counter (NVML error {failed})")
        readings[f"gpu{index}"] = (millijoules.value / 1e3, None)
    if not readings:
        raise Unmeasurable("NVML sees no GPU")
    return readings
