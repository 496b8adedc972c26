"""The shipped calibration set: the file that conf/quant pins, and nothing of what the evaluation asks."""

import json
from pathlib import Path

import pytest
import yaml

from pipeline.evals import dataset
from pipeline.files import sha256_file

REPOSITORY = Path(__file__).resolve().parents[2]
CALIBRATED = [
    settings["calibration"]
    for path in sorted((REPOSITORY / "conf/quant").glob("*.yaml"))
    for settings in (yaml.safe_load(path.read_text()).get("schemes") or {}).values()
    if "calibration" in settings
]
PASSAGE = 16  # words; filler has four successors a word, so this long a passage does not come twice by chance


def passages(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[at : at + PASSAGE]) for at in range(len(words) - PASSAGE + 1)}


def test_there_are_three_and_each_pins_the_file_that_ships():
    assert len(CALIBRATED) == 3
    for calibration in CALIBRATED:
        assert sha256_file(REPOSITORY / calibration["dataset"]) == calibration["sha256"]


@pytest.mark.parametrize("name", ["quick", "full"])
def test_it_shares_no_passage_with_the_evaluation(name, tmp_path):
    lines = (REPOSITORY / "calibration/tiny-k3.jsonl").read_text().splitlines()
    documents = [json.loads(line)["text"] for line in lines]
    mine = set().union(*map(passages, documents))
    assert len(documents) == 32 and len(mine) > 15_000
    settings = yaml.safe_load((REPOSITORY / f"conf/eval/{name}.yaml").read_text())
    settings["lengths"] = [length for length in settings["lengths"] if length <= 2048]
    dataset.generate(REPOSITORY / "models/tiny-k3", settings, tmp_path)
    asked = [item.prompt for item in dataset.load(tmp_path)[0]]
    assert len(asked) > 200
    common = mine & set().union(*map(passages, asked))
    assert not common, sorted(common)[:3]
    assert mine & passages(documents[0]), "the comparison would find a passage"
