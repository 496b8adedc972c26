"""One variant, served and evaluated: from parameters and a checkpoint to samples and their accuracy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline import params, store
from pipeline.evals import endpoint, runner
from pipeline.evals.settings import EvalSettings
from pipeline.files import read_json, sha256_json
from pipeline.plan import hardware
from pipeline.serve import errors
from pipeline.serve.process import guardians, still_wanted
from pipeline.serve.server import running
from pipeline.serving import server_settings
from pipeline.variant import Variant

TRIES = 2


def evaluate(name: str, settings: EvalSettings, samples: Path, *, label: str | None = None) -> dict[str, Any]:
    """Serve variant ``name`` and ask it every item of data/eval; ``samples`` gets the answers.

    A server that dies is started again once, and the run goes on at the request; unless it was ended because dvc was
    (then ``ServerDied`` is raised, and the next run goes on).  One that dies again is a finding,
    not a missing row: the shorter items are asked, and the result says ``invalid``, why, and ``server_died_at_length``.
    ``label`` names the log and the journal (default: the variant).
    """
    label, wanting = label or name, guardians()
    for attempt in range(1, TRIES + 1):
        try:
            return _once(name, settings, samples, label)
        except _Died as death:
            result = death.result
            print(f"evaluate: {label}: {death}", file=sys.stderr, flush=True)
            if not still_wanted(wanting):
                message = f"{label}: dvc is gone, so the server was ended; what was answered is kept"
                raise endpoint.ServerDied(message) from None
            if attempt < TRIES:
                print("evaluate: starting the server again, what was answered is kept", file=sys.stderr, flush=True)
    length = result.get("server_died_at_length")
    if length is None or length <= min(settings.lengths):
        return result
    print(f"evaluate: {label}: asking only what is shorter than {length}", file=sys.stderr, flush=True)
    try:
        return _once(name, settings, samples, label, below=length)
    except _Died:
        return result


def conditions(kv: dict[str, Any], tensor_parallel_size: int) -> dict[str, Any]:
    """What the samples of a variant are measured under; ``kv`` is its metrics/kv JSON."""
    return {
        "checkpoint_sha256": kv["checkpoint_sha256"],
        "kv": kv["setting"],
        "tensor_parallel_size": tensor_parallel_size,
        "software": sha256_json(read_json("metrics/software.json")),
    }


class _Died(Exception):
    """The server ended while it was asked.  ``result`` is the run's JSON so far."""

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message)
        self.result = result


def _once(name: str, settings: EvalSettings, samples: Path, label: str, below: int | None = None) -> dict[str, Any]:
    variant, model = Variant.parse(name), params.load("model")
    machine = hardware.parse(params.load("hardware"), "params.yaml, hardware")
    kv = read_json(f"metrics/kv/{name}.json")
    request = server_settings(
        machine,
        model["name"],
        store.resolve(variant.quant),
        kv["setting"],
        trust_remote_code=model["trust_remote_code"],
    )
    partial = None
    try:
        with running(request, Path("data/logs") / f"evaluate-{label}.log") as server:
            serving = {"requested": request.requested(), "effective": server.effective, "load_s": server.load_s}
            try:
                result = runner.evaluate(
                    server.base_url,
                    server.model,
                    model["path"],
                    Path("data/eval"),
                    settings,
                    samples,
                    conditions=conditions(kv, machine.tensor_parallel),
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
