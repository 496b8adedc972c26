import struct

import pytest

from pipeline import store
from pipeline.checkpoint.headers import build_header
from pipeline.checkpoint.lint import lint
from pipeline.checkpoint.reading import Checkpoint
from pipeline.errors import Invalid, Unreadable


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_checkpoint_in_place(tmp_path):
    (tmp_path / "checkpoints/fp8").mkdir(parents=True)
    assert store.resolve("fp8") == store.tracked("fp8")


def test_none_says_how_to_make_one():
    with pytest.raises(Unreadable, match="dvc repro quantize@fp8"):
        store.resolve("fp8")


def test_a_pointer_is_followed_and_a_changed_target_is_not_served(tmp_path):
    location = tmp_path / "big"
    location.mkdir()
    (location / "model.safetensors").write_bytes(b"12345")
    store.point("native", location, {"files": [{"name": "model.safetensors", "size_bytes": 5, "sha256": "-"}]})
    assert store.resolve("native") == location
    (location / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(Invalid, match="model.safetensors: 4 bytes, manifest says 5"):
        store.resolve("native")
    (location / "model.safetensors").unlink()
    with pytest.raises(Invalid, match="None bytes"):
        store.resolve("native")


def test_the_folder_of_a_big_checkpoint_depends_on_source_and_recipe_only():
    a = store.content_addressed("a" * 64, "b" * 64)
    assert a == store.content_addressed("a" * 64, "b" * 64) != store.content_addressed("a" * 64, "c" * 64)


def checkpoint(folder):
    """A one-tensor checkpoint in ``checkpoints/fp8``."""
    header, _ = build_header([("model.norm.weight", "F32", (1,))])
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(header + b"\0\0\0\0")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return Checkpoint.open(folder)


SCALE = "model.layers.0.self_attn.k_scale"


def test_an_overlay_adds_scales_and_copies_no_weight():
    source = checkpoint(store.tracked("fp8"))
    store.write_overlay("fp8-fp8_calibrated", source, {"quantization_config": {"kv_cache_scheme": {}}}, {SCALE: 0.25})
    served = store.served("fp8", "fp8-fp8_calibrated")
    seen = Checkpoint.open(served)
    assert seen.index == {"model.norm.weight": "model.safetensors", SCALE: store.SCALES}
    assert struct.unpack("<f", seen.read(SCALE)) == (0.25,)
    assert "quantization_config" in seen.config and (served / "tokenizer.json").exists()
    assert all(path.is_symlink() for path in served.iterdir())
    assert not [finding for finding in lint(served, headers_only=True) if finding.rule.startswith(("shard", "tensor", "total"))]


def test_a_variant_without_scales_is_served_from_its_checkpoint_and_loses_the_scales_it_had():
    source = checkpoint(store.tracked("fp8"))
    store.write_overlay("fp8-fp8", source, {}, {SCALE: 0.25})
    store.clear_overlay("fp8-fp8")
    assert store.served("fp8", "fp8-fp8") == store.tracked("fp8")


def test_half_an_overlay_is_never_served():
    source = checkpoint(store.tracked("fp8"))
    with pytest.raises(Unreadable, match="overlay.json: no such file"):
        store.served("fp8", "fp8-fp8")
    store.write_overlay("fp8-fp8", source, {}, {SCALE: 0.25})
    (store.overlay("fp8-fp8") / store.SCALES).unlink()
    with pytest.raises(Unreadable, match="kv_scales.safetensors; `dvc repro kv@fp8-fp8`"):
        store.served("fp8", "fp8-fp8")
