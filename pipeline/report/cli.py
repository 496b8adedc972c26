"""``python3 -m pipeline report``: write the report again and print the table."""

from __future__ import annotations

import argparse

from pipeline.report.build import build_all
from pipeline.report.table import markdown


def main(argv: list[str]) -> int:
    """Rebuild metrics/report.md and its kin from metrics/variants, and print the table."""
    argparse.ArgumentParser(prog="python3 -m pipeline report", description=main.__doc__).parse_args(argv)
    print(markdown(build_all()), end="")
    return 0
