"""Above `model.cache_below_gib` the bytes stay out of what DVC tracks, and survive a narrowed run."""

import shutil
from pathlib import Path

import pytest
import yaml

from pipeline import store
from pipeline.files import read_json
from stages import fetch, quantize

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    params["model"]["cache_below_gib"] = 1e-6
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    fetch.main()
    return tmp_path


def test_dvc_sees_a_pointer_and_a_manifest_and_a_narrowed_run_loses_nothing(here):
    quantize.main("w4a16")
    tracked = [path for path in (here / "checkpoints/w4a16").rglob("*") if path.is_file()]
    assert [path.name for path in tracked] == [store.LOCATION] and tracked[0].stat().st_size < 10_000
    location = store.resolve("w4a16")
    assert location.parent == store.STORE and list(location.glob("*.safetensors"))
    files = read_json("metrics/manifests/w4a16.json")["files"]
    assert all(entry["sha256"] and (location / entry["name"]).stat().st_size == entry["size_bytes"] for entry in files)
    before = {path: path.stat().st_mtime_ns for path in location.glob("*.safetensors")}
    shutil.rmtree(here / "checkpoints/w4a16")  # what dvc does to the outputs of stages that a narrowed run lacks
    quantize.main("w4a16")
    assert store.resolve("w4a16") == location
    assert {path: path.stat().st_mtime_ns for path in location.glob("*.safetensors")} == before
