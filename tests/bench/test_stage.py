"""The stage and the fidelity script around a bench: what they write and print."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import yaml

from pipeline import params, store
from pipeline.errors import Refused
from pipeline.files import read_json, write_json
from stages import bench as stage
from tests.imports import REPOSITORY


def test_the_stage_records_its_overhead_and_the_price(tmp_path, monkeypatch):
    for name in ("params.yaml", "metrics"):
        (tmp_path / name).symlink_to(REPOSITORY / name) if name != "metrics" else (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    kv = {"label": None, "setting": {"cache_dtype": "auto", "state_dtype": "auto"}}
    write_json("metrics/kv/native-auto.json", kv)
    for name in ("hardware", "software"):
        write_json(f"metrics/{name}.json", {})
    (tmp_path / "checkpoint").mkdir()
    server = SimpleNamespace(effective={"kv_scales": {"label": None}})
    monkeypatch.setattr(store, "served", lambda quant, variant: tmp_path / "checkpoint")
    monkeypatch.setattr(stage, "running", lambda settings, log: contextlib.nullcontext(server))
    asked = {}

    def bench(server, settings, out_dir, **options):
        asked.update(options)
        out_dir.mkdir(parents=True)
        return {"status": "valid", "output_tok_s": 1.0, "load": {"load_s": 10.0}, "client_s": 5.0}

    monkeypatch.setattr(stage, "bench", bench)
    monkeypatch.setattr("time.time", lambda: 0.0)  # a clock that was set back meanwhile
    stage.main("native-auto")
    found = read_json("metrics/bench/native-auto.json")["overhead"]
    assert found["server_start_s"] == 10.0 and found["client_s"] == 5.0 and found["stage_s"] > 0
    assert found["ratio"] == found["stage_s"] / 15.0
    assert asked["devices"] == 1 and asked["price_usd_per_hour"] is None and asked["platform"] == "cpu"
    assert not (tmp_path / ".cache" / "bench" / "native-auto").exists(), "a finished bench leaves no runs behind"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"input_len": 9000}, "longer than the 8192 that the server takes"),
        ({"repeats": "3"}, "repeats"),
        ({"misspelt": 1}, "misspelt"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_server_starts(tmp_path, monkeypatch, change, told):
    changed = params.read(REPOSITORY / "params.yaml")
    changed["bench"] |= change
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(changed))
    setting = {"cache_dtype": "auto", "state_dtype": "auto"}
    write_json("metrics/kv/native-auto.json", {"label": None, "setting": setting})
    monkeypatch.setattr(store, "served", lambda quant, variant: tmp_path / "checkpoint")
    monkeypatch.setattr(stage, "running", lambda *_: pytest.fail("a server was started"))
    with pytest.raises(Refused, match=told):
        stage.main("native-auto")


@pytest.fixture
def fidelity(monkeypatch):
    spec = importlib.util.spec_from_file_location("fidelity", REPOSITORY / "benchmarks" / "fidelity.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "running", lambda settings, log: contextlib.nullcontext(SimpleNamespace(pid=0)))
    return module


def test_fidelity_alternates_and_ends_with_one_json_line(fidelity, monkeypatch, capsys):
    order = []

    def ours(server, settings, folder):
        order.append("ours")
        return {"output_tok_s": 99.0, "ttft_ms_p50": 10.2}

    def by_hand(server, settings, seed, folder):
        order.append(f"by hand {seed}")
        return {"output_tok_s": 100.0, "ttft_ms_p50": 10.0}

    monkeypatch.setattr(fidelity, "ours", ours)
    monkeypatch.setattr(fidelity, "by_hand", by_hand)
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--pairs", "2"])
    assert fidelity.main() == 0
    kinds = [entry.split(" ")[0] for entry in order]
    assert kinds == ["ours", "by", "ours", "by", "ours", "by", "by"], "warm-up, then in turn"
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["output_tok_s_ratio"] == 0.99 and last["ttft_ratio"] == pytest.approx(1.02) and last["pairs"] == 2
    assert last["aa_output_tok_s_ratio"] == 1.0
