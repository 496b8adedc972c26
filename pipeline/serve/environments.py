"""Where an environment's Python is."""

from __future__ import annotations

import os
from pathlib import Path


def python_of(name: str) -> Path:
    """The interpreter of environment ``name``; the folder in ``K3Q_ENVS`` (one environment a subfolder) goes first."""
    if folder := os.environ.get("K3Q_ENVS"):
        return Path(folder) / name / "bin" / "python"
    from pipeline import env

    return Path(env.python_of(name))
