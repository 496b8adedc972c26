"""The isolated environments: made once, found by name, locked by hash.  Standard library only.

This is the door: ``python_of`` and ``ensure`` for code, ``python3 -m pipeline env`` for people.  ``K3Q_ENVS`` names the
folder of the environments; ``K3Q_LAUNCH`` (``srun --gpus-per-node=8``) is put before the command of ``env run``, where
DVC does not hash it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path

from pipeline import env_facts as facts
from pipeline.env_facts import DEFAULT, SPECS, home, python_of
from pipeline.env_make import ensure, remove
from pipeline.errors import Refused

__all__ = ["ensure", "home", "main", "python_of", "remove", "run_in"]


def size_bytes(folder: Path) -> int:
    """Disk space that a folder takes, each hard-linked file once."""
    blocks: dict[tuple[int, int], int] = {}
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(root, file))
                blocks[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(blocks.values())


def run_in(name: str, arguments: list[str]) -> None:
    """Become environment ``name``'s Python with ``arguments``, behind ``$K3Q_LAUNCH``: same output, same exit code.

    Never returns.  Raises :class:`Refused` when the launcher cannot be started, and what :func:`ensure` raises.
    """
    launcher = os.environ.get("K3Q_LAUNCH", "")
    python = ensure(name)
    command = [*shlex.split(launcher), str(python), *arguments]
    # Packages of the caller's own must not mix with the environment's; its tools come first, as after `activate`: the workers
    # of dvc's queue look for `dvc` on the path.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    environment["PATH"] = os.pathsep.join([str(Path(python).parent), environment.get("PATH", os.defpath)])
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise Refused(f"cannot start {command[0]!r}: {error.strerror} (K3Q_LAUNCH={launcher!r})") from None


def _list() -> None:
    rows = [("name", "state", "size", "path", "purpose")]
    for name, spec in SPECS.items():
        folder = home() / name
        size = f"{size_bytes(folder) / facts.GB:.2f} GB" if folder.exists() else "-"
        rows.append((name, facts.state(name), size, str(folder), spec.purpose))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(argv: list[str]) -> int:
    """``python3 -m pipeline env [list | make NAME...|all | run NAME -- ARGUMENT... | path NAME | remove NAME...]``."""
    parser = argparse.ArgumentParser(
        prog="python3 -m pipeline env", description="The isolated environments: list, make, use, remove."
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="name, state, size and path of each (the default)")
    make = commands.add_parser("make", help="make or renew environments")
    make.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(SPECS)}, or all (= {', '.join(DEFAULT)})")
    run = commands.add_parser("run", help="run the environment's Python with arguments, e.g. run quant -- -m pytest")
    run.add_argument("name", metavar="NAME")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ARGUMENT...")
    path = commands.add_parser("path", help="print the path of the environment's Python")
    path.add_argument("name", metavar="NAME")
    gone = commands.add_parser("remove", help="delete environments")
    gone.add_argument("names", nargs="+", metavar="NAME")
    options = parser.parse_args(argv)

    if options.command == "make":
        names = [name for chosen in options.names for name in (DEFAULT if chosen == "all" else (chosen,))]
        for name in names:
            facts.spec_of(name)  # a misspelt name is refused before the first one is made
        for name in names:
            print(f"{name}: ready, {ensure(name)}")
    elif options.command == "run":
        arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
        run_in(options.name, arguments)
    elif options.command == "path":
        print(python_of(options.name))
    elif options.command == "remove":
        for name in options.names:
            facts.spec_of(name)
        for name in options.names:
            print(f"{name}: {'removed' if remove(name) else 'was not there'}")
    else:
        _list()
    return 0
