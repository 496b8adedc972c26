"""Generates the evaluation data set offline: families x lengths x depths x seeds x languages, sized in served tokens.

Each item has its own random generator, seeded by what it is; adding a family or a length changes no other item.  The
key of the data set covers the tokenizer and every setting that shapes an item; the key of an item is the SHA-256 of
its prompt, which is what two runs are paired by.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Invalid, Refused, Unreadable
from pipeline.evals.draft import Draft
from pipeline.evals.lexicon import Lexicon
from pipeline.evals.settings import EvalSettings, parse
from pipeline.evals.templates import WORDINGS, Natural
from pipeline.evals.tokens import ServedTokenizer
from pipeline.files import read_json, sha256_file, sha256_json, write_json, write_text

GENERATOR_VERSION = 1
ITEMS, META = "items.jsonl", "meta.json"
BUDGET_STEP = 8  # budgets are rounded up to this, so that lm-eval batches items of different families together
NATURAL_SLACK = 1.5
FIRST_UNITS = 8  # filler units of the first trial, from which tokens per unit are estimated
BLANK_LINE = (
    "\n\n",
)  # a base model goes on after its answer; a chat model ends by itself, and may begin with a courtesy


@dataclass(frozen=True)
class Item:
    """One question.  ``prompt_tokens`` counts BOS (and, for chat, the template); ``depth`` is null where it has no
    meaning.
    """

    id: str
    family: str
    language: str
    length: int
    depth: float | None
    seed: int
    cluster: str
    """Items of one source document share it: they are resampled together."""
    prompt: str
    prompt_hash: str
    prompt_tokens: int
    targets: tuple[str, ...]
    pattern: str
    order: str
    terminator: str | None
    correct_at: float
    max_gen_toks: int
    until: tuple[str, ...]


def generate(tokenizer_dir: Path | str, settings: EvalSettings | dict, out_dir: Path | str) -> dict[str, Any]:
    """Write ``items.jsonl`` and ``meta.json`` to ``out_dir`` and return the latter.

    Raises :class:`Refused` when a family does not fit a length or a prompt cannot be sized within the tolerance.
    """
    settings, out_dir = parse(settings), Path(out_dir)
    if settings.tasks == "hub":
        return _nothing(settings, out_dir)
    tokenizer = ServedTokenizer(tokenizer_dir, trust_remote_code=settings.trust_remote_code)
    languages = _languages(tokenizer.directory, settings)
    items = [
        item
        for family in settings.items
        for length in settings.lengths
        for item in _cell(tokenizer, settings, languages, family, length)
    ]
    repeated = [prompt for prompt, count in Counter(item.prompt_hash for item in items).items() if count > 1]
    if repeated or not items:
        raise Invalid(
            f"{len(repeated)} prompts occur more than once: pairing by hash would be ambiguous"
            if repeated
            else "the settings select no item at all (qa needs a natural language)"
        )
    write_text(out_dir / ITEMS, "".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items))
    meta = _meta(tokenizer, settings, items) | {"items_sha256": sha256_file(out_dir / ITEMS)}
    write_json(out_dir / META, meta)
    return meta


def _nothing(settings: EvalSettings, out_dir: Path) -> dict[str, Any]:
    """lm-eval fetches the hub's tasks itself; what stands here only says so."""
    write_text(out_dir / ITEMS, "")
    meta = {
        "key": sha256_json(settings.model_dump(mode="json")),
        "items_total": 0,
        "items_by_family": {},
        "items_sha256": sha256_file(out_dir / ITEMS),
        "hub_tasks": list(settings.hub.tasks),
    }
    write_json(out_dir / META, meta)
    return meta


def load(dataset_dir: Path | str) -> tuple[list[Item], dict[str, Any]]:
    """Read a data set back.  Raises :class:`Unreadable` when its files are missing or do not belong together."""
    dataset_dir = Path(dataset_dir)
    meta = read_json(dataset_dir / META)
    path = dataset_dir / ITEMS
    if not path.is_file() or sha256_file(path) != meta.get("items_sha256"):
        raise Unreadable(f"{path}: missing, or not the file that {META} describes; generate the data set again")
    items = []
    for line in path.read_text(encoding="utf-8").splitlines():
        raw = json.loads(line)
        items.append(Item(**raw | {"targets": tuple(raw["targets"]), "until": tuple(raw["until"])}))
    return items, meta


def _languages(directory: Path, settings: EvalSettings) -> list[Lexicon | Natural]:
    path = directory / "lexicon.json"
    auto = ("lexicon",) if path.is_file() else tuple(WORDINGS)
    names = dict.fromkeys(
        itertools.chain.from_iterable(auto if name == "auto" else (name,) for name in settings.languages)
    )
    if "lexicon" in names and not path.is_file():
        raise Refused(f"{path}: no such file; eval.languages asks for the model's own lexicon. Use auto, en or zh")
    return [Lexicon(path) if name == "lexicon" else Natural(WORDINGS[name]) for name in names]


def _cell(tokenizer: ServedTokenizer, settings: EvalSettings, languages: list, family: str, length: int) -> list[Item]:
    """All items of one family at one length, dealt out over depths (fastest), languages, seeds, replicates."""
    depths, seeds = settings.depths, settings.seeds
    items = []
    for index in range(settings.count(family, length)):
        depth = depths[index % len(depths)]
        language = languages[index // len(depths) % len(languages)]
        seed = seeds[index // (len(depths) * len(languages)) % len(seeds)]
        replicate = index // (len(depths) * len(languages) * len(seeds))
        item = _item(tokenizer, settings, language, family, length, depth, seed, replicate)
        if item is not None:
            items.append(item)
    return items


def _item(
    tokenizer: ServedTokenizer,
    settings: EvalSettings,
    language: Lexicon | Natural,
    family: str,
    length: int,
    depth: float,
    seed: int,
    replicate: int,
) -> Item | None:
    name = f"{family}-{language.name}-{length}-d{depth:g}-s{seed}-{replicate}"
    rng = random.Random(hashlib.sha256(name.encode()).digest())
    draft = language.draft(family, rng, depth, settings.recall_items)
    if draft is None:
        return None
    chat = settings.endpoint == "chat"
    prompt, tokens = _fit(tokenizer, language, draft, length, rng, chat, settings.length_tolerance, name)
    answer_tokens = draft.answer_tokens or round(
        NATURAL_SLACK * tokenizer.count(language.separator.join(draft.answer.targets)) + BUDGET_STEP
    )
    budget = -(-answer_tokens // BUDGET_STEP) * BUDGET_STEP + settings.thinking_budget_tokens
    stops = (draft.answer.terminator,) if draft.answer.terminator else () if chat else BLANK_LINE
    return Item(
        id=name,
        family=family,
        language=language.name,
        length=length,
        depth=depth if draft.has_depth else None,
        seed=seed,
        cluster=name,
        prompt=prompt,
        prompt_hash=hashlib.sha256(prompt.encode()).hexdigest(),
        prompt_tokens=tokens,
        targets=draft.answer.targets,
        pattern=draft.answer.pattern,
        order=draft.answer.order,
        terminator=draft.answer.terminator,
        correct_at=settings.recall_correct_at if draft.answer.order == "sequence" else 1.0,
        max_gen_toks=budget,
        until=stops if settings.stop and settings.thinking == "never" else (),
    )


def _assemble(language: Lexicon | Natural, draft: Draft, units: list[str]) -> str:
    """Needles set between filler units by depth; needles of equal depth keep their order."""
    places = sorted(range(len(draft.needles)), key=lambda i: (draft.needles[i].depth, i))
    parts, done = [], 0
    for index in places:
        slot = round(draft.needles[index].depth * len(units))
        parts += [*units[done:slot], draft.needles[index].text]
        done = slot
    parts += units[done:]
    outer = language.separator if language.name == "lexicon" else "\n"
    whole = [part for part in (draft.preamble, language.separator.join(parts), draft.question) if part]
    return language.prefix + outer.join(whole)


def _fit(
    tokenizer: ServedTokenizer,
    language: Lexicon | Natural,
    draft: Draft,
    length: int,
    rng: random.Random,
    chat: bool,
    tolerance: float,
    name: str,
) -> tuple[str, int]:
    """The prompt with as much filler as brings it closest to ``length`` tokens, and its exact token count."""
    source, drawn = language.filler(rng), []

    def build(count: int, tail: str = "") -> tuple[str, int]:
        while len(drawn) < count:
            drawn.append(next(source))
        text = _assemble(language, draft, drawn[:count] + ([tail] if tail else []))
        return text, tokenizer.count(text, chat=chat)

    empty, base = build(0)
    if base > length * (1 + tolerance):
        raise Refused(
            f"{name}: takes {base} tokens without any filler, {length} were asked; raise the length, or for "
            "ordered_recall lower eval.recall_items"
        )
    best, low, high, trial = (empty, base), 0, None, FIRST_UNITS
    while best[1] < length and (high is None or high - low > 1):
        text, tokens = build(trial)
        if tokens <= length:
            low, best = trial, (text, tokens)
        else:
            high = trial
        # Next by tokens per unit so far, inside the bracket: two or three trials where units are alike.
        guess = trial + round((length - tokens) * trial / max(tokens - base, 1))
        trial = max(low + 1, guess if high is None else min(guess, high - 1))
    reached = best[1]
    for tail in language.shorter(next(source)):
        text, tokens = build(low, tail)
        if abs(tokens - length) <= abs(best[1] - length):
            best = (text, tokens)
    if abs(best[1] - length) > tolerance * length:
        raise Refused(
            f"{name}: {reached} to {best[1]} tokens is the nearest to {length} that the template reaches "
            f"(tolerance {tolerance:.0%}); raise eval.length_tolerance or the length"
        )
    return best


def key(tokenizer_hash: str, settings: EvalSettings) -> str:
    """The key of the data set that these settings and this tokenizer make."""
    return sha256_json(_shape(tokenizer_hash, settings))


def _shape(tokenizer_hash: str, settings: EvalSettings) -> dict[str, Any]:
    chosen = settings.model_dump(
        mode="json",
        include={
            "endpoint",
            "thinking",
            "thinking_budget_tokens",
            "lengths",
            "depths",
            "seeds",
            "languages",
            "items",
            "recall_items",
            "recall_correct_at",
            "length_tolerance",
            "stop",
        },
    )
    return chosen | {"tokenizer_sha256": tokenizer_hash, "generator_version": GENERATOR_VERSION}


def _meta(tokenizer: ServedTokenizer, settings: EvalSettings, items: list[Item]) -> dict[str, Any]:
    counts: dict[str, dict[str, int]] = {}
    for item in items:
        of_family = counts.setdefault(item.family, {})
        of_family[str(item.length)] = of_family.get(str(item.length), 0) + 1
    return _shape(tokenizer.sha256, settings) | {
        "key": key(tokenizer.sha256, settings),
        "items_total": len(items),
        "items_by_family": counts,
        "prompt_tokens_total": sum(item.prompt_tokens for item in items),
        "max_tokens_needed": max(item.prompt_tokens + item.max_gen_toks for item in items),
    }
