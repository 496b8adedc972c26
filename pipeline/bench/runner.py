"""The bench of one served variant: its timed runs, its memory, and what may be said of them; one JSON-able result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.bench import energy, summary
from pipeline.bench.client import BenchClient
from pipeline.bench.judge import judge
from pipeline.bench.key import VARIANT_AXES, comparability
from pipeline.bench.points import Points
from pipeline.bench.settings import BenchSettings
from pipeline.env_facts import python_of
from pipeline.files import sha256_json
from pipeline.serve import Server, measuring, watchdog


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
    points = Points(
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
        "trace_facts": points.workload.facts,
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
