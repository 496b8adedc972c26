"""``python3 -m pipeline test``: pytest once in each environment, with the tests that belong there.

The file name says where a test runs: ``*_quant.py`` in quant, ``*_serve.py`` and everything of the plugin in serve-cpu,
any other in core (``tests/conftest.py`` and the plugin's own do the choosing).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from pipeline import env

# Where each environment's tests lie; the plugin's need torch from their conftest on.
ENVIRONMENTS = {"core": "tests", "quant": "tests", "serve-cpu": "tests plugins/vllm_k3_cpu/tests"}
NO_TESTS = 5
REPOSITORY = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    """Run pytest with ``argv`` in every environment (``--env NAME`` first: in that one only); 0 when all of it passed."""
    environments = tuple(ENVIRONMENTS)
    if argv[:1] == ["--env"]:
        environments, argv = (argv[1],), argv[2:]
    codes, counts = {}, {"passed": 0, "failed": 0, "skipped": 0}
    for name in environments:
        print(f"\n== tests in environment {name}", flush=True)
        codes[name] = run(env.ensure(name), name, argv, counts)
    print("\n" + ", ".join(f"{name}: {'ok' if code in (0, NO_TESTS) else f'exit {code}'}" for name, code in codes.items()))
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if all(code == NO_TESTS for code in codes.values()):
        return NO_TESTS
    return next((code for code in codes.values() if code not in (0, NO_TESTS)), 0)


def run(python: Path, name: str, argv: list[str], counts: dict[str, int]) -> int:
    """One pytest process; adds its outcomes to ``counts`` and returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [str(python), "-m", "pytest", f"--junitxml={report}", "-o", f"testpaths={ENVIRONMENTS[name]}", *argv]
        code = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"K3Q_TEST_ENV": name}).returncode
        if report.exists():
            for suite in ElementTree.parse(report).getroot().iter("testsuite"):
                total, bad, skipped = (
                    int(suite.get("tests", 0)),
                    int(suite.get("failures", 0)) + int(suite.get("errors", 0)),
                    int(suite.get("skipped", 0)),
                )
                counts["passed"] += total - bad - skipped
                counts["failed"] += bad
                counts["skipped"] += skipped
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
