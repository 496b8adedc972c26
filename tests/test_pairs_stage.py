import errno
import json
import os
import sys

import pytest

from pipeline.errors import Unreadable
from pipeline.evals.runs import NEEDED, SAMPLES, load_run
from stages import pairs

ROW = {
    "id": "a",
    "family": "single",
    "language": "lexicon",
    "length": 512,
    "depth": 0.5,
    "cluster": "a",
    "prompt_hash": "h",
    "outcome": "correct",
    "score": 1.0,
    "hits": [1],
    "generated_tokens": 2,
    "text": "a long text that does not belong in git",
}
HEADER = {"kind": "header", "status": "valid", "reason": None, "dataset_key": "k", "conditions": {}}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data/samples/native-auto"
    folder.mkdir(parents=True)
    (folder / SAMPLES).write_text("".join(json.dumps(row) + "\n" for row in (HEADER, ROW)))
    return folder


def test_pairs_keep_what_a_comparison_needs_and_no_text(here, tmp_path):
    pairs.main("native-auto")
    run = load_run(tmp_path / "metrics/pairs/native-auto" / SAMPLES)
    assert run.header == HEADER and set(run.rows[0]) == NEEDED | {"depth", "language"}
    assert [path.name for path in (tmp_path / "metrics/pairs/native-auto").iterdir()] == [SAMPLES]
    (here / "logprobs.jsonl.gz").write_bytes(b"recorded")
    pairs.main("native-auto")
    assert (tmp_path / "metrics/pairs/native-auto/logprobs.jsonl.gz").read_bytes() == b"recorded"


def test_an_unfinished_run_gives_no_pairs(here, tmp_path):
    (here / SAMPLES).write_text(json.dumps(ROW) + "\n")
    with pytest.raises(Unreadable, match="header of a finished run"):
        pairs.main("native-auto")
    assert not (tmp_path / "metrics").exists()


def test_a_stage_error_is_one_line_with_its_exit_code(monkeypatch, capsys):
    from pipeline import stage
    from pipeline.errors import Invalid

    def main():
        raise Invalid("two runs disagree")

    monkeypatch.setattr(sys, "argv", ["somewhere/stages/compare.py"])
    with pytest.raises(SystemExit) as ended:
        stage.run(main)
    assert ended.value.code == 5 and capsys.readouterr().err == "compare: two runs disagree\n"


def test_a_full_disk_is_one_line_too_and_any_other_fault_a_traceback(monkeypatch, capsys):
    from pipeline import stage

    def main(number):
        raise OSError(number, os.strerror(number), "metrics/evals/fp8-auto.json")

    monkeypatch.setattr(sys, "argv", ["somewhere/stages/evaluate.py", errno.ENOSPC])
    with pytest.raises(SystemExit) as ended:
        stage.run(main)
    told = capsys.readouterr().err
    assert ended.value.code == 3 and told.startswith("evaluate: metrics/evals/fp8-auto.json: No space left on device.")
    monkeypatch.setattr(sys, "argv", ["somewhere/stages/evaluate.py", errno.EIO])
    with pytest.raises(OSError):
        stage.run(main)
