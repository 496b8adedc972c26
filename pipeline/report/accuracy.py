"""The report's section on accuracy: against native, by length of the answer and by script, and what is noise."""

from __future__ import annotations

from typing import Any

from pipeline.evals.accuracy import in_order

Comparisons = dict[str, dict[str, Any]]
GATED = ["variant", "verdict", "native's", "its own", "difference", "bounds", "lost", "won", "McNemar p", "noise floor"]
PICTURES = ("heat_maps.svg", "accuracy_by_length.svg", "flips.svg")


def section(comparisons: Comparisons) -> list[str]:
    """Lines of Markdown; none where nothing was compared."""
    if not comparisons:
        return []
    lines = ["## Accuracy against native", ""]
    lines += [sentence for block in comparisons.values() if (sentence := noise_sentence(block.get("noise")))]
    lines += ["", *_table(GATED, _gated(comparisons))]
    alarms = [f"- {name}: alarm, {alarm}" for name, block in comparisons.items() for alarm in block.get("alarms") or ()]
    lines += [*alarms, ""] if alarms else []
    lines += _axis(
        comparisons,
        "by_generated_tokens",
        "By length of native's answer (tokens)",
        "Damage that grows with the answer shows here: long answers are judged apart (`long_output`, `late_values`).",
    )
    lines += _axis(comparisons, "by_script", "By script of question and answer", "")
    lines += _table(
        ["variant", "unscored counted wrong", "unscored left out", "unscored", "repeating"],
        [[name, *_bounds(block["all_items"])] for name, block in comparisons.items() if block.get("all_items")],
        "Answers that could not be scored",
        "Empty, unfinished, degenerate, stuck or failed; too many of them make a run invalid.",
    )
    lines += _divergence(comparisons)
    for picture in PICTURES:
        lines += [f"![{picture.removesuffix('.svg').replace('_', ' ')}]({picture})", ""]
    return lines


def noise_sentence(noise: dict[str, Any] | None) -> str | None:
    """What native against itself showed, in words."""
    if noise is None:
        return None
    if noise["status"] != "valid":
        return f"Noise floor: none, {noise['reason']}."
    gated = noise["cells"].get("overall") or noise
    text = (
        f"Noise floor: native asked twice lost {gated['right_to_wrong']} and won {gated['wrong_to_right']} of "
        f"{gated['n']} gated answers, so a difference of up to {gated['floor']:.3f} is noise (each length has its own "
        "floor)."
    )
    fidelity = noise.get("fidelity") or {}
    if fidelity.get("status") == "valid":
        text += f"  Its KL divergence from itself is {fidelity['kl_mean']:.1e} nats a token."
    return text


def _gated(comparisons: Comparisons) -> list[list[str]]:
    """What the gate judged over all gateable items."""
    rows = []
    for name, block in comparisons.items():
        if (cell := block.get("overall")) is None:
            if block["verdict"] != "reference":
                rows.append([name, block["verdict"], *["—"] * 8])
            continue
        within = {True: "within", False: "above", None: "—"}[cell.get("within_noise")]
        rows.append(
            [
                name,
                block["verdict"],
                f"{cell['native']:.3f}",
                f"{cell['variant']:.3f}",
                f"{cell['difference']:+.3f}",
                f"{cell['lower']:+.3f} to {cell['upper']:+.3f}",
                str(cell["right_to_wrong"]),
                str(cell["wrong_to_right"]),
                "—" if cell["mcnemar_p"] is None else f"{cell['mcnemar_p']:.2g}",
                within,
            ]
        )
    return rows


def _axis(comparisons: Comparisons, key: str, title: str, remark: str) -> list[str]:
    """Accuracy of every variant along one axis, with the number of items."""
    with_axis = {name: block[key] for name, block in comparisons.items() if block.get(key)}
    if not with_axis:
        return []
    sizes = next(iter(with_axis.values()))
    groups = in_order(sizes)  # JSON keeps them by the alphabet
    header = ["variant", *(f"{group} (n {sizes[group]['n']})" for group in groups)]
    rows = [
        [name, *(f"{cells[group]['variant']:.3f}" if group in cells else "—" for group in groups)]
        for name, cells in with_axis.items()
    ]
    return _table(header, rows, title, remark)


def _divergence(comparisons: Comparisons) -> list[str]:
    """KL from native by position in the text and on answers alone; native's own line is its A/A run."""
    found = {}
    for name, block in comparisons.items():
        fidelity = block.get("fidelity") or (block.get("noise") or {}).get("fidelity") or {}
        if fidelity.get("status") == "valid":
            found[name] = fidelity
    if not found:
        return []
    places = in_order({place for fidelity in found.values() for place in fidelity["by_position"]})
    rows = []
    for name, fidelity in found.items():
        cells = [fidelity["by_position"].get(place) for place in places] + [fidelity["answers"]]
        kl = ["—" if cell is None else f"{cell['kl']:.1e}" for cell in cells]
        top1 = fidelity["top1_decided"]
        perplexity = f"{fidelity['perplexity_variant']:.3f}"
        rows.append([name, *kl, "—" if top1 is None else f"{top1:.1%}", perplexity])
    return _table(
        ["variant", *places, "answers", "first choice kept", "perplexity"],
        rows,
        "Divergence from native (KL, nats a token) by position in the text",
        "First choices are counted where native gives its own at least half.  An alarm, never a verdict.",
    )


def _bounds(cell: dict[str, Any]) -> list[str]:
    """Accuracy with unscored answers counted as wrong and left out, and their share; repetition."""
    unscored = cell["unscored_rate_variant"]
    left_out = f"{cell['variant'] / (1 - unscored):.3f}" if unscored < 1 else "—"
    return [f"{cell['variant']:.3f}", left_out, f"{unscored:.1%}", f"{cell['repetition_rate_variant']:.1%}"]


def _table(header: list[str], rows: list[list[str]], title: str = "", remark: str = "") -> list[str]:
    lines = [f"### {title}", ""] if title else []
    lines += [remark, ""] if remark else []
    lines += ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]
