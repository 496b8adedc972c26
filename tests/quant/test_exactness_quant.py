"""What is exact, and that everything else is counted: against a float64 reference, value by value."""

import math

import numpy as np
import pytest

from pipeline.checkpoint.lint import lint
from pipeline.quant import Recipe, engine, fp8, int8
from tests.checkpoint import fixtures
from tests.quant import reference

RECIPES = [
    Recipe("fp8_block"), Recipe("fp8_channel"), Recipe("fp8_block", scale="amax"), Recipe("fp8_channel", scale="amax"),
    Recipe("int8_channel"), Recipe("int8_channel", scale="amax"), Recipe("w4a16"), Recipe("w4a16", group_size=64),
    Recipe("w4a16", group_size=128), Recipe("nvfp4"), Recipe("w2_control"),
]  # fmt: skip
EXACT_UP_TO = {"fp8_block": 14, "fp8_channel": 14, "int8_channel": 3, "nvfp4": 17}


def label(recipe):
    return f"{recipe.format}-{recipe.group_size or ''}{recipe.scale}"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("sources"), {}

    def source(spread):
        if spread not in made:
            made[spread] = fixtures.write_k3(folder / str(spread), spread=spread, seed=spread)
        return made[spread]

    return source


@pytest.mark.parametrize("spread", [0, 3, 4, 14, 15, 17, 18, 23, 40])
@pytest.mark.parametrize("recipe", RECIPES, ids=label)
def test_the_damage_report_equals_a_float64_reference(sources, tmp_path, recipe, spread):
    source = sources(spread)
    report = engine.requantize(source, tmp_path / "out", recipe)
    before, after = reference.tensors_of(source), reference.tensors_of(tmp_path / "out")
    weights, inexact, error, signal = reference.damage(before, after, reference.modules_of(before))
    total = report["damage"]["total"]
    assert (total["weights"], total["inexact_weights"]) == (weights, inexact)
    assert total["exact_fraction"] == 1 - inexact / weights
    relative = math.sqrt(error / signal)
    assert total["relative_rmse"] == pytest.approx(relative, rel=1e-6, abs=1e-300)
    if error:
        assert total["sqnr_db"] == pytest.approx(-20 * math.log10(relative), abs=1e-4)
    else:
        assert total["sqnr_db"] is None
    if recipe.scale == "pow2" and spread <= EXACT_UP_TO[recipe.format]:
        assert inexact == 0
    if recipe.scale == "pow2" and spread >= EXACT_UP_TO[recipe.format] + 5:
        assert inexact > 0


def test_the_report_by_kind_and_layer(sources, tmp_path):
    source = sources(23)
    report = engine.requantize(source, tmp_path / "out", Recipe("int8_channel"))
    before, after = reference.tensors_of(source), reference.tensors_of(tmp_path / "out")
    rows = report["damage"]["by_kind_and_layer"]
    assert [(row["kind"][-2:], row["layer"]) for row in rows] == [(k, l) for k in ("w1", "w2", "w3") for l in (1, 2, 3)]
    for row in rows:
        members = [
            m for m in reference.modules_of(before) if f"layers.{row['layer']}." in m and m.endswith(row["kind"][-3:])
        ]
        weights, inexact, error, signal = reference.damage(before, after, members)
        assert (row["weights"], row["inexact_weights"]) == (weights, inexact)
        assert row["relative_rmse"] == pytest.approx(math.sqrt(error / signal), rel=1e-6)
        assert row["largest_exponent_spread"] == 23


@pytest.mark.parametrize(
    "scheme", [fp8.scheme(True, "pow2"), fp8.scheme(False, "pow2"), int8.scheme("pow2")], ids=lambda s: s.name
)
def test_the_exact_limits_are_sharp(scheme):
    """At the documented spread no code changes; one beyond, the smallest code does."""
    limit = EXACT_UP_TO[scheme.name]
    for spread, inexact in ((limit, 0), (limit + 1, None)):
        packed = np.full((128, 64), 0x77, np.uint8)  # 6, the largest code
        exponents = np.full((128, 4), 127, np.uint8)
        packed[:, :16] = 0x91  # 0.5 and -0.5
        exponents[:, 0] = 127 - spread
        damage = scheme.from_mxfp4(packed, exponents).damage
        assert damage.spread == spread
        assert damage.inexact == inexact if inexact == 0 else damage.inexact > 0


def test_all_zero_groups_do_not_widen_the_spread():
    packed = np.full((128, 64), 0x77, np.uint8)
    exponents = np.full((128, 4), 127, np.uint8)
    packed[:, :16], exponents[:, 0] = 0x80, 1  # zeros and minus zeros, with a far-off exponent
    converted = fp8.scheme(False, "pow2").from_mxfp4(packed, exponents)
    assert converted.damage.spread == 0 and converted.damage.inexact == 0
    assert (converted.weight.view(np.uint8)[:, :2] == [0, 0x80]).all()


@pytest.mark.parametrize("recipe", RECIPES, ids=label)
def test_an_expert_of_zeros_has_finite_scales_and_stays_zero(tmp_path, recipe):
    source = fixtures.write_k3(tmp_path / "source")
    module = fixtures.EXPERT.format(layer=1, expert=0, name="w1")
    fixtures.edit_values(source, module + ".weight_packed", lambda v: v.fill(0))
    engine.requantize(source, tmp_path / "out", recipe)
    after = reference.tensors_of(tmp_path / "out")
    dtype, scale = after[module + ".weight_scale"]
    assert np.isfinite(reference.floats(dtype, scale)).all() and (reference.floats(dtype, scale) > 0).all()
    assert not reference.matrix(after, module).any()


@pytest.mark.parametrize("recipe", RECIPES, ids=label)
@pytest.mark.parametrize("exponent", [0, 1, 127, 254])
def test_an_expert_of_zeros_may_carry_any_exponent(tmp_path, recipe, exponent):
    """Quantizers write 0 (2^-127) there; NVFP4's global scale for that would be 2^135, which is infinite."""
    source = fixtures.write_k3(tmp_path / "source")
    for name in ("w1", "w2", "w3"):
        module = fixtures.EXPERT.format(layer=1, expert=0, name=name)
        fixtures.edit_values(source, module + ".weight_packed", lambda v: v.fill(0x80))
        fixtures.edit_values(source, module + ".weight_scale", lambda v: v.fill(exponent))
    engine.requantize(source, tmp_path / "out", recipe)
    assert [f for f in lint(tmp_path / "out", base=source) if f.severity == "error"] == []
    after = reference.tensors_of(tmp_path / "out")
    for name in ("w1", "w2", "w3"):
        assert not reference.matrix(after, fixtures.EXPERT.format(layer=1, expert=0, name=name)).any()


@pytest.mark.parametrize("exponent", [0, 8, 9, 10, 253])
def test_nvfp4_is_exact_at_both_ends_of_the_exponents(tmp_path, exponent):
    source = fixtures.write_k3(tmp_path / "source")
    for name in ("w1", "w3"):
        module = fixtures.EXPERT.format(layer=1, expert=0, name=name)
        fixtures.edit_values(source, module + ".weight_packed", lambda v: v.__iand__(0xBB))  # at most 1.5: finite
        fixtures.edit_values(source, module + ".weight_scale", lambda v: v.fill(exponent))
    engine.requantize(source, tmp_path / "out", Recipe("nvfp4"))
    before, after = reference.tensors_of(source), reference.tensors_of(tmp_path / "out")
    overall = after[module + ".weight_global_scale"][1]
    assert np.isfinite(overall).all() and np.isfinite(1 / overall).all() and 1 / overall[0] >= 2.0**-126
    assert np.array_equal(reference.matrix(before, module), reference.matrix(after, module))


def test_the_spread_is_reported_where_exponents_are_extreme(tmp_path):
    source = fixtures.write_k3(tmp_path / "source")
    fixtures.edit_values(
        source, fixtures.EXPERT.format(layer=1, expert=0, name="w2") + ".weight_scale", lambda v: v[0].__setitem__(0, 3)
    )
    report = engine.requantize(source, tmp_path / "out", Recipe("int8_channel"))
    assert 110 <= report["damage"]["total"]["largest_exponent_spread"] <= 117


@pytest.mark.parametrize("recipe", RECIPES, ids=label)
@pytest.mark.parametrize("exponent", [1, 240])
def test_a_row_of_extreme_exponents_costs_no_other_row_its_exactness(tmp_path, recipe, exponent):
    plain, odd = fixtures.write_k3(tmp_path / "plain"), fixtures.write_k3(tmp_path / "odd")
    module = fixtures.EXPERT.format(layer=1, expert=0, name="w2")
    for source in (plain, odd):  # w2 shares no scale with another matrix
        fixtures.edit_values(source, module + ".weight_scale", lambda v: v.fill(120))
    fixtures.edit_values(odd, module + ".weight_scale", lambda v: [v[row].fill(exponent) for row in (0, 3, 4, 127)])
    found = []
    for source in (plain, odd):
        target = source.with_suffix(".out")
        report = engine.requantize(source, target, recipe)
        before, after = reference.tensors_of(source), reference.tensors_of(target)
        weights, inexact, _, _ = reference.damage(before, after, reference.modules_of(before))
        total = report["damage"]["total"]
        assert (total["weights"], total["inexact_weights"]) == (weights, inexact)
        found.append(reference.matrix(after, module))
    rows = [row for row in range(128) if row not in (0, 3, 4, 127)]
    if recipe.format not in ("fp8_block", "nvfp4"):  # there a block or the whole matrix shares a scale
        assert np.array_equal(found[0][rows], found[1][rows])


@pytest.mark.parametrize(
    "recipe", [Recipe("fp8_block"), Recipe("int8_channel", scale="amax"), Recipe("w4a16")], ids=label
)
@pytest.mark.parametrize("exponent", [2, 20, 24, 250])
def test_extreme_exponents_take_the_float_path_and_agree(tmp_path, recipe, exponent):
    source = fixtures.write_k3(tmp_path / "source")
    module = fixtures.EXPERT.format(layer=1, expert=0, name="w2")
    fixtures.edit_values(source, module + ".weight_scale", lambda v: v.fill(exponent))
    engine.requantize(source, tmp_path / "out", recipe)
    before, after = (reference.matrix(reference.tensors_of(d), module) for d in (source, tmp_path / "out"))
    largest = np.abs(before).max()
    assert np.abs(after - before).max() <= largest / 10
    if recipe.format == "fp8_block" and exponent >= 20:
        assert np.array_equal(before, after)


def test_infinity_from_an_exponent_that_overflows_is_refused(tmp_path):
    source = fixtures.write_k3(tmp_path / "source")
    module = fixtures.EXPERT.format(layer=1, expert=0, name="w2")
    fixtures.edit_values(source, module + ".weight_scale", lambda v: v.fill(254))
    with pytest.raises(engine.Refused, match=r"experts\.0\.w2 .*weights are NaN or infinite"):
        engine.requantize(source, tmp_path / "out", Recipe("fp8_block"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [Recipe("fp8_block", "dense_too"), Recipe("int8_channel", "dense_too"), Recipe("w4a16", "dense_too")],
    ids=label,
)
def test_bf16_weights_are_rounded_and_counted(tmp_path, recipe, packed):
    source = fixtures.write_k3(tmp_path / "source", packed=packed)
    report = engine.requantize(source, tmp_path / "out", recipe)
    before, after = reference.tensors_of(source), reference.tensors_of(tmp_path / "out")
    weights, inexact, error, signal = reference.damage(before, after, reference.modules_of(after))
    total = report["damage"]["total"]
    assert (total["weights"], total["inexact_weights"]) == (weights, inexact)
    assert total["relative_rmse"] == pytest.approx(math.sqrt(error / signal), rel=1e-6)
    assert 0 < total["relative_rmse"] < (0.12 if recipe.format == "w4a16" else 0.03)
