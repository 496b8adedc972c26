"""metrics/report.md, comparison.csv, headline.json and the pictures, from the rows of the table and the answers behind them."""

from pipeline import stage
from pipeline.report.build import build_all


def main() -> None:
    build_all()


if __name__ == "__main__":
    stage.run(main)
