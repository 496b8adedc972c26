"""Opening a directory, and the list of its files with hashes."""

import json

import pytest

from pipeline import files
from pipeline.checkpoint import Checkpoint, manifest
from pipeline.errors import Unreadable
from tests.checkpoint import fixtures
from tests.checkpoint.fixtures import PREFIX


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    return fixtures.write_k3(tmp_path_factory.mktemp("k3") / "k3")


def test_a_checkpoint_knows_its_tensors_and_files(k3):
    checkpoint = Checkpoint.open(k3)
    assert checkpoint.weight_map == json.loads((k3 / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(checkpoint.headers) == 3
    assert checkpoint.read(PREFIX + "norm.weight") == fixtures.k3_tensors()[PREFIX + "norm.weight"][1].tobytes()
    assert set(checkpoint.auxiliary) == {
        "LICENSE", "chat_template.jinja", "configuration_kimi_k3.py", "helpers_kimi_k3.py", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert checkpoint.text_config["model_type"] == "kimi_linear"
    with pytest.raises(Unreadable, match="no shard holds tensor nothing"):
        checkpoint.tensor("nothing")


def test_what_cannot_be_opened_says_why(tmp_path):
    with pytest.raises(Unreadable, match="no such directory"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(Unreadable, match=": empty"):
        Checkpoint.open(tmp_path)
    (tmp_path / "README.md").write_text("")
    with pytest.raises(Unreadable, match="README.md: a file; name the directory that holds it"):
        Checkpoint.open(tmp_path / "README.md")
    with pytest.raises(Unreadable, match="config.json: no such file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Unreadable, match="no .safetensors file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(Unreadable, match="has no weight_map"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("model-q4_k_m.gguf",), r"its weights are GGUF \(model-q4_k_m.gguf and 0 more\)"),
        (("config.json", "pytorch_model-1.bin", "pytorch_model-2.bin"), r"\.bin files \(pytorch_model-1.bin and 1"),
        (("config.json", "consolidated.00.pth"), r"\.pth files .*runs code when it is read.*safetensors"),
        (("adapter_config.json", "adapter_model.safetensors"), "an adapter .*merge it into its base"),
    ],
)
def test_a_model_in_another_container_is_named_and_never_opened(tmp_path, names, says):
    for name in names:
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(Unreadable, match=says):
        Checkpoint.open(tmp_path)


def test_pickles_beside_the_shards_are_not_auxiliary_files(tmp_path):
    directory = fixtures.write_k3(tmp_path / "k3")
    (directory / "original").mkdir()
    for name in ("pytorch_model.bin", "original/consolidated.00.pth"):
        (directory / name).write_bytes(b"x")
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.other_weights == ("original/consolidated.00.pth", "pytorch_model.bin")
    assert not set(checkpoint.other_weights) & set(checkpoint.auxiliary)


def test_a_manifest_lists_every_file_but_itself_and_hidden_ones(k3):
    built = manifest.build(k3)
    names = {entry["name"] for entry in built["files"]}
    (k3 / "manifest.json").write_text(json.dumps(built))
    (k3 / ".hidden").write_text("x")
    assert {entry["name"] for entry in manifest.build(k3)["files"]} == names
    assert "config.json" in names and "LICENSE" in names and len(names) == 11
    entry = next(entry for entry in built["files"] if entry["name"] == "LICENSE")
    assert entry == {"name": "LICENSE", "size_bytes": 8, "sha256": files.sha256_file(k3 / "LICENSE")}


def test_known_hashes_are_not_computed_again(k3):
    built = manifest.build(k3, {"LICENSE": "0" * 64})
    assert next(entry for entry in built["files"] if entry["name"] == "LICENSE")["sha256"] == "0" * 64


def test_check_finds_every_kind_of_difference(tmp_path):
    directory = fixtures.write_k3(tmp_path / "k3")
    built = manifest.build(directory)
    assert manifest.check(directory, built) == []
    (directory / "LICENSE").write_text("Licence\n")
    (directory / "tokenizer.json").write_text("{} ")
    (directory / "chat_template.jinja").unlink()
    (directory / "new.txt").write_text("")
    found = {(finding.rule, finding.file) for finding in manifest.check(directory, built)}
    assert found == {
        ("manifest-hash", "LICENSE"),
        ("manifest-size", "tokenizer.json"),
        ("manifest-missing", "chat_template.jinja"),
        ("manifest-extra", "new.txt"),
    }
    with pytest.raises(Unreadable, match="not a manifest"):
        manifest.check(directory, {"files": [{"name": "x"}]})
