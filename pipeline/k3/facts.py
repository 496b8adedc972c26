"""Layers and tensors of a model, from its config alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from pipeline.errors import Refused, Unreadable
from pipeline.k3 import layers as build
from pipeline.k3.config import check_types, text_config
from pipeline.k3.tensors import Role, Shard, Tensor


class LayerKind(Enum):
    """What a layer remembers: a latent or key-value pairs for every token, or one state for the sequence."""

    KDA = "kda"
    GDN = "gdn"
    MLA = "mla"
    GQA = "gqa"


RECURRENT = (LayerKind.KDA, LayerKind.GDN)


@dataclass(frozen=True)
class ModelFacts:
    """Shapes of one model.  ``layer_kinds[i]`` is the kind of layer ``i`` (0-based, as in tensor names)."""

    architecture: str
    model_type: str
    text: dict[str, Any]
    layer_kinds: tuple[LayerKind, ...]
    tensors: tuple[Tensor, ...]
    head_dim: int
    max_model_len: int

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def num_experts(self) -> int:
        return max((tensor.count for tensor in self.tensors if tensor.is_expert), default=0)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers with a cache that grows by the token.  KDA layers have k_proj and v_proj and are none of these."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind not in RECURRENT)

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind in RECURRENT)

    @property
    def uses_mla(self) -> bool:
        return LayerKind.MLA in self.layer_kinds

    @property
    def is_hybrid(self) -> bool:
        return bool(self.kv_layers) and bool(self.state_layers)

    @property
    def is_k3(self) -> bool:
        return self.model_type in ("kimi_k3", "kimi_linear")

    def parameters_by_role(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for tensor in self.tensors:
            counts[tensor.role.value] = counts.get(tensor.role.value, 0) + tensor.parameters
        return counts

    @cached_property
    def _distinct(self) -> dict[range | None, Counter[Tensor]]:
        return {}

    def distinct(self, layers: range | None = None) -> Counter[Tensor]:
        """Tensors that are equal but for their layer, with how often they occur among ``layers`` (default: all).

        A model of 93 layers has some 60 of them, so sums over them are cheap; the names carry ``*`` for the layer.
        """
        if layers not in self._distinct:
            found: Counter[Tensor] = Counter()
            for tensor in self.tensors:
                if layers is None or tensor.layer is None or tensor.layer in layers:
                    if tensor.layer is not None:
                        name = tensor.name.replace(f".{tensor.layer}.", ".*.", 1)
                        tensor = replace(tensor, name=name, layer=0)
                    found[tensor] += 1
            self._distinct[layers] = found
        return self._distinct[layers]

    @property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors)


def _layer_kinds(text: dict[str, Any]) -> tuple[LayerKind, ...]:
    count = text["num_hidden_layers"]
    attention = LayerKind.MLA if text.get("kv_lora_rank") else LayerKind.GQA
    linear = text.get("linear_attn_config")
    if linear:
        # 1-based in the config (configuration_kimi_linear.py: is_kda_layer tests layer_idx + 1).
        kda, full = set(linear["kda_layers"]), set(linear["full_attn_layers"])
        wrong = (kda & full) | (set(range(1, count + 1)) ^ (kda | full))
        if wrong:
            raise Unreadable(
                f"linear_attn_config: layers {sorted(wrong)} are in both or neither of kda_layers and full_attn_layers"
            )
        return tuple(LayerKind.KDA if i + 1 in kda else attention for i in range(count))
    kinds = text.get("layer_types")
    if kinds is None and text.get("full_attention_interval"):
        every = text["full_attention_interval"]
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    if kinds is None:
        return (attention,) * count
    known = {"linear_attention": LayerKind.GDN, "full_attention": attention}
    unknown = sorted(set(kinds) - set(known))
    if unknown or len(kinds) != count:
        raise Refused(
            f"layer_types: {len(kinds)} entries for {count} layers, unknown kinds {unknown}; "
            "the planner knows full_attention and linear_attention (sliding windows are not modelled)"
        )
    return tuple(known[kind] for kind in kinds)


def _is_moe(text: dict[str, Any], layer: int) -> bool:
    if not (text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts")):
        return False
    if layer in text.get("mlp_only_layers", ()):
        return False
    if "decoder_sparse_step" in text:
        return (layer + 1) % text["decoder_sparse_step"] == 0
    return layer >= text.get("first_k_dense_replace", 0) and layer % (text.get("moe_layer_freq") or 1) == 0


def _layer_tensors(text: dict[str, Any], prefix: str, layer: int, kind: LayerKind, head_dim: int) -> Iterable[Tensor]:
    hidden, is_kimi = text["hidden_size"], text.get("model_type") == "kimi_linear"
    if kind is LayerKind.KDA:
        yield from build.kda_layer(text, prefix, layer)
    elif kind is LayerKind.GDN:
        yield from build.gdn_layer(text, prefix, layer)
    elif kind is LayerKind.MLA:
        yield from build.mla_layer(text, prefix, layer)
    else:
        yield from build.gqa_layer(text, prefix, layer, head_dim)
    if _is_moe(text, layer):
        names = ("w1", "w2", "w3") if is_kimi else ("gate_proj", "down_proj", "up_proj")
        yield from build.moe_layer(text, prefix, layer, names, "block_sparse_moe" if is_kimi else "mlp")
    else:
        yield from build.mlp(f"{prefix}.mlp", Role.DENSE_MLP, hidden, text["intermediate_size"], layer)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if text.get("attn_res_block_size"):
        norms += ["self_attention_res_norm", "mlp_res_norm"]
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            yield Tensor(f"{prefix}.{name}", Role.RESIDUAL, (1, hidden), layer, linear=False)
    for name in norms:
        yield Tensor(f"{prefix}.{name}", Role.NORM, (hidden,), layer, linear=False)


def model_facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of the model that ``config`` (a parsed ``config.json``) describes.

    Raises :class:`Unreadable` naming the missing key, and :class:`Refused` for a layer kind that is not modelled.
    """
    check_types(config)
    text = text_config(config)
    try:
        kinds = _layer_kinds(text)
        heads, hidden, vocab = text["num_attention_heads"], text["hidden_size"], text["vocab_size"]
        head_dim = text.get("head_dim") or hidden // heads
        root = "language_model." if "text_config" in config else ""
        name = f"{root}model.embed_tokens"
        tensors = [Tensor(name, Role.EMBEDDING, (vocab, hidden), shard=Shard.VOCAB, linear=False)]
        for layer, kind in enumerate(kinds):
            tensors += _layer_tensors(text, f"{root}model.layers.{layer}", layer, kind, head_dim)
        tensors.append(Tensor(f"{root}model.norm", Role.NORM, (hidden,), linear=False))
        if text.get("attn_res_block_size"):
            tensors.append(Tensor(f"{root}model.output_attn_res_norm", Role.NORM, (hidden,), linear=False))
            tensors.append(Tensor(f"{root}model.output_attn_res_proj", Role.RESIDUAL, (1, hidden), linear=False))
        if not (text.get("tie_word_embeddings") or config.get("tie_word_embeddings")):
            tensors.append(Tensor(f"{root}lm_head", Role.LM_HEAD, (vocab, hidden), shard=Shard.VOCAB, linear=False))
        tensors += build.vision_tensors(config.get("vision_config") or {}, hidden)
        max_len = text.get("max_position_embeddings") or 0
    except KeyError as error:
        kind = text.get("model_type")
        raise Unreadable(f"config.json lacks {error.args[0]!r}, which a {kind!r} model needs") from None
    architecture = (config.get("architectures") or text.get("architectures") or [text.get("model_type", "?")])[0]
    return ModelFacts(architecture, text.get("model_type", "?"), text, kinds, tuple(tensors), head_dim, max_len)


def ignore_patterns_without_match(patterns: Iterable[str], facts: ModelFacts) -> list[str]:
    """The ignore patterns that match no tensor of the checkpoint (a typo, a fused name that the file does not have, or
    no regular expression at all).

    ``re:`` patterns are matched from the start of the module name, others exactly or as its last parts, as
    compressed-tensors does.  llm-compressor 0.14 accepts a pattern without a match in silence.
    """
    names = [tensor.name.replace("{e}", "0") for tensor in facts.tensors]
    unmatched = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expression = re.compile(pattern[3:])
            except re.error:
                expression = None
            matched = expression is not None and any(expression.match(name) for name in names)
        else:
            matched = any(name == pattern or name.endswith(f".{pattern}") for name in names)
        if not matched:
            unmatched.append(pattern)
    return unmatched
