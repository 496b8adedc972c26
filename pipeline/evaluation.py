"""One variant, served and evaluated: from parameters and a checkpoint to samples and their accuracy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline import params
from pipeline.evals import endpoint, runner
from pipeline.evals.settings import EvalSettings
from pipeline.files import read_json, sha256_json
from pipeline.serve import errors
from pipeline.serve.process import guardians, still_wanted
from pipeline.serve.server import running
from pipeline.serve.settings import ServerSettings
from pipeline.serving import check_scales, variant_settings
from pipeline.variant import Variant

TRIES = 2
TOLD_APART = ("kv_cache_dtype", "state_dtype", "tensor_parallel_size")  # of a server's settings: conditions of their own


def evaluate(name: str, settings: EvalSettings, samples: Path, *, label: str | None = None) -> dict[str, Any]:
    """Serve variant ``name`` and ask it every item of data/eval; ``samples`` gets the answers.

    A server that dies is started again once, and the run goes on at the request; unless it was ended because dvc was
    (then ``ServerDied`` is raised, and the next run goes on).  One that dies again is a finding, not a missing row: the
    shorter items are asked, and the result says ``invalid``, why, and ``server_died_at_length``.
    ``label`` names the log and the journal (default: the variant).
    """
    label, wanting = label or name, guardians()
    for attempt in range(1, TRIES + 1):
        try:
            return _once(name, settings, samples, label)
        except _Died as death:
            result = death.result
            print(f"evaluate: {label}: {death}", file=sys.stderr, flush=True)
            _stop_unless_wanted(wanting, label)
            if attempt < TRIES:
                print("evaluate: starting the server again, what was answered is kept", file=sys.stderr, flush=True)
    length = result.get("server_died_at_length")
    if length is None or length <= min(settings.lengths):
        return result
    print(f"evaluate: {label}: asking only what is shorter than {length}", file=sys.stderr, flush=True)
    try:
        return _once(name, settings, samples, label, below=length)
    except _Died as death:
        _stop_unless_wanted(wanting, label)
        return death.result  # the samples are of this attempt by now, so the counts must be too


def _stop_unless_wanted(wanting: list[list[int]], label: str) -> None:
    """A server that was ended because dvc was killed is no finding about the server."""
    if not still_wanted(wanting):
        raise endpoint.ServerDied(f"{label}: dvc is gone, so the server was ended; what was answered is kept")


def plan_of(name: str) -> tuple[ServerSettings, dict[str, Any]]:
    """How variant ``name`` is served, and the conditions that its answers are given under.

    ``serving`` are the settings that all variants share: two runs under different ones are not compared.
    """
    kv = read_json(f"metrics/kv/{name}.json")
    request = variant_settings(Variant.parse(name), kv["setting"])
    conditions = {
        "checkpoint_sha256": kv["checkpoint_sha256"],
        "kv": kv["setting"],
        "tensor_parallel_size": request.tensor_parallel_size,
        "serving": {key: value for key, value in request.requested().items() if key not in TOLD_APART},
        "software": sha256_json(read_json("metrics/software.json")),
    }
    return request, conditions


class _Died(Exception):
    """The server ended while it was asked.  ``result`` is the run's JSON so far."""

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message)
        self.result = result


def _once(name: str, settings: EvalSettings, samples: Path, label: str, below: int | None = None) -> dict[str, Any]:
    request, conditions = plan_of(name)
    partial = None
    try:
        with running(request, Path("data/logs") / f"evaluate-{label}.log") as server:
            check_scales(read_json(f"metrics/kv/{name}.json")["label"], server.effective["kv_scales"])
            serving = {"requested": request.requested(), "effective": server.effective, "load_s": server.load_s}
            try:
                result = runner.evaluate(
                    server.base_url,
                    server.model,
                    params.load("model")["path"],
                    Path("data/eval"),
                    settings,
                    samples,
                    conditions=conditions,
                    journal_dir=Path(".cache/journals") / label,
                    below=below,
                )
            except endpoint.ServerDied as death:
                partial = death.result
                raise
    except (endpoint.ServerDied, errors.ServerDied) as death:
        if partial is None:  # it died before the first request, or after the last
            raise
        raise _Died(str(death), partial | {"server": serving}) from None
    return result | {"server": serving}
