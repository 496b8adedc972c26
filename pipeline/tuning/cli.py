"""``python3 -m pipeline tune``: the ablation around a baseline, through DVC; or what it would measure."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipeline import env, params
from pipeline.repro import dvc_repro
from pipeline.tuning.settings import SERVER_AXES, TuningSettings, expand, read
from pipeline.variant import Variant

REPOSITORY = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int:
    """Run tuning/dvc.yaml (what it needs is made first), or with ``--plan`` only list the points."""
    parser = argparse.ArgumentParser(prog="python3 -m pipeline tune", description=main.__doc__)
    parser.add_argument("--plan", action="store_true", help="list the points of tuning/params.yaml, measure nothing")
    parser.add_argument("dvc", nargs="*", help="further arguments of `dvc repro`, after --")
    arguments = parser.parse_args(argv)
    os.chdir(REPOSITORY)
    settings = read(Path("tuning/params.yaml"))
    if arguments.plan:
        points = expand(settings, baseline_values(settings))
        print("\n".join(point.name for point in points))
        print(f"\n{len(points)} points of {settings.variant}; then the best one or two against the default, {settings.pairs} pairs each")
        return 0
    env.ensure(params.load("hardware")["server_env"])
    return dvc_repro(["tuning/dvc.yaml", *arguments.dvc])


def baseline_values(settings: TuningSettings) -> dict:
    """The baseline's value on each axis as far as parameters tell; the stage asks the server settings themselves."""
    from pipeline.serving import FIELDS, machine

    here, variant = machine(), Variant.parse(settings.variant)
    values = {field: here.flag(flag) for flag, field in FIELDS.items() if field in SERVER_AXES}
    return values | dict(settings.baseline) | {"kv": variant.kv, "quant": variant.quant}
