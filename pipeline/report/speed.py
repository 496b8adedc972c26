"""The report's section on speed: against native where both were measured alike, and why not where they were not."""

from __future__ import annotations

from typing import Any

FIGURES = {"output_tok_s": "output tok/s", "ttft_ms_p50": "TTFT p50", "tpot_ms_p50": "time a token p50"}


def section(comparisons: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of Markdown; none where no speed was compared.

    Weights of 8 bits can be slower with few requests in flight and faster with many, so one ratio is not enough: beside
    it stands the concurrency from which on the variant gives at least native's output tokens/s.
    """
    compared = {name: block["speed"] for name, block in comparisons.items() if block.get("speed")}
    if not compared:
        return []
    lines = ["## Speed against native", ""]
    if any(speed["status"] == "valid" for speed in compared.values()):
        lines += [f"| variant | {' | '.join(FIGURES.values())} | at least native's from a concurrency of |"]
        lines += ["|---|" + "---:|" * (len(FIGURES) + 1)]
        lines += [f"| {name} | {' | '.join(_cells(speed))} |" for name, speed in compared.items()]
        lines += ["", "In brackets: the lowest and highest ratio of any two repeats.", ""]
    reasons: dict[str, list[str]] = {}
    for name, speed in compared.items():
        if speed["status"] != "valid":
            reasons.setdefault(speed["reason"], []).append(name)
    lines += [f"- {', '.join(names)}: not comparable, {reason}" for reason, names in reasons.items()]
    return [*lines, ""] if reasons else lines


def _cells(speed: dict[str, Any]) -> list[str]:
    if speed["status"] != "valid":
        return ["not comparable"] * (len(FIGURES) + 1)
    return [*(_ratio(name, speed) for name in FIGURES), str(speed["break_even_concurrency"] or "none tried")]


def _ratio(name: str, speed: dict[str, Any]) -> str:
    if name not in speed["ratios"]:
        return "—"
    told = f"{speed['ratios'][name]:.2f}x" + (" emulated" if speed["emulated"] else "")
    if (between := speed["ranges"].get(name)) is not None:
        told += f" ({between[0]:.2f} to {between[1]:.2f})"
    return told
