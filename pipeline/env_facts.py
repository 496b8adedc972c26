"""What the isolated environments are, where they lie and in what state.  Standard library only; reads, changes nothing.

llm-compressor and vLLM pin different releases of compressed-tensors, so no one environment can hold both.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import Refused

REPO = Path(__file__).resolve().parents[1]
PYTHON = (3, 11)
TORCH_VERSION = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PLUGIN = "plugins/vllm_k3_cpu"
STAMP = ".k3q-env"
PLUGIN_STAMP = ".k3q-plugin"

ABSENT, HALF_MADE, STALE, STALE_PLUGIN, READY = "absent", "half-made", "stale", "stale plugin", "ready"

GB = 10**9


@dataclass(frozen=True)
class Spec:
    """What an environment is, beyond its lock ``requirements/NAME.txt``."""

    purpose: str
    disk_bytes: int
    """Installed size plus the wheels that pip holds while it installs."""
    cpu_torch: bool = False
    """Torch's CPU build is installed apart from the lock: the index that has it must not serve anything else."""
    imports: tuple[str, ...] = ()
    """Modules whose import proves that native libraries load."""
    plugin: str | None = None
    """Source tree installed on top, with a stamp of its own."""


SPECS = {
    "core": Spec(
        "DVC, evaluation client, statistics, report, tests; no torch", 2 * GB, imports=("dvc.repo", "lm_eval")
    ),
    "quant": Spec("llm-compressor, torch for CPU", 3 * GB, True, imports=("torch", "numba")),
    "serve-cpu": Spec("vLLM for CPU with the K3 plugin", 4 * GB, True, imports=("torch",), plugin=PLUGIN),
    "serve-cuda": Spec("vLLM for NVIDIA GPUs", 25 * GB),
}
DEFAULT = ("core", "quant", "serve-cpu")
"""What ``env make all`` makes: nobody fetches a CUDA build to run the default."""


def home() -> Path:
    """Folder of the environments: ``$K3Q_ENVS`` (an absolute path), else beside the running one, else ``REPO/.venvs``.

    DVC runs temporary experiments in checkouts under ``.dvc/tmp/exps``; those share the environments of the tree
    around them.
    """
    if chosen := os.environ.get("K3Q_ENVS"):
        if not Path(chosen).is_absolute():  # it would mean another folder in every checkout
            raise Refused(f"K3Q_ENVS must be an absolute path, not {chosen!r}")
        return Path(chosen)
    if (Path(sys.prefix) / STAMP).exists():
        return Path(sys.prefix).parent
    around = next((parent.parent for parent in REPO.parents if parent.name == ".dvc"), REPO)
    return around / ".venvs"


def spec_of(name: str) -> Spec:
    try:
        return SPECS[name]
    except KeyError:
        raise Refused(f"no environment is called {name!r}: there are {', '.join(SPECS)}") from None


def python_of(name: str) -> Path:
    """The interpreter of an environment, made or not."""
    spec_of(name)
    return home() / name / "bin" / "python"


def site_packages_of(name: str) -> Path:
    """Where an environment's packages lie, so that their metadata can be read without starting it."""
    spec_of(name)
    return home() / name / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"


def lock_file(name: str) -> Path:
    return REPO / "requirements" / f"{name}.txt"


def locked_versions(name: str) -> dict[str, str]:
    """Normalized package name -> version, from the lock."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", lock_file(name).read_text(), re.MULTILINE)
    return {normalized(package): version for package, version in pins}


def normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def plugin_sources(name: str) -> list[Path]:
    """The files that the installed plugin consists of: neither its tests nor what Python or a build leaves behind."""
    root = REPO / (spec_of(name).plugin or "")
    if not spec_of(name).plugin or not (root / "pyproject.toml").exists():
        return []
    skipped = {"tests", "build", "dist", "__pycache__"}
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file()
        and not any(
            part in skipped or part.startswith(".") or part.endswith(".egg-info")
            for part in path.relative_to(root).parts
        )
    )


def expected_stamp(name: str) -> str:
    """Hash of the lock, the specification and the Python release."""
    torch = TORCH_VERSION if spec_of(name).cpu_torch else None
    what = f"torch {torch} python {PYTHON} {platform.machine()}"
    return hashlib.sha256(lock_file(name).read_bytes() + what.encode()).hexdigest()


def expected_plugin_stamp(name: str) -> str:
    digest = hashlib.sha256()
    for path in plugin_sources(name):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(REPO)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def state(name: str) -> str:
    """``absent``, ``half-made`` (no stamp, or no interpreter), ``stale``, ``stale plugin`` or ``ready``."""
    folder = home() / name
    if not folder.exists():
        return ABSENT
    if not (folder / STAMP).exists() or not python_of(name).exists():
        return HALF_MADE
    if _read(folder / STAMP) != expected_stamp(name):
        return STALE
    if plugin_sources(name) and _read(folder / PLUGIN_STAMP) != expected_plugin_stamp(name):
        return STALE_PLUGIN
    return READY


def installed_versions(name: str) -> dict[str, str]:
    """Normalized package name -> version, read from the environment's metadata; nothing is imported or started."""
    found = importlib.metadata.distributions(path=[str(site_packages_of(name))])
    return {normalized(distribution.metadata["Name"]): distribution.version for distribution in found}
