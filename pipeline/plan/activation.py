"""Peak of activations in one step, as a function of tokens and sequences in the batch, from shapes alone.

The step is a list of sites: memory that lives through the whole step, and what each kind of layer adds while it runs.
The peak is the first plus the largest of the second; the largest site is named, because that is what a smaller
``max_num_batched_tokens`` shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.k3 import LayerKind, ModelFacts, Role
from pipeline.plan import activation_cpu
from pipeline.plan.layout import Layout
from pipeline.plan.sites import BF16, FP32, Site, Step, expert_shape, widest

MLA_WORKSPACE_TOKENS = 64 * 1024  # vllm/model_executor/layers/attention/mla_attention.py, chunked prefill workspace


@dataclass(frozen=True)
class Activation:
    """``peak_bytes`` = persistent + largest transient site.  ``measured`` says whether the model was fitted on this
    platform."""

    peak_bytes: int
    largest_site: str
    persistent: tuple[Site, ...]
    transient: tuple[Site, ...]
    measured: bool


def gpu_sites(facts: ModelFacts, layout: Layout, step: Step) -> tuple[list[Site], list[Site]]:
    """Sites of the fused GPU path of vLLM 0.32, read from its source.  Not fitted: no run on these machines was
    available.

    Persistent: the residual stream, the sealed blocks of attention residuals and MLA's chunked-prefill workspace.
    """
    text, hidden, ways, tokens = facts.text, facts.text["hidden_size"], layout.tensor, step.tokens
    persistent = [Site("hidden states and residual", 3 * tokens * hidden * BF16)]
    if text.get("attn_res_block_size"):
        blocks = -(-facts.num_layers // text["attn_res_block_size"])
        persistent.append(Site("attention residual blocks", blocks * tokens * hidden * BF16))
    transient = []
    if facts.uses_mla:
        heads = text["num_attention_heads"] // ways
        nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        latent = text["kv_lora_rank"]
        context = min(max(8 * step.context, 4 * step.sequences * 128), MLA_WORKSPACE_TOKENS)
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
        width, inner, top_k = expert_shape(facts, layout)
        # Without expert parallelism every rank sees the tokens of all data-parallel replicas.  Fused MoE keeps the
        # gate-up output, its activation and the down output of every (token, expert) pair.
        gathered = tokens * (layout.data if not layout.expert else 1)
        transient.append(Site("routed experts", gathered * top_k * (3 * width + inner) * BF16))
    dense = widest(facts, Role.DENSE_MLP, Role.SHARED_EXPERT)
    transient.append(Site("dense MLP", 3 * tokens * dense // ways * BF16))
    transient.append(Site("logits and sampling", 3 * step.sequences * text["vocab_size"] * FP32))
    return persistent, transient


def activation(facts: ModelFacts, layout: Layout, step: Step, platform: str) -> Activation:
    """The peak of one step on one rank."""
    if platform == "cpu":
        persistent, transient = activation_cpu.cpu_sites(facts, layout, step)
    else:
        persistent, transient = gpu_sites(facts, layout, step)
    largest = max(transient, key=lambda site: site.bytes)
    total = sum(site.bytes for site in persistent) + largest.bytes
    return Activation(total, largest.name, tuple(persistent), tuple(transient), measured=platform == "cpu")
