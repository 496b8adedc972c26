"""Chooses the tests of the environment that runs: another environment's files are not even imported."""

import os
import signal
from pathlib import Path

# A shell that starts us in the background has SIGINT ignored, and every child would inherit that: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

SUFFIXES = {"_quant": "quant", "_serve": "serve-cpu"}


def environment_of(path: Path) -> str:
    return next((name for suffix, name in SUFFIXES.items() if path.stem.endswith(suffix)), "core")


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """Also a folder all of whose tests belong elsewhere: its conftest.py would import what is not here."""
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    tests = [path for path in files if path.name.startswith("test_")]
    wanted = os.environ.get("K3Q_TEST_ENV", "core")
    return True if tests and not any(environment_of(path) == wanted for path in tests) else None
