"""A plan as text for people: one table for a plan, one Markdown table for every machine."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.plan.result import PlanResult

GIB, MIB = 1 << 30, 1 << 20


def size(count: float) -> str:
    """Bytes with a binary unit, and the exact number where it is small."""
    for unit, scale in (("TiB", GIB * 1024), ("GiB", GIB), ("MiB", MIB)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count:,.0f} B"


def length(tokens: int) -> str:
    if tokens >= 1 << 20:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}k" if tokens >= 1024 else str(tokens)


def _largest_first(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in sorted(sizes.items(), key=lambda item: -item[1]))


def _by_length(values: dict[str, float], form: str) -> str:
    return ", ".join(f"{length(int(tokens))}: {value:{form}}" for tokens, value in values.items())


def table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def plan_text(result: PlanResult) -> str:
    """One plan: weights, cache, budget, capacity, then refusals and warnings."""
    r = result
    rows = [
        ("model", f"{r.model}, {r.parameters / 1e9:,.3f} G parameters"),
        ("machine", f"{r.hardware}, {r.layout}, {r.ranks} rank{'s' if r.ranks > 1 else ''}, {r.engine}"),
        (
            "variant",
            f"{r.quant}-{r.kv}  (verdict: {r.verdict}; KV {r.kv_label}; source -> variant: {r.requantization})",
        ),
        ("fits", r.fits),
        ("checkpoint", f"{r.weight_bytes / 1e12:.3f} TB" if r.weight_bytes > 1e11 else size(r.weight_bytes)),
        (
            "weights a rank",
            f"{size(r.weight_bytes_per_rank)} of {size(r.budget_bytes)} budget ({size(r.device_bytes)} device)",
        ),
        ("  by role", _largest_first(r.weight_bytes_by_role)),
        ("  by dtype", _largest_first(r.weight_bytes_by_dtype)),
        (
            "activation peak",
            f"{size(r.activation_peak_bytes)} at {r.max_num_batched_tokens} tokens of {r.max_num_seqs} sequences "
            f"(largest: {r.activation_largest_site}); worst {size(r.activation_worst_bytes)} "
            f"({r.activation_worst_site}); {'fitted' if r.activation_measured else 'an estimate, not fitted'}",
        ),
        ("KV a token", f"{r.kv_bytes_per_token:,} B over {r.kv_layers} layers"),
        (
            "effective block",
            f"{r.effective_block_size} tokens (asked {r.requested_block_size}), page {r.kv_page_bytes:,} B",
        ),
    ]
    if r.state_layers:
        rows += [
            (
                "state a sequence",
                f"nominal {size(r.state_bytes_per_sequence)} (recurrent {size(r.state_recurrent_bytes_per_sequence)}, "
                f"convolution {size(r.state_convolution_bytes_per_sequence)}), "
                f"padded {size(r.state_bytes_per_sequence_padded)}, pool {size(r.state_bytes_per_sequence_pool)} "
                f"in {r.state_blocks_per_sequence} blocks",
            ),
            ("state = cache at", f"{r.tie_tokens:,.0f} tokens (bf16 KV), {r.tie_tokens_fp8:,.0f} (fp8 KV), a rank"),
        ]
    rows += [
        (
            "pool",
            f"{size(r.kv_pool_bytes)} = {r.num_blocks:,} blocks of {size(r.bytes_per_block)}, "
            f"{r.kv_capacity_tokens:,} tokens",
        ),
        ("longest sequence", f"{r.longest_sequence_tokens:,} tokens (max_model_len {r.max_model_len:,})"),
        ("concurrency", _by_length(r.max_concurrency, "d")),
        ("fp8 KV gains, x", _by_length(r.fp8_kv_gain, ".2f") + "  (nominal bytes)"),
        ("  in the pool, x", _by_length(r.fp8_kv_gain_pool, ".2f") + "  (whole blocks)"),
    ]
    text = table(rows)
    for refusal in r.refusals:
        text += f"\n\nREFUSED ({refusal.rule}): {refusal.message}"
        if refusal.alternative:
            text += f"\n  nearest that works: {refusal.alternative}"
    for warning in r.warnings:
        text += f"\n\nwarning: {warning}"
    return text


def _cell(result: PlanResult) -> str:
    if result.refusals:
        return f"no: {', '.join(dict.fromkeys(refusal.rule for refusal in result.refusals))}"
    at_32k = result.max_concurrency.get("32768", 0)
    at_1m = result.max_concurrency.get("1048576") if result.max_model_len >= 1 << 20 else None
    counts = f"{at_32k} @ 32k" + (f", {at_1m} @ 1M" if at_1m is not None else "")
    mark = "" if result.fits == "yes" else " (marginal)"
    return f"{counts}{mark}" + (" *" if result.verdict == "untested" else "")


def decision_table(results: dict[tuple[str, str], PlanResult], quants: list[str]) -> str:
    """Markdown: a row a machine, a column a scheme; a cell is the largest concurrency, or why not."""
    machines = list(dict.fromkeys(machine for machine, _ in results))
    lines = [
        "| machine | layout | KV | native weights a rank | block | " + " | ".join(quants) + " |",
        "|" + "---|" * (5 + len(quants)),
    ]
    for machine in machines:
        first = results[machine, quants[0]]
        cells = " | ".join(_cell(results[machine, quant]) for quant in quants)
        lines.append(
            f"| {machine} | {first.layout} | {first.kv} | {first.weight_bytes_per_rank / 1e9:.1f} of "
            f"{first.budget_bytes / 1e9:.1f} GB | {first.effective_block_size} | {cells} |"
        )
    lines += [
        "",
        "Cells: whole sequences held at that length, all replicas together. `no:` names the rules that refuse it. "
        "`*`: the engine's source says that it loads, nobody is on record as having run it.",
    ]
    return "\n".join(lines)
