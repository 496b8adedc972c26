"""``python3 -m pipeline report``: write the report again and print the table."""

from __future__ import annotations

import argparse

from pipeline.report.build import build, build_evaluation_pictures, build_memory, read_rows
from pipeline.report.table import markdown


def main(argv: list[str]) -> int:
    """Rebuild metrics/report.md and its kin from metrics/variants, and print the table."""
    argparse.ArgumentParser(prog="python3 -m pipeline report", description=main.__doc__).parse_args(argv)
    rows = read_rows()
    build(rows)
    build_memory()
    build_evaluation_pictures(rows)
    print(markdown(rows), end="")
    return 0
