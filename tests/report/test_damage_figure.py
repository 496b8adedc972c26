import pytest

from pipeline.errors import Unreadable
from pipeline.files import write_json
from pipeline.report.build import build, build_damage_picture
from pipeline.report.damage_figure import damage_svg, title


def report(*rows):
    return {"total": {}, "by_kind_and_layer": [{"kind": k, "layer": layer, "sqnr_db": db} for k, layer, db in rows]}


W1, W2 = "block_sparse_moe.experts.w1", "block_sparse_moe.experts.w2"
DAMAGE = {
    "native": None,
    "fp8": report((W1, 1, None), (W2, 1, None)),
    "w4a16": report((W1, 1, 21.2), (W1, 2, 20.9), (W2, 1, 19.0), ("self_attn.o_proj", 0, 31.0)),
}


def test_one_panel_a_kind_experts_first_and_one_line_a_scheme():
    text = damage_svg(DAMAGE)
    places = [text.index(name) for name in ("experts w1 (gate)", "experts w2 (down)", "self_attn o_proj")]
    assert places == sorted(places)
    assert ">fp8<" in text and ">w4a16<" in text and ">native<" not in text
    assert " exact" in text


def test_it_is_the_same_for_the_same_reports_and_another_for_others():
    assert damage_svg(DAMAGE) == damage_svg(DAMAGE)
    assert damage_svg(DAMAGE) != damage_svg(DAMAGE | {"w4a16": report((W1, 1, 11.0))})


def test_exact_is_drawn_but_has_no_figure():
    """An axis that ran up to the line would read as a number of decibels."""
    import re

    ticks = [float(tick) for tick in re.findall(r">([0-9.]+)</text>", damage_svg(DAMAGE))]
    assert max(ticks) <= 31


def test_nothing_re_encoded_says_so():
    assert "no weights were re-encoded" in damage_svg({"native": None})


def test_titles():
    assert title(W1) == "experts w1 (gate)" and title("self_attn.o_proj") == "self_attn o_proj"
    assert title("lm_head") == "lm_head"


def test_the_report_embeds_it_and_an_absent_report_is_named(tmp_path):
    rows = {"w4a16-auto": {"status": "valid", "reason": None}}
    build(rows, tmp_path)
    assert "![SQNR by layer](damage_by_layer.svg)" in (tmp_path / "report.md").read_text()
    with pytest.raises(Unreadable, match="w4a16.json"):
        build_damage_picture(rows, tmp_path, tmp_path)
    write_json(tmp_path / "w4a16.json", {"damage": DAMAGE["w4a16"]})
    build_damage_picture(rows, tmp_path, tmp_path)
    assert ">w4a16<" in (tmp_path / "damage_by_layer.svg").read_text()
