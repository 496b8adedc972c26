"""Kimi K3's text model on vLLM's parallel layers (CPU)."""

from __future__ import annotations

import re

import torch
from torch import nn
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching, SupportsQuant
from vllm.model_executor.models.utils import maybe_prefix

from .kda import KimiDeltaAttention
from .mla import KimiMLAAttention
from .moe import DenseMLP, LatentMoE
from .norm import RMSNorm
from .quantization import dense_config


class AttentionResidual(nn.Module):
    """Attention over the sealed block states and the running sum, with one learned query (AttnRes).

    Checkpoint names ``X_res_norm.weight`` [D] and ``X_res_proj.weight`` [1, D].
    """

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(hidden))
        self.query = nn.Parameter(torch.empty(1, hidden))
        self.eps = eps

    def forward(self, running: torch.Tensor, sealed: list[torch.Tensor]) -> torch.Tensor:
        """running [T, D], sealed n x [T, D] -> [T, D]."""
        states = torch.stack([*sealed, running], 1).float()  # [T, n + 1, D]
        query = self.norm_weight.float() * self.query[0].float()
        scores = torch.matmul(states, query) * torch.rsqrt(states.square().mean(-1) + self.eps)
        return torch.matmul(scores.softmax(-1).unsqueeze(1), states).squeeze(1).to(running.dtype)


class DecoderLayer(nn.Module):
    """KDA or MLA, then dense MLP or latent MoE; both read the residual stream through `AttentionResidual`."""

    def __init__(self, config, vllm_config, prefix: str):
        super().__init__()
        index = int(prefix.rsplit(".", 1)[1])
        quant_config = vllm_config.quant_config
        dense = dense_config(quant_config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attention = KimiDeltaAttention if config.is_kda_layer(index) else KimiMLAAttention
        self.self_attn = attention(config, vllm_config, dense, f"{prefix}.self_attn")
        past_dense = index >= config.first_k_dense_replace and index % config.moe_layer_freq == 0
        has_experts = bool(config.num_experts) and past_dense
        if has_experts:
            self.block_sparse_moe = LatentMoE(config, quant_config, dense, f"{prefix}.block_sparse_moe")
        else:
            self.mlp = DenseMLP(config, hidden, config.intermediate_size, dense, f"{prefix}.mlp")
        self.ffn_name = "block_sparse_moe" if has_experts else "mlp"
        self.input_layernorm = RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)
        self.block_size = config.attn_res_block_size
        if self.block_size:
            self.seals_block = index % self.block_size == 0
            self.self_attention_res = AttentionResidual(hidden, eps)
            self.mlp_res = AttentionResidual(hidden, eps)

    def forward(self, running: torch.Tensor, sealed: list[torch.Tensor]) -> torch.Tensor:
        """running [T, D]: sum of the current block; ``sealed``: sums of the blocks before it (appended to)."""
        ffn = getattr(self, self.ffn_name)
        if not self.block_size:
            running = running + self.self_attn(self.input_layernorm(running))
            return running + ffn(self.post_attention_layernorm(running))
        hidden = self.self_attention_res(running, sealed) if sealed else running
        if self.seals_block:
            sealed.append(running)
        attended = self.self_attn(self.input_layernorm(hidden))
        running = attended if self.seals_block else running + attended
        return running + ffn(self.post_attention_layernorm(self.mlp_res(running, sealed)))


class KimiLinearModel(nn.Module):
    """Embedding, layers, final norm: token ids [T] -> hidden [T, D]."""

    def __init__(self, config, vllm_config, prefix: str):
        super().__init__()
        if get_pp_group().world_size != 1:
            raise ValueError("Kimi K3 on CPU does not support pipeline parallelism")
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, vllm_config, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output_attn_res = None
        if config.attn_res_block_size:
            self.output_attn_res = AttentionResidual(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        running = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        sealed: list[torch.Tensor] = []
        for layer in self.layers:
            running = layer(running, sealed)
        if self.output_attn_res is not None:
            running = self.output_attn_res(running, sealed)
        return self.norm(running)


# Checkpoint name -> (parameter name, part of a fused parameter).  A rule applies where the parameter exists: MLA layers
# keep their own q_proj and g_proj.
_FUSED = [
    (f".{source}.", f".{target}.", part)
    for target, sources in (
        ("gate_up_proj", ("gate_proj", "up_proj")),
        ("w13", ("w1", "w3")),
        ("in_proj_qkvg", ("q_proj", "k_proj", "v_proj", "g_proj")),
        ("in_proj_qkv", ("q_proj", "k_proj", "v_proj")),
    )
    for part, source in enumerate(sources)
] + [(f".{x}_conv1d.weight", ".conv_taps", part) for part, x in enumerate("qkv")]
_RENAMED = [("_res_norm.weight", "_res.norm_weight"), ("_res_proj.weight", "_res.query")]
# Where checkpoints keep the scales of an FP8 cache (compressed-tensors, and vLLM's own remapped names).
_KV_SCALE = re.compile(r"^(.*\.self_attn)(?:\.attn|\.mla_attn\.mla_attn)?\.([kv]_scale)$")


class KimiLinearForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsQuant, SupportsMambaPrefixCaching):
    """Flat layout: tensors under ``model.`` and ``lm_head.``."""

    packed_modules_mapping = {
        "gate_up_proj": ["gate_proj", "up_proj"],
        "w13": ["w1", "w3"],
        "in_proj_qkvg": ["q_proj", "k_proj", "v_proj", "g_proj"],
        "in_proj_qkv": ["q_proj", "k_proj", "v_proj"],
    }

    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.model = KimiLinearModel(config, vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=dense_config(vllm_config.quant_config),
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs) -> torch.Tensor:
        return self.model(input_ids, inputs_embeds)  # NoPE: positions are not used

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config):
        cache = vllm_config.cache_config
        return MambaStateDtypeCalculator.kda_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config):
        linear = vllm_config.model_config.hf_text_config.linear_attn_config
        return MambaStateShapeCalculator.kda_state_shape(
            vllm_config.parallel_config.tensor_parallel_size,
            linear["num_heads"],
            linear["head_dim"],
            conv_kernel_size=linear["short_conv_kernel_size"],
        )

    @classmethod
    def get_mamba_state_copy_func(cls):
        return MambaStateCopyFuncCalculator.kda_state_copy_func()

    def load_weights(self, weights) -> set[str]:
        """Load (name, tensor) pairs.  Raises `KeyError` for a tensor the model has no place for: a checkpoint whose
        ignore list does not match what it stores must not be half loaded."""
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if scale := _KV_SCALE.match(name):
                self._load_kv_scale(*scale.groups(), tensor)
                continue
            target, part = _parameter_of(name, parameters)
            parameter = parameters[target]
            if part is None:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            else:
                parameter.weight_loader(parameter, tensor, part)
            loaded.add(target)
        return loaded

    def _load_kv_scale(self, layer_name: str, scale_name: str, tensor: torch.Tensor) -> None:
        layer = self.get_submodule(layer_name)
        if not isinstance(layer, KimiMLAAttention):
            raise KeyError(f"{layer_name}.{scale_name}: this layer has a recurrent state, not a KV cache")
        layer.load_scale(scale_name, tensor)


def _parameter_of(name: str, parameters: dict[str, nn.Parameter]) -> tuple[str, int | None]:
    for source, target, part in _FUSED:
        if source in name or name.endswith(source):
            candidate = name.replace(source, target)
            if candidate in parameters:
                return candidate, part
    for source, target in _RENAMED:
        name = name.replace(source, target) if name.endswith(source) else name
    if name not in parameters:
        raise KeyError(
            f"the checkpoint holds {name}, which the model has no parameter for: does quantization_config (targets, "
            "ignore) say what is stored?"
        )
    return name, None


class KimiK3ForConditionalGeneration(nn.Module, HasInnerState, IsHybrid, SupportsQuant, SupportsMambaPrefixCaching):
    """Released layout: the text model under ``language_model.``; vision tower and projector are left unread."""

    packed_modules_mapping = KimiLinearForCausalLM.packed_modules_mapping
    get_mamba_state_dtype_from_config = KimiLinearForCausalLM.get_mamba_state_dtype_from_config
    get_mamba_state_shape_from_config = KimiLinearForCausalLM.get_mamba_state_shape_from_config
    get_mamba_state_copy_func = KimiLinearForCausalLM.get_mamba_state_copy_func
    text_prefix = "language_model."

    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.language_model = KimiLinearForCausalLM(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, self.text_prefix[:-1])
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.language_model.embed_input_ids(input_ids)

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return self.language_model(*args, **kwargs)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights) -> set[str]:
        text = (
            (name[len(self.text_prefix) :], tensor) for name, tensor in weights if name.startswith(self.text_prefix)
        )
        return {self.text_prefix + name for name in self.language_model.load_weights(text)}
