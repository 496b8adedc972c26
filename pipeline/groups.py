"""The groups of params.yaml and who parses each; a wrong key or value is found before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from pipeline.bench.settings import parse as parse_bench
from pipeline.evals.settings import parse as parse_eval
from pipeline.evals.settings import parse_gates
from pipeline.kv_calibration import Calibration
from pipeline.plan import hardware
from pipeline.plan.cache import is_calibrated, kv_key
from pipeline.quant.recipe import Recipe


class Group(BaseModel):
    """A group whose unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Group):
    """Which model, and where its shards are."""

    name: str
    path: str
    repo: str | None
    revision: str | None
    trust_remote_code: StrictBool
    reference_scores: str | None
    cache_below_gib: Annotated[float, Field(gt=0, strict=True)]


class KvSetting(Group):
    """One KV cache setting: dtype of the attention cache and of the recurrent state, and how its scales are calibrated if at all."""

    cache_dtype: str
    state_dtype: Literal["auto", "float32", "bfloat16"]
    calibration: Calibration | None = None

    def model_post_init(self, _: Any) -> None:
        if self.calibration and self.cache_dtype not in ("fp8", "fp8_e4m3"):
            raise ValueError(f"kv cache {self.cache_dtype}: scales are calibrated for E4M3 (fp8, fp8_e4m3) only")


class Quant(Group):
    """The quantizations of this table, by key."""

    schemes: dict[str, dict[str, Any]]

    def model_post_init(self, _: Any) -> None:
        for settings in self.schemes.values():
            Recipe.from_params(settings)


class Kv(Group):
    """The KV settings of this table, by key; the key spells the setting (``fp8_state16``), and the two must agree."""

    dtypes: dict[str, KvSetting]

    def model_post_init(self, _: Any) -> None:
        for key, setting in self.dtypes.items():
            if kv_key(key) != (setting.cache_dtype, setting.state_dtype):
                raise ValueError(f"kv.dtypes.{key}: the key says {kv_key(key)}, the setting {setting}")
            if is_calibrated(key) != (setting.calibration is not None):
                raise ValueError(f"kv.dtypes.{key}: a key that ends in _calibrated has a calibration, and no other has one")


class Serve(Group):
    """What may be served."""

    allow_untested: StrictBool = False


GROUPS: dict[str, Callable[[Any], Any]] = {
    "model": Model.model_validate,
    "hardware": lambda raw: hardware.parse(raw, "hardware"),
    "quant": Quant.model_validate,
    "kv": Kv.model_validate,
    "serve": Serve.model_validate,
    "eval": parse_eval,
    "bench": parse_bench,
    "gates": parse_gates,
}
