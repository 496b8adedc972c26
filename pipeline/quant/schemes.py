"""Recipe -> scheme: the only place that knows all of them."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from pipeline.quant import fp8, int8, w4a16
from pipeline.quant.nvfp4 import Nvfp4Scheme
from pipeline.quant.recipe import Recipe
from pipeline.quant.scheme import RegionScheme

Scheme: TypeAlias = RegionScheme | Nvfp4Scheme


@lru_cache
def of_recipe(recipe: Recipe) -> Scheme:
    """The scheme of a recipe (``native`` has none)."""
    return {
        "fp8_block": lambda: fp8.scheme(True, recipe.scale),
        "fp8_channel": lambda: fp8.scheme(False, recipe.scale),
        "int8_channel": lambda: int8.scheme(recipe.scale),
        "w4a16": lambda: w4a16.scheme(recipe.group_size or 0),
        "w2_control": lambda: w4a16.control(recipe.group_size or 0),
        "nvfp4": Nvfp4Scheme,
    }[recipe.format]()


@lru_cache
def fallback(recipe: Recipe) -> Scheme:
    """What takes a module whose shape the recipe's scheme cannot: FP8 blocks become FP8 channels, nothing else
    changes.
    """
    return fp8.scheme(False, recipe.scale) if recipe.format == "fp8_block" else of_recipe(recipe)
