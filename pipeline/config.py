"""Composes conf/ into params.yaml, and checks the whole of it.  Runs in core (Hydra through DVC, so both agree byte for byte).

``dvc exp run -S group=choice`` composes by itself; ``dvc repro`` does not, so a hand edit of conf/ needs
``python3 -m pipeline config`` before it (a test compares the two).
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import PipelineError, Refused, wrong_values
from pipeline.files import write_text
from pipeline.params import PARAMS

TUNING = Path("tuning/params.yaml")
CONF = Path(__file__).resolve().parents[1] / "conf"


def compose(overrides: list[str] = (), name: str = "config") -> str:
    """The text of params.yaml for ``overrides`` such as ``["quant=fp8", "kv=auto"]``.

    ``name``: ``config`` for params.yaml, ``tune`` for tuning/params.yaml.

    Raises :class:`Refused` with Hydra's own message for a group or a key that does not exist.
    """
    from dvc.utils.hydra import compose_and_dump
    from hydra.errors import HydraException

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "params.yaml"
        try:
            compose_and_dump(str(target), str(CONF), None, name, folder, list(overrides))
        except HydraException as error:
            # Without Hydra's search path, and its advice to add the key with `+`, which the check refuses.
            told = re.split(r"\s*(?:Config search path|To append)", str(error))[0].removeprefix("In 'config': ")
            raise Refused(f"{told}\nconf/ holds every group and key.") from None
        return target.read_text()


def check(params: dict[str, Any]) -> None:
    """Check every group with the module that uses it.  Raises :class:`Refused` naming the group and the key."""
    from pydantic import ValidationError

    from pipeline.groups import GROUPS

    unknown = sorted(params.keys() ^ GROUPS.keys())
    if unknown:
        raise Refused(f"params.yaml: groups {unknown} are unknown or missing; conf/config.yaml lists them")
    for name, parse in GROUPS.items():
        try:
            parse(params[name])
        except PipelineError:
            raise
        except ValidationError as error:
            raise wrong_values(name, error) from None
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(f"params.yaml, group {name}: {error}") from None


def main(argv: list[str]) -> int:
    """Write params.yaml and tuning/params.yaml, or print them with ``--print``."""
    from pipeline.tuning.settings import parse as parse_tuning

    parser = argparse.ArgumentParser(prog="python3 -m pipeline config", description=main.__doc__)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. quant=fp8 eval=full")
    parser.add_argument("--print", action="store_true", dest="show", help="print it, write nothing")
    arguments = parser.parse_args(argv)
    tuned = [override for override in arguments.overrides if override.lstrip("+~").startswith("tuning")]
    texts = {
        PARAMS: compose([override for override in arguments.overrides if override not in tuned]),
        TUNING: compose(tuned, "tune"),
    }
    check(yaml.safe_load(texts[PARAMS]))
    parse_tuning(yaml.safe_load(texts[TUNING])["tuning"], TUNING)
    for path, text in texts.items():
        if arguments.show:
            print(f"# {path}\n{text}", end="")
        else:
            write_text(path, text)
            print(f"wrote {path}")
    return 0
