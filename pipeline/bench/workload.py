"""What is sent: one workload as the arguments of ``vllm bench serve``, its requests drawn anew for every seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.bench import trace
from pipeline.bench.settings import BenchSettings, Load
from pipeline.errors import Refused
from pipeline.serve import Server


def trace_that_fits(settings: BenchSettings, max_model_len: int | None) -> list[trace.TraceRequest]:
    """The requests of the trace, scaled; none without one.  Also asks whether the server takes the other loads'.

    Raises :class:`Refused` for requests longer than ``max_model_len`` tokens (``None``: nobody knows yet), and what
    :func:`trace.read` raises for a file that cannot be replayed.
    """
    synthetic = any(load.kind != "trace" for load in settings.loads)
    if synthetic and max_model_len is not None and settings.longest_request > max_model_len:
        raise Refused(
            f"bench: requests of up to {settings.longest_request} tokens (prefix_len {settings.prefix_len}, input_len "
            f"{settings.input_len}, output_len {settings.output_len}, range_ratio {settings.range_ratio:g}) are longer "
            f"than the {max_model_len} that the server takes; lower them, or raise max-model-len in hardware.flags"
        )
    if not settings.trace:
        return []
    whole = trace.read(settings.trace, settings.trace_block_tokens)
    requests = trace.scaled(whole, settings.trace_time_scale, settings.trace_length_scale, settings.trace_requests)
    trace.check_fits(requests, max_model_len, settings.trace)
    return requests


class Workload:
    """The requests of one bench of ``server``.  ``folder`` gets the request files.

    Raises as :func:`trace_that_fits`.
    """

    def __init__(self, server: Server, settings: BenchSettings, folder: Path) -> None:
        self.server, self.settings, self.folder = server, settings, folder
        self._trace = trace_that_fits(settings, server.max_model_len)
        self.facts: dict[str, Any] | None = trace.describe(self._trace) if self._trace else None
        """Of the trace, where there is one: see :func:`trace.describe`."""

    def prompts(self, load: Load) -> int:
        """How many requests a timed run of ``load`` sends."""
        asked = self.settings.prompts(load)
        return len(self._trace[: asked or None]) if load.kind == "trace" else asked

    def planned_s(self, load: Load, prompts: int) -> list[float]:
        """When the requests of a trace are due, in seconds from its start; nothing for other loads."""
        return [request.at_s for request in self._trace[:prompts]] if load.kind == "trace" else []

    def arguments(self, load: Load, prompts: int, seed: int, result: Path) -> list[str]:
        """The command line that sends ``prompts`` requests and leaves its figures in ``result``."""
        arguments = [
            "--backend",
            "openai",
            "--base-url",
            self.server.base_url,
            "--endpoint",
            "/v1/completions",
            "--model",
            self.server.model,
            "--tokenizer",
            str(Path(self.server.settings.model).resolve()),
            *self._data_set(load, prompts, seed),
            *self._arrivals(load),
            "--num-prompts",
            str(prompts),
            "--seed",
            str(seed),
            "--temperature",
            "0",
            "--ignore-eos",
            "--percentile-metrics",
            "ttft,tpot,itl,e2el",
            "--metric-percentiles",
            "50,90,99",
            "--disable-tqdm",
            "--save-result",
            "--save-detailed",
            "--result-dir",
            str(result.parent),
            "--result-filename",
            result.name,
        ]
        if slo := self.settings.slo:
            arguments += ["--goodput", *(f"{latency}:{limit:g}" for latency, limit in slo.items())]
        if self.server.settings.trust_remote_code:
            arguments.append("--trust-remote-code")
        return arguments

    def _data_set(self, load: Load, prompts: int, seed: int) -> list[str]:
        settings = self.settings
        if load.kind == "trace":
            block = max(1, round(settings.trace_block_tokens * settings.trace_length_scale))
            return self._timed_trace(self._trace, seed, block)
        if settings.dataset == "shared_prefix":
            requests = trace.shared_prefixes(
                prompts, settings.num_prefixes, settings.prefix_len, settings.input_len, settings.output_len
            )
            return [*self._timed_trace(requests, seed, settings.prefix_len), "--no-self-timed"]
        return [
            *("--dataset-name", "random"),
            *("--random-input-len", str(settings.input_len), "--random-output-len", str(settings.output_len)),
            *("--random-range-ratio", f"{settings.range_ratio:g}"),
        ]

    def _timed_trace(self, requests: list[trace.TraceRequest], seed: int, block_tokens: int) -> list[str]:
        path = self.folder / "requests.jsonl"
        trace.write_timed(requests, path, seed, block_tokens)
        return [
            *("--dataset-name", "timed_trace", "--dataset-path", str(path)),
            *("--timed-trace-chunk-hash-size", str(block_tokens), "--timed-trace-sec-multiplier", "1"),
        ]

    def _arrivals(self, load: Load) -> list[str]:
        if load.kind == "concurrency":
            return ["--max-concurrency", str(int(load.value))]
        return ["--request-rate", f"{load.value:g}"] if load.kind == "request_rate" else []
