"""What is sent: one workload as the arguments of ``vllm bench serve``, its requests drawn anew for every seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.bench import trace
from pipeline.bench.settings import BenchSettings, Load
from pipeline.serve import Server


class Workload:
    """The requests of one bench of ``server``.  ``folder`` gets the request files.

    Raises what :func:`trace.read` and :func:`trace.check_fits` raise for a trace that cannot be replayed.
    """

    def __init__(self, server: Server, settings: BenchSettings, folder: Path) -> None:
        self.server, self.settings, self.folder = server, settings, folder
        self._trace: list[trace.TraceRequest] = []
        self.facts: dict[str, Any] | None = None
        """Of the trace, where there is one: see :func:`trace.describe`."""
        if settings.trace:
            whole = trace.read(settings.trace, settings.trace_block_tokens)
            self._trace = trace.scaled(
                whole, settings.trace_time_scale, settings.trace_length_scale, settings.trace_requests
            )
            trace.check_fits(self._trace, server.settings.max_model_len, settings.trace)
            self.facts = trace.describe(self._trace)

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
