"""The committed tuning report is what the program makes of the committed result: no figure of it is edited by hand."""

import json

import pytest

from pipeline.tuning import report
from tests.imports import REPOSITORY

FOLDER = REPOSITORY / "tuning"
WRITTEN = {
    "ablation.md": report.markdown,
    "ablation.csv": report.as_csv,
    "pareto.svg": report.pareto_svg,
    "knees.svg": report.knees_svg,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_written_from_the_result_beside_it(name):
    result = json.loads((FOLDER / "ablation.json").read_text())
    assert (FOLDER / name).read_text() == WRITTEN[name](result)
