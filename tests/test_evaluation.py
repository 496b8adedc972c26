"""One variant served and evaluated, the server a stand-in: deaths are survived or become a row, and the baseline is
asked twice where that means something.
"""

import contextlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from pipeline import evaluation
from pipeline.evals.compare import noise
from pipeline.evals.runs import SAMPLES, load_run
from pipeline.evals.settings import parse
from pipeline.files import write_json
from pipeline.report.row import build_row
from stages import evaluate as evaluate_stage
from stages import noise as noise_stage
from stages import pairs as pairs_stage
from tests.evals.support import TOKENIZER, Answers, make, settings
from tests.mock_openai import Behaviour, MockServer

REPOSITORY = Path(__file__).resolve().parents[1]


MEMORY = (
    "weight_bytes",
    "kv_bytes_per_token",
    "kv_capacity_tokens",
    "state_bytes_per_sequence",
    "activation_peak_bytes",
)


class Machine:
    """Stands in for :func:`pipeline.serve.server.running`: one behaviour a start, the last one from then on."""

    def __init__(self, items) -> None:
        self.items, self.behaviours, self.servers = items, [{}], []

    @contextlib.contextmanager
    def __call__(self, request, log):
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        with MockServer(
            Behaviour(**{"tokenizer": str(TOKENIZER)} | behaviour), request.served_name, Answers(self.items)
        ) as server:
            self.servers.append(server)
            yield SimpleNamespace(base_url=server.base_url, model=server.model, effective={"kv_scales": {"label": None}}, load_s=1.0)

    @property
    def asked(self) -> list[int]:
        return [len(server.state.requests) for server in self.servers]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params | {"eval": settings()}))
    for name in ("native-auto", "fp8-auto"):
        kv = {"label": None, "checkpoint_sha256": "c", "setting": {"cache_dtype": "auto", "state_dtype": "auto"}}
        write_json(f"metrics/kv/{name}.json", kv)
        write_json(f"data/kv/{name}/overlay.json", {"calibrated": False})
    write_json("metrics/software.json", {"vllm": "1"})
    for quant in ("native", "fp8"):
        (tmp_path / "checkpoints" / quant).mkdir(parents=True)
    machine = Machine(make(tmp_path / "data/eval", settings()))
    monkeypatch.setattr(evaluation, "running", machine)
    return machine


def test_a_variant_is_evaluated_under_the_conditions_it_is_served_with(machine):
    evaluate_stage.main("fp8-auto")
    result = json.loads(Path("metrics/evals/fp8-auto.json").read_text())
    assert result["status"] == "valid" and result["accuracy"] == 1.0 and machine.asked == [31]
    conditions = result["conditions"]
    assert (conditions["checkpoint_sha256"], conditions["tensor_parallel_size"]) == ("c", 1)
    assert conditions["kv"] == {"cache_dtype": "auto", "state_dtype": "auto"} and conditions["software"]
    assert conditions["serving"]["max_num_batched_tokens"] == 2048 and "kv_cache_dtype" not in conditions["serving"]
    assert result["server"]["requested"] and result["server"]["load_s"] == 1.0


def test_a_server_that_dies_once_is_started_again_and_asked_only_the_rest(machine):
    machine.behaviours = [{"die_after": 12}, {}]
    result = evaluation.evaluate("fp8-auto", parse(settings()), Path("data/samples/fp8-auto"))
    assert result["status"] == "valid" and result["n"] == 30 and result["requests_resumed"] > 0
    assert machine.asked[1] == 1 + 30 - result["requests_resumed"]


def test_a_server_that_dies_at_a_length_gives_a_row_that_says_so_not_a_missing_one(machine, capsys):
    machine.behaviours = [{"die_above_prompt_tokens": 300}]
    evaluate_stage.main("fp8-auto")
    result = json.loads(Path("metrics/evals/fp8-auto.json").read_text())
    assert (result["status"], result["server_died_at_length"]) == ("invalid", 384) and len(machine.asked) == 3
    assert [result["by_length"][length]["accuracy_unscored_left_out"] for length in ("256", "384")] == [1.0, None]
    assert "died at length 384" in result["reason"] and "15 of 30 answers are error" in result["reason"]
    assert "dvc repro --force --single-item evaluate@fp8-auto" in capsys.readouterr().err
    pairs_stage.main("fp8-auto")
    kept = load_run(f"metrics/pairs/fp8-auto/{SAMPLES}")
    assert kept.header["status"] == "invalid" and len(kept.rows) == 30
    bench = {"status": "valid", "reason": None, "speed_label": "measured", "output_tok_s": 1.0, "ttft_ms_p50": 1.0}
    bench |= {"tpot_ms_p50": 1.0, "load": {"load_s": 1.0}, "memory_summary": dict.fromkeys(MEMORY, 1), "comparability": {"key": "k"}}
    row = build_row(result, bench, {"label": "-"}, {"damage": None}, {"verdict": "invalid", "memory_findings": []})
    assert row["status"] == "invalid" and "died" in row["reason"]
    machine.behaviours = [{}]  # repaired: the next run asks only what has no answer
    evaluate_stage.main("fp8-auto")
    result = json.loads(Path("metrics/evals/fp8-auto.json").read_text())
    assert (result["status"], result["requests_resumed"], machine.asked[-1]) == ("valid", 15, 1 + 15)


def test_a_server_that_dies_of_everything_leaves_what_it_answered(machine):
    machine.behaviours = [{"die_after": 9}]
    evaluate_stage.main("fp8-auto")
    result = json.loads(Path("metrics/evals/fp8-auto.json").read_text())
    assert result["status"] == "invalid" and 0 < result["n"] < 30 and result["items_total"] == 30
    pairs_stage.main("fp8-auto")
    kept = load_run(f"metrics/pairs/fp8-auto/{SAMPLES}")
    assert kept.header["status"] == "invalid" and len(kept.rows) == result["n"]


def test_a_server_that_was_ended_because_dvc_was_killed_is_not_started_again(machine, monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(evaluation, "guardians", lambda: [[gone.pid, 1]])
    machine.behaviours = [{"die_after": 12}, {}]
    with pytest.raises(evaluation.endpoint.ServerDied, match="dvc is gone"):
        evaluate_stage.main("fp8-auto")
    assert len(machine.asked) == 1 and not Path("metrics/evals/fp8-auto.json").exists()
    (journal,) = Path(".cache/journals/fp8-auto").iterdir()
    assert len(journal.read_text().splitlines()) > 4  # what the next run goes on from


def test_a_server_that_dies_before_the_first_answer_stops_the_stage(machine):
    machine.behaviours = [{"die_after": 0}]
    with pytest.raises(evaluation.endpoint.ServerDied):
        evaluate_stage.main("fp8-auto")
    assert not Path("metrics/evals/fp8-auto.json").exists()


# --- the baseline against itself ---


@pytest.fixture
def native(machine):
    evaluate_stage.main("native-auto")
    pairs_stage.main("native-auto")
    return machine


def floors() -> dict:
    pairs = Path("metrics/pairs")
    return noise(pairs / "native-auto" / SAMPLES, pairs / "native-auto-again" / SAMPLES, {})


def test_the_baseline_is_asked_everything_again(native):
    noise_stage.main()
    assert native.asked == [31, 31]
    found = floors()
    assert (found["status"], found["n"], found["difference"]) == ("valid", 30, 0.0) and 0 < found["floor"] < 0.1
    (row, *_) = load_run(noise_stage.TARGET / SAMPLES).rows
    assert "text" not in row


def test_an_a_a_run_resumes_by_itself_and_not_from_the_first_run(native):
    native.behaviours = [{"die_after": 12}, {}]
    noise_stage.main()
    assert len(native.asked) == 3 and sum(native.asked[1:]) >= 31 and floors()["status"] == "valid"


def test_nothing_is_served_where_an_a_a_run_would_say_nothing(native):
    params = yaml.safe_load(Path("params.yaml").read_text())

    def reason() -> str:
        noise_stage.main()
        found = floors()
        assert found["status"] != "valid" and found["floor"] is None and native.asked == [31]
        return found["reason"]

    Path("params.yaml").write_text(yaml.safe_dump(params | {"gates": params["gates"] | {"noise_concurrency": None}}))
    assert "noise_concurrency is null" in reason()
    Path("params.yaml").write_text(yaml.safe_dump(params))
    write_json("metrics/software.json", {"vllm": "2"})
    assert "measured under another software" in reason()
    write_json("metrics/software.json", {"vllm": "1"})
    Path("checkpoints/native").rmdir()  # as after a narrowed run
    assert "checkpoints/native: no such checkpoint" in reason()
