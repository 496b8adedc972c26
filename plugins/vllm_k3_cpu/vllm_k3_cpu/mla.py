"""Gated multi-head latent attention without rotary embedding (K3's 24 full-attention layers), over vLLM's paged cache.

The cache holds one latent per token: ``kv_lora_rank + qk_rope_head_dim`` values, replicated on every rank.  Any block
size and head size, chunked prefill, prefix caching; model type or FP8 elements.  Both prefill and decode read keys
from the cache, so an FP8 cache gives the same answer however a prompt is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import divide, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import MLAAttentionSpec, get_kv_quant_mode

from . import kv_cache, lookup
from .norm import RMSNorm

# Moonshot's definition builds both latent norms with the framework's default eps, not the config's rms_norm_eps.
LATENT_NORM_EPS = 1e-6
QUERY_TILE = 512  # queries attended at once when a prompt continues a cached context
DECODE_LATENTS = 1 << 22  # cached values gathered at once for single-token rows


@dataclass
class MLAMetadata:
    """One step's rows (requests): single tokens batched, longer spans one by one."""

    slots: torch.Tensor  # [T] cache slot of every token, -1 for padding
    single_tokens: torch.Tensor  # [N] position in the batch of rows with one token
    single_lengths: torch.Tensor  # [N] tokens visible to it, itself included
    single_blocks: torch.Tensor  # [N, blocks]
    spans: list[tuple[int, int, int, torch.Tensor]]  # first token, end token, visible tokens at the end, blocks


class MLAMetadataBuilder(AttentionMetadataBuilder[MLAMetadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> MLAMetadata:
        m = common_attn_metadata
        starts = m.query_start_loc_cpu[: m.num_reqs + 1].tolist()
        lengths = m.seq_lens[: m.num_reqs].tolist()
        table = m.block_table_tensor
        singles, spans = [], []
        for row, (start, end, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
            if end == start + 1:
                singles.append(row)
            elif end > start:
                spans.append((start, end, length, table[row, : -(-length // self.block_size)].long()))
        rows = torch.tensor(singles, dtype=torch.long)
        single_lengths = torch.tensor([lengths[row] for row in singles], dtype=torch.long)
        blocks = -(-max((lengths[row] for row in singles), default=0) // self.block_size)
        return MLAMetadata(
            slots=m.slot_mapping[: m.num_actual_tokens],
            single_tokens=torch.tensor([starts[row] for row in singles], dtype=torch.long),
            single_lengths=single_lengths,
            single_blocks=table[rows, :blocks].long(),
            spans=spans,
        )


class MLABackend(AttentionBackend):
    supported_dtypes = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = list(kv_cache.SUPPORTED)

    @staticmethod
    def get_name():
        return "K3_CPU_MLA"

    @staticmethod
    def get_impl_cls():
        return None

    @staticmethod
    def get_builder_cls():
        return MLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def is_mla(cls):
        return True


class KimiMLAAttention(nn.Module, AttentionLayerBase):
    """Gated NoPE MLA of one layer, heads sharded over tensor parallel ranks.  Hidden [T, D] -> [T, D].

    H local heads, L = kv_lora_rank, N = qk_nope_head_dim, R = qk_rope_head_dim, V = v_head_dim.
    """

    def __init__(self, config, vllm_config, quant_config, prefix: str):
        super().__init__()
        cache = vllm_config.cache_config
        if not config.mla_use_nope:
            raise ValueError(f"{prefix}: only MLA without rotary embedding (mla_use_nope) is implemented on CPU")
        kv_cache.require_supported(cache.cache_dtype, cache.kv_cache_dtype_skip_layers)
        self.prefix = prefix
        self.H = divide(config.num_attention_heads, get_tensor_model_parallel_world_size())
        self.L, self.N, self.R, self.V = (
            config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
        )  # fmt: skip
        self.scale = (self.N + self.R) ** -0.5
        self._create_projections(config, quant_config)
        self.kv_cache_dtype = cache.cache_dtype
        self.fp8_type = kv_cache.FP8_TYPES.get(cache.cache_dtype)
        # The latent serves as key and value, so only k_scale is applied; v_scale is kept for the report.
        self.k_scale = self.v_scale = 1.0
        self.loaded_scales: set[str] = set()
        self.kv_cache = torch.empty(0)
        self._up_projection = None
        context = vllm_config.compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"duplicate layer name {prefix}")
        context[prefix] = self

    def _create_projections(self, config, quant_config) -> None:
        hidden, heads = config.hidden_size, config.num_attention_heads

        def options(name):
            return {"bias": False, "quant_config": quant_config, "prefix": f"{self.prefix}.{name}"}

        query = heads * (self.N + self.R)
        self.q_lora_rank = config.q_lora_rank
        if self.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, query, **options("q_proj"))
        else:
            self.q_a_proj = ReplicatedLinear(hidden, self.q_lora_rank, **options("q_a_proj"))
            self.q_a_layernorm = RMSNorm(self.q_lora_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = ColumnParallelLinear(self.q_lora_rank, query, **options("q_b_proj"))
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden, self.L + self.R, **options("kv_a_proj_with_mqa"))
        self.kv_a_layernorm = RMSNorm(self.L, eps=LATENT_NORM_EPS)
        self.kv_b_proj = ColumnParallelLinear(self.L, heads * (self.N + self.V), **options("kv_b_proj"))
        self.o_proj = RowParallelLinear(heads * self.V, hidden, **options("o_proj"))
        self.g_proj = None
        if config.mla_use_output_gate:
            self.g_proj = ColumnParallelLinear(hidden, heads * self.V, **options("g_proj"))

    def get_attn_backend(self):
        return MLABackend

    def get_kv_cache_spec(self, vllm_config):
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.L + self.R,
            dtype=kv_cache_dtype_str_to_dtype(self.kv_cache_dtype, vllm_config.model_config),
            cache_dtype_str=self.kv_cache_dtype,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
        )

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """[blocks, 1, block size, L + R] -> [blocks, block size, L + R]."""
        self.kv_cache = kv_cache.squeeze(1)
        if not self.kv_cache.is_contiguous():
            raise ValueError(f"{self.prefix}: expected contiguous cache pages, got strides {self.kv_cache.stride()}")

    def load_scale(self, name: str, value: torch.Tensor) -> None:
        """A calibrated ``k_scale`` / ``v_scale``: one value a layer."""
        if value.numel() != 1 or not torch.isfinite(value.float()).all() or value.float().min() <= 0:
            raise ValueError(
                f"{self.prefix}.{name}: expected one finite positive scale, got {value.flatten()[:4].tolist()}"
            )
        setattr(self, name, value.float().item())
        self.loaded_scales.add(name)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.q_lora_rank is None:
            query = self.q_proj(hidden)[0]
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)[0]))[0]
        query = query.view(-1, self.H, self.N + self.R)
        compressed, position_key = self.kv_a_proj_with_mqa(hidden)[0].split([self.L, self.R], -1)
        latent = torch.cat([self.kv_a_layernorm(compressed.contiguous()), position_key], -1)
        out = self._attend(query, latent).flatten(1)
        if self.g_proj is not None:
            out = out * torch.sigmoid(self.g_proj(hidden)[0])
        return self.o_proj(out)[0]

    def _attend(self, query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """query [T, H, N + R], this step's latents [T, L + R] -> [T, H, V]."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # profile run without a cache: the footprint of one full prefill
            return self._attend_span(query, latent, 0)
        m: MLAMetadata = metadata[self.prefix]
        out = query.new_zeros(query.shape[0], self.H, self.V)
        self._write(latent, m.slots)
        for rows in self._decode_slices(m):
            tokens = m.single_tokens[rows]
            out[tokens] = self._attend_singles(query[tokens], m.single_blocks[rows], m.single_lengths[rows])
        for start, end, visible, blocks in m.spans:
            cached = self._read(blocks, query.dtype)[:visible]
            out[start:end] = self._attend_span(query[start:end], cached, visible - (end - start))
        return out

    def _decode_slices(self, m: MLAMetadata) -> list[slice]:
        """Slices of the single-token rows whose gathered latents stay within `DECODE_LATENTS` values."""
        rows = m.single_tokens.numel()
        if not rows:
            return []
        per_row = m.single_blocks.shape[1] * self.kv_cache.shape[1] * (self.L + self.R)
        size = max(1, DECODE_LATENTS // per_row)
        return [slice(i, i + size) for i in range(0, rows, size)]

    def _write(self, latent: torch.Tensor, slots: torch.Tensor) -> None:
        """Store [T, L + R] at cache slots; FP8 saturates instead of overflowing."""
        latent = latent[: slots.shape[0]]
        if self.fp8_type is not None:
            limit = torch.finfo(self.fp8_type).max
            latent = (latent.float() / self.k_scale).clamp_(-limit, limit).to(self.fp8_type).view(torch.uint8)
        if slots.min() < 0:
            latent, slots = latent[slots >= 0], slots[slots >= 0]
        self.kv_cache.flatten(0, 1).index_copy_(0, slots, latent.to(self.kv_cache.dtype))

    def _read(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cache blocks [..., B] -> latents [..., B * block size, L + R] in the compute type."""
        cached = self.kv_cache.index_select(0, blocks.flatten()).view(*blocks.shape[:-1], -1, self.L + self.R)
        if self.fp8_type is None:
            return cached.to(dtype)
        return lookup.decode(lookup.fp8_table(self.fp8_type, dtype, self.k_scale), cached)

    def _absorbed(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK [H, N, L] and W_UV [H, L, V]: `kv_b_proj` as matrices, dequantized whatever its scheme."""
        if self._up_projection is None or self._up_projection[0].dtype != dtype:
            weight = self.kv_b_proj(torch.eye(self.L, dtype=dtype))[0].view(self.L, self.H, self.N + self.V)
            up_key, up_value = weight.split([self.N, self.V], -1)
            self._up_projection = up_key.permute(1, 2, 0).contiguous(), up_value.transpose(0, 1).contiguous()
        return self._up_projection

    def _attend_singles(self, query: torch.Tensor, blocks: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """One query each of N rows, in latent space: [N, H, N + R] -> [N, H, V].

        The latent is one key/value head shared by all H query heads, so the heads are the queries of one attention.
        """
        up_key, up_value = self._absorbed(query.dtype)
        latent = self._read(blocks, query.dtype)[:, : int(lengths.max())]  # [N, S, L + R]
        content, position = query.split([self.N, self.R], -1)
        content = torch.matmul(content.transpose(0, 1), up_key).transpose(0, 1)  # [N, H, L]
        absorbed = torch.cat([content, position], -1)
        hidden = torch.arange(latent.shape[1]) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask[:, None, None].expand(-1, 1, self.H, -1)
        keys = latent.unsqueeze(1)
        mixed = F.scaled_dot_product_attention(absorbed.unsqueeze(1), keys, keys, attn_mask=mask, scale=self.scale)
        mixed = mixed[:, 0, :, : self.L]  # [N, H, L]
        return torch.matmul(mixed.transpose(0, 1), up_value).transpose(0, 1)

    def _attend_span(self, query: torch.Tensor, latent: torch.Tensor, context: int) -> torch.Tensor:
        """T queries after ``context`` cached tokens: query [T, H, N + R], latents [context + T, L + R] -> [T, H, V]."""
        up_key, up_value = self._absorbed(query.dtype)
        content, position = latent.split([self.L, self.R], -1)
        key = torch.cat(
            [torch.matmul(content, up_key.transpose(-1, -2)), position.expand(self.H, -1, -1)], -1
        )  # [H, S, N + R]
        # torch's flash attention on CPU wants one width for query, key and value, else it materializes the scores.
        value = F.pad(torch.matmul(content, up_value), (0, self.N + self.R - self.V))
        query, key, value = query.transpose(0, 1)[None], key[None], value[None]
        tokens = query.shape[2]
        if context == 0:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        else:
            tiles = range(0, tokens, QUERY_TILE)
            out = torch.cat([self._attend_tile(query, key, value, context, t) for t in tiles], 2)
        return out[0, :, :, : self.V].transpose(0, 1)

    def _attend_tile(self, query, key, value, context: int, first: int) -> torch.Tensor:
        """Queries ``first .. first + QUERY_TILE`` against the keys they may see."""
        tile = query[:, :, first : first + QUERY_TILE]
        visible = context + first + tile.shape[2]
        mask = torch.full((tile.shape[2], visible), float("-inf"), dtype=query.dtype).triu_(context + first + 1)
        return F.scaled_dot_product_attention(
            tile, key[:, :, :visible], value[:, :, :visible], attn_mask=mask, scale=self.scale
        )
