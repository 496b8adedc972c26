"""``pipeline verify``: exit codes, JSON, and a checkpoint of real Kimi K3's size."""

import json
import time

import numpy as np
import pytest

from pipeline.checkpoint import manifest, rules_content
from pipeline.checkpoint.cli import main
from pipeline.checkpoint.headers import build_header
from tests.checkpoint import fixtures
from tests.checkpoint.fixtures import EXPERT


@pytest.fixture
def fp8(tmp_path):
    return fixtures.write_rough(tmp_path / "fp8", "fp8")


def test_a_clean_checkpoint_exits_0(fp8, capsys):
    assert main([str(fp8)]) == 0
    assert capsys.readouterr().out.endswith("0 errors, 0 warnings\n")


def test_findings_exit_3_and_are_printed_with_place_and_remedy(fp8, capsys):
    name = EXPERT.format(layer=1, expert=0, name="w1") + ".weight_scale"
    fixtures.put(fp8, name, "F32", np.zeros((128, 1), np.float32))
    assert main([str(fp8)]) == 3
    out = capsys.readouterr().out
    assert f"error scale-zero: model-00001-of-000003.safetensors {name}: 128 of 128 scales are 0" in out
    assert " -> requantize it" in out


def test_warnings_alone_exit_0_unless_strict(tmp_path, capsys):
    native = fixtures.write_k3(tmp_path / "native")
    assert main([str(native)]) == 0
    assert main([str(native), "--strict"]) == 3
    assert "declared-not-quantized" in capsys.readouterr().out


def test_what_cannot_be_read_exits_6(tmp_path, capsys):
    assert main([str(tmp_path / "absent"), "--json"]) == 6
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "invalid" and "no such directory" in result["reason"]
    native = fixtures.write_k3(tmp_path / "native")
    (native / "config.json").write_text("{")
    assert main([str(native)]) == 6
    assert "config.json: not valid JSON" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_exits_6(fp8, capsys, monkeypatch):
    def refuses(*_):
        raise PermissionError(13, "Permission denied", "model-00001-of-000003.safetensors")

    monkeypatch.setattr(rules_content, "chunks_of", refuses)
    assert main([str(fp8)]) == 6
    assert "Permission denied: 'model-00001-of-000003.safetensors'" in capsys.readouterr().err


def test_names_that_no_terminal_takes_are_printed_escaped(fp8, capsys):
    index = {"weight_map": {"\udcff.ü": "model-00001-of-000003.safetensors"}}
    (fp8 / "model.safetensors.index.json").write_text(json.dumps(index))
    for arguments in ([], ["--json"]):
        assert main([str(fp8), *arguments]) == 3
        assert "\\udcff.ü" in capsys.readouterr().out


def test_where_the_quantization_config_sits_is_told(tmp_path, fp8, capsys):
    native, plain = fixtures.write_k3(tmp_path / "native"), fixtures.write_k3(tmp_path / "plain", packed=False)
    for directory, place in ((native, "$.text_config.quantization_config"), (fp8, "$.quantization_config")):
        assert main([str(directory)]) == 0
        assert f"config.json declares quantization at {place}\n" in capsys.readouterr().out
        assert main([str(directory), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["quantization_configs"] == [place]
    assert main([str(plain)]) == 0
    assert "config.json declares quantization at no place\n" in capsys.readouterr().out


def test_a_truncated_shard_is_a_finding_not_a_crash(fp8, capsys):
    shard = fp8 / "model-00002-of-000003.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    assert main([str(fp8)]) == 3
    assert "shard-unreadable: model-00002-of-000003.safetensors" in capsys.readouterr().out


def test_json_is_one_object_with_counts(fp8, capsys):
    (fp8 / "tokenizer.json").unlink()
    assert main([str(fp8), "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["rules"] == {"tokenizer-missing": 1} and result["errors"] == 1 and not result["clean"]
    assert result["findings"][0].keys() == {"rule", "file", "tensor", "message", "remedy", "severity"}


def test_hashes_and_base(tmp_path, fp8, capsys):
    native = fixtures.write_k3(tmp_path / "native")
    (tmp_path / "m.json").write_text(json.dumps(manifest.build(fp8)))
    assert main([str(fp8), "--base", str(native), "--hashes", str(tmp_path / "m.json")]) == 0
    (fp8 / "LICENSE").write_text("licencE\n")
    assert main([str(fp8), "--base", str(native), "--hashes", str(tmp_path / "m.json")]) == 3
    out = capsys.readouterr().out
    assert "manifest-hash: LICENSE" in out and "aux-changed: LICENSE" in out
    (tmp_path / "m.json").write_text("{}")
    assert main([str(fp8), "--hashes", str(tmp_path / "m.json")]) == 6


def write_headers_of_k3(directory, layers, experts=896):
    """A checkpoint of real K3 shapes whose shards are sparse files: all headers, no bytes."""
    directory.mkdir()
    weight_map, total = {}, 0
    for layer in range(layers):
        entries = []
        for expert in range(experts):
            for name, rows, columns in (("w1", 3072, 3584), ("w3", 3072, 3584), ("w2", 3584, 3072)):
                module = EXPERT.format(layer=layer, expert=expert, name=name)
                entries += [(f"{module}.weight_packed", "U8", (rows, columns // 2))]
                entries += [(f"{module}.weight_scale", "U8", (rows, columns // 32))]
        raw, tensors = build_header(entries)
        shard = f"model-{layer + 1:05d}-of-{layers:06d}.safetensors"
        with open(directory / shard, "wb") as stream:
            stream.write(raw)
            stream.truncate(tensors[-1].end)
        weight_map |= dict.fromkeys((tensor.name for tensor in tensors), shard)
        total += tensors[-1].end - len(raw)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = fixtures.model_config()
    config["text_config"] |= {"num_hidden_layers": layers, "num_experts": experts}
    config["text_config"]["quantization_config"]["ignore"] = []
    config.pop("auto_map")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text("{}")
    return len(weight_map)


def test_a_tenth_of_k3_takes_a_tenth_of_a_minute(tmp_path, capsys):
    """Real K3 has 497 k tensors in 96 shards; this is a tenth, against a tenth of the minute that is allowed."""
    count = write_headers_of_k3(tmp_path / "k3", layers=9)
    started = time.process_time()
    assert main([str(tmp_path / "k3"), "--headers-only"]) == 0
    assert count == 48384 and time.process_time() - started < 6


def test_what_is_no_manifest_is_told_with_its_file(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    assert main([str(fixtures.write_k3(tmp_path / "k3")), "--hashes", str(tmp_path / "other.json")]) == 6
    assert "other.json: not a manifest" in capsys.readouterr().err
