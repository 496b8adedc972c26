"""Composes conf/ into params.yaml, and checks the whole of it.  Runs in core (Hydra through DVC, so both agree byte for byte).

``dvc exp run -S group=choice`` composes by itself; ``dvc repro`` does not, so a hand edit of conf/ needs
``python3 -m pipeline config`` before it (a test compares the two).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import PipelineError, Refused
from pipeline.files import write_text
from pipeline.params import PARAMS

CONF = Path(__file__).resolve().parents[1] / "conf"


def compose(overrides: list[str] = ()) -> str:
    """The text of params.yaml for ``overrides`` such as ``["quant=fp8", "kv=auto"]``.

    Raises :class:`Refused` with Hydra's own message for a group or a key that does not exist.
    """
    from dvc.utils.hydra import compose_and_dump
    from hydra.errors import HydraException

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "params.yaml"
        try:
            compose_and_dump(str(target), str(CONF), None, "config", folder, list(overrides))
        except HydraException as error:
            raise Refused(f"conf/: {error}") from None
        return target.read_text()


def check(params: dict[str, Any]) -> None:
    """Check every group with the module that uses it.  Raises :class:`Refused` naming the group and the key."""
    from pipeline.groups import GROUPS

    unknown = sorted(params.keys() ^ GROUPS.keys())
    if unknown:
        raise Refused(f"params.yaml: groups {unknown} are unknown or missing; conf/config.yaml lists them")
    for name, parse in GROUPS.items():
        try:
            parse(params[name])
        except PipelineError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(f"params.yaml, group {name}: {error}") from None


def main(argv: list[str]) -> int:
    """Write params.yaml, or print it with ``--print``."""
    parser = argparse.ArgumentParser(prog="python3 -m pipeline config", description=main.__doc__)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. quant=fp8 eval=full")
    parser.add_argument("--print", action="store_true", dest="show", help="print it, write nothing")
    arguments = parser.parse_args(argv)
    text = compose(arguments.overrides)
    check(yaml.safe_load(text))
    if arguments.show:
        print(text, end="")
    else:
        write_text(PARAMS, text)
        print(f"wrote {PARAMS}")
    return 0
