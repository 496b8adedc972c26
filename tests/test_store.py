import pytest

from pipeline import store
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
