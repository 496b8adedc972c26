"""A tuning run against stand-in servers, with a client whose speed depends on the server's requested settings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest

from pipeline.bench import BenchSettings
from pipeline.evals.dataset import Item
from pipeline.files import write_json
from pipeline.serve import ServerDied, http, running
from pipeline.tuning import measure, run
from pipeline.tuning.measure import Machine
from pipeline.tuning.settings import TuningSettings
from tests.bench.conftest import make_run
from tests.serve.conftest import checkpoint, mock_settings, own_temporary_directory  # noqa: F401  (fixtures)

SETTINGS = TuningSettings(
    variant="native-auto",
    axes={"block_size": [64, 128], "max_num_seqs": [8, 32]},
    bench=BenchSettings(input_len=16, output_len=8, concurrency=(2,), num_prompts_per_concurrency=1, min_prompts=2),
    probe_families=("single",),
    probe_items=2,
    pairs=3,
)
MEMORY = {
    "rank": 0,
    "weight_bytes": 6_000_000,
    "kv_bytes_allocated": 8_000_000,
    "activation_peak_bytes": 1_000_000,
    "kv_bytes_per_token": 576,
    "kv_capacity_tokens": 5000,
    "emulated": ["mxfp4"],
}


def item(index: int) -> Item:
    return Item(
        id=f"single-{index}",
        family="single",
        language="lexicon",
        length=16,
        depth=0.5,
        seed=0,
        cluster=f"c{index}",
        prompt=f"key{index} =",
        prompt_hash=f"h{index}",
        prompt_tokens=2,
        targets=("42",),
        pattern=r"\d+",
        order="exact",
        terminator=None,
        correct_at=1.0,
        max_gen_toks=4,
        until=("\n\n",),
    )


ITEMS = [item(index) for index in range(4)]


class Client:
    """Sends real requests, so that the server's counters move; says the speed that ``speed(settings)`` gives."""

    def __init__(self, urls: dict, speed, dies_at: int | None = None) -> None:
        self.urls, self.speed, self.dies_at = urls, speed, dies_at
        self.busy_s, self.timed = 0.0, 0

    def run(self, arguments, timeout_s):
        options = dict(zip(arguments, arguments[1:]))
        count, seed, url = int(options["--num-prompts"]), int(options["--seed"]), options["--base-url"]
        name = options["--result-filename"]
        if not name.startswith("warmup"):
            self.timed += 1
            if self.timed == self.dies_at:
                raise ServerDied("the server exited with code 1")
        for index in range(count):
            prompt = " ".join(f"s{seed}i{index}w{word}" for word in range(16))
            http.request_json(f"{url}/v1/completions", {"prompt": prompt, "max_tokens": 8})
        tok_s = self.speed(self.urls[url]) * (1 + 0.002 * (self.timed % 3))
        raw = make_run(prompts=count, tok_s=tok_s).raw
        write_json(Path(options["--result-dir"]) / name, raw)
        return {"ok": True, "retries": 0, "seed": seed, "prompt_tokens_sent": [16] * count}


@dataclasses.dataclass
class Tuning:
    """What a test looks at: servers started so far, and the function that runs a tuning."""

    started: list
    tune: object
    folder: Path


@pytest.fixture
def tuning(mock_settings, checkpoint, tmp_path, monkeypatch):  # noqa: F811
    urls, started = {}, []

    @contextlib.contextmanager
    def recorded(settings, log_path):
        with running(settings, log_path) as server:
            urls[server.base_url] = settings
            started.append(settings)
            yield server

    def tune(speed, settings=SETTINGS, refuse=None, dies_at=None, items=ITEMS[:2], **behaviour):
        fields = {"memory_report": (MEMORY,), "answers": {f"key{index} =": " 42" for index in range(4)}} | behaviour

        def server(quant, kv):
            asked = mock_settings(**fields, _max_num_seqs=16, _max_num_batched_tokens=512)
            folder = tmp_path / f"checkpoint-{quant}"
            folder.mkdir(exist_ok=True)
            if not (folder / "model.safetensors").exists():
                (folder / "model.safetensors").write_bytes(quant.encode())
                (folder / "config.json").write_text('{"vocab_size": 1024}')
            return dataclasses.replace(asked, model=folder, kv_cache_dtype=kv)

        def starts(settings, log_path):
            if refuse and refuse(settings):
                command = [*settings.command]
                broken = {"exit_at_start": 1, "log_lines": ["ValueError: Invalid prefix_match_unit=7"]}
                command[command.index("--behaviour") + 1] = json.dumps(broken)
                settings = dataclasses.replace(settings, command=tuple(command))
            return recorded(settings, log_path)

        monkeypatch.setattr(measure, "running", starts)
        monkeypatch.setattr(run, "python_of", lambda name: None)
        client = Client(urls, speed, dies_at)
        monkeypatch.setattr(run, "BenchClient", lambda *_: contextlib.nullcontext(client))
        result = run.tune(settings, Machine(server, {"cpu": "x"}, {"vllm": "y"}), items, tmp_path / "tuning")
        json.dumps(result, allow_nan=False)
        return result, client

    return Tuning(started, tune, tmp_path / "tuning")
