import pytest

from pipeline.variant import Variant


def test_the_last_part_is_the_kv_cache():
    assert Variant.parse("w4a16_g128-fp8_e5m2") == Variant("w4a16_g128", "fp8_e5m2")
    assert Variant("fp8", "auto").name == "fp8-auto"


@pytest.mark.parametrize("name", ["fp8", "", "-auto", "fp8-", "../x-auto", "fp8-a/b"])
def test_anything_else_is_an_error(name):
    with pytest.raises(ValueError):
        Variant.parse(name)
