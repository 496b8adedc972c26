import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from pipeline.errors import Unreadable
from pipeline.files import atomic_open, read_json, sha256_file, sha256_json, write_json


def test_a_failing_writer_leaves_the_old_file_and_no_temporary(tmp_path):
    target = tmp_path / "result.json"
    write_json(target, {"a": 1})
    with pytest.raises(RuntimeError), atomic_open(target) as stream:
        stream.write(b"half")
        raise RuntimeError
    assert read_json(target) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    target = tmp_path / "result.json"
    write_json(target, {"a": 1})

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as error:
        write_json(target, {"a": 2})
    assert error.value.filename == str(target) and read_json(target) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_killed_writer_leaves_nothing_that_looks_finished(tmp_path):
    target = tmp_path / "result.json"
    code = (
        "import sys, os, signal\nfrom pipeline.files import atomic_open\n"
        "with atomic_open(sys.argv[1]) as f:\n    f.write(b'half'); f.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)])
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    assert all(p.suffix == ".tmp" for p in tmp_path.iterdir())


def test_nan_is_refused_before_a_byte_is_written(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{}"])
def test_unreadable_json_names_the_file(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(Unreadable, match="broken.json"):
        read_json(path)
    with pytest.raises(Unreadable, match="no such file"):
        read_json(tmp_path / "absent.json")


def test_a_result_with_a_nan_is_damage_and_a_strangers_config_with_infinity_is_not(tmp_path):
    path = tmp_path / "x.json"
    for name in ("NaN", "Infinity", "-Infinity"):
        path.write_text(f'{{"a": [1, {name}]}}')
        with pytest.raises(Unreadable, match=f"x.json: not valid JSON .{name} is no number"):
            read_json(path, finite=True)
        assert len(read_json(path)["a"]) == 2


def test_written_files_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_json(tmp_path / "x.json", 1)
    finally:
        os.umask(old)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o640


def test_hashes(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_json({"b": 1, "a": [1.5]}) == sha256_json(json.loads('{"a": [1.5], "b": 1}'))
