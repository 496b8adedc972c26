"""Safetensors headers: what the reference library writes is read, what it would not read is named."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from pipeline.checkpoint.headers import HeaderError, build_header, read_header


def write(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(start, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_reads_what_the_reference_library_writes(tmp_path):
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(5, dtype=np.uint8),
        "s": np.array(3, np.float16),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"format": "np"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "np"}
    raw = (tmp_path / "x.safetensors").read_bytes()
    for name, array in tensors.items():
        tensor = header.tensors[name]
        assert tensor.shape == array.shape
        assert raw[tensor.start : tensor.end] == array.tobytes()


def test_the_reference_library_reads_what_is_built(tmp_path):
    raw, tensors = build_header([("w", "F32", (2, 2)), ("s", "I64", (2,)), ("b", "U8", (3,))])
    data = np.arange(4, dtype=np.float32).tobytes() + np.array([7, 8]).tobytes() + b"abc"
    (tmp_path / "x.safetensors").write_bytes(raw + data)
    assert [tensor.start for tensor in tensors] == [len(raw), len(raw) + 16, len(raw) + 32]
    with safe_open(tmp_path / "x.safetensors", "np") as read:
        assert read.get_tensor("w").tolist() == [[0, 1], [2, 3]]
        assert read.get_tensor("s").tolist() == [7, 8]
        assert read.get_tensor("b").tobytes() == b"abc"


def test_a_misaligned_layout_is_not_built():
    with pytest.raises(ValueError, match="s: I64 at byte 3"):
        build_header([("b", "U8", (3,)), ("s", "I64", (2,))])


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry(0, 4)}, b"abc", "truncated"),
        ({"a": entry(0, 4)}, b"abcde", "trailing"),
        ({"a": entry(0, 4), "b": entry(3, 6)}, b"abcdef", "b: .*overlaps"),
        ({"a": entry(0, 2), "b": entry(3, 6)}, b"abcdef", "b: .*hole"),
        ({"a": entry(0, 4, "F32", [2])}, b"abcd", r"F32 \[2\] needs 8 bytes, has 4"),
        ({"a": entry(0, 4, "F99")}, b"abcd", "unknown dtype 'F99'"),
        ({"a": {"dtype": "U8"}}, b"", "a: malformed"),
        ({"a": entry(0, -1, shape=[1])}, b"", "a: malformed"),
        ({"a": 3}, b"", "a: malformed"),
        (b"{nope", b"", "not valid JSON"),
        (b"[1]", b"", "not a JSON object"),
        (b" {}", b"", "begins with its first byte"),
        ('{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16-le"), b"", "not valid JSON"),
        ({"__metadata__": {"step": 7}}, b"", "__metadata__ is no mapping"),
        ({"__metadata__": ["pt"]}, b"", "__metadata__ is no mapping"),
        ({"a": entry(0, 4) | {"dtype": ["U8"]}}, b"abcd", "a: malformed"),
        ({"a": entry(0, 4) | {"shape": "four"}}, b"abcd", "a: malformed"),
        ({"a": entry(0, 4) | {"data_offsets": [0, 4, 8]}}, b"abcd", "a: malformed"),
        ({"a": entry(0, 1, "F4", [3])}, b"a", r"a: F4 \[3\] does not fill whole bytes"),
        (b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": {}}', b"", "'a' appears twice"),
    ],
)
def test_damage_is_named(tmp_path, header, data, says):
    with pytest.raises(HeaderError, match=says):
        read_header(write(tmp_path / "x.safetensors", header, data))


def test_a_length_beyond_the_file_is_not_read(tmp_path):
    with pytest.raises(HeaderError, match="header claims 1099511627776 bytes, the file has 10"):
        read_header(write(tmp_path / "x.safetensors", b"{}", length=1 << 40))
    # The reference library gives up at 100 MB; a sparse file stands for one.
    path = write(tmp_path / "long.safetensors", b"{", length=100_000_001)
    with open(path, "r+b") as stream:
        stream.truncate(100_000_100)
    with pytest.raises(HeaderError, match="header of 100000001 bytes, no reader takes more than 100000000"):
        read_header(path)
    (tmp_path / "short.safetensors").write_bytes(b"\0\0")
    with pytest.raises(HeaderError, match="2 bytes, too short"):
        read_header(tmp_path / "short.safetensors")


def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4986211280\n")
    with pytest.raises(HeaderError, match="a Git LFS pointer of 135 bytes.*`git lfs pull`"):
        read_header(path)


def test_empty_tensors_and_tensors_without_dimensions_are_read(tmp_path):
    header = {"a": entry(0, 0, "F32", [0, 3]), "b": entry(0, 4, "F32", []), "é.weight": entry(4, 4, shape=[0])}
    tensors = read_header(write(tmp_path / "x.safetensors", header, b"abcd")).tensors
    assert {name: tensor.size_bytes for name, tensor in tensors.items()} == {"a": 0, "b": 4, "é.weight": 0}
