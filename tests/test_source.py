import json
from pathlib import Path

import pytest
import yaml

from pipeline import params, source
from pipeline.checkpoint.manifest import check as check_manifest
from pipeline.errors import Refused, Unreadable
from pipeline.files import sha256_file
from stages import fetch
from tests.imports import REPOSITORY


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"one")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"two")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / source.INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


def test_every_missing_shard_is_listed(folder):
    assert source.missing_shards(folder) == []
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert source.missing_shards(folder) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / source.INDEX).unlink()
    assert source.missing_shards(folder) == [source.INDEX]


@pytest.mark.parametrize(
    ("group", "change", "told"),
    [
        ("bench", {"repeats": "three"}, "bench: repeats 'three'"),
        ("gates", {"acuracy_margin": 0.1}, "acuracy_margin"),
        ("model", {"cache_below_gib": "50"}, "cache_below_gib"),
        ("eval", {"items": {"single": -1}}, "items.single"),
        ("serve", {"allow_untested": "false"}, "allow_untested"),
        ("kv", {"dtypes": {"fp9": {"cache_dtype": "fp8", "state_dtype": "auto"}}}, "fp9"),
    ],
)
def test_the_first_stage_refuses_what_a_later_one_would_trip_over(tmp_path, monkeypatch, group, change, told):
    changed = params.read(REPOSITORY / "params.yaml")
    changed[group] |= change
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(yaml.safe_dump(changed))
    with pytest.raises(Refused, match=told):
        fetch.main()
    assert not Path("metrics").exists()


def test_the_manifest_lists_the_files_that_verify_looks_for(folder, tmp_path):
    (folder / "training").mkdir()
    (folder / "training" / "README.md").write_text("how it was made")
    made = {"files": source.manifest(folder, hash_cache=tmp_path / "cache.json")}
    assert "training/README.md" in {entry["name"] for entry in made["files"]}
    assert not check_manifest(folder, made)


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_is(folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache.json"
    first = source.manifest(folder, hash_cache=cache)
    assert {entry["name"]: entry["sha256"] for entry in first}["model-00001-of-00002.safetensors"] == sha256_file(
        folder / "model-00001-of-00002.safetensors"
    )
    reads = []
    monkeypatch.setattr(source, "sha256_file", lambda path: reads.append(path.name) or sha256_file(path))
    assert source.manifest(folder, hash_cache=cache) == first
    assert reads == []
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"2wo")
    assert source.manifest(folder, hash_cache=cache) != first
    assert reads == ["model-00002-of-00002.safetensors"]


def test_a_download_that_cannot_be_made_says_what_to_do(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    with pytest.raises(Unreadable, match="cannot be downloaded.*no route to the hub"):
        source.download("moonshotai/Kimi-K3", "main", tmp_path, trust_remote_code=False)
    assert not (tmp_path / source.COMMIT).exists()


def test_the_commit_is_remembered_by_the_folder(folder):
    assert source.downloaded_commit(folder) is None
    (folder / source.COMMIT).write_text('{"repo": "a/b", "commit": "abc"}')
    assert source.downloaded_commit(folder) == "abc"
    assert all(entry["name"] != source.COMMIT for entry in source.manifest(folder, hash_cache=folder.parent / "c.json"))
