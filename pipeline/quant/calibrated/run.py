"""Calibrate once, then answer for each module what it becomes; the streaming engine asks while it writes."""

from __future__ import annotations

import gc
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.checkpoint import Checkpoint, layout, numbers
from pipeline.errors import Invalid, Refused
from pipeline.quant import schemes, scope
from pipeline.quant.calibrated import cpu, methods, observe, tokens
from pipeline.quant.calibrated import model as models
from pipeline.quant.damage import Damage
from pipeline.quant.recipe import Recipe
from pipeline.quant.scheme import Converted, RegionScheme
from pipeline.quant.scope import Module

# 4-bit groups cost about a tenth of a weight matrix; a matrix off by half is garbage.
LARGEST_RELATIVE_ERROR = 0.5
# Rounding leaves a column's length what it was.  Smoothing on one side only multiplies each by its factor.
LARGEST_COLUMN_DRIFT = 0.1


@dataclass
class Calibrated:
    """The calibrated model's values.  ``replaced``: tensor -> bytes of what smoothing rewrote, dtype and shape kept."""

    model: nn.Module
    scheme: RegionScheme
    smoothing: dict[str, np.ndarray]
    replaced: dict[str, bytes]
    hessians: dict[str, torch.Tensor]
    report: dict[str, Any]
    _errors: dict[tuple[str, int | None], np.ndarray] = field(default_factory=lambda: defaultdict(lambda: np.zeros(3)))

    def convert(self, module: Module, source: np.ndarray) -> Converted:
        """What ``module`` becomes; ``source`` are its float32 values before.

        Raises :class:`Invalid` for scales that are no positive numbers and values that are not the source's, rounded.
        """
        linear = self.model.get_submodule(module.name)
        weight = linear.weight.float().numpy(force=True)
        if hasattr(linear, "weight_scale"):
            if getattr(linear, "weight_zero_point", None) is not None and linear.weight_zero_point.any():
                raise Invalid(f"{module.name}: a zero point; the scheme is symmetric")
            scale = linear.weight_scale.float().numpy(force=True).reshape(len(weight), -1)
            if not (np.isfinite(scale).all() and (scale > 0).all()):
                wrong = int((~(np.isfinite(scale) & (scale > 0))).sum())
                raise Invalid(f"{module.name}: {wrong} of {scale.size} scales are not positive numbers")
            stored, decoded = self.scheme.with_scale(weight, scale, module.dtype)
        else:  # left out: plain rounding of what smoothing made of it
            rounded = self.scheme.from_float(weight, module.dtype)
            stored, scale = rounded.weight, rounded.scale
            decoded = self.scheme.with_scale(weight, scale, module.dtype)[1]
        factor = self.smoothing.get(module.name.rpartition(".experts.")[0]) if module.name[-1] in "13" else None
        result = decoded.astype(np.float64) if factor is None else decoded / factor
        error = result - source
        damage = Damage(
            source.size, int(np.count_nonzero(error)), float(np.square(error).sum()),
            float(np.square(source, dtype=np.float64).sum()), None,
        )  # fmt: skip
        drift = _column_drift(source, result)
        if damage.error > LARGEST_RELATIVE_ERROR**2 * damage.signal or drift > LARGEST_COLUMN_DRIFT:
            raise Invalid(
                f"{module.name}: {np.sqrt(damage.error / damage.signal):.2f} away from the source's values, relative, "
                f"and half the columns longer or shorter by {drift:.0%} and more: that is no rounding, something was "
                "scaled on one side only"
            )
        self._note_output_error(module, source, error)
        return Converted(stored, scale, damage)

    def _note_output_error(self, module: Module, source: np.ndarray, error: np.ndarray) -> None:
        hessian = self.hessians.get(module.name)
        if hessian is None:
            return
        plain = self.scheme.from_float(source, module.dtype)
        plain_error = self.scheme.with_scale(source, plain.scale, module.dtype)[1].astype(np.float64) - source
        matrix = hessian.double().numpy()
        energies = [float(((x @ matrix) * x).sum()) for x in (error, plain_error, source.astype(np.float64))]
        self._errors[module.kind, layout.layer_of(module.name)] += energies

    def finish(self) -> dict[str, Any]:
        """The calibration's report, once every module was converted."""

        def ratios(energies: np.ndarray) -> dict[str, float]:
            ours, plain, signal = energies
            if not signal:
                return {}
            return {"relative_output_rmse": (ours / signal) ** 0.5, "plain_rounding": (plain / signal) ** 0.5}

        error = {
            "total": ratios(sum(self._errors.values())),
            "by_kind_and_layer": [
                {"kind": kind, "layer": layer} | ratios(energies)
                for (kind, layer), energies in sorted(self._errors.items())
            ],
        }
        return self.report | {"output_error": error if self._errors else None}


def _column_drift(source: np.ndarray, result: np.ndarray) -> float:
    """The median over columns of ``|c - 1|``, where ``c`` times the source's column comes closest to the result's."""
    energy = np.square(source, dtype=np.float64).sum(0)
    full = energy > 0
    if not full.any():
        return 0.0
    return float(np.median(np.abs((source * result).sum(0)[full] / energy[full] - 1)))


def calibrate(source: Path, recipe: Recipe, trust_remote_code: bool = False) -> Calibrated:
    """Run ``oneshot``.  Raises :class:`Refused`, ``Invalid`` or ``Unreadable`` for whatever would end in a bad file."""
    checkpoint = Checkpoint.open(source)
    if not scope.is_k3(checkpoint):
        raise Refused(f"{source}: calibrated recipes know Kimi K3's layout only; use w4a16 or int8, which need no data")
    modules = scope.modules_of(checkpoint)
    chosen = scope.select(checkpoint, modules, recipe)
    smoothed = methods.smoothed_matrices(modules, chosen, recipe)
    models.check_memory(checkpoint, chosen)
    calibration = recipe.calibration
    ids = tokens.load(calibration, source, checkpoint.text_config["vocab_size"], trust_remote_code)
    with cpu.kernels():
        model = models.load(checkpoint, chosen)
        observed = observe.run(model, chosen, ids)
        # AWQ rounds after smoothing and needs no tokens of an expert's own, only the layer's.
        every = calibration.every_expert or calibration.method == "awq"
        few = sorted(expert for expert, count in observed.tokens.items() if count < calibration.min_tokens)
        left_out = [] if every else few
        if len(left_out) == len(observed.tokens):
            raise Refused(
                f"{calibration.dataset}: no expert gets calibration.min_tokens = {calibration.min_tokens} of "
                f"{ids.size} tokens; take more rows"
            )
        recipe_modifiers = methods.modifiers(recipe, smoothed, left_out)
        _oneshot(model, ids, recipe_modifiers, every)
    models.check_finite(model, "after calibration")
    for expert in left_out:
        for name in ("w1", "w2", "w3"):
            linear = model.get_submodule(f"{expert}.{name}")
            if hasattr(linear, "weight_scale"):
                raise Invalid(f"{expert}.{name}: calibrated though left out")
    smoothing, replaced = _smoothing(model, checkpoint, smoothed)
    failed = [name for modifier in recipe_modifiers for name in getattr(modifier, "_rtn_fallback_module_names", ())]
    report = {
        "method": calibration.method,
        "set": tokens.describe(calibration, ids),
        "experts": {
            "rule": "every expert sees every token" if every else
            f"routed tokens only; below {calibration.min_tokens} an expert is rounded plainly",
            "experts": len(observed.tokens),
            "rounded_plainly": {expert: observed.tokens[expert] for expert in left_out},
            "never_routed": sorted(expert for expert, count in observed.tokens.items() if not count),
            "fewest_tokens": min(observed.tokens.values()),
            "most_tokens": max(observed.tokens.values()),
        },
        "hessian_not_invertible": sorted(failed),
        "changed_tensors": sorted(replaced),
        "smoothing": {
            parent: {"smallest": float(s.min()), "largest": float(s.max())} for parent, s in sorted(smoothing.items())
        },
    }  # fmt: skip
    return Calibrated(model, schemes.of_recipe(recipe), smoothing, replaced, observed.hessians, report)


def _oneshot(model: nn.Module, ids: np.ndarray, modifiers: list[Any], every_expert: bool) -> None:
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader
    from transformers import PreTrainedTokenizerBase

    rows = [{"input_ids": torch.from_numpy(row)} for row in ids]
    loader = DataLoader(rows, batch_size=observe.BATCH_ROWS)
    oneshot(
        model=model, processor=PreTrainedTokenizerBase(), dataset=loader, recipe=modifiers,
        pipeline="independent",  # smoothing has its own pass: GPTQ must see the smoothed inputs
        sequential_targets=["KimiDecoderLayer"], moe_calibrate_all_experts=every_expert,
    )  # fmt: skip
    gc.collect()


def _smoothing(
    model: nn.Module, checkpoint: Checkpoint, smoothed: list[Module]
) -> tuple[dict[str, np.ndarray], dict[str, bytes]]:
    """Layer of experts -> the factor that each latent channel was divided by; and the rewritten tensors' bytes.

    llm-compressor does not keep the factor: it is the mean ratio of a row's weights before and after, whose roundings
    to bf16 (at most 2^-9) mostly average out.
    """
    factors, replaced = {}, {}
    for module in smoothed:
        before = models.source_values(checkpoint, module).astype(np.float64)
        after = model.get_submodule(module.name).weight.float().numpy(force=True)
        present = after != 0
        ratio = np.divide(before, after, out=np.zeros_like(before), where=present)
        factor = np.where(present.any(1), ratio.sum(1) / np.maximum(present.sum(1), 1), 1.0)
        if not (np.isfinite(factor).all() and (factor > 0).all()):
            raise Invalid(f"{module.name}: smoothing by factors that are not positive numbers")
        factors[module.name.rpartition(".")[0]] = factor
        replaced[module.name + ".weight"] = numbers.bf16_bits(after).tobytes()
    return factors, replaced
