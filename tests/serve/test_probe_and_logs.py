from __future__ import annotations

import pytest

from pipeline.errors import Invalid
from pipeline.serve import ServerDied, compare_probe, http, logs
from tests.mock_openai import Behaviour, MockServer


def test_two_servers_that_agree():
    with MockServer() as direct, MockServer() as disaggregated:
        result = compare_probe(direct.base_url, disaggregated.base_url, "mock")
        assert result["equal"] and result["status"] == "valid" and len(result["tokens"]) == 64
        assert direct.state.requests[0]["temperature"] == 0.0


def test_a_lost_state_shows_at_its_token():
    """https://github.com/vllm-project/vllm/issues/52627: fluent on both sides, unlike from some token on."""
    with MockServer() as direct, MockServer(Behaviour(diverge_at=41)) as disaggregated:
        result = compare_probe(direct.base_url, disaggregated.base_url, "mock")
        assert result["first_difference"] == 41 and result["status"] == "invalid" and "token 41" in result["reason"]


@pytest.mark.parametrize("behaviour", [Behaviour(short_output_tokens=3), Behaviour(generation_status=500)])
def test_nothing_to_compare_is_no_agreement(behaviour):
    with MockServer(behaviour) as one, MockServer(behaviour) as other:
        with pytest.raises(Invalid):
            compare_probe(one.base_url, other.base_url, "mock")


LOG = """\
INFO 09-22 kv] GPU KV cache size: 1,966,080 tokens, Maximum concurrency for 1,048,576 tokens per request: 1.88x
INFO 09-22 default_loader.py:502] Loading weights took 170.25 seconds
INFO 09-22 interface] Setting attention block size to 1536 tokens to ensure that attention page size is >= it.
WARNING 09-22 kv_cache] Using KV cache scaling factor 1.0 for fp8_e4m3. If this is unintended, verify that k/v_scale
WARNING 09-22 kv_cache.py:201] Using uncalibrated q_scale 1.0 and/or prob_scale 1.0 with fp8 attention.
"""


def test_every_number_of_a_log_keeps_its_line():
    found = logs.facts(LOG)
    assert found["kv_cache_tokens"]["value"] == 1_966_080 and found["max_concurrency"]["value"] == 1.88
    assert found["weights_load_s"]["value"] == 170.25 and found["attention_block_size"]["value"] == 1536
    assert all(fact["raw"] in LOG for fact in found.values())


def test_a_scale_of_one_is_called_uncalibrated():
    found = logs.facts(LOG)
    assert found["kv_scales"]["value"] == "uncalibrated (scale 1.0)"
    assert found["query_scales"]["value"] == "uncalibrated"
    assert "kv_scales" not in logs.facts(LOG.replace("scaling factor 1.0", "scaling factor 0.75"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total", "nvidia-smi"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "raise kv-cache-memory-bytes"),
        ("ValueError: To serve at least one request with the model's max seq len (1048576), 28.99 GiB", "lower max-model"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "the host's memory"),
        ("OSError: [Errno 98] error while attempting to bind on address: address already in use", "took the port"),
        ("OSError: [Errno 28] No space left on device", "is full"),
        ("ValueError: no kernel for W9", None),
    ],
)
def test_what_ends_servers_most_often_is_told_with_its_remedy(tmp_path, line, told):
    (tmp_path / "log").write_text(f"INFO loading\n{line}\n")
    message = str(ServerDied("the server exited with code 1", tmp_path / "log"))
    assert message.startswith("the server exited with code 1") and message.endswith(line)
    assert (told in message.splitlines()[1]) if told else ("tells why" not in message)


def test_the_end_of_a_long_log(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x\n" * 100_000 + b"\xff the end\n")
    assert logs.last_lines(path, 2).splitlines()[1].endswith("the end")
    assert logs.last_lines(tmp_path / "none") == ""


def test_metrics_are_summed_over_engines_and_gauges_are_not():
    text = (
        "# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0",model_name="a,b"} 10.0\nvllm:generation_tokens_total{engine="1"} 5.0\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
        'vllm:request_success_total{finished_reason="stop"} 3.0\n'
        'vllm:request_success_total{finished_reason="length"} 4.0\n'
        'vllm:e2e_bucket{le="0.5"} 7\n'
        'vllm:cache_config_info{block_size="256",cache_dtype="auto",engine="0"} 1.0\n'
    )
    values = http.parse_metrics(text)
    assert values["vllm:generation_tokens_total"] == 15 and values["vllm:kv_cache_usage_perc"] == 0.75
    assert values["vllm:request_success_total"] == 7 and values["vllm:request_success_total/stop"] == 3
    assert "vllm:e2e_bucket" not in values
    assert http.cache_config(text)["block_size"] == "256"


def test_a_metric_that_is_no_number_counts_as_not_exported():
    text = "vllm:kv_cache_usage_perc NaN\nvllm:num_requests_running oops\nvllm:prompt_tokens_total 3 1790000000\n"
    assert http.parse_metrics(text) == {"vllm:prompt_tokens_total": 3.0}
