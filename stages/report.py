"""metrics/report.md, comparison.csv, headline.json and the pictures, from the rows of the table and the answers behind them."""

from pipeline import stage
from pipeline.report.build import build, build_damage_picture, build_evaluation_pictures, read_comparisons, read_rows


def main() -> None:
    rows, comparisons = read_rows(), read_comparisons()
    build(rows, comparisons=comparisons)
    build_evaluation_pictures(rows, comparisons)
    build_damage_picture(rows)


if __name__ == "__main__":
    stage.run(main)
