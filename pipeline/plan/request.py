"""What is asked of the planner: a model, a machine, a variant, and the settings that the caller overrides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Unreadable
from pipeline.k3 import ModelFacts, model_facts, read_config, source_format
from pipeline.plan.cache import CacheSettings, kv_key
from pipeline.plan.compatibility import Combination, family
from pipeline.plan.hardware import Hardware
from pipeline.plan.hardware import load as load_hardware
from pipeline.plan.layout import Layout
from pipeline.plan.schemes import Scheme, has_block_scales, known_as, scheme, scheme_of_recipe

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


@dataclass(frozen=True)
class Model:
    """A model's config and the facts in it; read once, planned many times."""

    name: str
    config: dict[str, Any]
    facts: ModelFacts
    directory: Path | None = None


def load_model(name: str) -> Model:
    """``conf/model/NAME``, ``models/NAME`` or a path, whichever has a config.json.  Raises :class:`Unreadable`."""
    places = [Path(name), ROOT / "conf" / "model" / name, ROOT / "models" / name]
    for place in places:
        if (place / "config.json").is_file() or (place.is_file() and place.suffix == ".json"):
            config = read_config(place)
            return Model(name, config, model_facts(config), place)
    raise Unreadable(f"{name}: no config.json in {', '.join(str(place) for place in places)}")


@dataclass(frozen=True)
class Overrides:
    """Settings of the caller; None leaves the recipe's value, or the engine's default."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    decode_context_parallel: int | None = None
    expert_parallel: bool | None = None
    engine_version: str | None = None
    text_only: bool | None = None


@dataclass(frozen=True)
class Request:
    """Everything the memory model needs, with every default filled in."""

    model: Model
    hardware: Hardware
    scheme: Scheme
    kv: str
    layout: Layout
    cache: CacheSettings
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float
    kv_budget: int | None
    engine_version: str
    text_only: bool
    overrides: Overrides

    @property
    def quant(self) -> str:
        return self.scheme.key

    @property
    def combination(self) -> Combination:
        cache, state = kv_key(self.kv)
        return Combination(
            family(self.model.facts),
            self._stored_as(),
            cache,
            state,
            self.hardware.platform,
            self.hardware.architecture,
            self.layout.tensor,
            self.layout.pipeline,
            self.layout.decode_context,
            self.layout.expert,
        )

    def _stored_as(self) -> str:
        """The scheme's key; for ``native`` the key of what the checkpoint holds, where it is not what the model
        ships as."""
        if self.scheme.format != "native":
            return known_as(self.scheme)
        if not self.model.facts.is_k3:
            return self.quant
        source = source_format(self.model.config)
        if source.weights == "float8":
            return "fp8" if has_block_scales(self.model.config) else "fp8_channel"
        return {"int8": "int8", "int4": "w4a16", "nvfp4": "nvfp4", "bfloat16": "bf16"}.get(source.weights, self.quant)


def request_of(
    model_config: dict[str, Any] | str | Path | Model,
    hardware: Hardware | str,
    quant: str,
    kv: str,
    recipe: dict[str, Any] | None = None,
    overrides: Overrides | None = None,
    name: str = "model",
) -> Request:
    """The request behind loosely typed arguments: ``model_config`` is a parsed ``config.json`` (then called ``name``), a path or name
    of one, or a loaded :class:`Model`; ``hardware`` a name or a loaded file; ``recipe`` replaces what ``quant`` stands for.

    Raises :class:`Unreadable` for a model or machine that cannot be read, :class:`~pipeline.errors.Refused` for a key that does
    not exist.
    """
    if isinstance(model_config, dict):
        model = Model(name, model_config, model_facts(model_config))
    elif isinstance(model_config, Model):
        model = model_config
    else:
        model = load_model(str(model_config))
    machine = load_hardware(hardware) if isinstance(hardware, str) else hardware
    chosen = scheme_of_recipe(quant, recipe) if recipe else scheme(quant)
    return make_request(model, machine, chosen, kv, overrides)


def _batch_defaults(hardware: Hardware) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of vLLM's API server (vllm/engine/arg_utils.py, get_batch_defaults)."""
    if hardware.platform == "cpu":
        return 2048, 256
    if hardware.memory.usable_bytes >= 160 * GIB:
        return 16384, 1024
    return (8192, 1024) if hardware.memory.usable_bytes >= 70 * GIB else (2048, 256)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def make_request(
    model: Model, hardware: Hardware, chosen: Scheme, kv: str, overrides: Overrides | None = None
) -> Request:
    """Fill in what the caller left open: the recipe's flag, else the engine's default."""
    asked = overrides or Overrides()
    tokens, seqs = _batch_defaults(hardware)
    cache, state = kv_key(kv)
    base = hardware.layout
    length = _first(asked.max_model_len, hardware.flag("max-model-len"), model.facts.max_model_len or 8192)
    block = _first(asked.block_size, hardware.flag("block-size"))
    return Request(
        model=model,
        hardware=hardware,
        scheme=chosen,
        kv=kv,
        layout=Layout(
            _first(asked.tensor_parallel, base.tensor),
            _first(asked.pipeline_parallel, base.pipeline),
            _first(asked.data_parallel, base.data),
            _first(asked.expert_parallel, base.expert),
            _first(asked.decode_context_parallel, base.decode_context),
        ),
        cache=CacheSettings(
            kv=cache,
            model_dtype=_first(hardware.flag("dtype"), model.facts.text.get("dtype"), "bfloat16"),
            state_dtype=state,
            block_size=block,
            # vLLM switches prefix caching on by default for every model that generates.
            prefix_caching=bool(_first(asked.prefix_caching, hardware.flag("enable-prefix-caching"), True)),
            max_model_len=length,
            platform=hardware.platform,
        ),
        max_num_seqs=_first(asked.max_num_seqs, hardware.flag("max-num-seqs"), seqs),
        max_num_batched_tokens=_first(asked.max_num_batched_tokens, hardware.flag("max-num-batched-tokens"), tokens),
        utilization=_first(asked.gpu_memory_utilization, hardware.flag("gpu-memory-utilization"), 0.92),
        kv_budget=_first(asked.kv_cache_memory_bytes, hardware.flag("kv-cache-memory-bytes")),
        engine_version=_first(asked.engine_version, hardware.engine_version),
        text_only=_first(asked.text_only, hardware.platform == "cpu"),
        overrides=asked,
    )
