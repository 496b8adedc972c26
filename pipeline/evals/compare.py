"""Did quantization do harm?  One variant against native, answer by answer, at a margin and with an honest confidence.

A cell (all items, one length, long outputs, late values of long lists) **passes** when the lower one-sided bound of
the accuracy difference is above minus its margin, **fails** when the upper one is below it, and is **inconclusive**
otherwise.  Bounds are the more cautious of Tango's score interval and the clustered bootstrap.  To pass, *every* cell
must pass: an intersection-union test, which needs no correction.  To fail, *one* cell is enough, so those p-values
are Holm-adjusted.  Cells of (family, length) in which native itself is below ``native_floor`` cannot show harm; they
are left out and listed.

A long list is also judged value by value: its values from place ``long_output_tokens`` on, lists resampled whole,
form the cell ``late_values``.  It shows damage that grows with the answer even where hardly a list is right from end
to end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evals.breakdown import breakdown, counts
from pipeline.evals.runs import SCORED, Run, load_run, right
from pipeline.evals.settings import GateSettings, parse_gates
from pipeline.stats import paired, power
from pipeline.stats.multiplicity import holm
from pipeline.stats.noise import noise_floor

LENGTH, OVERALL = "length ", "overall"
Row = dict[str, Any]
Pair = tuple[Row, Row]
Answers = tuple[list[bool], list[bool], list[str]]
"""(native right, variant right, cluster) of each pair."""


def compare(
    native_samples: Path | str | Run,
    variant_samples: Path | str | Run,
    gates: GateSettings | dict,
    *,
    fidelity: dict[str, Any] | None = None,
    noise: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``comparison`` block of a variant's metrics.

    ``status`` is ``valid``, ``invalid`` (one of the runs cannot be trusted) or ``not_comparable`` (the two were not
    run alike); ``verdict`` is ``pass``, ``fail``, ``inconclusive`` or ``not_gateable``, and the status again where
    that is not valid. ``fidelity`` (of :func:`pipeline.evals.fidelity.compare_logprobs`) can raise alarms, never a
    verdict.  ``noise`` (of :func:`noise`) says which differences native shows against itself.
    """
    gates, native, variant = parse_gates(gates), load_run(native_samples), load_run(variant_samples)
    if (problem := _unlike(native, variant, gates)) is not None:
        status, reason = problem
        return {"status": status, "reason": reason, "verdict": status, "fidelity": fidelity, "alarms": []}
    others = variant.by_hash
    pairs = [(row, others[row["prompt_hash"]]) for row in native.rows]
    gateable, excluded = _gateable(pairs, gates)
    cells = _cells(gateable, pairs, gates, noise)
    families = sorted({before["family"] for before, _ in gateable} | set(_late_families(cells)))
    verdict, reason = _verdict(cells, families, gates)
    return {
        "status": "valid",
        "verdict": verdict,
        "reason": reason,
        "overall": cells.get("overall"),
        "by_length": {name.removeprefix(LENGTH): cell for name, cell in cells.items() if name.startswith(LENGTH)},
        "long_output": cells.get("long_output"),
        "late_values": cells.get("late_values"),
        "gateable_families": families,
        "excluded_cells": excluded,
        "fidelity": fidelity,
        "alarms": _alarms(fidelity, cells, gates),
    } | breakdown(pairs)


def noise(
    first_samples: Path | str | Run, second_samples: Path | str | Run, gates: GateSettings | dict
) -> dict[str, Any]:
    """An A/A run: native twice over the same prompts.  ``cells`` has a floor for every cell that the gate judges."""
    gates, first, second = parse_gates(gates), load_run(first_samples), load_run(second_samples)
    if (problem := _unlike(first, second, gates, ("first", "second"))) is not None:
        return {"status": problem[0], "reason": problem[1], "floor": None, "cells": {}}
    others = second.by_hash
    pairs = [(row, others[row["prompt_hash"]]) for row in first.rows]
    groups = _groups(_gateable(pairs, gates)[0], pairs, gates)
    cells = {name: noise_floor(*answers, gates.alpha) for name, (answers, _) in groups.items()}
    return {"status": "valid", "reason": None} | noise_floor(*_answers(pairs), gates.alpha) | {"cells": cells}


def _unlike(
    native: Run, variant: Run, gates: GateSettings, names: tuple[str, str] = ("native", "variant")
) -> tuple[str, str] | None:
    """Why the two runs cannot be compared, as (status, reason)."""
    for name, run in zip(names, (native, variant), strict=True):
        if run.header.get("status") != "valid":
            return "invalid", f"the {name} run is {run.header.get('status')}: {run.header.get('reason')}"
    if native.header.get("dataset_key") != variant.header.get("dataset_key"):
        keys = [str(run.header.get("dataset_key"))[:12] for run in (native, variant)]
        return "not_comparable", f"different data sets: {keys[0]} and {keys[1]}"
    for key in gates.conditions_must_match:
        values = [run.header.get("conditions", {}).get(key) for run in (native, variant)]
        if values[0] != values[1]:
            return "not_comparable", _tell_unlike(key, *values)
    if native.repeated or variant.repeated:
        return "not_comparable", f"prompts occur twice (native {native.repeated}, variant {variant.repeated})"
    missing = native.by_hash.keys() ^ variant.by_hash.keys()
    if missing or not native.rows:
        return (
            "not_comparable",
            f"{len(missing)} prompts are in one run only ({len(native.rows)} and {len(variant.rows)} in all)",
        )
    return None


def _tell_unlike(key: str, native: Any, variant: Any) -> str:
    if isinstance(native, dict) and isinstance(variant, dict):
        name = next(name for name in sorted(native | variant) if native.get(name) != variant.get(name))
        key, native, variant = f"{key}.{name}", native.get(name), variant.get(name)
    return f"{key}: native ran with {native!r}, the variant with {variant!r}"


def _gateable(pairs: list[Pair], gates: GateSettings) -> tuple[list[Pair], list[dict[str, Any]]]:
    """Pairs of the cells in which native is good enough to lose something, and the cells left out."""
    cells: dict[tuple[str, int], list[Pair]] = {}
    for pair in pairs:
        cells.setdefault((pair[0]["family"], pair[0]["length"]), []).append(pair)
    kept, excluded = [], []
    for (family, length), group in sorted(cells.items()):
        accuracy = sum(right(before) for before, _ in group) / len(group)
        if accuracy >= gates.native_floor:
            kept += group
        else:
            excluded.append(
                {"family": family, "length": length, "n": len(group), "native": accuracy, "verdict": "not_gateable"}
            )
    return kept, excluded


def _groups(
    gateable: list[Pair], pairs: list[Pair], gates: GateSettings
) -> dict[str, tuple[Answers, list[str] | None]]:
    """What the gate judges: ``length N`` ..., ``long_output``, ``late_values``, ``overall``; answers, and families
    where they are not those of the items.
    """
    groups: dict[str, tuple[Answers, list[str] | None]] = {
        f"{LENGTH}{length}": (_answers([pair for pair in gateable if pair[0]["length"] == length]), None)
        for length in sorted({before["length"] for before, _ in gateable})
    }
    long_output = [pair for pair in gateable if (pair[0]["generated_tokens"] or 0) >= gates.long_output_tokens]
    if long_output:
        groups["long_output"] = _answers(long_output), None
    if (late := _late_values(pairs, gates)) is not None:
        groups["late_values"] = late
    if gateable:
        groups[OVERALL] = _answers(gateable), None
    return groups


def _cells(
    gateable: list[Pair], pairs: list[Pair], gates: GateSettings, noise: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Every gated cell with its verdict."""
    cells: dict[str, dict[str, Any]] = {}
    for name, (answers, families) in _groups(gateable, pairs, gates).items():
        margin = gates.accuracy_margin if name == OVERALL else gates.length_margin
        cells[name] = _cell(*answers, margin, gates, _floor(name, gates, noise))
        if families is not None:
            cells[name]["families"] = families
    for key in ("inferiority_p", "mcnemar_p"):
        tested = [cell for name, cell in cells.items() if cell[key] is not None and name != OVERALL]
        for cell, adjusted in zip(tested, holm([cell[key] for cell in tested]), strict=True):
            cell[f"{key}_holm"] = adjusted
        if OVERALL in cells:  # the primary question stands alone: it is not adjusted
            cells[OVERALL][f"{key}_holm"] = cells[OVERALL][key]
    for cell in cells.values():
        cell["verdict"] = _cell_verdict(cell, gates.alpha)
    return cells


def _floor(name: str, gates: GateSettings, noise: dict[str, Any] | None) -> float | None:
    """The noise floor of a cell: the one of the parameters, else what the A/A run showed there."""
    if gates.noise_floor is not None:
        return gates.noise_floor
    return ((noise or {}).get("cells") or {}).get(name, {}).get("floor")


def _answers(pairs: list[Pair]) -> Answers:
    """(native right, variant right, cluster) of each item."""
    return [right(a) for a, _ in pairs], [right(b) for _, b in pairs], [a["cluster"] for a, _ in pairs]


def _late_values(pairs: list[Pair], gates: GateSettings) -> tuple[Answers, list[str]] | None:
    """The same for each value of long answers from place ``long_output_tokens`` on, with the families they are of.

    Only families in which native finds at least ``native_floor`` of those values; ``None`` when there is none.
    """
    before, after, clusters, families = [], [], [], []
    for family in sorted({a["family"] for a, _ in pairs}):
        rows = [(a, b) for a, b in pairs if a["family"] == family and len(a["hits"]) > gates.long_output_tokens]
        late = [
            (hit, other, a["cluster"])
            for a, b in rows
            for hit, other in zip(
                _hits(a)[gates.long_output_tokens :], _hits(b)[gates.long_output_tokens :], strict=True
            )
        ]
        if late and sum(hit for hit, _, _ in late) >= gates.native_floor * len(late):
            families.append(family)
            before += [hit for hit, _, _ in late]
            after += [other for _, other, _ in late]
            clusters += [cluster for _, _, cluster in late]
    return ((before, after, clusters), families) if families else None


def _hits(row: Row) -> list[bool]:
    """Values found; none in an answer that could not be scored."""
    return [bool(hit) and row["outcome"] in SCORED for hit in row["hits"]]


def _late_families(cells: dict[str, dict[str, Any]]) -> list[str]:
    return cells["late_values"]["families"] if "late_values" in cells else []


def _cell(
    before: list[bool],
    after: list[bool],
    clusters: list[str],
    margin: float,
    gates: GateSettings,
    floor: float | None,
) -> dict[str, Any]:
    """Counts, bounds, p-values and what this many pairs can support."""
    flips = paired.Flips.of(before, after)
    effect, effective_n = paired.effective_flips(before, after, clusters)
    tango = paired.tango_clustered(before, after, clusters, gates.alpha)
    resampled = paired.bootstrap_interval(
        [b - a for a, b in zip(before, after, strict=True)],
        clusters,
        gates.alpha,
        resamples=gates.bootstrap_resamples,
        seed=gates.seed,
    )
    supported = power.smallest_margin(effective_n, flips.discordance, gates.alpha, gates.power)
    scaled, freedom = paired.scaled(flips, effect), paired.cluster_freedom(clusters)
    return counts(before, after, clusters) | {
        "margin": margin,
        "lower": min(tango[0], resampled[0]),
        "upper": max(tango[1], resampled[1]),
        "confidence": 1 - gates.alpha,
        "tango": list(tango),
        "bootstrap": list(resampled),
        "clusters": len(set(clusters)),
        "effective_n": effective_n,
        "noninferiority_p": paired.noninferiority_p(scaled, margin, freedom),
        "inferiority_p": paired.inferiority_p(scaled, margin, freedom),
        "smallest_margin": supported,
        "margin_supported": supported <= margin,
        "n_needed": round(effect * power.pairs_for_margin(margin, flips.discordance, gates.alpha, gates.power)),
        "noise_floor": floor,
        "within_noise": None if floor is None else abs(flips.difference) <= floor,
        "below_noise_floor": None if floor is None else margin < floor,
    }


def _cell_verdict(cell: dict[str, Any], alpha: float) -> str:
    if cell["lower"] > -cell["margin"]:
        return "pass"
    if cell["upper"] < -cell["margin"] and cell["inferiority_p_holm"] < alpha:
        return "fail"
    return "inconclusive"


def _verdict(cells: dict[str, dict[str, Any]], families: list[str], gates: GateSettings) -> tuple[str, str | None]:
    """The verdict over all cells, and why it is not a pass."""
    failed = [_tell(name, cell) for name, cell in cells.items() if cell["verdict"] == "fail"]
    if failed:
        return "fail", "; ".join(failed)
    absent = sorted(set(gates.required_families) - set(families))
    if len(families) < gates.min_gateable_families or absent:
        return "not_gateable", (
            f"native is good enough to judge in {len(families)} families ({', '.join(families) or 'none'}); "
            f"needed are {gates.min_gateable_families}" + (f", among them {', '.join(absent)}" if absent else "")
        )
    open_cells = [_tell(name, cell) for name, cell in cells.items() if cell["verdict"] == "inconclusive"]
    return ("inconclusive", "; ".join(open_cells)) if open_cells else ("pass", None)


def _tell(name: str, cell: dict[str, Any]) -> str:
    return (
        f"{name}: {cell['native']:.3f} -> {cell['variant']:.3f} "
        f"({cell['right_to_wrong']} lost, {cell['wrong_to_right']} won "
        f"of {cell['n']}), difference in [{cell['lower']:+.3f}, {cell['upper']:+.3f}], margin {cell['margin']:.3f}; "
        f"had nothing been lost, {cell['n']} items would show {cell['smallest_margin']:.3f}, and {cell['n_needed']} the margin"
    )


def _alarms(fidelity: dict[str, Any] | None, cells: dict[str, dict[str, Any]], gates: GateSettings) -> list[str]:
    """What a person should look at; no verdict."""
    alarms = []
    if fidelity and fidelity.get("status") == "valid":
        kl, top1 = fidelity["kl_mean"], fidelity["top1_decided"]
        if gates.kl_alarm is not None and kl > gates.kl_alarm:
            alarms.append(f"mean KL divergence from native is {kl:.4f} nats a token (alarm above {gates.kl_alarm})")
        if gates.top1_alarm is not None and top1 is not None and top1 < gates.top1_alarm:
            alarms.append(
                f"the first choice is native's in {top1:.1%} of the places where native is decided "
                f"(alarm below {gates.top1_alarm:.0%})"
            )
    alarms += [
        f"{name}: the margin of {cell['margin']:.3f} is below the noise floor of {cell['noise_floor']:.3f}: "
        "it judges noise"
        for name, cell in cells.items()
        if cell["below_noise_floor"]
    ]
    alarms += [
        f"{name}: better than native by more than the margin (at least {cell['lower']:+.3f}): re-encoding improves no "
        "model, so look for what else differed between the two runs"
        for name, cell in cells.items()
        if cell["lower"] > cell["margin"]
    ]
    return alarms
