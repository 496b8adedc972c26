import errno
import json
import os
import subprocess
import sys

import pytest

from pipeline.errors import Unreadable
from pipeline.evals.runs import NEEDED, SAMPLES, load_run
from pipeline.report.build import build_pictures
from stages import pairs
from tests.imports import REPOSITORY

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


def test_pictures_show_the_variants_whose_answers_are_here(tmp_path):
    pairs.main("native-auto")
    build_pictures({"native-auto": {}, "fp8-auto": {}}, {}, tmp_path / "metrics")
    picture = (tmp_path / "metrics/accuracy_by_length.svg").read_text()
    assert "native-auto" in picture and "fp8-auto" not in picture
    assert (tmp_path / "metrics/flips.svg").exists() and (tmp_path / "metrics/heat_maps.svg").exists()


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


@pytest.mark.parametrize(("raised", "code"), [("Refused('no')", 3), ("Invalid('no')", 5), ("Unreadable('no')", 6)])
def test_repro_ends_with_the_code_of_the_stage_that_failed_and_not_with_dvcs(tmp_path, capfd, raised, code):
    from pipeline.repro import dvc_repro

    script = f"from pipeline import errors, stage\n\ndef main():\n    raise errors.{raised}\n\nstage.run(main)\n"
    (tmp_path / "fails.py").write_text(f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n{script}")
    command = f"{sys.executable} fails.py"
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": {"a": {"cmd": command, "outs": ["never"]}}}))
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], check=True)
    assert dvc_repro([]) == code
    assert "fails: no" in capfd.readouterr().err
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": {"a": {"cmd": "exit 7", "outs": ["never"]}}}))
    assert dvc_repro([]) == 255, "no stage of ours: dvc's own"
