"""After the whole table: one variant alone, back again, a changed report, another machine.  Asks dvc which stages it would run.

Runs in core.  The first two are real `dvc exp run`s (everything is cached, so they are quick); the others are dry.
"""

import json
import re
import sys
from pathlib import Path

from command import dvc

ALWAYS = {"fetch", "fingerprint"}
RUNNING = re.compile(r"Running stage '([^']+)'")
MENTIONED = re.compile(r"[Ss]tage '([^']+)'")


def told(*arguments: str) -> str:
    done = dvc(*arguments)
    return done.stdout + done.stderr


def expect(what: str, condition: bool, seen: object) -> None:
    if not condition:
        sys.exit(f"{what}: NOT so; dvc said {seen}")
    print(f"{what}: yes", flush=True)


def would_run() -> set[str]:
    """Names of the stages that `dvc repro` would run now, the always-changed ones aside."""
    return set(RUNNING.findall(told("repro", "--dry"))) - ALWAYS


def with_change(path: str, change) -> set[str]:
    """:func:`would_run` while the file is changed."""
    file = Path(path)
    before = file.read_bytes()
    try:
        file.write_text(change(before.decode()))
        return would_run()
    finally:
        file.write_bytes(before)


def kinds(stages: set[str]) -> set[str]:
    return {name.partition("@")[0] for name in stages}


def main() -> None:
    text = told("exp", "run", "-S", "quant=fp8")
    others = {name for name in MENTIONED.findall(text) if "@" in name and not name.partition("@")[2].startswith("fp8")}
    expect("`dvc exp run -S quant=fp8` touches fp8's stages only", not others and "evaluate@fp8-auto" in text, sorted(others))
    text = told("exp", "run", "-S", "quant=all")
    ran = set(RUNNING.findall(text)) - ALWAYS
    expect("back to quant=all runs nothing again but the report", ran <= {"report"}, sorted(ran))
    expect("nothing is left to run", not would_run(), sorted(would_run()))
    ran = with_change("pipeline/report/table.py", lambda text: text + "\n# changed\n")
    expect("a changed report re-runs the report only", ran == {"report"}, sorted(ran))

    def other(key: str, value: object):
        return lambda text: json.dumps(json.loads(text) | {key: value})

    ran = kinds(with_change("metrics/hardware.json", other("cpu", {"model": "another"})))
    expect("another machine re-runs bench and neither evaluate nor quantize", "bench" in ran and not ran & {"evaluate", "quantize"}, ran)
    ran = kinds(with_change("metrics/software.json", other("instruction_set", ["sse2"])))
    expect("another instruction set re-runs evaluate and bench, not quantize", {"bench", "evaluate"} <= ran and "quantize" not in ran, ran)


if __name__ == "__main__":
    main()
