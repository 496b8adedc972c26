"""Measures the points of a tuning run: a server a point, one bench client for all; finished points are files.

A point's file is named by what decides its figures: comparability key, requested settings, checkpoint, probe.  A
killed run goes on where it was (inside a point as well: the bench keeps its finished runs), and nothing that is done
is done again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.bench.client import BenchClient
from pipeline.bench.key import comparability
from pipeline.bench.prefix import boundary_lengths, parallel_hits, prefix_hits
from pipeline.bench.runner import bench, checkpoint_id
from pipeline.errors import Invalid, Refused
from pipeline.evals.dataset import Item
from pipeline.files import read_json, sha256_json, write_json
from pipeline.serve import NotReady, Server, ServerSettings, running
from pipeline.tuning.probe import probe
from pipeline.tuning.settings import SERVER_AXES, UNDER_TEST, Point, TuningSettings
from pipeline.variant import Variant

PREFIX_AXES = (None, "block_size", "prefix_match_unit")
RESOLVED = {"block_size": "block_size", "kv": "kv_cache_dtype", "prefix_match_unit": "prefix_hit_alignment_tokens"}
"""Axes whose effect the engine reports before anything is measured, and under which name: two points with equal
reports, this name's among them, are one engine."""
ATTEMPTS = 2
"""A point that something disturbed is measured once more."""
PARALLEL_ANSWERS = 4
EMPTY = {"status": "invalid"} | dict.fromkeys(
    ("reason", "coincides_with", "resolved", "bench", "probe", "prefix", "parallel")
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where and how points are served; ``server(quant, kv)`` gives the settings of a variant on this machine."""

    server: Callable[[str, str], ServerSettings]
    hardware: Mapping | None
    software: Mapping | None
    devices: int = 1
    price_usd_per_hour: float | None = None
    platform: str = "cpu"


class Measurer:
    """Measures points and pairs of one tuning run; results lie under ``folder``."""

    def __init__(
        self, settings: TuningSettings, machine: Machine, items: Sequence[Item], folder: Path, client: BenchClient
    ) -> None:
        self.settings, self.machine, self.items, self.folder, self.client = settings, machine, items, folder, client
        self._variant = Variant.parse(settings.variant)

    # --- what is asked of a server ----------------------------------------------------------------------------------

    def requested(self, moved: Mapping[str, Any]) -> ServerSettings:
        """The baseline's server with the axes in ``moved`` set."""
        base = self.machine.server(moved.get("quant", self._variant.quant), moved.get("kv", self._variant.kv))
        fields = {name: value for name, value in {**self.settings.baseline, **moved}.items() if name in SERVER_AXES}
        return dataclasses.replace(base, **fields)

    def baseline_values(self) -> dict[str, Any]:
        """The baseline's value on each axis; ``None`` where the engine decides."""
        server = self.requested({})
        return {name: getattr(server, name) for name in SERVER_AXES} | {
            "kv": self._variant.kv,
            "quant": self._variant.quant,
        }

    def key(self, server: ServerSettings) -> str:
        """Names the file of a measurement."""
        known = comparability(self.settings.bench, server, self.machine.hardware, self.machine.software, UNDER_TEST)
        probed = [[item.prompt_hash, item.max_gen_toks] for item in self.items]
        return sha256_json([known["parts"], server.requested(), checkpoint_id(server.model), probed])

    def _runs(self, key: str) -> Path:
        return self.folder / "runs" / key[:24]

    # --- points -----------------------------------------------------------------------------------------------------

    def measure(self, point: Point, done: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The result of one point; of a file where there is one.  ``done``: results so far, for coinciding settings.

        Raises what :func:`pipeline.serve.running` raises once the server was ready; a server that does not take the
        setting is a result: ``status`` invalid and its reason.
        """
        moved = {} if point.axis is None else {point.axis: point.value}
        server = self.requested(moved)
        key = self.key(server)
        path = self.folder / "points" / f"{key[:24]}.json"
        identity = {"axis": point.axis, "value": point.value, "name": point.name, "key": key}
        if path.exists() and (saved := read_json(path)).get("key") == key:
            return EMPTY | saved | identity
        for _ in range(ATTEMPTS):
            try:
                with running(server, self.folder / "logs" / f"{point.name.replace('=', '-')}.log") as started:
                    result = self._on(started, point, done, key)
            except NotReady as error:
                lines = str(error).splitlines()
                told = next((line for line in reversed(lines) if "Error" in line), lines[0])
                result = EMPTY | {"reason": f"the server does not start: {told.strip()[:300]}"}
                break
            if result["status"] == "valid":
                write_json(path, identity | result)  # an invalid point is measured again by the next run
                break
            log(f"tune: {point.name} is invalid, {result['reason']}")
            shutil.rmtree(self._runs(key))  # repeats that do not agree would never agree by being kept
        return identity | result

    def _on(self, server: Server, point: Point, done: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
        effective = resolved(server.effective)
        known = effective.get(RESOLVED.get(point.axis, "")) is not None
        for other in done if known else ():
            if other["resolved"] == effective and other["axis"] in (None, point.axis) and not other["coincides_with"]:
                return EMPTY | {"status": "valid", "coincides_with": other["name"], "resolved": effective}
        measured = bench(
            server,
            self.settings.bench,
            self._runs(key),
            hardware=self.machine.hardware,
            software=self.machine.software,
            under_test=UNDER_TEST,
            client=self.client,
            devices=self.machine.devices,
            price_usd_per_hour=self.machine.price_usd_per_hour,
            platform=self.machine.platform,
        )
        return EMPTY | self._sharing(server, point, done) | {
            "status": measured["status"],
            "reason": measured["reason"],
            "resolved": effective,
            "bench": measured,
            "probe": probe(server, self.items),
        }

    def _sharing(self, server: Server, point: Point, done: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What requests share, where the axis can change it: prefixes around the baseline's block, and the prompt of
        several answers to it.

        https://github.com/vllm-project/recipes/pull/861: 1400 shared tokens and blocks of 1536 gave no hit at all.
        """
        block = (done[0]["resolved"] if done else resolved(server.effective))["block_size"]
        if point.axis not in PREFIX_AXES or not block:
            return {}
        config = read_json(server.settings.model / "config.json")
        vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
        return {
            "prefix": prefix_hits(server, [round(0.9 * block), *boundary_lengths(block)], vocabulary),
            "parallel": parallel_hits(server, round(2.5 * block), PARALLEL_ANSWERS, vocabulary),
        }

    # --- pairs ------------------------------------------------------------------------------------------------------

    def pairs(self, moved: Mapping[str, Any], tick: Callable[[], Any]) -> list[dict[str, Any]]:
        """``settings.pairs`` fresh pairs of the baseline and ``moved``, with the same prompts, order in turn."""
        servers = {"default": self.requested({}), "recommended": self.requested(moved)}
        keys = {name: self.key(server) for name, server in servers.items()}
        found = []
        with contextlib.ExitStack() as stack:
            serve = _Servers(servers, self.folder / "logs", stack, self.settings.pair_servers == "together")
            for pair in range(self.settings.pairs):
                path = self.folder / "pairs" / f"{sha256_json([keys, pair])[:24]}.json"
                if not path.exists():
                    order = list(servers) if pair % 2 == 0 else list(reversed(servers))
                    write_json(path, self._pair(pair, order, serve))
                found.append(read_json(path))
                tick()
        return found

    def _pair(self, pair: int, order: Sequence[str], serve: _Servers) -> dict[str, Any]:
        figures: dict[str, Any] = {"pair": pair, "first": order[0]}
        once = dataclasses.replace(
            self.settings.bench, repeats=1, min_repeats=1, max_repeats=1, seed=self.settings.bench.seed + 1000 + pair
        )
        for name in order:
            with serve(name) as server:
                result = bench(
                    server,
                    once,
                    self.folder / "runs" / f"pair-{name}-{pair}",
                    hardware=self.machine.hardware,
                    software=self.machine.software,
                    under_test=UNDER_TEST,
                    client=self.client,
                )
            value = result["values"][self.settings.objective][0]
            figures[name] = {"status": result["status"], "reason": result["reason"], "value": value}
        return figures


def resolved(effective: Mapping[str, Any]) -> dict[str, Any]:
    """What of the effective settings tells two engines apart: all but log lines and scales."""
    return {name: value for name, value in effective.items() if name not in ("log", "kv_scales")}


class _Servers:
    """Gives the server of a name: one that stays up, or a fresh one each time."""

    def __init__(
        self, servers: Mapping[str, ServerSettings], logs: Path, stack: contextlib.ExitStack, together: bool
    ) -> None:
        self._servers, self._logs, self._stack, self._together = servers, logs, stack, together
        self._up: dict[str, Server] = {}

    def __call__(self, name: str) -> contextlib.AbstractContextManager[Server]:
        if not self._together:
            return running(self._servers[name], self._logs / f"pair-{name}.log")
        if not self._up:
            for other, settings in self._servers.items():
                self._up[other] = self._stack.enter_context(running(settings, self._logs / f"pair-{other}.log"))
        return contextlib.nullcontext(self._up[name])


def check_comparable(results: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`Invalid` when the baseline itself cannot be quoted: nothing could be told against it."""
    baseline = results[0]
    if baseline["axis"] is not None:
        raise Refused("a tuning run begins with its baseline")
    if baseline["status"] != "valid":
        raise Invalid(
            f"the baseline is {baseline['status']}: {baseline['reason']}; run `python3 -m pipeline tune` again"
        )


def log(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)
