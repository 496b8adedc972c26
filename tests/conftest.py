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
    if not (collection_path.is_file() and collection_path.name.startswith("test_")):
        return None
    return True if environment_of(collection_path) != os.environ.get("K3Q_TEST_ENV", "core") else None
