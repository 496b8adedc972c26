"""Kimi Delta Attention layer: projections, short convolution and recurrent state in vLLM's cache pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import divide, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from . import delta_rule


@dataclass
class KDAMetadata:
    """One step's rows for a group of KDA layers.  A row is one request; its state lives in one cache block."""

    num_tokens: int
    step_tokens: torch.Tensor  # [N] positions in the batch of rows that continue a state by one token
    step_states: torch.Tensor  # [N] their state blocks
    spans: list[tuple[int, int, int, bool]]  # other rows: first token, end token, state block, has a state


class KDAMetadataBuilder(AttentionMetadataBuilder[KDAMetadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.cache_mode = vllm_config.cache_config.mamba_cache_mode

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> KDAMetadata:
        m = common_attn_metadata
        blocks = mamba_get_block_table_tensor(
            m.block_table_tensor[: m.num_reqs], m.seq_lens[: m.num_reqs], self.kv_cache_spec, self.cache_mode
        )
        starts = m.query_start_loc_cpu[: m.num_reqs + 1].tolist()
        steps, step_states, spans = [], [], []
        for start, end, length, block in zip(
            starts[:-1], starts[1:], m.seq_lens[: m.num_reqs].tolist(), blocks[:, 0].tolist(), strict=True
        ):
            has_state = length > end - start
            if end == start + 1 and has_state:
                steps.append(start)
                step_states.append(block)
            elif end > start:
                spans.append((start, end, block, has_state))
        return KDAMetadata(m.num_actual_tokens, torch.tensor(steps), torch.tensor(step_states), spans)


class KDABackend(AttentionBackend):
    @staticmethod
    def get_name():
        return "K3_CPU_KDA"

    @staticmethod
    def get_impl_cls():
        return None

    @staticmethod
    def get_builder_cls():
        return KDAMetadataBuilder

    @classmethod
    def is_ssm(cls):
        return True


class KimiDeltaAttention(nn.Module, MambaBase):
    """KDA of one layer, heads sharded over tensor parallel ranks.  Hidden [T, D] -> [T, D]."""

    def __init__(self, config, vllm_config, quant_config, prefix: str):
        super().__init__()
        linear = config.linear_attn_config
        self.prefix = prefix
        self.model_config, self.cache_config = vllm_config.model_config, vllm_config.cache_config
        self.tp_size = get_tensor_model_parallel_world_size()
        self.heads, self.width = linear["num_heads"], linear["head_dim"]
        self.local_heads = divide(self.heads, self.tp_size)
        self.local_dim = self.local_heads * self.width
        self.conv_width = linear["short_conv_kernel_size"]
        self.gate_lower_bound = linear.get("gate_lower_bound")
        self.norm_eps = config.rms_norm_eps
        self._create_projections(config.hidden_size, linear.get("use_full_rank_gate", False), quant_config)
        self._create_parameters()
        context = vllm_config.compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"duplicate layer name {prefix}")
        context[prefix] = self

    def _create_projections(self, hidden: int, full_rank_gate: bool, quant_config) -> None:
        projected = self.heads * self.width

        def options(name):
            return {"bias": False, "quant_config": quant_config, "prefix": f"{self.prefix}.{name}"}

        # q, k, v and a full-rank gate read the same input: one matrix, as in vLLM's GPU model, hence one scheme for
        # all four.
        self.fused_name = "in_proj_qkvg" if full_rank_gate else "in_proj_qkv"
        self.parts = 4 if full_rank_gate else 3
        fused = MergedColumnParallelLinear(hidden, [projected] * self.parts, **options(self.fused_name))
        setattr(self, self.fused_name, fused)
        if not full_rank_gate:
            self.g_a_proj = ReplicatedLinear(hidden, self.width, **options("g_a_proj"))
            self.g_b_proj = ColumnParallelLinear(self.width, projected, **options("g_b_proj"))
        self.f_a_proj = ReplicatedLinear(hidden, self.width, **options("f_a_proj"))
        self.f_b_proj = ColumnParallelLinear(self.width, projected, **options("f_b_proj"))
        self.b_proj = ColumnParallelLinear(hidden, self.heads, **options("b_proj"))
        self.o_proj = RowParallelLinear(projected, hidden, **options("o_proj"))

    def _create_parameters(self) -> None:
        """float32 like the checkpoint's (`A_log`, `dt_bias`, `*_conv1d.weight`, `o_norm.weight`)."""
        self.conv_taps = nn.Parameter(torch.empty(self.conv_width, 3 * self.local_dim, dtype=torch.float32))
        set_weight_attrs(self.conv_taps, {"weight_loader": self._load_conv})
        self.dt_bias = nn.Parameter(torch.empty(self.local_dim, dtype=torch.float32))
        set_weight_attrs(self.dt_bias, {"weight_loader": sharded_weight_loader(0)})
        self.A_log = nn.Parameter(torch.empty(self.local_heads, dtype=torch.float32))
        set_weight_attrs(self.A_log, {"weight_loader": self._load_a_log})
        self.o_norm = nn.Module()
        self.o_norm.weight = nn.Parameter(torch.empty(self.width, dtype=torch.float32))

    def _load_conv(self, param: torch.Tensor, loaded: torch.Tensor, part: int) -> None:
        """One of q/k/v ``conv1d.weight`` [H * D, 1, W] into its columns of ``conv_taps`` [W, 3 * local]."""
        first = get_tensor_model_parallel_rank() * self.local_dim
        taps = loaded[first : first + self.local_dim, 0].t()
        param.data[:, part * self.local_dim : (part + 1) * self.local_dim].copy_(taps)

    def _load_a_log(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        """Released checkpoints store [H] or [1, 1, H, 1]."""
        first = get_tensor_model_parallel_rank() * self.local_heads
        param.data.copy_(loaded.reshape(-1)[first : first + self.local_heads])

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.GDN_ATTN

    def get_attn_backend(self):
        return KDABackend

    def get_state_dtype(self):
        """(convolution, recurrent): model type and float32 unless ``--mamba-ssm-cache-dtype bfloat16``."""
        cache = self.cache_config
        return MambaStateDtypeCalculator.kda_state_dtype(
            self.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    def get_state_shape(self):
        return MambaStateShapeCalculator.kda_state_shape(
            self.tp_size, self.heads, self.width, conv_kernel_size=self.conv_width
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        fused = getattr(self, self.fused_name)(hidden)[0]
        qkv = fused[:, : 3 * self.local_dim]
        if self.parts == 4:
            gate = fused[:, 3 * self.local_dim :]
        else:
            gate = self.g_b_proj(self.g_a_proj(hidden)[0])[0]
        decay = self.f_b_proj(self.f_a_proj(hidden)[0])[0]
        mixed = self._mix(qkv, decay, self.b_proj(hidden)[0])
        return self.o_proj(self._gated_norm(mixed, gate, hidden.dtype))[0]

    def _gated_norm(self, x: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """RMSNorm per head times sigmoid(gate), in float32: [T, H, D] -> [T, H * D]."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps)
        normed = (x * scale).mul_(self.o_norm.weight)
        return normed.flatten(1).mul_(torch.sigmoid(gate.float())).to(dtype)

    def _mix(self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Convolution and delta rule over the batch: qkv [T, 3 * local] -> float32 [T, local heads, D]."""
        out = torch.zeros(qkv.shape[0], self.local_heads, self.width)
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # profile run without a cache
            return out
        m: KDAMetadata = metadata[self.prefix]
        conv_state, state = self.kv_cache  # state blocks [blocks, H, D, D], key x value
        if is_conv_state_dim_first():
            conv_state = conv_state.transpose(-1, -2)  # [blocks, W - 1, 3 * local]
        decay = decay.view(-1, self.local_heads, self.width)
        if not m.spans:  # every row is one token, in order
            rows = slice(0, m.num_tokens)
            g = self._log_decay(decay[rows])
            out[rows] = self._step(qkv[rows].float(), g, beta[rows], conv_state, state, m.step_states)
        elif m.step_tokens.numel():
            rows = m.step_tokens
            g = self._log_decay(decay[rows])
            out[rows] = self._step(qkv[rows].float(), g, beta[rows], conv_state, state, m.step_states)
        for start, end, block, has_state in m.spans:
            rows = slice(start, end)
            g = self._log_decay(decay[rows])
            out[rows] = self._span(qkv[rows].float(), g, beta[rows], conv_state[block], state[block], has_state)
        return out

    def _log_decay(self, decay: torch.Tensor) -> torch.Tensor:
        return delta_rule.log_decay(decay, self.A_log, self.dt_bias, self.gate_lower_bound)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Convolved [T, 3 * local] -> q (unit, scaled), k (unit), v, each [T, H, D]."""
        q, k, v = qkv.view(-1, 3, self.local_heads, self.width).unbind(1)
        return delta_rule.l2_normalize(q).mul_(self.width**-0.5), delta_rule.l2_normalize(k), v

    def _step(self, qkv, g, beta, conv_state, state, blocks) -> torch.Tensor:
        """One token each of N sequences that have a state."""
        window = torch.cat([conv_state.index_select(0, blocks).float(), qkv.unsqueeze(1)], 1)  # [N, W, 3 * local]
        conv_state.index_copy_(0, blocks, window[:, 1:].to(conv_state.dtype))
        q, k, v = self._heads(F.silu((window * self.conv_taps).sum(1)))
        current = state.index_select(0, blocks).float()
        out = delta_rule.step(q, k, v, g, beta.float().sigmoid(), current)
        state.index_copy_(0, blocks, current.to(state.dtype))
        return out

    def _span(self, qkv, g, beta, conv_state, state, has_state: bool) -> torch.Tensor:
        """Tokens of one sequence; ``conv_state`` [W - 1, 3 * local] and ``state`` [H, D, D] are views of its block."""
        tokens, before = qkv.shape[0], self.conv_width - 1
        past = conv_state.float() if has_state else qkv.new_zeros(before, qkv.shape[1])
        window = torch.cat([past, qkv])
        conv_state.copy_(window[tokens:])
        mixed = window[:tokens] * self.conv_taps[0]
        for i in range(1, self.conv_width):
            mixed.addcmul_(window[i : i + tokens], self.conv_taps[i])
        q, k, v = self._heads(F.silu(mixed, inplace=True))
        initial = state.float() if has_state else torch.zeros(state.shape)
        run = delta_rule.chunked if delta_rule.chunk_is_safe(self.gate_lower_bound) else delta_rule.recurrent
        out, final = run(q, k, v, g, beta.float().sigmoid(), initial)
        state.copy_(final)
        return out
