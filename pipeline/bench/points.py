"""The timed runs of one bench: warm-up, repeats in turn, each kept as a file for the next process."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.bench import energy, guards
from pipeline.bench.client import BenchClient
from pipeline.bench.kv_use import KvUse
from pipeline.bench.settings import BenchSettings, Load
from pipeline.bench.workload import Workload
from pipeline.errors import Invalid
from pipeline.files import read_json, write_json
from pipeline.serve import Server, watchdog


class Points:
    """Runs the points of one bench against one server."""

    def __init__(
        self, server: Server, settings: BenchSettings, out_dir: Path, key: str, meter: energy.EnergyMeter
    ) -> None:
        self.server, self.settings, self.key, self.meter = server, settings, key, meter
        self.folder = out_dir / "runs"
        self.workload = Workload(server, settings, self.folder)
        self.kv_use: float | None = None

    def measure(self, client: BenchClient) -> dict[Load, list[guards.Run]]:
        """Warm up each load, then all repeats; loads alternate, so that drift hits all of them."""
        settings = self.settings
        runs = {load: self._kept_runs(load) for load in settings.loads}
        if any(len(kept) < settings.repeats or self._wide(kept) for kept in runs.values()):
            with KvUse(self.server) as use:
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
            try:
                run = guards.Run(
                    **saved["run"] | {name: tuple(saved["run"][name]) for name in ("server_before", "server_after")}
                )
            except (KeyError, TypeError):  # kept by another version of this program
                break
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
        prompts = self.workload.prompts(load)
        raw, answer = self._run(
            client, load, prompts, settings.point_seed(repeat, load), f"{load.name}-r{repeat}-raw"
        )
        spent = energy.spent(joules, self.meter.read())
        server.check(f"benching {load.name}, repeat {repeat}")
        run = guards.Run(
            raw=raw,
            prompt_tokens_sent=answer["prompt_tokens_sent"],
            output_tokens_asked=answer.get("output_tokens_asked", []),
            planned_s=self.workload.planned_s(load, prompts),
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
        path = self.folder / f"{name}.json"
        path.unlink(missing_ok=True)
        answer = client.run(self.workload.arguments(load, prompts, seed, path), self.settings.client_timeout_s)
        if not answer["ok"]:
            self.server.check(f"benching {load.name}")
            raise Invalid(f"vllm bench serve failed at {load.name}: {answer['error']}")
        raw = read_json(path, finite=True)
        if raw.get("completed") != prompts:
            self.server.check(f"benching {load.name}")
        return raw, answer
