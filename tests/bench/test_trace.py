"""Traces: both public layouts, what is wrong with a file, scaling, sharing."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from pipeline.bench import trace
from pipeline.errors import Refused, Unreadable

SHIPPED = Path(__file__).resolve().parents[2] / "benchmarks" / "traces"
MOONCAKE = [
    {"timestamp": 2000, "input_length": 700, "output_length": 20, "hash_ids": [1, 3]},
    {"timestamp": 1000, "input_length": 512, "output_length": 10, "hash_ids": [1]},
]
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


def written(path: Path, entries) -> Path:
    path.write_text(entries if isinstance(entries, str) else "\n".join(map(json.dumps, entries)) + "\n")
    return path


def test_mooncake(tmp_path):
    requests = trace.read(written(tmp_path / "t.jsonl", MOONCAKE), 512)
    assert [(r.at_s, r.input_tokens, r.output_tokens, r.blocks) for r in requests] == [
        (0.0, 512, 10, (1,)),
        (1.0, 700, 20, (1, 3)),
    ]


def test_burstgpt_leaves_failed_requests_out_and_shares_nothing(tmp_path):
    requests = trace.read(written(tmp_path / "t.csv", BURSTGPT), 512)
    assert [(r.at_s, r.input_tokens, r.output_tokens) for r in requests] == [(0.0, 472, 18), (113.0, 417, 276)]
    assert trace.describe(requests)["shared_block_fraction"] == 0.0


@pytest.mark.parametrize(
    "entries, told",
    [
        ("", "holds no request"),
        ('{"timestamp": 1', "line 1"),
        ([MOONCAKE[0], {"timestamp": 1, "input_length": 5}], "line 2: has no 'output_length'"),
        ([MOONCAKE[0] | {"hash_ids": [1]}], "1 hash_ids for 700 tokens, 2 expected"),
        ([MOONCAKE[0] | {"input_length": 0, "hash_ids": []}], "at least one token"),
        ([MOONCAKE[0] | {"timestamp": float("nan")}], "a request needs a time"),
        ([MOONCAKE[0] | {"output_length": float("inf")}], "line 1: cannot convert float infinity"),
        ([MOONCAKE[0] | {"hash_ids": [1, 2**32]}], "hash_ids must be whole numbers from 0 to 4294967295"),
        ([[1, 2]], "line 1"),
        ("Timestamp,Model,Response tokens\n1,GPT-4,5\n", "line 1: has no column Request tokens; wanted are Timestamp"),
        ("Time;Request tokens;Response tokens\n1;2;3\n", "line 1: has no column Timestamp, Request tokens"),
        ("Timestamp,Request tokens,Response tokens\n1,5,7\n2,5\n", "line 3"),
        ("Timestamp,Request tokens,Response tokens\n1,5,-7\n", "line 2: a request needs"),
        ("Timestamp,Request tokens,Response tokens\nnan,5,7\n", "line 2: a request needs"),
        ("Timestamp,Request tokens,Response tokens\n2023-01-01,5,7\n", "line 2: could not convert string to float"),
        ("Timestamp,Request tokens,Response tokens\n", "holds no request"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_line(tmp_path, entries, told):
    with pytest.raises(Unreadable, match="t.jsonl") as error:
        trace.read(written(tmp_path / "t.jsonl", entries), 512)
    assert told in str(error.value)


def test_a_spreadsheet_s_csv(tmp_path):
    """Byte-order mark, Windows line ends, quotes and other columns first; times before 0 and out of order."""
    text = '\ufeff"Model", "Timestamp","Request tokens","Response tokens"\r\n"a",5,10,3\r\n"a",-4.5,20,4\r\n'
    path = tmp_path / "später.csv"
    path.write_bytes(text.encode())
    requests = trace.read(path, 512)
    assert [(r.at_s, r.input_tokens, r.output_tokens) for r in requests] == [(0.0, 20, 4), (9.5, 10, 3)]


def test_scaling_and_the_first_requests(tmp_path):
    requests = trace.scaled(trace.read(written(tmp_path / "t.jsonl", MOONCAKE), 512), 0.5, 0.1)
    assert [(r.at_s, r.input_tokens, r.output_tokens) for r in requests] == [(0.0, 51, 2), (0.5, 70, 2)]
    assert len(trace.scaled(requests, 1, 1, limit=1)) == 1


def test_what_is_written_has_the_sharing_of_the_trace_and_fresh_ids_a_seed(tmp_path):
    requests = trace.scaled(trace.read(written(tmp_path / "t.jsonl", MOONCAKE), 512), 1, 0.1)
    ids = {}
    for seed in (1, 2):
        trace.write_timed(requests, tmp_path / "out.jsonl", seed, 51)
        ids[seed] = [json.loads(line)["hash_ids"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert ids[seed][0][0] == ids[seed][1][0] and [len(blocks) for blocks in ids[seed]] == [1, 2]
    assert not {x for blocks in ids[1] for x in blocks} & {x for blocks in ids[2] for x in blocks}


def test_requests_that_the_server_cannot_take_are_refused_not_dropped():
    requests = [trace.TraceRequest(0, 100, 10, (1,)), trace.TraceRequest(1, 300, 10, (2,))]
    trace.check_fits(requests, 310, "t")
    trace.check_fits(requests, None, "t")
    with pytest.raises(Refused, match="1 of 2 requests are longer than the 200 tokens.*trace_length_scale to 0.645"):
        trace.check_fits(requests, 200, "t")


def test_shared_prefixes():
    requests = trace.shared_prefixes(6, 2, 100, 30, 8)
    assert {request.blocks[0] for request in requests} == {0, 1} and requests[0].input_tokens == 130
    tails = [request.blocks[1:] for request in requests]
    assert len(set(tails)) == 6 and all(len(tail) == 1 for tail in tails)


def test_the_trace_that_ships_is_what_its_script_writes_and_shares_prefixes(tmp_path):
    made = runpy.run_path(str(SHIPPED / "make.py"))["requests"]()
    assert [json.loads(line) for line in (SHIPPED / "mixed.jsonl").read_text().splitlines()] == made
    facts = trace.describe(trace.read(SHIPPED / "mixed.jsonl", 512))
    assert facts["requests"] > 30 and 0.2 < facts["shared_block_fraction"] < 0.8 and facts["duration_s"] < 25
