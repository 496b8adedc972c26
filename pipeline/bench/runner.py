"""The bench of one served variant: warm-up, repeated cold runs, guards, memory; one JSON-able result."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.bench import energy, guards, summary, trace
from pipeline.bench.client import BenchClient
from pipeline.bench.key import VARIANT_AXES, comparability
from pipeline.bench.settings import BenchSettings, Load, headline
from pipeline.env_facts import python_of
from pipeline.errors import Invalid
from pipeline.files import read_json, sha256_json, write_json
from pipeline.serve import Server, measuring, watchdog

KV_SAMPLE_S = 0.25
KV_USE = "vllm:kv_cache_usage_perc"
HEADLINE = (
    "output_tok_s_per_device",
    "total_tok_s_per_device",
    "output_tok_s_per_user",
    "interval_level",
    "goodput_requests_s",
    "goodput_fraction",
    "energy_j_per_output_token",
    "energy_reason",
    "usd_per_million_output_tokens",
    "usd_per_million_tokens",
    "usd_reason",
    "prefix_hit_rate",
    "output_tok_s_min",
    "output_tok_s_max",
    "values",
)
"""Figures of the headline point that stand at the top of the result, besides vllm's own."""


def bench(
    server: Server,
    settings: BenchSettings,
    out_dir: Path | str,
    *,
    hardware: Mapping | None = None,
    software: Mapping | None = None,
    under_test: tuple[str, ...] = VARIANT_AXES,
    checkpoint_sha256: str | None = None,
    client_env: str | None = None,
    client: BenchClient | None = None,
    devices: int = 1,
    price_usd_per_hour: float | None = None,
    platform: str = "cpu",
) -> dict[str, Any]:
    """Measure ``server``; each finished run is kept as ``out_dir/runs/<load>-r<repeat>.json``.

    Runs that are already there from the same server settings, workload and checkpoint are not repeated.  ``hardware``
    and ``software`` are the fingerprints of this machine; without them the result compares with nothing.
    ``checkpoint_sha256`` names the checkpoint by content (its manifest's hash); without it, names, sizes and times do.
    ``client``: one that runs already (a tuning run has one for all its points).  ``price_usd_per_hour`` is that of all
    ``devices`` together.

    Result: ``status`` and ``reason``, figures of the headline point, ``per_concurrency``,
    ``per_request_rate``, ``trace``, ``memory`` (one dict a rank), ``memory_summary``, ``load``, requested and effective
    settings, ``comparability``.

    Raises :class:`~pipeline.serve.errors.ServerDied` when the server ends meanwhile (finished runs are kept);
    :class:`Invalid` when the client fails.
    """
    out_dir = Path(out_dir)
    (out_dir / "runs").mkdir(parents=True, exist_ok=True)
    known = comparability(settings, server.settings, hardware, software, under_test)
    points = _Points(
        server,
        settings,
        out_dir,
        sha256_json([known["parts"], server.settings.requested(), checkpoint_id(server.settings.model)]),
        energy.EnergyMeter(platform),
    )
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(measuring(f"benching {server.model}"))
        waited = 0.0 if client is None else client.busy_s
        if client is None:
            python = python_of(client_env or server.settings.env)
            client = stack.enter_context(BenchClient(python, out_dir / "client.log"))
        runs = points.measure(client)
        host = host_memory(server)
        memory = server.memory_report()  # runs a forward pass: after the last timed run
    result = judge(runs, settings, devices, price_usd_per_hour, points.meter.reason)
    emulated = sorted({name for rank in memory for name in rank.get("emulated") or []})
    return result | {
        "emulated": emulated,
        "speed_label": "emulated" if emulated else "measured",
        "workload": settings.workload_key(),
        "trace_facts": points.trace_facts,
        "slo_ms": settings.slo,
        "devices": devices,
        "price_usd_per_hour": price_usd_per_hour,
        "energy_source": None if points.meter.reason else points.meter.source,
        "comparability": known,
        "checkpoint_id": checkpoint_sha256 or checkpoint_id(server.settings.model),
        "requested": server.settings.requested(),
        "effective": effective(server, memory),
        "kv_cache_usage_max": points.kv_use,
        "memory": memory,
        "memory_summary": summary.memory_summary(memory),
        "load": server.load,
        "host_memory": host,
        "bench_s": time.monotonic() - began,
        "client_s": client.busy_s - waited,
    }


def judge(
    runs: Mapping[Load, list[guards.Run]],
    settings: BenchSettings,
    devices: int = 1,
    price_usd_per_hour: float | None = None,
    no_energy: str | None = None,
) -> dict[str, Any]:
    """Status, reasons, figures of each point and headline of finished runs.  Figures of invalid runs stay visible."""
    reasons: list[dict[str, str]] = []
    points: dict[Load, dict[str, Any]] = {}
    for load, repeats in runs.items():
        found = [
            (f"{load.name} r{run.repeat}", reason) for run in repeats for reason in guards.check_run(run, settings)
        ]
        throughputs = [run.raw["output_throughput"] for run in repeats]
        found += [(load.name, reason) for reason in guards.check_repeats(throughputs, settings)]
        reasons += [{"where": where, "code": reason.code, "detail": reason.detail} for where, reason in found]
        points[load] = summary.summarize(repeats, devices, price_usd_per_hour, no_energy) | {
            "status": "invalid" if found else "valid",
            "reason": found[0][1].detail if found else None,
        }
    chosen = headline(points)
    closed = [load.value for load in points if load.kind == "concurrency"]
    return {
        "status": "invalid" if reasons else "valid",
        "reason": "; ".join(f"{reason['where']}: {reason['code']}: {reason['detail']}" for reason in reasons) or None,
        "reasons": reasons,
        "reason_codes": sorted({reason["code"] for reason in reasons}),
        "headline": chosen.name,
        "concurrency": int(max(closed)) if closed else None,
        **{name: points[chosen][name] for name in (*summary.METRICS, *HEADLINE)},
        "spec_decode_accept_length": points[chosen]["spec_decode_accept_length"],
        "preemptions": sum(point["preemptions"] for point in points.values()),
        "per_concurrency": _of_kind(points, "concurrency"),
        "per_request_rate": _of_kind(points, "request_rate"),
        "trace": next((point for load, point in points.items() if load.kind == "trace"), None),
    }


def _of_kind(points: Mapping[Load, dict], kind: str) -> dict[str, dict]:
    return {f"{load.value:g}": point for load, point in points.items() if load.kind == kind}


def effective(server: Server, memory: list[dict]) -> dict[str, Any]:
    """The settings the engine resolved, completed by what its workers say of themselves (rank 0; they are equal)."""
    rank = memory[0]
    names = {
        "block_size": "kv_block_size",
        "max_num_seqs": "max_num_seqs",
        "kernels": "kernels",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "state_cache_mode": "state_cache_mode",
    }
    return server.effective | {ours: rank[theirs] for ours, theirs in names.items() if rank.get(theirs) is not None}


def checkpoint_id(model: Path) -> str:
    """Identity of a checkpoint directory by names, sizes and times of its weight files."""
    files = sorted(Path(model).glob("*.safetensors"))
    return sha256_json([[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files])


def host_memory(server: Server) -> dict[str, int | None]:
    """Host memory of all the server's processes: resident (shared pages counted in each) and proportional."""
    totals = {"Rss": 0, "Pss": 0}
    for pid in watchdog.family(server.pid):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            return {"host_rss_bytes": None, "host_pss_bytes": None}
        for line in text.splitlines():
            name, _, rest = line.partition(":")
            if name in totals:
                totals[name] += int(rest.split()[0]) * 1024
    return {"host_rss_bytes": totals["Rss"], "host_pss_bytes": totals["Pss"]}


class _Points:
    """Runs the points of one bench against one server."""

    def __init__(
        self, server: Server, settings: BenchSettings, out_dir: Path, key: str, meter: energy.EnergyMeter
    ) -> None:
        self.server, self.settings, self.key, self.meter = server, settings, key, meter
        self.folder = out_dir / "runs"
        self.kv_use: float | None = None
        self._trace: list[trace.TraceRequest] = []
        self.trace_facts: dict[str, Any] | None = None
        if settings.trace:
            whole = trace.read(settings.trace, settings.trace_block_tokens)
            self._trace = trace.scaled(
                whole, settings.trace_time_scale, settings.trace_length_scale, settings.trace_requests
            )
            trace.check_fits(self._trace, server.settings.max_model_len, settings.trace)
            self.trace_facts = trace.describe(self._trace)

    def measure(self, client: BenchClient) -> dict[Load, list[guards.Run]]:
        """Warm up each load, then all repeats; loads alternate, so that drift hits all of them."""
        settings = self.settings
        runs = {load: self._kept_runs(load) for load in settings.loads}
        if any(len(kept) < settings.repeats or self._wide(kept) for kept in runs.values()):
            with _KvUse(self.server) as use:
                for load in settings.loads:
                    self._run(
                        client,
                        load,
                        settings.warmup_prompts(load),
                        settings.point_seed(settings.max_repeats, load),
                        f"warmup-{load.name}",
                    )
            self.kv_use = use.highest
        for repeat in range(settings.max_repeats):
            for load, done in runs.items():
                if len(done) == repeat and (repeat < settings.repeats or self._wide(done)):
                    done.append(self._timed(client, load, repeat))
        return runs

    def _wide(self, runs: list[guards.Run]) -> bool:
        return guards.too_wide([run.raw["output_throughput"] for run in runs], self.settings)

    def _kept_runs(self, load: Load) -> list[guards.Run]:
        """Valid runs of this very measurement that an earlier, ended process left."""
        kept: list[guards.Run] = []
        for repeat in range(self.settings.max_repeats):
            path = self._path(load, repeat)
            saved = read_json(path) if path.exists() else {}
            if saved.get("key") != self.key:
                break
            run = guards.Run(
                **saved["run"] | {name: tuple(saved["run"][name]) for name in ("server_before", "server_after")}
            )
            if guards.check_run(run, self.settings):
                break
            kept.append(run)
        return kept

    def _path(self, load: Load, repeat: int) -> Path:
        return self.folder / f"{load.name}-r{repeat}.json"

    def _timed(self, client: BenchClient, load: Load, repeat: int) -> guards.Run:
        settings, server = self.settings, self.server
        if settings.cache != "warm":
            server.reset_prefix_cache()
        before, born, joules = server.settled_metrics(), self._identity(), self.meter.read()
        prompts = len(self._trace[: settings.prompts(load) or None]) if load.kind == "trace" else settings.prompts(load)
        raw, answer = self._run(
            client, load, prompts, settings.point_seed(repeat, load), f"{load.name}-r{repeat}-raw"
        )
        spent = energy.spent(joules, self.meter.read())
        server.check(f"benching {load.name}, repeat {repeat}")
        run = guards.Run(
            raw=raw,
            prompt_tokens_sent=answer["prompt_tokens_sent"],
            output_tokens_asked=answer.get("output_tokens_asked", []),
            planned_s=[request.at_s for request in self._trace[:prompts]] if load.kind == "trace" else [],
            before=before,
            after=server.settled_metrics(),
            server_before=born,
            server_after=self._identity(),
            energy_j=spent,
            retries=answer["retries"],
            prompts=prompts,
            load=load.name,
            repeat=repeat,
            seed=answer["seed"],
        )
        write_json(self._path(load, repeat), {"key": self.key, "run": vars(run)})
        self._path(load, repeat).with_name(f"{load.name}-r{repeat}-raw.json").unlink()
        print(
            f"bench {server.model}: {load.name}, repeat {repeat + 1}: "
            f"{raw['output_throughput']:.1f} output tok/s, TTFT {raw['median_ttft_ms']:.1f} ms",
            file=sys.stderr,
            flush=True,
        )
        return run

    def _identity(self) -> tuple[int, ...]:
        process = watchdog.read_process(self.server.pid)
        return (self.server.pid, process.start_ticks if process else 0)

    def _run(self, client: BenchClient, load: Load, prompts: int, seed: int, name: str) -> tuple[dict, dict]:
        server = self.server
        path = self.folder / f"{name}.json"
        path.unlink(missing_ok=True)
        arguments = [
            "--backend",
            "openai",
            "--base-url",
            server.base_url,
            "--endpoint",
            "/v1/completions",
            "--model",
            server.model,
            "--tokenizer",
            str(Path(server.settings.model).resolve()),
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
            str(path.parent),
            "--result-filename",
            path.name,
        ]
        if slo := self.settings.slo:
            arguments += ["--goodput", *(f"{latency}:{limit:g}" for latency, limit in slo.items())]
        if server.settings.trust_remote_code:
            arguments.append("--trust-remote-code")
        answer = client.run(arguments, self.settings.client_timeout_s)
        if not answer["ok"]:
            server.check(f"benching {load.name}")
            raise Invalid(f"vllm bench serve failed at {load.name}: {answer['error']}")
        raw = read_json(path)
        if raw.get("completed") != prompts:
            server.check(f"benching {load.name}")
        return raw, answer

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


class _KvUse:
    """Highest share of the KV cache in use, sampled in the warm-up: a sample in a timed run would disturb it."""

    def __init__(self, server: Server) -> None:
        self.highest: float | None = None
        self._server, self._done = server, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _KvUse:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(KV_SAMPLE_S):
            try:
                use = self._server.metrics().get(KV_USE)
            except Invalid:
                return
            if use is not None:
                self.highest = use if self.highest is None else max(self.highest, use)
