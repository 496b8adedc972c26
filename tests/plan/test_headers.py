"""Headers against config: a checkpoint that is another model's, or has lost a shard, is told before it is loaded."""

from __future__ import annotations

import json
import struct
import time

import pytest

from pipeline.errors import Unreadable
from pipeline.k3 import model_facts
from pipeline.plan.cli import main
from pipeline.plan.headers import read_stored
from pipeline.plan.request import load_model
from pipeline.plan.schemes import SCHEMES, storage_rule
from tests.plan import configs

NAMES = {"bfloat16": ("BF16", 2), "float32": ("F32", 4), "uint8": ("U8", 1)}


def write_shard(path, tensors):
    """A sparse safetensors file: a true header, and zeros that take no room."""
    header, position = {}, 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + position)


def checkpoint(folder, config, shards=2):
    """The tensors that the facts say the config has, as files."""
    facts = model_facts(config)
    rule = storage_rule(config, facts, SCHEMES["native"])
    tensors = []
    for tensor in facts.tensors:
        for e in range(tensor.count):
            name = tensor.name.replace("{e}", str(e)).replace("*", str(e))
            stored = rule(tensor)
            if stored is None:
                dtype, width = NAMES[tensor.dtype]
                tensors.append((f"{name}.weight", dtype, list(tensor.shape), width * tensor.parameters // tensor.count))
            else:
                rows, columns = tensor.shape
                tensors.append((f"{name}.weight_packed", "U8", [rows, columns // 2], rows * columns // 2))
                tensors.append((f"{name}.weight_scale", "U8", [rows, columns // 32], rows * columns // 32))
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_shard(folder / name, tensors[i::shards])
        weight_map |= {tensor[0]: name for tensor in tensors[i::shards]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_whole_checkpoint(tmp_path):
    stored = read_stored(load_model(checkpoint(tmp_path, configs.k3())))
    assert stored.refusals == [] and stored.bytes == stored.expected_bytes and stored.shards == 2


def test_the_config_of_another_model(tmp_path, capsys):
    directory = checkpoint(tmp_path, configs.k3())
    config = configs.k3()
    config["text_config"]["num_experts"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["--model", directory, "--hardware", "cpu"]) == 0
    assert main(["--model", directory, "--hardware", "cpu", "--headers"]) == 3
    assert "one of them is of another model" in capsys.readouterr().out


def test_a_lost_shard_and_a_cut_one(tmp_path):
    directory = checkpoint(tmp_path, configs.k3(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with open(tmp_path / "model-00003-of-00003.safetensors", "r+b") as stream:
        stream.truncate(1000)
    messages = [refusal.message for refusal in read_stored(load_model(directory)).refusals]
    assert any("model-00002-of-00003" in message for message in messages)
    assert any(message.startswith("model-00003-of-00003") for message in messages)


def test_no_shards_at_all(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.k3()))
    with pytest.raises(Unreadable, match="safetensors"):
        read_stored(load_model(str(tmp_path)))


def test_a_hundred_thousand_tensors(tmp_path):
    """A million must take under 60 s: a tenth of it, a tenth of the time."""
    (tmp_path / "config.json").write_text(json.dumps(configs.k3()))
    for i in range(4):
        write_shard(tmp_path / f"model-{i}.safetensors", [(f"s{i}.t{j}.weight", "U8", [4], 4) for j in range(25_000)])
    start = time.process_time()
    stored = read_stored(load_model(str(tmp_path)))
    assert stored.tensors == 100_000 and time.process_time() - start < 6
