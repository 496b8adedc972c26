"""The engine on whole checkpoints: what it writes lints clean, what cannot end well is refused before a byte is
written.
"""

import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from pipeline import files
from pipeline.checkpoint import manifest
from pipeline.checkpoint.lint import lint
from pipeline.errors import Invalid, PipelineError, Refused
from pipeline.quant import Recipe, engine, planning, streaming
from tests.checkpoint import fixtures
from tests.checkpoint.fixtures import EXPERT, PREFIX, edit_json, edit_values
from tests.quant import reference

W1 = EXPERT.format(layer=2, expert=3, name="w1")
RECIPES = [
    Recipe(form, scope)
    for form in ("fp8_block", "fp8_channel", "int8_channel", "w4a16", "w2_control")
    for scope in ("experts", "dense_too", "dense_only")
] + [Recipe("nvfp4"), Recipe("w4a16", group_size=128), Recipe("native")]


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    return fixtures.write_k3(tmp_path_factory.mktemp("k3") / "k3")


@pytest.fixture
def mine(k3, tmp_path):
    return shutil.copytree(k3, tmp_path / "source")


def hashes(directory):
    return {entry["name"]: entry["sha256"] for entry in manifest.build(directory)["files"]}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.format}-{r.scope}-{r.group_size}")
def test_every_recipe_lints_clean_against_its_source(k3, tmp_path, recipe):
    report = engine.requantize(k3, tmp_path / "out", recipe)
    errors = [finding for finding in lint(tmp_path / "out", base=k3, manifest=report) if finding.severity == "error"]
    assert errors == []
    assert files.read_json(tmp_path / "out/manifest.json") == {"files": report["files"]}
    json.dumps(report, allow_nan=False)


def test_what_is_not_quantized_keeps_its_bytes_and_dtype(k3, tmp_path):
    engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"))
    before, after = reference.tensors_of(k3), reference.tensors_of(tmp_path / "out")
    kept = [name for name in before if ".experts." not in name]
    assert len(kept) > 60 and any(before[name][0] == "F32" for name in kept)
    for name in kept:
        assert after[name][0] == before[name][0] and after[name][1].tobytes() == before[name][1].tobytes()


def test_config_has_one_quantization_config_and_keeps_the_rest(k3, tmp_path):
    engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"))
    new, old = (json.loads((d / "config.json").read_text()) for d in (tmp_path / "out", k3))
    assert "quantization_config" not in new["text_config"]
    quantization = new.pop("quantization_config")
    old["text_config"].pop("quantization_config")
    assert new == old
    assert quantization["format"] == "float-quantized" and quantization["quant_method"] == "compressed-tensors"
    assert quantization["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_shards_keep_their_names_and_auxiliary_files_are_carried(k3, tmp_path):
    (k3 / "requantization.json").write_text("{}")  # a stale one must not be carried
    engine.requantize(k3, tmp_path / "out", Recipe("w4a16"))
    (k3 / "requantization.json").unlink()
    assert {
        p.name for p in (tmp_path / "out").iterdir()
    } == {p.name for p in k3.iterdir()} | {"manifest.json", "requantization.json"}
    assert (tmp_path / "out/LICENSE").read_text() == "licence\n"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    tensors = reference.tensors_of(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(data.nbytes for _, data in tensors.values())
    assert files.read_json(tmp_path / "out/requantization.json")["recipe"]["format"] == "w4a16"


def test_scope_dense_only_leaves_experts_as_they_are_beside_the_new_group(k3, tmp_path):
    engine.requantize(k3, tmp_path / "out", Recipe("int8_channel", "dense_only"))
    before, after = reference.tensors_of(k3), reference.tensors_of(tmp_path / "out")
    for name in (name for name in before if ".experts." in name):
        assert after[name][1].tobytes() == before[name][1].tobytes()
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    formats = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert config["format"] == "mixed-precision" and formats.keys() == {"int-quantized", "mxfp4-pack-quantized"}
    assert after[PREFIX + "layers.1.self_attn.o_proj.weight"][0] == "I8"


def test_fp8_block_falls_back_to_channels_for_a_whole_family(k3, tmp_path):
    """The fixture's o_proj has 64 columns; its MLPs divide by 128."""
    engine.requantize(k3, tmp_path / "out", Recipe("fp8_block", "dense_too"))
    after = reference.tensors_of(tmp_path / "out")
    assert after[PREFIX + "layers.1.self_attn.o_proj.weight_scale"][1].shape == (128, 1)
    assert after[PREFIX + "layers.0.mlp.gate_proj.weight_scale"][1].shape == (2, 1)
    assert after[W1 + ".weight_scale"][1].shape == (1, 1)
    groups = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["weights"]["strategy"] for group in groups.values()} == {"block", "channel"}


def test_nvfp4_mates_share_a_global_scale_across_shards(mine, tmp_path):
    """w1 and w3 of one expert in different shards, with exponents far apart."""
    w3 = EXPERT.format(layer=2, expert=3, name="w3")
    edit_values(mine, w3 + ".weight_scale", lambda v: np.copyto(v, v - 14))
    moved = {}
    fixtures.edit_tensors(
        mine,
        w3 + ".weight_packed",
        lambda t: moved.update({n: t.pop(n) for n in list(t) if n.startswith(w3)}),
        reindex=False,
    )
    fixtures.edit_tensors(mine, PREFIX + "norm.weight", lambda t: t.update(moved))
    report = engine.requantize(mine, tmp_path / "out", Recipe("nvfp4"))
    after = reference.tensors_of(tmp_path / "out")
    assert after[W1 + ".weight_global_scale"][1] == after[w3 + ".weight_global_scale"][1]
    assert report["damage"]["total"]["exact_fraction"] == 1.0
    assert not [f for f in lint(tmp_path / "out", base=mine) if f.severity == "error"]


def test_a_scale_in_another_shard_than_its_weight(mine, tmp_path, k3):
    name = W1 + ".weight_scale"
    moved = {}
    fixtures.edit_tensors(mine, name, lambda t: moved.update({name: t.pop(name)}), reindex=False)
    fixtures.edit_tensors(mine, PREFIX + "norm.weight", lambda t: t.update(moved))
    engine.requantize(mine, tmp_path / "out", Recipe("fp8_block"))
    engine.requantize(k3, tmp_path / "plain", Recipe("fp8_block"))
    ours, plain = reference.tensors_of(tmp_path / "out"), reference.tensors_of(tmp_path / "plain")
    assert ours.keys() == plain.keys()
    assert all(ours[name][1].tobytes() == plain[name][1].tobytes() for name in plain)


@pytest.mark.parametrize("recipe", [Recipe("fp8_block", "dense_too"), Recipe("nvfp4"), Recipe("native")], ids=lambda r: r.format)
def test_tensors_may_lie_in_any_order_in_a_shard(mine, k3, tmp_path, recipe):
    """Scales far before or behind their weights: the same tensors come out, and the source's hash is still right."""
    for number, path in enumerate(sorted(mine.glob("*.safetensors"))):
        tensors = fixtures.load(path)
        names = sorted(tensors, key=lambda name: (name.endswith("weight_scale"), name), reverse=number % 2 == 0)
        fixtures.save(path, tensors, sorted(names, key=lambda name: -tensors[name][1].itemsize))
    report = engine.requantize(mine, tmp_path / "out", recipe)
    engine.requantize(k3, tmp_path / "plain", recipe)
    assert {e["name"]: e["sha256"] for e in report["source"]["files"]} == {p.name: files.sha256_file(p) for p in mine.glob("*.s*s")}
    ours, plain = reference.tensors_of(tmp_path / "out"), reference.tensors_of(tmp_path / "plain")
    assert ours.keys() == plain.keys()
    assert all(ours[name][1].tobytes() == plain[name][1].tobytes() for name in plain)


def test_a_single_file_without_index(tmp_path):
    source = fixtures.write_k3(tmp_path / "source", shards=1)
    (source / "model-00001-of-000001.safetensors").rename(source / "model.safetensors")
    (source / "model.safetensors.index.json").unlink()
    engine.requantize(source, tmp_path / "out", Recipe("int8_channel"))
    assert (tmp_path / "out/model.safetensors").exists()
    assert not [f for f in lint(tmp_path / "out", base=source) if f.severity == "error"]


def test_rows_come_in_chunks_without_a_seam(k3, tmp_path, monkeypatch):
    for recipe in (
        Recipe("fp8_block", "dense_too"), Recipe("w4a16"), Recipe("int8_channel", "dense_too"), Recipe("nvfp4")
    ):
        engine.requantize(k3, tmp_path / "whole", recipe)
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "CHUNK_WEIGHTS", 1000)
            patch.setattr(streaming, "CHUNK_BYTES", 100)
            engine.requantize(k3, tmp_path / "parts", recipe)
        whole, parts = hashes(tmp_path / "whole"), hashes(tmp_path / "parts")
        whole.pop("requantization.json"), parts.pop("requantization.json")  # sums of floats in another order
        assert whole == parts


def test_workers_write_the_same_bytes(k3, tmp_path):
    engine.requantize(k3, tmp_path / "one", Recipe("fp8_block"))
    engine.requantize(k3, tmp_path / "two", Recipe("fp8_block"), workers=2)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")


def test_hashes_are_those_of_the_files(k3, tmp_path):
    report = engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"))
    for entry in report["files"]:
        assert files.sha256_file(tmp_path / "out" / entry["name"]) == entry["sha256"]
    for entry in report["source"]["files"]:
        assert files.sha256_file(k3 / entry["name"]) == entry["sha256"]


def test_a_source_that_differs_from_its_manifest_is_refused(mine, tmp_path):
    listed = manifest.build(mine)
    engine.requantize(mine, tmp_path / "good", Recipe("int8_channel"), source_manifest=listed)
    edit_values(mine, W1 + ".weight_packed", lambda v: v.reshape(-1).__setitem__(0, v.reshape(-1)[0] ^ 1))
    for form in ("int8_channel", "native"):
        with pytest.raises(Refused, match=r"model-0000\d-of-000003.safetensors.*sha256 .*manifest says"):
            engine.requantize(mine, tmp_path / "bad", Recipe(form), source_manifest=listed)
        assert not (tmp_path / "bad").exists()


SHARD = "model-00002-of-000003.safetensors"
NOT_WHOLE = {
    "NaN exponent": (
        lambda d: edit_values(d, W1 + ".weight_scale", lambda v: v.reshape(-1)[:3].fill(255)),
        rf"{W1}\.weight_scale \({SHARD}\): 3 of 512 exponents are 255",
    ),
    "truncated shard": (lambda d: os.truncate(d / SHARD, 5000), f"{SHARD}: header claims"),
    "missing shard": (lambda d: (d / SHARD).unlink(), f"{SHARD}: in the index, not on disk"),
    "tensor not in its shard": (
        lambda d: fixtures.drop(d, PREFIX + "norm.weight", reindex=False), "norm.weight: the index says"
    ),
    "tensor not in the index": (
        lambda d: edit_json(d, "model.safetensors.index.json", lambda i: i["weight_map"].pop(PREFIX + "norm.weight")),
        "norm.weight: in model-00003-of-000003.safetensors, not in the index",
    ),
}
NOT_MXFP4 = {
    "missing scale": (
        lambda d: fixtures.drop(d, W1 + ".weight_scale"),
        rf"{W1}\.weight_packed \({SHARD}\) has no {W1}\.weight_scale",
    ),
    "unknown format": (
        lambda d: edit_json(d, "config.json", lambda c: rename_format(c["text_config"]["quantization_config"])),
        r"already quantized at \$\.text_config\.quantization_config \(fp5-packed\)",
    ),
    "wrong scale shape": (
        lambda d: fixtures.put(d, W1 + ".weight_scale", "U8", np.zeros((128, 8), np.uint8)),
        r"scale U8 \[128, 8\], not MXFP4",
    ),
}


def rename_format(quantization):
    quantization["config_groups"]["group_0"]["format"] = quantization["format"] = "fp5-packed"


def refuses(source, target, form, says):
    with pytest.raises(Refused, match=says):
        engine.requantize(source, target, Recipe(form))
    assert sorted(path.name for path in target.parent.iterdir()) == ["source"]  # not a byte written


@pytest.mark.parametrize("form", ["fp8_block", "native"])
@pytest.mark.parametrize("fault", NOT_WHOLE)
def test_a_source_that_is_not_whole_is_refused_before_a_byte_is_written(mine, tmp_path, fault, form):
    damage, says = NOT_WHOLE[fault]
    damage(mine)
    refuses(mine, tmp_path / "out", form, says)


@pytest.mark.parametrize("fault", NOT_MXFP4)
def test_a_source_that_is_not_what_it_claims_is_refused_before_a_byte_is_written(mine, tmp_path, fault):
    damage, says = NOT_MXFP4[fault]
    damage(mine)
    refuses(mine, tmp_path / "out", "int8_channel", says)


def stale_scale(directory):
    o_proj = PREFIX + "layers.2.self_attn.o_proj"
    fixtures.put(directory, o_proj + ".weight_scale", "F32", np.ones((128, 1), np.float32), beside=o_proj + ".weight")


def as_gptq(directory):
    edit_json(directory, "config.json", lambda c: c["text_config"].pop("quantization_config"))
    for path in directory.glob("*.safetensors"):
        tensors = fixtures.load(path)
        renamed = {name.replace("weight_packed", "qweight"): tensor for name, tensor in tensors.items()}
        fixtures.save(path, {name: tensor for name, tensor in renamed.items() if not name.endswith("weight_scale")})
    fixtures.write_index(directory)


FOREIGN = {
    "stale scale": (stale_scale, r"1 tensors have names that the output needs: .*o_proj\.weight_scale \(model-"),
    "weight stored twice": (
        lambda d: fixtures.put(d, W1 + ".weight", *fixtures.bf16(np.ones((128, 128))), beside=W1 + ".weight_packed"),
        rf"{W1}\.weight_packed \({SHARD}\) is stored beside {W1}\.weight",
    ),
    "GPTQ without a config": (as_gptq, r"36 weights cannot be read.*\n.*qweight .* is packed as GPTQ or AWQ packs"),
    "ModelOpt's own file": (
        lambda d: (d / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}'),
        r"already quantized, says hf_quant_config.json \(modelopt\)",
    ),
    "no rows": (
        lambda d: [
            fixtures.put(d, W1 + part, "U8", np.ones((0, width), np.uint8))
            for part, width in ((".weight_packed", 64), (".weight_scale", 4))
        ],
        r"U8 \[0, 64\].*not MXFP4",
    ),
    "no config groups": (
        lambda d: edit_json(
            d, "config.json", lambda c: c["text_config"]["quantization_config"].update(config_groups=None)
        ),
        r"\$\.text_config\.quantization_config has no config_groups",
    ),
    "an ignore list that is none": (
        lambda d: edit_json(
            d, "config.json", lambda c: c["text_config"]["quantization_config"].update(ignore="lm_head")
        ),
        r"\$\.text_config\.quantization_config\.ignore: 'lm_head', expected list",
    ),
    "a shard of another folder": (
        lambda d: edit_json(
            d,
            "model.safetensors.index.json",
            lambda i: i["weight_map"].update({W1 + ".weight_packed": "../x.safetensors"}),
        ),
        r"\.\./x\.safetensors: in the index, not on disk",
    ),
    "a pointer of Git LFS": (
        lambda d: (d / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        f"{SHARD}: a Git LFS pointer",
    ),
    "only a pickle": (
        lambda d: [path.rename(path.with_suffix(".bin")) for path in d.glob("model*")],
        r"its weights are \.bin files .*not opened",
    ),
}


@pytest.mark.parametrize("fault", FOREIGN)
def test_what_other_tools_leave_is_refused_before_a_byte_is_written(mine, tmp_path, fault):
    damage, says = FOREIGN[fault]
    damage(mine)
    with pytest.raises(PipelineError, match=says):
        engine.requantize(mine, tmp_path / "out", Recipe("fp8_block", "dense_too"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_pickles_beside_the_shards_are_not_carried(mine, tmp_path):
    (mine / "pytorch_model.bin").write_bytes(b"x")
    engine.requantize(mine, tmp_path / "out", Recipe("fp8_block"))
    assert not (tmp_path / "out/pytorch_model.bin").exists()
    assert not [finding for finding in lint(tmp_path / "out", base=mine) if finding.severity == "error"]


def test_mxfp4_is_taken_for_bf16_whatever_the_config_says(mine, tmp_path, k3):
    """llm-compressor dequantizes to bf16; fp16 scales would overflow."""
    edit_json(mine, "config.json", lambda c: c["text_config"].update(dtype="float16"))
    for recipe in (Recipe("w4a16"), Recipe("fp8_channel", scale="amax")):
        engine.requantize(mine, tmp_path / "half", recipe)
        engine.requantize(k3, tmp_path / "plain", recipe)
        ours, plain = reference.tensors_of(tmp_path / "half"), reference.tensors_of(tmp_path / "plain")
        assert all((ours[n][0], ours[n][1].tobytes()) == (plain[n][0], plain[n][1].tobytes()) for n in plain)


def test_indivisible_columns_are_refused_with_the_number(mine, tmp_path):
    for parameter, width in (("weight_packed", 48), ("weight_scale", 3)):
        fixtures.put(mine, f"{W1}.{parameter}", "U8", np.full((128, width), 120, np.uint8))
    with pytest.raises(Refused, match=rf"{W1}: 96 columns do not divide by 128 \(96 % 128 = 96\) for w4a16 group 128"):
        engine.requantize(mine, tmp_path / "out", Recipe("w4a16", group_size=128))
    assert not list(tmp_path.glob(".out*"))
    report = engine.requantize(
        mine, tmp_path / "out", Recipe("fp8_block")
    )  # all experts fall back to channels together
    assert report["damage"]["total"]["exact_fraction"] == 1.0
    scales = [d.shape[1] for n, (_, d) in reference.tensors_of(tmp_path / "out").items() if n.endswith("weight_scale")]
    assert set(scales) == {1}


def test_nvfp4_of_floats_is_refused(tmp_path):
    source = fixtures.write_k3(tmp_path / "source", packed=False)
    with pytest.raises(Refused, match="nvfp4 takes MXFP4 weights only"):
        engine.requantize(source, tmp_path / "out", Recipe("nvfp4"))


def test_nan_in_a_float_weight_is_refused_and_nothing_takes_the_name(mine, tmp_path):
    edit_values(mine, PREFIX + "layers.2.self_attn.o_proj.weight", lambda v: v.reshape(-1)[:2].fill(0x7FC0))
    with pytest.raises(Refused, match=r"layers\.2\.self_attn\.o_proj \(.*model-00002.*2 weights are NaN"):
        engine.requantize(mine, tmp_path / "out", Recipe("fp8_block", "dense_too"))
    assert not (tmp_path / "out").exists()


def test_too_little_space_is_refused_with_numbers(k3, tmp_path, monkeypatch):
    monkeypatch.setattr(engine.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(Refused, match=r"GB are needed for 3 shards, 0\.00 GB are free"):
        engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"))
    assert not list((tmp_path / ".out.partial").rglob("*.safetensors"))


def test_source_and_target_must_differ_and_workers_be_positive(mine):
    for form in ("native", "fp8_block"):
        with pytest.raises(Refused, match="same directory"):
            engine.requantize(mine, mine, Recipe(form))
    with pytest.raises(Refused, match="workers 0"):
        engine.requantize(mine, mine.parent / "x", Recipe("fp8_block"), workers=0)


@pytest.mark.parametrize("form", ["fp8_block", "native"])
def test_source_and_target_must_not_lie_in_each_other(mine, tmp_path, form):
    """A target is replaced as a whole: one around the source would take the source with it."""
    before = hashes(mine)
    for target in (mine / "out", mine / "deep/er", tmp_path, mine / ".." / "source"):
        with pytest.raises(Refused, match="lies inside the other|same directory"):
            engine.requantize(mine, target, Recipe(form))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(Refused, match="lies inside the other"):
        engine.requantize(mine, link, Recipe(form))
    assert hashes(mine) == before


@pytest.mark.parametrize("form", ["fp8_block", "native"])
def test_a_target_that_holds_something_else_is_not_replaced(k3, tmp_path, form):
    target = tmp_path / "out"
    target.write_text("precious")
    with pytest.raises(Refused, match="out: a file; choose another target"):
        engine.requantize(k3, target, Recipe(form))
    target.unlink()
    target.mkdir()
    (target / "thesis.tex").write_text("precious")
    with pytest.raises(Refused, match=r"holds 1 files \(thesis.tex ...\) that no run of this program wrote"):
        engine.requantize(k3, target, Recipe(form))
    assert (target / "thesis.tex").read_text() == "precious"
    (target / "thesis.tex").unlink()
    engine.requantize(k3, target, Recipe(form))
    engine.requantize(k3, target, Recipe("w4a16"))
    assert not lint(target)


@pytest.mark.parametrize("form", ["fp8_block", "native"])
def test_a_target_that_cannot_be_written_is_refused(k3, tmp_path, form):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="file.*: Not a directory"):
        engine.requantize(k3, tmp_path / "file/out", Recipe(form))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_in_the_middle_is_told_and_resumed(k3, tmp_path, monkeypatch, workers):
    original = streaming.Writer.write

    def full(self, data):
        if self.path.name.startswith("model-00003") and self.size > 5000:
            self._file.close()
            self._file = open("/dev/full", "wb", buffering=0)
        original(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(streaming.Writer, "write", full)
        with pytest.raises(Refused, match=r"model-00003.*: No space left on device within its .*run again"):
            engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"), workers=workers)
    assert not (tmp_path / "out").exists()
    report = engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"))
    if workers == 1:  # else the run may end while another shard is still waiting for a worker
        assert (report["run"]["shards_done"], report["run"]["shards_resumed"]) == (1, 2)
    assert not lint(tmp_path / "out")


def test_a_worker_that_the_kernel_kills_is_told_and_resumed(k3, tmp_path, monkeypatch):
    original = engine.convert_shard

    def killed(source, target, shard, *rest):
        if shard.name == SHARD:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(source, target, shard, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "convert_shard", killed)
        with pytest.raises(Invalid, match="a worker process was killed .*run again to resume, with fewer workers"):
            engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"), workers=2)
    assert not (tmp_path / "out").exists()
    engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"))
    assert not lint(tmp_path / "out") and sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_shard_that_grows_while_it_is_read_is_refused(mine, tmp_path, monkeypatch):
    original = engine.convert_shard

    def growing(source, target, shard, *rest):
        result = original(source, target, shard, *rest)
        with open(source / shard.name, "ab") as stream:
            stream.write(b"more")
        return result

    monkeypatch.setattr(engine, "convert_shard", growing)
    with pytest.raises(Refused, match="model-00001.*: changed while it was read; let its writer finish"):
        engine.requantize(mine, tmp_path / "out", Recipe("fp8_block"))
    assert not (tmp_path / "out").exists()


def test_a_shard_that_the_manifest_does_not_list_is_refused(k3, tmp_path):
    listed = manifest.build(k3)
    listed["files"] = [entry for entry in listed["files"] if entry["name"] != SHARD]
    with pytest.raises(Refused, match=rf"{SHARD} and 0 more shards are not in the source's manifest"):
        engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"), source_manifest=listed)


def test_who_waited_for_the_lock_of_a_finished_run_takes_a_new_one(k3, tmp_path):
    """The finished run removed the directory with the lock file that the other one waits for."""
    work, order = tmp_path / ".out.partial", []

    def wait_and_run():
        order.append(engine.requantize(k3, tmp_path / "out", Recipe("w4a16"))["recipe"]["format"])

    with engine._locked(work):
        waiting = threading.Thread(target=wait_and_run)
        waiting.start()
        time.sleep(0.3)
        shutil.rmtree(work)
        (work / engine.RECORDS).mkdir(parents=True)
    waiting.join()
    assert order == ["w4a16"] and not lint(tmp_path / "out")


def test_two_writers_of_one_target_do_not_mix(k3, tmp_path, monkeypatch):
    entered, leave = threading.Event(), threading.Event()
    original = engine._convert_one

    def slow(*args):
        entered.set()
        leave.wait(10)
        return original(*args)

    monkeypatch.setattr(engine, "_convert_one", slow)
    monkeypatch.setattr(engine, "LOCK_PATIENCE_S", 0.1)
    first = threading.Thread(target=engine.requantize, args=(k3, tmp_path / "out", Recipe("fp8_block")))
    first.start()
    assert entered.wait(10)
    with pytest.raises(Refused, match="another process is writing it"):
        engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"))
    leave.set()
    first.join()
    assert not lint(tmp_path / "out")


def test_a_new_recipe_replaces_an_old_target(k3, tmp_path):
    engine.requantize(k3, tmp_path / "out", Recipe("fp8_block"))
    engine.requantize(k3, tmp_path / "out", Recipe("w4a16"))
    assert not lint(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_native_makes_no_second_copy_and_lists_the_same_files(mine, tmp_path):
    report = engine.requantize(mine, tmp_path / "out", Recipe("native"))
    assert {e["name"]: e["sha256"] for e in report["files"]} == hashes(mine)
    shard = "model-00001-of-000003.safetensors"
    if report["run"]["linked_by"] == ["hard link"]:
        assert (tmp_path / "out" / shard).samefile(mine / shard)
    assert report["damage"]["total"]["exact_fraction"] == 1.0


def test_planning_writes_nothing_and_knows_every_size(k3, tmp_path):
    plan = planning.plan(k3, Recipe("fp8_block", "dense_too"))
    engine.requantize(k3, tmp_path / "out", Recipe("fp8_block", "dense_too"))
    for shard in plan.shards:
        assert (tmp_path / "out" / shard.name).stat().st_size == shard.target_bytes
