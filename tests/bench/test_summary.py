"""Figures beside the speed: per device and user, goodput, energy, cost, overhead; each null has its reason."""

from __future__ import annotations

import pytest

from pipeline.bench import energy, summary


def test_per_device_and_per_user(run):
    point = summary.summarize([run(tok_s=value) for value in (90, 100, 120)], devices=4)
    assert point["output_tok_s"] == 100 and point["output_tok_s_per_device"] == 25
    assert point["output_tok_s_per_user"] == 100.0, "10 ms a token"
    assert (point["output_tok_s_min"], point["output_tok_s_max"], point["interval_level"]) == (90, 120, 0.75)


def test_goodput_is_of_the_requests_sent(run):
    good = [run(prompts=4, tok_s=32.0, request_goodput=value, duration=1.0) for value in (2.0, 3.0, 4.0)]
    point = summary.summarize(good)
    assert point["goodput_requests_s"] == 3.0 and point["goodput_fraction"] == 0.75
    assert summary.summarize([run()] * 3)["goodput_requests_s"] is None


def test_cost_needs_a_price_and_says_so(run):
    point = summary.summarize([run(tok_s=1000)] * 3, devices=8, price_usd_per_hour=36.0)
    assert point["usd_per_million_output_tokens"] == pytest.approx(10.0) and point["usd_reason"] is None
    point = summary.summarize([run()] * 3)
    assert point["usd_per_million_tokens"] is None and "price_usd_per_hour" in point["usd_reason"]


def test_energy_per_token_or_the_reason(run):
    point = summary.summarize([run(energy_j=64.0)] * 3)
    assert point["energy_j_per_output_token"] == 2.0 and point["energy_reason"] is None
    point = summary.summarize([run(energy_j=64.0), run()], no_energy="hidden by the container")
    assert point["energy_j_per_output_token"] is None and point["energy_reason"] == "hidden by the container"


def test_energy_of_a_counter_that_stands_still_or_of_no_token_is_null_with_a_reason(run):
    still = {"intel-rapl:0": (5.0, 1e3)}
    assert energy.spent(still, still) is None
    point = summary.summarize([run(energy_j=64.0), run(energy_j=energy.spent(still, still))])
    assert point["energy_j_per_output_token"] is None and "did not move" in point["energy_reason"]
    point = summary.summarize([run(energy_j=64.0, output_lens=[0] * 4)])
    assert point["energy_j_per_output_token"] is None and point["energy_reason"] == "no token was generated"


def package(folder, index, microjoules, limit=1_000_000_000):
    path = folder / f"intel-rapl:{index}"
    path.mkdir(exist_ok=True)
    (path / "energy_uj").write_text(str(microjoules))
    (path / "max_energy_range_uj").write_text(str(limit))
    return path


def test_rapl_adds_packages_and_mends_a_counter_that_wrapped(tmp_path):
    package(tmp_path, 0, 999_000_000), package(tmp_path, 1, 5_000_000), package(tmp_path, "0:0", 77)
    meter = energy.EnergyMeter("cpu", tmp_path)
    before = meter.read()
    package(tmp_path, 0, 1_000_000), package(tmp_path, 1, 7_000_000)
    assert meter.reason is None and energy.spent(before, meter.read()) == pytest.approx(2 + 2)


def test_no_counter_is_a_reason_not_a_zero(tmp_path, monkeypatch):
    assert "no RAPL package" in energy.EnergyMeter("cpu", tmp_path).reason
    (package(tmp_path, 0, 1) / "energy_uj").unlink()
    assert "cannot be read" in energy.EnergyMeter("cpu", tmp_path).reason
    monkeypatch.setattr(energy, "NVML", "libno-such-library.so")
    meter = energy.EnergyMeter("cuda")
    assert "NVML cannot be loaded" in meter.reason and meter.read() is None
    assert energy.EnergyMeter("rocm").reason and energy.spent(None, None) is None


def test_overhead():
    found = summary.overhead(stage_s=44.0, server_start_s=15.0, client_s=25.0)
    assert found["ratio"] == 1.1 and set(found) == {"stage_s", "server_start_s", "client_s", "ratio"}
