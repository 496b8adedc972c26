"""metrics/report.md, comparison.csv, comparison.svg and headline.json from the rows of the table."""

from pipeline import stage
from pipeline.report.build import build, read_rows


def main() -> None:
    build(read_rows())


if __name__ == "__main__":
    stage.run(main)
