"""The bench of one served variant: warm-up, repeated cold runs, guards, memory; one JSON-able result."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.bench import guards, summary
from pipeline.bench.client import BenchClient
from pipeline.bench.key import VARIANT_AXES, comparability
from pipeline.bench.settings import BenchSettings
from pipeline.env_facts import python_of
from pipeline.errors import Invalid
from pipeline.files import read_json, sha256_json, write_json
from pipeline.serve import Server, measuring, watchdog

KV_SAMPLE_S = 0.25
KV_USE = "vllm:kv_cache_usage_perc"


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
) -> dict[str, Any]:
    """Measure ``server``; each finished run is kept as ``out_dir/runs/c<concurrency>-r<repeat>.json``.

    Runs that are already there from the same server settings, workload and checkpoint are not repeated.  ``hardware``
    and ``software`` are the fingerprints of this machine; without them the result compares with nothing.
    ``checkpoint_sha256`` names the checkpoint by content (its manifest's hash); without it, names, sizes and times do.

    Result: ``status`` and ``reason``, headline figures (highest concurrency), ``per_concurrency``, ``memory`` (one dict
    a rank), ``memory_summary``, ``load``, requested and effective settings, ``comparability``.

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
    )
    began = time.monotonic()
    with measuring(f"benching {server.model}"):
        with BenchClient(python_of(client_env or server.settings.env), out_dir / "client.log") as client:
            runs = points.measure(client)
        host = host_memory(server)
        memory = server.memory_report()  # runs a forward pass: after the last timed run
    result = judge(runs, settings)
    emulated = sorted({name for rank in memory for name in rank.get("emulated") or []})
    return result | {
        "emulated": emulated,
        "speed_label": "emulated" if emulated else "measured",
        "workload": settings.workload_key(),
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
    }


def judge(runs: Mapping[int, list[guards.Run]], settings: BenchSettings) -> dict[str, Any]:
    """Status, reasons, figures per concurrency and headline of finished runs.  Figures of invalid runs stay visible."""
    reasons, per_concurrency = [], {}
    for concurrency, repeats in runs.items():
        found = [
            (f"c{concurrency} r{run.repeat}", reason) for run in repeats for reason in guards.check_run(run, settings)
        ]
        throughputs = [run.raw["output_throughput"] for run in repeats]
        found += [(f"c{concurrency}", reason) for reason in guards.check_repeats(throughputs, settings)]
        reasons += [{"where": where, "code": reason.code, "detail": reason.detail} for where, reason in found]
        per_concurrency[str(concurrency)] = summary.summarize(repeats) | {
            "status": "invalid" if found else "valid",
            "reason": found[0][1].detail if found else None,
        }
    headline = per_concurrency[str(max(runs))]
    return {
        "status": "invalid" if reasons else "valid",
        "reason": "; ".join(f"{reason['where']}: {reason['code']}: {reason['detail']}" for reason in reasons) or None,
        "reasons": reasons,
        "reason_codes": sorted({reason["code"] for reason in reasons}),
        "concurrency": max(runs),
        **{name: headline[name] for name in summary.METRICS},
        "spec_decode_accept_length": headline["spec_decode_accept_length"],
        "preemptions": sum(point["preemptions"] for point in per_concurrency.values()),
        "per_concurrency": per_concurrency,
    }


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

    def __init__(self, server: Server, settings: BenchSettings, out_dir: Path, key: str) -> None:
        self.server, self.settings, self.key = server, settings, key
        self.folder = out_dir / "runs"
        self.kv_use: float | None = None

    def measure(self, client: BenchClient) -> dict[int, list[guards.Run]]:
        """Warm up each concurrency, then all repeats; concurrencies alternate, so that drift hits all of them."""
        settings = self.settings
        runs = {concurrency: self._kept_runs(concurrency) for concurrency in settings.concurrency}
        if any(len(kept) < settings.repeats or self._wide(kept) for kept in runs.values()):
            with _KvUse(self.server) as use:
                for concurrency in settings.concurrency:
                    self._run(
                        client,
                        concurrency,
                        settings.warmup_prompts(concurrency),
                        settings.point_seed(settings.max_repeats, concurrency),
                        f"warmup-c{concurrency}",
                    )
            self.kv_use = use.highest
        for repeat in range(settings.max_repeats):
            for concurrency, done in runs.items():
                if len(done) == repeat and (repeat < settings.repeats or self._wide(done)):
                    done.append(self._timed(client, concurrency, repeat))
        return runs

    def _wide(self, runs: list[guards.Run]) -> bool:
        return guards.too_wide([run.raw["output_throughput"] for run in runs], self.settings)

    def _kept_runs(self, concurrency: int) -> list[guards.Run]:
        """Valid runs of this very measurement that an earlier, ended process left."""
        kept: list[guards.Run] = []
        for repeat in range(self.settings.max_repeats):
            path = self._path(concurrency, repeat)
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

    def _path(self, concurrency: int, repeat: int) -> Path:
        return self.folder / f"c{concurrency}-r{repeat}.json"

    def _timed(self, client: BenchClient, concurrency: int, repeat: int) -> guards.Run:
        settings, server = self.settings, self.server
        if settings.cache == "cold":
            server.reset_prefix_cache()
        before, born = server.settled_metrics(), self._identity()
        prompts = settings.prompts(concurrency)
        raw, answer = self._run(
            client, concurrency, prompts, settings.point_seed(repeat, concurrency), f"c{concurrency}-r{repeat}-raw"
        )
        server.check(f"benching concurrency {concurrency}, repeat {repeat}")
        run = guards.Run(
            raw=raw,
            prompt_tokens_sent=answer["prompt_tokens_sent"],
            before=before,
            after=server.settled_metrics(),
            server_before=born,
            server_after=self._identity(),
            retries=answer["retries"],
            prompts=prompts,
            concurrency=concurrency,
            repeat=repeat,
            seed=answer["seed"],
        )
        write_json(self._path(concurrency, repeat), {"key": self.key, "run": vars(run)})
        self._path(concurrency, repeat).with_name(f"c{concurrency}-r{repeat}-raw.json").unlink()
        print(
            f"bench {server.model}: concurrency {concurrency}, repeat {repeat + 1}: "
            f"{raw['output_throughput']:.1f} output tok/s, TTFT {raw['median_ttft_ms']:.1f} ms",
            file=sys.stderr,
            flush=True,
        )
        return run

    def _identity(self) -> tuple[int, ...]:
        process = watchdog.read_process(self.server.pid)
        return (self.server.pid, process.start_ticks if process else 0)

    def _run(self, client: BenchClient, concurrency: int, prompts: int, seed: int, name: str) -> tuple[dict, dict]:
        server, settings = self.server, self.settings
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
            "--dataset-name",
            settings.workload,
            "--random-input-len",
            str(settings.input_len),
            "--random-output-len",
            str(settings.output_len),
            "--num-prompts",
            str(prompts),
            "--max-concurrency",
            str(concurrency),
            "--seed",
            str(seed),
            "--temperature",
            "0",
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
        if server.settings.trust_remote_code:
            arguments.append("--trust-remote-code")
        answer = client.run(arguments, settings.client_timeout_s)
        if not answer["ok"]:
            server.check(f"benching concurrency {concurrency}")
            raise Invalid(f"vllm bench serve failed at concurrency {concurrency}: {answer['error']}")
        raw = read_json(path)
        if raw.get("completed") != prompts:
            server.check(f"benching concurrency {concurrency}")
        return raw, answer


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
