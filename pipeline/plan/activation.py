"""Peak of activations in one step, as a function of tokens in the batch and sequences, from shapes alone.

The step is a list of sites: memory that lives through the whole step, and what each kind of layer adds while it runs.
The peak is the first plus the largest of the second; the largest site is named, because that is what a smaller
``max_num_batched_tokens`` shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.k3 import LayerKind, ModelFacts, Role
from pipeline.plan.cache import CacheSettings
from pipeline.plan.layout import Layout

BF16, FP32 = 2, 4
MLA_WORKSPACE_TOKENS = 64 * 1024  # vllm/model_executor/layers/attention/mla_attention.py, chunked prefill workspace


@dataclass(frozen=True)
class Site:
    """Bytes alive at one place of the step."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Activation:
    """``peak_bytes`` = persistent + largest transient site.  ``measured`` says whether the model was fitted on this platform."""

    peak_bytes: int
    largest_site: str
    persistent: tuple[Site, ...]
    transient: tuple[Site, ...]
    measured: bool


def _width(facts: ModelFacts, role: Role) -> int:
    """Output width of the widest matrix of a role (the intermediate size of an MLP)."""
    return max((max(tensor.shape) for tensor in facts.distinct() if tensor.role is role and tensor.linear), default=0)


def gpu_activation(facts: ModelFacts, layout: Layout, settings: CacheSettings, tokens: int, seqs: int) -> Activation:
    """Estimate for the fused GPU path of vLLM 0.32.  Not fitted: no run on these machines was available.

    Persistent: the residual stream, the sealed blocks of attention residuals and MLA's chunked-prefill workspace.
    """
    text, hidden, ways = facts.text, facts.text["hidden_size"], layout.tensor
    persistent = [Site("hidden states and residual", 3 * tokens * hidden * BF16)]
    if text.get("attn_res_block_size"):
        blocks = -(-facts.num_layers // text["attn_res_block_size"])
        persistent.append(Site("attention residual blocks", blocks * tokens * hidden * BF16))
    transient = []
    if facts.uses_mla:
        heads = text["num_attention_heads"] // ways
        nope, rope, value, latent = (text[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        context = min(max(8 * settings.max_model_len, 4 * seqs * 128), MLA_WORKSPACE_TOKENS)
        persistent.append(Site("MLA chunked-prefill workspace", context * (latent + rope) * BF16))
        per_token = heads * (2 * (nope + rope) + 2 * value) + (text.get("q_lora_rank") or 0)
        expanded = context * heads * (nope + rope + value + nope) * BF16
        transient.append(Site("MLA prefill (context expanded to heads)", tokens * per_token * BF16 + expanded))
    if LayerKind.KDA in facts.layer_kinds:
        linear = text["linear_attn_config"]
        width = linear["num_heads"] * linear["head_dim"] // ways
        transient.append(Site("KDA prefill (q, k, v, gates, chunk products)", tokens * width * (5 * BF16 + 5 * FP32)))
    if LayerKind.GDN in facts.layer_kinds:
        width = text["linear_num_value_heads"] * text["linear_value_head_dim"] // ways
        transient.append(Site("GDN prefill", tokens * width * (5 * BF16 + 5 * FP32)))
    if LayerKind.GQA in facts.layer_kinds:
        heads = text["num_attention_heads"] // ways or 1
        transient.append(Site("attention (q, k, v, out)", 4 * tokens * heads * facts.head_dim * BF16))
    if facts.num_experts:
        top_k = text.get("num_experts_per_token") or text.get("num_experts_per_tok") or 1
        inner = text.get("routed_expert_hidden_size") or hidden
        cut = 1 if layout.expert else layout.expert_ranks
        width = -(-text["moe_intermediate_size"] // cut)
        # Fused MoE keeps gate-up output, its activation and the down output of every (token, expert) pair.
        gathered = tokens * (layout.data if not layout.expert else 1)
        transient.append(Site("routed experts", gathered * top_k * (3 * width + inner) * BF16))
    dense = max(_width(facts, Role.DENSE_MLP), _width(facts, Role.SHARED_EXPERT))
    transient.append(Site("dense MLP", 3 * tokens * dense // ways * BF16))
    transient.append(Site("logits and sampling", 3 * seqs * text["vocab_size"] * FP32))
    return _peak(persistent, transient, measured=False)


def _peak(persistent: list[Site], transient: list[Site], measured: bool) -> Activation:
    largest = max(transient, key=lambda site: site.bytes)
    total = sum(site.bytes for site in persistent) + largest.bytes
    return Activation(total, largest.name, tuple(persistent), tuple(transient), measured)


def activation(facts: ModelFacts, layout: Layout, settings: CacheSettings, tokens: int, seqs: int) -> Activation:
    """The peak for a step of ``tokens`` tokens in at most ``seqs`` sequences, on one rank."""
    return gpu_activation(facts, layout, settings, tokens, seqs)
