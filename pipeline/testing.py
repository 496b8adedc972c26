"""``python3 -m pipeline test``: pytest once in each environment, with the tests that belong there.

The file name says where a test under ``tests/`` runs: ``*_quant.py`` in quant, ``*_serve.py`` in serve-cpu, any other in core
(``tests/conftest.py`` chooses).  The plugin's tests run in serve-cpu.  To run one file: ``--env NAME path``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from pipeline import env

# One pytest each: (environment, folder).  The plugin's tests run engines in their own process, so they get one to themselves.
RUNS = (("core", "tests"), ("quant", "tests"), ("serve-cpu", "tests"), ("serve-cpu", "plugins/vllm_k3_cpu/tests"))
NO_TESTS = 5
REPOSITORY = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    """Run pytest with ``argv`` in every environment (``--env NAME`` first: in that one only); 0 when all of it passed."""
    if set(argv) & {"-h", "--help"}:
        print(f"usage: python3 -m pipeline test [--env NAME] [arguments of pytest]\n\n{__doc__}")
        return 0
    only, argv = (argv[1], argv[2:]) if argv[:1] == ["--env"] else (None, argv)
    codes, counts = {}, {"passed": 0, "failed": 0, "skipped": 0}
    for name, folder in RUNS:
        if only in (None, name):
            print(f"\n== {folder} in environment {name}", flush=True)
            codes[f"{folder} in {name}"] = run(env.ensure(name), name, folder, argv, counts)
    print("\n" + "\n".join(f"{run}: {'ok' if code in (0, NO_TESTS) else f'exit {code}'}" for run, code in codes.items()))
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if all(code == NO_TESTS for code in codes.values()):
        return NO_TESTS
    return next((code for code in codes.values() if code not in (0, NO_TESTS)), 0)


def run(python: Path, name: str, folder: str, argv: list[str], counts: dict[str, int]) -> int:
    """One pytest process over ``folder`` (or the paths in ``argv``); adds its outcomes to ``counts``, returns its exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "junit.xml"
        command = [str(python), "-m", "pytest", f"--junitxml={report}", "-o", f"testpaths={folder}", *argv]
        code = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"K3Q_TEST_ENV": name}).returncode
        if report.exists():
            for suite in ElementTree.parse(report).getroot().iter("testsuite"):
                total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
                bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
                counts["passed"] += total - bad - skipped
                counts["failed"] += bad
                counts["skipped"] += skipped
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
