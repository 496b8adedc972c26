"""Pictures hold the numbers they should, are whole, and are the same bytes each time."""

import json

import numpy as np

from pipeline.evals import figures
from pipeline.evals.baseline import reference
from pipeline.evals.compare import compare
from pipeline.evals.runs import Run
from tests.evals.test_compare import GATES, HEADER, run

MEASURED = {"by_length": {"512": {"n": 20, "accuracy": 0.95}, "4096": {"n": 20, "accuracy": 0.5}}}


def gridded(rule) -> Run:
    rows = [row | {"depth": (0.0, 0.5, 1.0)[int(row["id"].rsplit("-")[-1]) % 3]} for row in run(rule, per_cell=6).rows]
    return Run(HEADER, tuple(rows))


def as_read(block: dict) -> dict:
    """As it comes back from its file, where keys are in alphabetical order."""
    return json.loads(json.dumps(block, sort_keys=True))


def deep_loss(family, length, index):
    return not (length == 4096 and index % 3 == 1)


def test_grid_places_each_item():
    block = as_read(compare(gridded(lambda *_: True), gridded(deep_loss), GATES))
    lengths, depths, accuracy = figures.grid(block, "variant")
    assert lengths == ["512", "1024", "2048", "4096"] and depths == ["0", "0.5", "1"]
    expected = np.ones((3, 4))
    expected[1, 3] = 0
    assert (accuracy == expected).all()
    assert (figures.grid(block, "difference")[2] == expected - 1).all() and (figures.grid(block, "n")[2] == 10).all()


def test_a_cell_without_items_is_no_zero():
    def without_the_end_of_4096(which: Run) -> Run:
        return Run(which.header, tuple(row for row in which.rows if (row["length"], row["depth"]) != (4096, 1.0)))

    native, variant = (without_the_end_of_4096(gridded(rule)) for rule in (lambda *_: True, deep_loss))
    _, _, accuracy = figures.grid(compare(native, variant, GATES), "variant")
    assert np.isnan(accuracy[2, 3]) and np.isnan(accuracy).sum() == 1


def test_every_picture_is_made_and_reproducible(tmp_path):
    native, variant = gridded(lambda *_: True), gridded(deep_loss)
    block, itself = compare(native, variant, GATES), reference(native, None, GATES)
    invalid = compare(native, Run(HEADER | {"status": "invalid", "reason": "stuck"}, ()), GATES)
    blocks = {"native-auto": itself, "fp8-auto": block, "int8-auto": invalid}

    def draw(folder):
        return [
            figures.heat_maps(blocks, folder / "heat.svg"),
            figures.accuracy_by_length({"native-auto": MEASURED, "int8-auto": {"status": "invalid"}}, folder / "length.svg"),
            figures.flips(blocks, folder / "flips.svg"),
        ]

    first, second = draw(tmp_path / "a"), draw(tmp_path / "b")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes() and b"</svg>" in one.read_bytes()
    heat, by_length, flips = (picture.read_text().replace("\u2212", "-") for picture in first)
    assert heat.count(">-1.00<") == 1 and heat.count(">0.00<") == 0 and heat.count(">0<") >= 11
    assert heat.count(">1.00<") == 12 + 11  # native's cells, and the variant's but the lost one
    assert ">fp8-auto: accuracy<" in heat and ">fp8-auto - native<" in heat
    assert ">native-auto - native<" not in heat and "int8" not in heat
    assert ">512<" in by_length and ">4096<" in by_length and ">native-auto<" in by_length and "int8" not in by_length
    assert f">{block['overall']['right_to_wrong']}<" in flips and "native-auto" not in flips
    for empty in (figures.flips, figures.heat_maps, figures.accuracy_by_length):
        assert empty({}, tmp_path / "none.png").read_bytes()[:4] == b"\x89PNG"
