"""The life of one server: start, readiness, settings in effect, memory report, death, stop."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import env_facts
from pipeline.errors import Invalid, Refused
from pipeline.serve import gpu, http, logs, probe
from pipeline.serve.errors import NotReady, ServerDied, ServerError, WrongModel
from pipeline.serve.lock import measuring
from pipeline.serve.process import ServerProcess, free_port
from pipeline.serve.settings import ServerSettings

API_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
POLL_S = 0.2
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
DYING_S = 0.5
GENERATION_TRIES = 3
FIRST_GENERATION_S = 300.0
"""Least time-out of the readiness generation: kernels are compiled in it."""


class Server:
    """A ready server.  Made by :func:`running`."""

    def __init__(self, settings: ServerSettings, process: ServerProcess, port: int, log_path: Path) -> None:
        self.settings, self.log_path = settings, log_path
        self.model = settings.served_name
        self.base_url = f"http://127.0.0.1:{port}"
        self.load_s: float = 0.0
        """Seconds from the start of the process to the first generated token."""
        self.effective: dict[str, Any] = {}
        self.max_model_len: int | None = settings.max_model_len
        """Longest prompt and answer together, in tokens: as asked for, or less where the server says so."""
        self._process = process

    @property
    def pid(self) -> int:
        """Pid, process-group id and session id of the server."""
        return self._process.group

    @property
    def alive(self) -> bool:
        """Is its first process there?  See :meth:`check` for "does it still generate"."""
        return self._process.ended() is None

    def check(self, doing: str = "serving") -> None:
        """Raise :class:`ServerDied` when the process ended, or when ``/health`` no longer says 200."""
        if (end := self._process.ended()) is not None:
            raise ServerDied(f"the server {end} while {doing}", self.log_path)
        try:
            http.request(f"{self.base_url}/health", timeout_s=30.0)
        except http.RequestFailed as error:
            time.sleep(DYING_S)  # the sockets of an ending process close before it has ended
            if (end := self._process.ended()) is not None:
                raise ServerDied(f"the server {end} while {doing}", self.log_path) from None
            raise ServerDied(f"the server stopped answering while {doing}: {error}", self.log_path) from None

    def metrics(self) -> dict[str, float]:
        """``/metrics``: ``{name: value}``, see :func:`pipeline.serve.http.parse_metrics`."""
        return http.parse_metrics(self._get("/metrics").decode())

    def settled_metrics(self, timeout_s: float = 5.0) -> dict[str, float]:
        """:meth:`metrics` once nothing runs and two readings agree: counters lag behind the last answer."""
        deadline, last = time.monotonic() + timeout_s, self.metrics()
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = self.metrics()
            if not any(now.get(name) for name in BUSY) and all(now.get(name) == last.get(name) for name in TOKENS):
                return now
            last = now
        return last

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache.  Raises :class:`Invalid` when the server does not confirm it."""
        for _ in range(20):
            answer = self._post("/reset_prefix_cache")
            if answer.get("success"):
                return
            time.sleep(0.25)  # blocks are still held by a request that is just ending
        raise Invalid(
            f"{self.base_url}: the prefix cache could not be reset ({answer}); a cold measurement is impossible"
        )

    def memory_report(self) -> list[dict[str, Any]]:
        """One dict a rank from the worker extension; runs a full forward pass, so keep it outside timed windows.

        Raises :class:`Invalid` when the worker has no such report.
        """
        return self._workers("memory_report")

    def kv_scales(self) -> dict[str, Any]:
        """Where the KV cache's scales come from, as the workers see them.

        ``{"label", "layers"}``; label: ``not applied`` (the cache is not FP8), ``calibrated`` (every layer's scales are
        the checkpoint's), ``uncalibrated (scale 1.0)``, ``partly calibrated``, or ``None`` where the layers do not say.
        """
        layers = {
            f"rank{rank['rank']}/{name}": layer
            for rank in self._workers("kv_scales")
            for name, layer in rank["layers"].items()
        }
        sources = {layer["source"] for layer in layers.values()}
        if not any(layer["applied"] for layer in layers.values()):
            label = "not applied" if layers else None
        else:
            label = {
                frozenset(["checkpoint"]): "calibrated",
                frozenset(["default"]): "uncalibrated (scale 1.0)",
                frozenset(["checkpoint", "default"]): "partly calibrated",
            }.get(frozenset(sources))
        return {"label": label, "layers": layers}

    def _workers(self, method: str) -> list[dict[str, Any]]:
        """Call a method of the worker extension: one dict a rank."""
        answer = self._post("/collective_rpc", {"method": method, "timeout": 600.0}, timeout_s=620.0)
        ranks = answer.get("results")
        if not ranks or not all(isinstance(rank, dict) for rank in ranks):
            raise Invalid(f"{self.base_url}: the workers do not answer {method}: {str(answer)[:300]}")
        return ranks

    @property
    def load(self) -> dict[str, Any]:
        """Load time and rate; ``weights_load_s`` is what the engine logged, with the raw line."""
        told = logs.facts(logs.start_of(self.log_path)).get("weights_load_s")
        size = self.settings.checkpoint_bytes
        return {
            "load_s": self.load_s,
            "checkpoint_bytes": size,
            "load_gb_s": size / 1e9 / self.load_s,
            "weights_load_s": told["value"] if told else None,
            "weights_load_gb_s": size / 1e9 / told["value"] if told and told["value"] else None,
            "weights_load_log_line": told["raw"] if told else None,
        }

    def _get(self, path: str, timeout_s: float = 60.0) -> bytes:
        return self._ask(lambda: http.request(self.base_url + path, timeout_s=timeout_s), path)

    def _post(self, path: str, body: dict | None = None, timeout_s: float = 60.0) -> Any:
        return self._ask(lambda: http.request_json(self.base_url + path, body or {}, timeout_s, "POST"), path)

    def _ask(self, send, path: str):
        try:
            return send()
        except http.RequestFailed as error:
            self.check(f"answering {path}")
            raise Invalid(str(error)) from None


@contextlib.contextmanager
def running(settings: ServerSettings, log_path: Path | str) -> Iterator[Server]:
    """Start a server, wait until it really generates, yield it, end it with everything it started.

    Holds the machine-wide measuring lock throughout.  The log stays at ``log_path``.

    Raises
        :class:`~pipeline.serve.errors.ForeignGpuUse`, or :class:`Refused` for an environment whose packages or plugin are
        not this tree's, before anything starts; :class:`NotReady`, :class:`WrongModel`
        while starting; :class:`ServerDied` when the server ended by itself during the block, whatever the block raised;
        :class:`~pipeline.serve.errors.StillAlive` when it cannot be ended.
    """
    log_path = Path(log_path)
    size = settings.checkpoint_bytes  # no weights: say so before waiting for the machine
    command = settings.command or (str(_python(settings.env)), *API_SERVER)
    print(f"serve: starting {settings.served_name} ({size:,} bytes), log in {log_path}", file=sys.stderr, flush=True)
    with measuring(f"serving {settings.served_name}") as lock:
        if settings.env.startswith("serve-cuda"):
            gpu.check_free(settings.process_environment().get("CUDA_VISIBLE_DEVICES"))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_bytes(b"")
        port = free_port()
        started = time.monotonic()
        process = ServerProcess(
            [*command, *settings.arguments(port)],
            settings.process_environment(),
            log_path,
            settings.stop_grace_s,
            keep_open=[lock],
        )
        server = Server(settings, process, port, log_path)
        try:
            _wait_ready(server, port, started)
            server.load_s = time.monotonic() - started
            server.effective = effective_settings(server)
            yield server
            server.check("serving, before it was asked to end")
        except ServerError:
            raise
        except Exception as error:
            server.check(f"serving; its client saw {type(error).__name__}: {error}")
            raise
        finally:
            process.stop()


def _python(env: str) -> Path:
    """The environment's interpreter; a figure from another plugin than this tree's would be told under the wrong name."""
    if (state := env_facts.state(env)) != env_facts.READY:
        raise Refused(f"environment {env} is {state}: `python3 -m pipeline env make {env}` makes it as this tree wants it")
    return env_facts.python_of(env)


def _wait_ready(server: Server, port: int, started: float) -> None:
    """Return when the right model has generated; raise :class:`NotReady` or :class:`WrongModel`."""
    settings, process = server.settings, server._process
    deadline = started + settings.start_timeout_s
    told, failures = started, 0
    while True:
        if (end := process.ended()) is not None:
            raise NotReady(f"the server {end} while starting", server.log_path)
        now = time.monotonic()
        if now > deadline:
            raise NotReady(
                f"the server was not ready after {settings.start_timeout_s:.0f} s "
                f"({settings.start_allowance_s:.0f} s + {settings.checkpoint_bytes:,} bytes at "
                f"{settings.read_rate_bytes_s:,.0f} bytes/s); raise read_rate_bytes_s' time or "
                "start_allowance_s if the storage is slower",
                server.log_path,
            )
        if now - told >= settings.heartbeat_s:
            told = now
            last = logs.last_lines(server.log_path, 1)
            print(
                f"serve: loading {settings.served_name} ({settings.checkpoint_bytes:,} bytes), {now - started:.0f} s "
                f"of at most {settings.start_timeout_s:.0f} s | {last[:160]}",
                file=sys.stderr,
                flush=True,
            )
        try:
            http.request(f"{server.base_url}/health", timeout_s=5.0)
        except http.RequestFailed:
            time.sleep(POLL_S)
            continue
        if not process.listens(port):
            raise WrongModel(f"port {port} is answered by a process that is not ours; start again", server.log_path)
        _check_model(server)
        try:
            probe.ready_generation(server.base_url, server.model, max(FIRST_GENERATION_S, deadline - now))
            return
        except http.RequestFailed as error:
            failures += 1
            if failures >= GENERATION_TRIES and process.ended() is None:
                raise NotReady(
                    f"/health says 200, but generation failed {failures} times: {error}", server.log_path
                ) from None
            time.sleep(POLL_S)


def _check_model(server: Server) -> None:
    try:
        answer = http.request_json(f"{server.base_url}/v1/models", timeout_s=30.0)
        served = {model["id"]: model for model in answer["data"]}
    except (http.RequestFailed, KeyError, TypeError) as error:
        raise WrongModel(f"{server.base_url}/v1/models lists no models: {error}", server.log_path) from None
    if server.model not in served:
        raise WrongModel(f"{server.base_url} serves {list(served)}, not {server.model!r}", server.log_path)
    told = [limit for limit in (served[server.model].get("max_model_len"), server.settings.max_model_len) if limit]
    server.max_model_len = min(told, default=None)


def effective_settings(server: Server) -> dict[str, Any]:
    """What the engine resolved, from the engine's own ``/metrics``; facts that only the log has keep their raw line.

    Block sizes in tokens; ``None`` where the engine does not say.
    """
    cache = http.cache_config(server._get("/metrics").decode())

    def number(name: str) -> int | None:
        text = cache.get(name, "None")
        return int(float(text)) if text.replace(".", "", 1).isdigit() else None

    effective: dict[str, Any] = {
        "block_size": number("effective_attention_block_size") or number("block_size"),
        "num_blocks": number("num_gpu_blocks"),
        "kv_capacity_tokens": number("kv_cache_size_tokens"),
        "prefix_hit_alignment_tokens": number("cache_hit_alignment_tokens"),
        "kv_cache_dtype": cache.get("cache_dtype"),
        "state_dtype": cache.get("mamba_ssm_cache_dtype"),
        "mamba_cache_mode": cache.get("mamba_cache_mode"),
        "enable_prefix_caching": {"True": True, "False": False}.get(cache.get("enable_prefix_caching", "")),
    }
    try:
        effective["kv_scales"] = server.kv_scales()
    except Invalid as error:  # a worker without the extension serves all the same
        effective["kv_scales"] = {"label": None, "reason": str(error).splitlines()[0]}
    effective["log"] = logs.facts(logs.start_of(server.log_path))
    return effective
