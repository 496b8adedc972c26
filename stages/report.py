"""metrics/report.md, comparison.csv, headline.json and the pictures, from the rows of the table and the answers behind them."""

from pipeline import stage
from pipeline.report.build import build, build_evaluation_pictures, build_memory, read_rows


def main() -> None:
    rows = read_rows()
    build(rows)
    build_memory()
    build_evaluation_pictures(rows)


if __name__ == "__main__":
    stage.run(main)
