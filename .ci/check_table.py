"""What the main job must have produced: eight rows, every figure in each, and the orderings that physics dictates."""

import json
import sys
from pathlib import Path

ROWS = {path.stem: json.loads(path.read_text()) for path in sorted(Path("metrics/variants").glob("*.json"))}
EXPECTED = {f"{quant}-{kv}" for quant in ("native", "fp8", "int8", "w4a16") for kv in ("auto", "fp8")}
FIGURES = (
    "accuracy",
    "output_tok_s",
    "ttft_ms_p50",
    "weight_bytes",
    "kv_bytes_per_token",
    "kv_capacity_tokens",
    "state_bytes_per_sequence",
    "activation_peak_bytes",
)
COMPARISONS = {path.stem: json.loads(path.read_text()) for path in sorted(Path("metrics/comparisons").glob("*.json"))}
ITEMS, FAMILIES, NATIVE = 240, 4, 0.8


def weak_evidence() -> list[str]:
    """Where the evaluation has too little to say: items, gateable families, native's own accuracy, the A/A run."""
    found = [f"{name}: {row['items']} items, {ITEMS} are wanted" for name, row in ROWS.items() if row["items"] < ITEMS]
    for name, block in COMPARISONS.items():
        if block["verdict"] == "reference":
            if block["noise"]["status"] != "valid":
                found.append(f"{name}: no A/A run: {block['noise']['reason']}")
            if block["baseline"]["verdict"] != "pass":
                found.append(f"{name}: against its reference scores: {block['baseline']['reason']}")
            continue
        if len(block["gateable_families"]) < FAMILIES:
            found.append(f"{name}: only {block['gateable_families']} can be judged")
        for length, cell in block["by_length"].items():
            if cell["native"] < NATIVE:
                found.append(f"{name}: native is at {cell['native']:.3f} at length {length}, {NATIVE} is wanted")
            if not cell["margin_supported"]:
                found.append(f"{name}: {cell['n']} items at length {length} do not support the margin of {cell['margin']}")
    return found


def problems() -> list[str]:
    """Everything that is wrong, in words."""
    found = [f"row {name} is missing" for name in sorted(EXPECTED - ROWS.keys())]
    for name, row in ROWS.items():
        found += [f"{name}: {key} is {row.get(key)!r}" for key in FIGURES if not row.get(key)]
        if row["status"] != "valid":
            found.append(f"{name}: {row['status']}, {row['reason']}")
    if found:
        return found
    for kv in ("auto", "fp8"):
        for small in ("native", "w4a16"):
            if ROWS[f"{small}-{kv}"]["weight_bytes"] >= ROWS[f"fp8-{kv}"]["weight_bytes"]:
                found.append(f"{small}-{kv}: its weights are not smaller than fp8's")
    for quant in ("native", "fp8", "int8", "w4a16"):
        full, half = ROWS[f"{quant}-auto"], ROWS[f"{quant}-fp8"]
        if half["kv_bytes_per_token"] * 2 != full["kv_bytes_per_token"]:
            found.append(f"{quant}: an fp8 KV cache takes {half['kv_bytes_per_token']} B a token, bf16 {full['kv_bytes_per_token']}")
        if half["kv_capacity_tokens"] <= full["kv_capacity_tokens"]:
            found.append(f"{quant}: an fp8 KV cache holds no more tokens")
    return found + weak_evidence()


if __name__ == "__main__":
    if bad := problems():
        sys.exit("\n".join(bad))
    for name, row in ROWS.items():
        if row["speed"] == "invalid":  # another load on this machine does that, and the row says so
            print(f"note: the speed of {name} is invalid: {row['speed_reason']}")
    print(f"{len(ROWS)} rows, all figures there, orderings as they must be")
