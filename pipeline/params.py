"""Reads params.yaml for the stages.  Kept tiny on purpose: every stage depends on it, so a change here re-runs them all.

Each group is checked by the module that uses it; :mod:`pipeline.config` checks the whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import Unreadable

PARAMS = Path("params.yaml")


def read(path: Path | str = PARAMS) -> dict[str, Any]:
    """The whole of params.yaml.  Raises :class:`Unreadable` when it is missing or holds no groups."""
    try:
        params = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unreadable(f"{path}: no such file; `python3 -m pipeline config` composes it from conf/") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Unreadable(f"{path}: not valid YAML ({error})") from None
    if not isinstance(params, dict):
        raise Unreadable(f"{path}: holds no groups; `python3 -m pipeline config` composes it from conf/")
    return params


def load(group: str, path: Path | str = PARAMS) -> Any:
    """One group of params.yaml, e.g. ``load("eval")``.  Raises :class:`Unreadable` when file or group is missing."""
    params = read(path)
    if group not in params:
        raise Unreadable(f"{path}: has no group {group!r}; `python3 -m pipeline config` composes it from conf/")
    return params[group]
