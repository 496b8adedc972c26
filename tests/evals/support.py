"""Small data sets, and servers that answer them: rightly, or wrong in a chosen way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.evals import dataset, runner
from pipeline.evals.dataset import Item
from tests.mock_openai import Behaviour, MockServer

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "tiny-k3"
SETTINGS: dict[str, Any] = {
    "name": "test",
    "lengths": [256, 384],
    "depths": [0.0, 0.5, 1.0],
    "seeds": [0, 1],
    "items": {"single": 6, "multi_key": 6, "ordered_recall": 3},
    "concurrency": 4,
    "retries": 1,
    "deadline_s": 20.0,
    "fidelity": {"prompts_per_length": 0},
}


def settings(**changes: Any) -> dict[str, Any]:
    return SETTINGS | changes


def right(item: Item) -> str:
    return f" {' '.join(item.targets)} {item.terminator or ''}"


class Answers:
    """Answers each prompt of a data set by ``rule(item)`` (the right answer unless told otherwise)."""

    def __init__(self, items: list[Item], rule: Callable[[Item], str] = right) -> None:
        self.by_prompt, self.rule = {item.prompt: item for item in items}, rule

    def __call__(self, prompt: str, max_tokens: int) -> str:
        item = self.by_prompt.get(prompt.removeprefix("<bos>")) or self.by_prompt[prompt]
        return self.rule(item)


def make(folder: Path, raw: dict[str, Any]) -> list[Item]:
    dataset.generate(TOKENIZER, raw, folder)
    return dataset.load(folder)[0]


def run(
    tmp_path: Path,
    raw: dict[str, Any] | None = None,
    rule: Callable[[Item], str] = right,
    behaviour: dict[str, Any] | None = None,
    out: str = "out",
    **arguments: Any,
) -> tuple[dict, list[dict], Any]:
    """Evaluate against a stand-in server; returns (result, samples, server state)."""
    raw = raw or settings()
    items = make(tmp_path / "data", raw)
    with MockServer(
        Behaviour(**({"tokenizer": str(TOKENIZER)} | (behaviour or {}))), answer=Answers(items, rule)
    ) as server:
        result = runner.evaluate(
            server.base_url, server.model, TOKENIZER, tmp_path / "data", raw, tmp_path / out, **arguments
        )
    return result, samples(tmp_path / out), server.state


def samples(folder: Path) -> list[dict]:
    lines = (folder / runner.SAMPLES).read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def item(**changes: Any) -> Item:
    """One item without a data set."""
    base = dict(
        id="single-lexicon-256-d0-s0-0",
        family="single",
        language="lexicon",
        length=256,
        depth=0.0,
        seed=0,
        cluster="c",
        prompt="p",
        prompt_hash="h",
        prompt_tokens=256,
        targets=("123",),
        pattern=r"\S+",
        order="exact",
        terminator=";",
        correct_at=1.0,
        max_gen_toks=8,
        until=(";",),
    )
    return Item(**base | changes)
