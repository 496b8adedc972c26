from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import pytest

from pipeline.serve import lock

HOLDER = """
import sys, time
sys.path.insert(0, {root!r})
from pipeline.serve.lock import measuring
with measuring("another bench"):
    print("held", flush=True)
    time.sleep({seconds})
"""


def holder(seconds):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(root=root, seconds=seconds)],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": tempfile.gettempdir()},
    )
    assert process.stdout.readline() == b"held\n"
    return process


def test_the_second_waits_and_says_for_whom(capfd):
    process = holder(0.8)
    began = time.monotonic()
    with lock.measuring("my bench"):
        assert time.monotonic() - began > 0.4
    assert "my bench: waiting for the machine; it is measuring: another bench" in capfd.readouterr().err
    process.wait()


def test_a_killed_holder_lets_go():
    process = holder(60)
    process.kill()
    process.wait()
    began = time.monotonic()
    with lock.measuring("my bench"):
        assert time.monotonic() - began < 2


def test_the_same_process_may_hold_it_twice():
    with lock.measuring("outer") as outer, lock.measuring("inner") as inner:
        assert inner == outer
    with lock.measuring("again"):
        pass


def test_a_planted_link_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("kept")
    os.symlink(target, lock.lock_path())
    with pytest.raises(OSError):
        with lock.measuring("x"):
            pass
    assert target.read_text() == "kept"
