"""``python3 -m pipeline gate``: may these variants be shipped?

Exit code: 0 all pass; 3 one fails; 4 none fails, one is inconclusive or cannot be judged; 5 the baseline, a run or a
pair of runs cannot be trusted; 6 the metrics cannot be read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.errors import EXIT_GOOD, EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_REFUSED, Unreadable
from pipeline.files import read_json

METRICS = Path("metrics/comparisons")
EXIT_CODES = {
    "pass": EXIT_GOOD,
    "reference": EXIT_GOOD,
    "fail": EXIT_REFUSED,
    "inconclusive": EXIT_INCONCLUSIVE,
    "not_gateable": EXIT_INCONCLUSIVE,
    "invalid": EXIT_INVALID,
    "not_comparable": EXIT_INVALID,
}
WORST_FIRST = (EXIT_REFUSED, EXIT_INVALID, EXIT_INCONCLUSIVE)


def main(argv: list[str]) -> int:
    """Print one line a variant and return the exit code.  Raises :class:`Unreadable` when there is nothing to judge."""
    parser = argparse.ArgumentParser(
        prog="python3 -m pipeline gate", description=__doc__.partition(": ")[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "variants", nargs="*", help="variants to judge, e.g. fp8-auto (default: all that were compared)"
    )
    parser.add_argument("--metrics", type=Path, default=METRICS, help=f"folder of the comparisons (default {METRICS})")
    parser.add_argument("--json", action="store_true", help="print the whole decision as JSON")
    arguments = parser.parse_args(argv)
    decision = decide(read_blocks(arguments.metrics), arguments.variants)
    print(json.dumps(decision, indent=2, ensure_ascii=False) if arguments.json else text(decision))
    return decision["exit_code"]


def read_blocks(folder: Path) -> dict[str, dict[str, Any]]:
    """The comparison of every variant in ``folder``, each in a file of its own."""
    blocks = {}
    for path in sorted(folder.glob("*.json")):
        block = read_json(path, finite=True)
        blocks[path.stem] = (
            block
            if isinstance(block, dict) and block.get("verdict") in EXIT_CODES
            else {"status": "not_comparable", "verdict": "not_comparable", "reason": f"{path}: holds no comparison"}
        )
    if not blocks:
        raise Unreadable(f"{folder}: no variant was compared; `python3 -m pipeline repro` makes them")
    return blocks


def decide(blocks: dict[str, dict[str, Any]], wanted: list[str]) -> dict[str, Any]:
    """The decision over ``wanted`` variants (all when empty); without a sound baseline nobody is judged."""
    unknown = sorted(set(wanted) - blocks.keys())
    if unknown:
        raise Unreadable(f"not compared: {', '.join(unknown)}; there are {', '.join(blocks)}")
    references = {name: block for name, block in blocks.items() if block.get("verdict") == "reference"}
    chosen = {name: blocks[name] for name in wanted or blocks}
    if (fault := _baseline_fault(blocks, references)) is not None:
        return {
            "verdict": "invalid",
            "exit_code": EXIT_INVALID,
            "reason": fault,
            "baseline": _baseline(references),
            "noise": _noise(references),
            "variants": {name: _line(block) | {"verdict": "not_judged"} for name, block in chosen.items()},
        }
    codes = {name: EXIT_CODES.get(block.get("verdict"), EXIT_INVALID) for name, block in chosen.items()}
    code = next((code for code in WORST_FIRST if code in codes.values()), EXIT_GOOD)
    verdicts = {EXIT_GOOD: "pass", EXIT_REFUSED: "fail", EXIT_INCONCLUSIVE: "inconclusive", EXIT_INVALID: "invalid"}
    decisive = [f"{name}: {block.get('reason')}" for name, block in chosen.items() if code and codes[name] == code]
    return {
        "verdict": verdicts[code],
        "exit_code": code,
        "reason": "; ".join(decisive) or None,
        "baseline": _baseline(references),
        "noise": _noise(references),
        "variants": {name: _line(block) for name, block in chosen.items()},
    }


def _baseline_fault(blocks: dict[str, dict], references: dict[str, dict]) -> str | None:
    if not references:
        broken = [f"{name}: {block.get('reason')}" for name, block in blocks.items() if name.startswith("native-")]
        return "there is no valid baseline to judge against" + (f" ({'; '.join(broken)})" if broken else "")
    for name, block in references.items():
        baseline = block.get("baseline") or {}
        if baseline.get("verdict") == "fail":
            return (
                f"{name} does not reach its reference scores, so the harness or the model is broken and no variant is "
                f"judged until that is explained: {baseline.get('reason')}"
            )
    return None


def _baseline(references: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        name: {key: (block.get("baseline") or {}).get(key) for key in ("verdict", "reason")}
        for name, block in references.items()
    }


def _noise(references: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The A/A run of each reference over all gateable items: its flips and floor, or why there is none."""
    keys = ("n", "difference", "right_to_wrong", "wrong_to_right", "floor")
    told = {}
    for name, block in references.items():
        if noise := block.get("noise"):
            numbers = noise["cells"].get("overall") or noise
            told[name] = {key: noise[key] for key in ("status", "reason")} | {key: numbers.get(key) for key in keys}
    return told


def _line(block: dict[str, Any]) -> dict[str, Any]:
    overall = block.get("overall") or {}
    keys = ("n", "native", "variant", "difference", "lower", "upper", "margin", "recovery")
    numbers = {key: overall.get(key) for key in (*keys, "noise_floor", "within_noise")}
    return {
        "verdict": block.get("verdict"),
        "reason": block.get("reason"),
        "alarms": block.get("alarms") or [],
    } | numbers


def text(decision: dict[str, Any]) -> str:
    """The decision for a terminal: baseline, one line a variant, what decided."""
    lines = [
        f"baseline {name}: {one['verdict']}" + (f" ({one['reason']})" if one["reason"] else "")
        for name, one in decision["baseline"].items()
    ]
    for name, one in decision["noise"].items():
        if one["status"] == "valid":
            lines.append(
                f"A/A {name} against itself: {one['right_to_wrong']} lost, {one['wrong_to_right']} won of {one['n']}; "
                f"differences up to {one['floor']:.3f} are noise"
            )
        else:
            lines.append(f"A/A {name}: no noise floor, {one['reason']}")
    width = max(map(len, decision["variants"]))
    for name, one in decision["variants"].items():
        line = f"{name:{width}}  {one['verdict']:14}"
        if one["lower"] is not None:
            line += (
                f" {one['native']:.3f} -> {one['variant']:.3f}, difference {one['difference']:+.3f} in "
                f"[{one['lower']:+.3f}, {one['upper']:+.3f}], margin {one['margin']:.3f}, n {one['n']}"
            )
            if one["within_noise"]:
                line += f"; within the noise of {one['noise_floor']:.3f}"
        lines.append(line.rstrip())
        if one["reason"] and one["verdict"] not in ("pass", "reference"):
            lines.append(f"{'':{width}}  because {one['reason']}")
        lines += [f"{'':{width}}  alarm: {alarm}" for alarm in one["alarms"]]
    if decision["verdict"] == "invalid" and decision["reason"]:
        lines.append(decision["reason"])
    lines.append(f"gate: {decision['verdict']} (exit {decision['exit_code']})")
    return "\n".join(lines)
