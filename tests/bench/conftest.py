"""Finished runs as the client saves them, without a client."""

from __future__ import annotations

import pytest

from pipeline.bench.guards import Run
from tests.serve.conftest import mock_settings, own_temporary_directory  # noqa: F401  (fixtures)


def make_run(prompts=4, output_len=8, input_len=16, tok_s=100.0, itl_s=0.01, hits=0, repeat=0, **changes):
    """A correct run of ``prompts`` requests; ``changes`` replace fields of the run or of its raw result."""
    raw = {
        "completed": prompts,
        "duration": prompts * output_len / tok_s,
        "failed": 0,
        "errors": [""] * prompts,
        "input_lens": [input_len] * prompts,
        "output_lens": [output_len] * prompts,
        "itls": [[itl_s] * (output_len - 1)] * prompts,
        "output_throughput": tok_s,
        "total_token_throughput": 3 * tok_s,
        "request_throughput": tok_s / output_len,
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        raw |= {f"{statistic}_{name}_ms": 10.0 for statistic in ("median", "mean", "p90", "p99")}
    before = {
        "vllm:generation_tokens_total": 50.0,
        "vllm:prompt_tokens_total": 90.0,
        "vllm:prefix_cache_hits_total": 7.0,
        "vllm:prefix_cache_queries_total": 90.0,
        "vllm:num_preemptions_total": 0.0,
        "vllm:prompt_tokens_created": 1e9,
    }
    grown = {
        "vllm:generation_tokens_total": prompts * output_len,
        "vllm:prompt_tokens_total": prompts * input_len,
        "vllm:prefix_cache_hits_total": hits,
        "vllm:prefix_cache_queries_total": prompts * input_len,
    }
    fields = {
        "prompt_tokens_sent": [input_len] * prompts,
        "before": before,
        "server_before": (9, 1),
        "server_after": (9, 1),
        "after": {name: value + grown.get(name, 0.0) for name, value in before.items()},
        "prompts": prompts,
        "repeat": repeat,
    }
    for name, value in changes.items():
        (fields if name in Run.__dataclass_fields__ else raw)[name] = value
    return Run(raw=raw, **fields)


@pytest.fixture
def run():
    return make_run
