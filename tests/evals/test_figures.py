"""Pictures hold the numbers they should, are whole, and are the same bytes each time."""

import numpy as np
import pytest

from pipeline.evals import figures
from pipeline.evals.compare import compare
from pipeline.evals.runs import Run
from tests.evals.test_compare import GATES, HEADER, run


def gridded(rule) -> Run:
    rows = [row | {"depth": (0.0, 0.5, 1.0)[int(row["id"].rsplit("-")[-1]) % 3]} for row in run(rule, per_cell=6).rows]
    return Run(HEADER, tuple(rows))


def deep_loss(family, length, index):
    return not (length == 4096 and index % 3 == 1)


def test_grid_places_each_item():
    lengths, depths, accuracy, n = figures.grid(gridded(deep_loss))
    assert lengths == [512, 1024, 2048, 4096] and depths == [0.0, 0.5, 1.0] and (n == 10).all()
    expected = np.ones((3, 4))
    expected[1, 3] = 0
    assert (accuracy == expected).all()


def test_every_picture_is_made_and_reproducible(tmp_path):
    native, variant = gridded(lambda *_: True), gridded(deep_loss)
    block = compare(native, variant, GATES)

    def draw(folder):
        return [
            figures.heat_map(variant, "fp8-auto", folder / "heat.svg"),
            figures.heat_map(variant, "fp8-auto", folder / "difference.svg", native),
            figures.accuracy_by_length({"native-auto": native, "fp8-auto": variant}, folder / "length.svg"),
            figures.flips({"fp8-auto": block, "native-auto": {"overall": None}}, folder / "flips.svg"),
        ]

    first, second = draw(tmp_path / "a"), draw(tmp_path / "b")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes() and b"</svg>" in one.read_bytes()
    assert "-1.00" in first[1].read_text().replace("\u2212", "-")
    assert f">{block['overall']['right_to_wrong']} <" in first[3].read_text()
    assert (tmp_path / "a/png").parent.exists() and figures.flips({}, tmp_path / "none.png").read_bytes()[
        :4
    ] == b"\x89PNG"


def test_unlike_grids_are_an_error():
    few = Run(HEADER, tuple(row for row in gridded(deep_loss).rows if row["length"] != 512))
    with pytest.raises(ValueError, match="different lengths"):
        figures.heat_map(few, "x", "never.svg", gridded(deep_loss))
