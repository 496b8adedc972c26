"""Calibrated recipes on the tiny model: what is written, what is refused, and that every trap of the way is closed."""

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from pipeline import files
from pipeline.checkpoint import Checkpoint, numbers
from pipeline.checkpoint.finding import ERROR
from pipeline.checkpoint.lint import lint
from pipeline.errors import Invalid, Refused, Unreadable
from pipeline.quant import Recipe, engine, scope
from pipeline.quant.calibrated import cpu, methods, observe, run, tokens
from pipeline.quant.calibrated import model as models
from pipeline.quant.calibration import Calibration
from tests.checkpoint import fixtures
from tests.quant import decompression, reference

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "models" / "tiny-k3"
KEYS = ("w4a16_gptq", "w4a16_awq", "int8_sq")
MOE = fixtures.PREFIX + "layers.{}.block_sparse_moe"
ONE = MOE.format(3) + ".experts.2"


def recipe_of(key: str, **changes) -> Recipe:
    settings = yaml.safe_load((REPOSITORY / "conf/quant" / f"{key}.yaml").read_text())["schemes"][key]
    settings["calibration"] |= {"dataset": str(REPOSITORY / settings["calibration"]["dataset"])} | changes
    return Recipe.from_params(settings)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The tiny model without its training folder."""
    target = tmp_path_factory.mktemp("source") / "tiny"
    return shutil.copytree(TINY, target, ignore=shutil.ignore_patterns("training", "goldens"))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """key -> (folder, report), each made once; ``make.models[key]`` is the model that ``oneshot`` left."""
    done, calibrate = {}, engine._calibrate

    def make(key):
        if key not in done:
            target = tmp_path_factory.mktemp("made") / key
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, "_calibrate", lambda *given: make.models.setdefault(key, calibrate(*given)))
                done[key] = target, engine.requantize(source, target, recipe_of(key))
            make.models[key] = make.models[key].model
        return done[key]

    make.models = {}

    return make


@pytest.fixture(scope="module")
def loaded(source):
    """The model and its experts' matrices."""
    checkpoint = Checkpoint.open(source)
    modules = scope.modules_of(checkpoint)
    chosen = scope.select(checkpoint, modules, recipe_of("w4a16_gptq"))
    with cpu.kernels():
        return models.load(checkpoint, chosen), chosen


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_the_source_s_exponent_spread_is_reported_as_of_the_plain_scheme(made, source, key, tmp_path):
    _, report = made(key)
    plain = engine.requantize(source, tmp_path / "plain", replace(recipe_of(key), calibration=None))
    spreads = [[row["largest_exponent_spread"] for row in r["damage"]["by_kind_and_layer"]] for r in (report, plain)]
    assert spreads[0] == spreads[1] and None not in spreads[0]


@pytest.mark.parametrize("key", KEYS)
def test_it_verifies_against_its_source(made, source, key):
    target, report = made(key)
    found = [item for item in lint(target, base=source, manifest=report) if item.severity == ERROR]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("key", KEYS)
def test_nothing_but_experts_and_what_is_listed_differs(made, source, key):
    target, report = made(key)
    before, after = reference.tensors_of(source), reference.tensors_of(target)
    plain = {name for name in before if ".experts." not in name}
    differing = {name for name in plain if before[name][1].tobytes() != after[name][1].tobytes()}
    assert differing == set(report["calibration"]["changed_tensors"])
    assert all(before[name][0] == after[name][0] for name in plain)
    wanted = set() if key == "w4a16_gptq" else {f"{MOE.format(n)}.routed_expert_down_proj.weight" for n in (1, 2, 3, 4)}
    assert differing == wanted


@pytest.mark.parametrize("key", KEYS)
def test_it_decompresses_in_the_library_to_the_source_s_values_roughly(made, source, key):
    target, report = made(key)
    weights, stored = decompression.decompressed(target), reference.tensors_of(source)
    assert len(weights) == 96
    smoothing = report["calibration"]["smoothing"]
    for module, weight in weights.items():
        if module.rpartition(".experts.")[0] in smoothing and module[-1] in "13":
            continue
        wanted = torch.from_numpy(reference.matrix(stored, module)).double()
        assert (weight.double() - wanted).norm() < 0.2 * wanted.norm(), module


@pytest.mark.parametrize("key", KEYS)
def test_the_bytes_are_those_that_llm_compressor_would_save(made, key):
    from compressed_tensors.compressors.base import compress_module

    target, report = made(key)
    stored, compared = decompression.load(target), 0
    for name, linear in made.models[key].named_modules():
        if ".experts." not in name or not hasattr(linear, "weight_scale"):
            continue
        linear = copy.deepcopy(linear)
        compress_module(linear)
        theirs = {f"{name}.{part}": value.data for part, value in linear.named_parameters()} | {
            f"{name}.{part}": value for part, value in linear.named_buffers()
        }
        for tensor, value in theirs.items():
            if tensor.endswith("zero_point"):
                assert not value.any()
                continue
            assert stored[tensor].dtype == value.dtype and torch.equal(stored[tensor], value), tensor
        assert theirs.keys() >= {tensor for tensor in stored if tensor.startswith(name + ".")}
        compared += 1
    assert compared == 96 - 3 * len(report["calibration"]["experts"]["rounded_plainly"])


@pytest.mark.parametrize("key", KEYS)
def test_the_container_is_that_of_the_plain_scheme(made, source, key, tmp_path):
    """Names, dtypes, shapes and config: what serves the one serves the other."""
    target, _ = made(key)
    engine.requantize(source, tmp_path / "plain", replace(recipe_of(key), calibration=None))
    ours, plain = Checkpoint.open(target), Checkpoint.open(tmp_path / "plain")
    assert {name: (t.dtype, t.shape) for name, t in ours.tensors().items()} == {
        name: (t.dtype, t.shape) for name, t in plain.tensors().items()
    }
    assert ours.config == plain.config and ours.weight_map == plain.weight_map


def test_gptq_beats_plain_rounding_where_it_counts(made):
    error = made("w4a16_gptq")[1]["calibration"]["output_error"]
    assert error["total"]["relative_output_rmse"] < 0.8 * error["total"]["plain_rounding"]
    assert {row["kind"] for row in error["by_kind_and_layer"]} == {f"block_sparse_moe.experts.w{n}" for n in (1, 2, 3)}
    assert [row["layer"] for row in error["by_kind_and_layer"][:4]] == [1, 2, 3, 4]


@pytest.mark.parametrize("key", ["w4a16_awq", "int8_sq"])
def test_smoothing_changed_the_scales_and_cancels(made, source, key):
    """``down_proj`` divided by s, ``w1`` multiplied by s: the product of the two is what it was."""
    target, _ = made(key)
    before, after = reference.tensors_of(source), reference.tensors_of(target)
    weights = decompression.decompressed(target)
    for layer in (1, 4):
        down = MOE.format(layer) + ".routed_expert_down_proj.weight"
        first, second = (numbers.bf16_values(t[down][1].view(np.uint16)).astype(np.float64) for t in (before, after))
        assert np.ptp(np.abs(first).sum(1) / np.abs(second).sum(1)) > 0.05, "nothing was smoothed"
        for name in ("experts.0.w1", "experts.7.w3"):
            module = f"{MOE.format(layer)}.{name}"
            wanted = reference.matrix(before, module) @ first
            product = weights[module].double().numpy() @ second
            assert np.linalg.norm(product - wanted) < 0.2 * np.linalg.norm(wanted), module


@pytest.mark.parametrize("key", KEYS)
def test_the_report_records_set_and_rule(made, key):
    report = made(key)[1]
    settings = recipe_of(key).calibration
    found = report["calibration"]
    assert found["set"]["tokens"] == settings.rows * settings.tokens >= 4096
    assert found["set"]["pin"] == files.sha256_file(settings.dataset) and len(found["set"]["token_ids_sha256"]) == 64
    experts = found["experts"]
    assert experts["experts"] == 32 and experts["fewest_tokens"] <= experts["most_tokens"]
    if key == "w4a16_awq":
        assert not experts["rounded_plainly"] and experts["rule"] == "every expert sees every token"
    else:
        # How many have too few is the model's affair; `test_an_expert_never_routed` sees the rule at work.
        assert (experts["fewest_tokens"] < 256) == bool(experts["rounded_plainly"]) and "256" in experts["rule"]
        assert all(tokens < 256 for tokens in experts["rounded_plainly"].values())
    assert found["hessian_not_invertible"] == []
    assert report["recipe"]["calibration"]["method"] == settings.method


def test_an_expert_left_out_is_rounded_plainly(made, source, tmp_path):
    target, report = made("w4a16_gptq")
    engine.requantize(source, tmp_path / "plain", Recipe("w4a16"))
    ours, plain = reference.tensors_of(target), reference.tensors_of(tmp_path / "plain")
    assert ours.keys() == plain.keys()
    for expert in report["calibration"]["experts"]["rounded_plainly"]:
        for name in (f"{expert}.{w}.{p}" for w in ("w1", "w2", "w3") for p in ("weight_packed", "weight_scale")):
            assert ours[name][1].tobytes() == plain[name][1].tobytes(), name
    other = MOE.format(1) + ".experts.1.w1.weight_packed"
    assert ours[other][1].tobytes() != plain[other][1].tobytes()


def test_a_second_run_finds_the_first_one_done(made, source, monkeypatch):
    target, first = made("w4a16_gptq")
    monkeypatch.setattr(engine, "_calibrate", lambda *_: pytest.fail("calibrated again"))
    again = engine.requantize(source, target, recipe_of("w4a16_gptq"))
    assert again["run"]["shards_done"] == 0 and again["calibration"] == first["calibration"]


# -- the model ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_cpu_stand_ins_compute_the_goldens(source):
    goldens = load_file(TINY / "goldens/logits.safetensors")
    checkpoint = Checkpoint.open(source)
    modules = scope.modules_of(checkpoint)
    with cpu.kernels():
        model = models.load(checkpoint, [module for module in modules.values() if module.mxfp4])
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        logits = model(input_ids=goldens["ids_0"][None, :200], use_cache=False).logits[0]
    assert (logits - goldens["logits_0"][:200]).abs().max() < 1e-3


def test_f32_tensors_are_calibrated_with_as_they_are(loaded, source):
    model, _ = loaded
    name = MOE.format(2) + ".gate.e_score_correction_bias"
    assert torch.equal(model.get_parameter(name), load_file(fixtures.shard_of(source, name))[name])
    assert model.get_parameter(name).dtype == torch.float32


def test_the_loaded_model_keeps_no_scale_of_the_source(loaded):
    model, chosen = loaded
    for module in chosen:
        linear = model.get_submodule(module.name)
        assert not hasattr(linear, "weight_scale") and not hasattr(linear, "quantization_scheme")


def test_smoothing_is_refused_without_a_latent_space(source):
    checkpoint = Checkpoint.open(source)
    modules = {n: m for n, m in scope.modules_of(checkpoint).items() if "routed_expert" not in n}
    chosen = [module for module in modules.values() if module.mxfp4]
    assert methods.smoothed_matrices(modules, chosen, recipe_of("w4a16_gptq")) == []
    with pytest.raises(Refused, match="the router reads too"):
        methods.smoothed_matrices(modules, chosen, recipe_of("int8_sq"))


# -- broken inputs -----------------------------------------------------------------------------------------------------


def test_too_few_rows(source, tmp_path):
    with pytest.raises(Refused, match="32 rows of 512 tokens, 33 are wanted"):
        run.calibrate(source, recipe_of("w4a16_gptq", rows=33))
    assert not list(tmp_path.iterdir())


def test_no_tokenizer(source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "source")
    for path in broken.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(Unreadable, match="no tokenizer"):
        run.calibrate(broken, recipe_of("w4a16_gptq"))


def test_another_file_than_the_pinned_one(source, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": " tiki = 182 ;"}) + "\n")
    with pytest.raises(Refused, match=files.sha256_file(text)):
        run.calibrate(source, recipe_of("w4a16_gptq", dataset=str(text)))
    with pytest.raises(Refused, match="column 'body' is empty or absent"):
        run.calibrate(source, recipe_of("w4a16_gptq", dataset=str(text), sha256=files.sha256_file(text), column="body"))
    with pytest.raises(Unreadable, match="no such calibration file"):
        run.calibrate(source, recipe_of("w4a16_gptq", dataset=str(tmp_path / "none.jsonl")))


def test_a_nan_among_the_unquantized_weights(source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "source")
    name = fixtures.PREFIX + "layers.2.self_attn.o_proj.weight"
    fixtures.edit_values(broken, name, lambda v: v.reshape(-1)[7:8].fill(0x7FC0))
    with pytest.raises(Refused, match=r"1 parameters are NaN or infinite before calibration: .*2\.self_attn\.o_proj"):
        engine.requantize(broken, tmp_path / "out", recipe_of("w4a16_gptq"))
    assert not (tmp_path / "out").exists()


def test_a_nan_among_the_experts_scales(source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "source")
    fixtures.edit_values(broken, ONE + ".w1.weight_scale", lambda v: v[3:4].fill(255))
    with pytest.raises(Refused, match="255, which is NaN"):
        engine.requantize(broken, tmp_path / "out", recipe_of("w4a16_gptq"))


def test_a_missing_tensor_never_becomes_a_random_one(source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "source")
    fixtures.drop(broken, MOE.format(2) + ".routed_expert_up_proj.weight")
    with pytest.raises(Refused, match="does not load whole"):
        run.calibrate(broken, recipe_of("w4a16_gptq"))


def test_an_expert_never_routed(source, tmp_path):
    """Its bias keeps the router away: no token, no Hessian; still whole scales and plain rounding."""
    broken = shutil.copytree(source, tmp_path / "source")
    name = MOE.format(1) + ".gate.e_score_correction_bias"
    fixtures.edit_values(broken, name, lambda v: v[5:6].fill(-100))
    report = engine.requantize(broken, tmp_path / "out", recipe_of("w4a16_gptq", rows=8, min_tokens=1))
    experts = report["calibration"]["experts"]
    never = MOE.format(1) + ".experts.5"
    assert experts["never_routed"] == [never] and experts["rounded_plainly"] == {never: 0}
    engine.requantize(broken, tmp_path / "plain", Recipe("w4a16"))
    ours, plain = reference.tensors_of(tmp_path / "out"), reference.tensors_of(tmp_path / "plain")
    assert ours[never + ".w2.weight_scale"][1].tobytes() == plain[never + ".w2.weight_scale"][1].tobytes()
    assert not [item for item in lint(tmp_path / "out", base=broken) if item.severity == ERROR]


def test_no_expert_gets_enough(source):
    with pytest.raises(Refused, match="no expert gets calibration.min_tokens = 100000"):
        run.calibrate(source, recipe_of("w4a16_gptq", rows=2, min_tokens=100_000))


def test_a_host_too_small_for_the_dequantized_model(source, monkeypatch):
    monkeypatch.setattr(models.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 5_000_000}))
    with pytest.raises(Refused, match="GB of memory are free; take a larger host"):
        run.calibrate(source, recipe_of("w4a16_gptq"))


def test_another_architecture(tmp_path):
    tensors = {"model.layers.0.mlp.up_proj.weight": fixtures.bf16(np.ones((64, 64), np.float32))}
    config = {"model_type": "llama", "dtype": "bfloat16"}
    other = fixtures.write_checkpoint(tmp_path / "llama", tensors, config, shards=1)
    with pytest.raises(Refused, match="Kimi K3's layout only"):
        run.calibrate(other, recipe_of("w4a16_gptq"))


class Stub(torch.nn.Module):
    """One expert matrix as ``oneshot`` would leave it."""

    def __init__(self, weight, scale):
        super().__init__()
        self.x = torch.nn.Linear(*reversed(weight.shape), bias=False)
        self.x.weight.data, self.x.weight_scale = weight, torch.nn.Parameter(scale, requires_grad=False)

    def get_submodule(self, name):
        return self.x


@pytest.mark.parametrize("fault", [None, "nan scale", "zero scale", "scaled on one side", "garbage"])
def test_values_that_are_no_rounding_of_the_source_are_not_written(fault):
    rng = np.random.default_rng(0)
    source = numbers.round_bf16(rng.standard_normal((64, 128)).astype(np.float32))
    weight = torch.from_numpy(source).bfloat16()
    scale = (weight.float().reshape(64, 4, 32).abs().amax(-1) / 7.5).bfloat16()
    if fault == "nan scale":
        scale[3, 1] = float("nan")
    elif fault == "zero scale":
        scale[3, 1] = 0
    elif fault == "scaled on one side":
        weight, scale = weight * 4, scale * 4
    elif fault == "garbage":
        weight = weight[torch.randperm(64)]
    values = run.Calibrated(Stub(weight, scale), run.schemes.of_recipe(Recipe("w4a16")), {}, {}, {}, {})
    module = scope.Module("m.experts.0.w1", False, ("m.experts.0.w1.weight",), (64, 128), "BF16", "s")
    if fault:
        with pytest.raises(Invalid, match="not positive numbers" if "scale" == fault[-5:] else "no rounding"):
            values.convert(module, source)
    else:
        assert 0 < values.convert(module, source).damage.inexact


# -- a stand-in for oneshot, whose every factor is known ---------------------------------------------------------------


def smooth_and_round(factors, forget=None):
    """A ``_oneshot`` that smooths by known factors and rounds w1, w2, w3; ``forget``: one matrix that is not smoothed."""

    def stand_in(model, ids, modifiers, every_expert):
        ignored = [pattern.removeprefix("re:") for pattern in modifiers[-1].ignore]
        for name, linear in list(model.named_modules()):
            weight = getattr(linear, "weight", None)
            layer = re.search(r"layers\.(\d+)\.block_sparse_moe", name)
            if layer is None:
                continue
            s = torch.from_numpy(factors[int(layer.group(1))]).float()
            if name.endswith("routed_expert_down_proj"):
                weight.data = (weight.float() / s[:, None]).bfloat16()
            elif ".experts." in name and weight is not None:
                if name[-1] in "13" and name != forget:
                    weight.data = (weight.float() * s).bfloat16()
                if not any(re.match(pattern, name) for pattern in ignored):
                    scale = (weight.float().abs().amax(1, keepdim=True) / 127.5).bfloat16()
                    linear.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
                    weight.data = ((weight / scale).float().clamp(-128, 127).round() * scale.float()).bfloat16()

    return stand_in


@pytest.fixture
def factors():
    rng = np.random.default_rng(4)
    return {layer: np.exp(0.3 * rng.standard_normal(128)) for layer in range(1, 5)}


def test_known_factors_are_read_back_and_taken_out_of_the_damage(source, factors, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_oneshot", smooth_and_round(factors))
    kept = []
    calibrate = engine._calibrate
    monkeypatch.setattr(engine, "_calibrate", lambda *given: kept.append(calibrate(*given)) or kept[0])
    report = engine.requantize(source, tmp_path / "out", recipe_of("int8_sq", rows=4, min_tokens=100))
    for parent, found in kept[0].smoothing.items():
        wanted = factors[int(re.search(r"layers\.(\d+)", parent).group(1))]
        off = np.abs(found / wanted - 1)
        assert off.max() < 2**-9 and np.median(off) < 3e-4, parent
    assert report["calibration"]["experts"]["rounded_plainly"], "the rule for rare experts was not exercised"
    assert 0 < report["damage"]["total"]["relative_rmse"] < 0.02
    error = report["calibration"]["output_error"]["total"]
    assert 0 < error["relative_output_rmse"] < 0.02 and 0 < error["plain_rounding"] < 0.02
    found = [item for item in lint(tmp_path / "out", base=source, manifest=report) if item.severity == ERROR]
    assert not found, "\n".join(map(str, found))


def test_one_matrix_smoothed_on_one_side_only_is_not_written(source, factors, tmp_path, monkeypatch):
    forgotten = MOE.format(2) + ".experts.3.w3"
    monkeypatch.setattr(run, "_oneshot", smooth_and_round(factors, forget=forgotten))
    with pytest.raises(Invalid, match=rf"{re.escape(forgotten)}: .* scaled on one side only"):
        engine.requantize(source, tmp_path / "out", recipe_of("int8_sq", rows=2, min_tokens=1))
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_calibration_made_nan_is_not_written(source, tmp_path, monkeypatch):
    def ruin(model, *_):
        model.get_parameter(fixtures.PREFIX + "layers.2.input_layernorm.weight").data[3] = float("nan")

    monkeypatch.setattr(run, "_oneshot", ruin)
    with pytest.raises(Refused, match=r"NaN or infinite after calibration: .*layers\.2\.input_layernorm"):
        engine.requantize(source, tmp_path / "out", recipe_of("w4a16_gptq", rows=2, min_tokens=1))
    assert not (tmp_path / "out").exists()


# -- settings ----------------------------------------------------------------------------------------------------------

GOOD = {"method": "gptq", "dataset": "a.jsonl", "sha256": "0" * 64, "rows": 4, "tokens": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "magic"}, "unknown"), ({"rows": 0}, "at least 1"), ({"sha256": None}, "pinned by its sha256"),
        ({"dataset": "org/set"}, "pinned by a revision"), ({"revision": "0" * 40}, "nothing else"),
        ({"dataset": "org/set", "sha256": None, "revision": "main"}, "a branch moves"),
        ({"smoothing_strength": 2}, "0..1"), ({"colour": 1}, "unknown keys colour"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(change, message):
    Calibration.from_params(GOOD)
    with pytest.raises(Refused, match=message):
        Calibration.from_params(GOOD | change)


def test_a_method_makes_its_own_format_only():
    with pytest.raises(Refused, match="makes format w4a16"):
        Recipe("int8_channel", scale="amax", calibration=Calibration(**GOOD))
    assert "calibration" not in Recipe("w4a16").to_dict()
    one = Recipe("w4a16", calibration=Calibration(**GOOD))
    assert one.sha256 != Recipe("w4a16").sha256
    assert one.sha256 != replace(one, calibration=replace(one.calibration, sha256="1" * 64)).sha256


def test_rows_are_packed_and_begin_with_the_first_document(source):
    settings = recipe_of("w4a16_gptq").calibration
    ids = tokens.load(settings, source, 1024)
    assert ids.shape == (32, 512) and (ids[:, 0] == 1).all()
    half = tokens.load(replace(settings, tokens=256, rows=64), source, 1024)
    assert np.array_equal(half.reshape(32, 512), ids)
    with pytest.raises(Refused, match="do not belong together"):
        tokens.load(settings, source, 100)


def test_a_hub_dataset_is_asked_for_at_its_commit_and_only_as_far_as_needed(source, monkeypatch):
    import datasets

    asked, read = [], []

    def rows():
        for number in range(1000):
            read.append(number)
            yield {"messages": [{"role": "user", "content": " tiki = 182 ; koga = 014 ;"}]}

    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: asked.append((given, named)) or rows())
    settings = Calibration("gptq", "org/set", rows=2, tokens=16, revision="a" * 40, subset="en", column="messages")
    ids = tokens.load(settings, source, 1024)
    named = {"split": "train", "revision": "a" * 40, "streaming": True}
    assert asked == [(("org/set", "en"), named)] and ids.shape == (2, 16) and len(read) < 10
    assert ids[0, 0] == 1 and (ids == 1).sum() == len(read), "one BOS a document, the template's or ours, never two"


def test_counting_is_the_router_s_own(loaded):
    model, chosen = loaded
    ids = np.random.default_rng(0).integers(4, 1000, (2, 32))
    with cpu.kernels():
        seen = observe.run(model, chosen, ids)
    for layer in range(1, 5):
        assert sum(seen.tokens[f"{MOE.format(layer)}.experts.{e}"] for e in range(8)) == ids.size * 2
    first = seen.hessians[MOE.format(1) + ".experts.0.w1"]
    assert torch.equal(first, first.T) and first is seen.hessians[MOE.format(1) + ".experts.0.w3"]
