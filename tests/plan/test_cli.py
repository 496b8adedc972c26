"""The command: exit codes, JSON keys, time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.plan.cli import main
from tests.plan import configs

ROOT = Path(__file__).resolve().parents[2]


def run(capsys, *arguments):
    code = main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.k3()))
    return str(tmp_path)


def test_fits(capsys, tiny):
    code, out, _ = run(capsys, "--model", tiny, "--hardware", "cpu", "--kv", "fp8")
    assert code == 0 and "fits              yes" in out and "512 tokens (asked 128)" in out and "emulated" in out


def test_refused(capsys):
    code, out, _ = run(capsys, "--hardware", "b300x8", "--quant", "fp8", "--kv", "fp8")
    assert code == 3 and "REFUSED (weights)" in out and "nearest that works:" in out


def test_json_keys(capsys):
    code, out, _ = run(capsys, "--model", "kimi-k3", "--hardware", "b300x8", "--quant", "fp8", "--kv", "fp8", "--json")
    result = json.loads(out)
    assert code == 3 and result["fits"] == "no" and result["status"] == "valid"
    assert result["weight_bytes"] / 1e12 == pytest.approx(2.837, rel=0.005)
    assert result["kv_bytes_per_token"] == 13_824 and result["effective_block_size"] == 1536
    assert result["state_bytes_per_sequence"] == pytest.approx(449.4e6 / 8, rel=0.001)
    assert set(result["max_concurrency"]) == {str(1 << n) for n in (10, 12, 13, 15, 17, 18, 19, 20)}
    assert result["weight_bytes_per_rank"] > 300e9
    assert result["refusals"][0].keys() == {"rule", "message", "alternative"}


def test_settings_reach_the_plan(capsys, tiny):
    arguments = "--max-model-len 4096 --max-num-seqs 4 --max-num-batched-tokens 512"
    arguments += " --tensor-parallel 2 --no-prefix-caching"
    _, out, _ = run(capsys, "--model", tiny, "--hardware", "cpu", "--json", *arguments.split())
    result = json.loads(out)
    assert (result["max_model_len"], result["max_num_seqs"], result["max_num_batched_tokens"]) == (4096, 4, 512)
    assert (result["layout"], result["prefix_caching"], result["state_blocks_per_sequence"]) == ("TP2", False, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--model", "nowhere"], 6, "no config.json"),
        (["--hardware", "nowhere"], 6, "no such hardware file"),
        (["--quant", "fp9"], 3, "no quantization 'fp9'"),
        (["--kv", "int3"], 3, "int3"),
    ],
)
def test_what_cannot_be_read_or_does_not_exist(capsys, arguments, code, said):
    got, _, err = run(capsys, *arguments)
    assert got == code and said in err


def test_a_broken_config_is_unreadable(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert run(capsys, "--model", str(tmp_path))[0] == 6


@pytest.mark.parametrize("flag", ["--max-model-len=-5", "--block-size=0", "--gpu-memory-utilization=3"])
def test_a_size_that_no_machine_can_have_is_no_plan(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([flag])
    assert "must be" in capsys.readouterr().err


def test_wrong_usage_is_argparses_own_code():
    with pytest.raises(SystemExit, match="2"):
        main(["--no-such-option"])


def test_decision_table(capsys):
    code, out, _ = run(capsys, "--all-hardware")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 9 and not any(line.startswith("| cpu") for line in lines)
    assert len({line.count("|") for line in lines}) == 1
    row = next(line for line in lines if line.startswith("| gb200x16"))
    assert "no: divisibility" in row and "TP16" in row
    assert len(json.loads(run(capsys, "--all-hardware", "--json")[1])) == 9 * 8


def test_under_a_second_and_200_megabytes():
    """The released model, from a cold process.  Processor time: with nothing read but two small files, an idle
    machine takes no longer, and a busy one does not fail the test."""
    # ru_maxrss would count the pages of this process, which fork shares before exec; VmHWM is the child's own.
    code = (
        "import sys; from pipeline.plan.cli import main; status = main(sys.argv[1:]); "
        "print(open('/proc/self/status').read(), file=sys.stderr); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, *"--hardware b300x8 --quant fp8 --kv fp8 --json".split()]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    status_lines = process.stderr.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert usage.ru_utime + usage.ru_stime < 1.0
    peak_kib = next(int(line.split()[1]) for line in status_lines if line.startswith("VmHWM:"))
    assert peak_kib < 200 << 10


def test_only_the_standard_library_and_yaml_are_imported():
    code = (
        "import sys; before = set(sys.modules); import pipeline.plan.cli; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    # PyYAML's C loader brings two modules of Cython's along.
    assert {name for name in done.stdout.split() if "cython" not in name} <= {"pipeline", "yaml", "_yaml"}
