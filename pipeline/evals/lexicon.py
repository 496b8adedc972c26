"""The closed-vocabulary task grammar that the tiny model was trained on.  Every word is one token with its leading
space.

Statement ``K = V ;``; query ``? K =`` (answer ``V``, stop at ``;``).  Two hops ``K2 = @ K1 ;``.  Several values of
one key ``? K +``.  Several keys ``? K1 K2 K3 K4 :``.  A list ``[ W1 ... Wn ]``, recalled by ``? [``.  Marked words
``# W ;``, the most frequent asked by ``? #``.  Filler is an order-1 Markov chain over ``filler_successors``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from pipeline.evals.draft import Answer, Draft, Needle
from pipeline.files import read_json

VALUES_PER_KEY = 3
KEYS_PER_QUERY = 4
STATEMENTS = 16
CHAINS = 8
DISTRACTORS = 5
FREQUENT_TIMES = 8
OTHER_WORDS = 3


class Lexicon:
    """Drafts items from the ``lexicon.json`` that a model directory ships."""

    name = "lexicon"
    separator = " "
    prefix = " "

    def __init__(self, path: Path) -> None:
        raw = read_json(path)
        self.keys, self.values, self.filler_words = raw["keys"], raw["values"], raw["filler"]
        self.successors, self.marks = raw["filler_successors"], raw["marks"]

    def filler(self, rng: random.Random) -> Iterator[str]:
        """Endless filler, one word (= one token) at a time."""
        state = rng.randrange(len(self.filler_words))
        while True:
            yield self.filler_words[state]
            state = rng.choice(self.successors[state])

    def shorter(self, unit: str) -> list[str]:
        """Nothing is shorter than one word."""
        return []

    def draft(self, family: str, rng: random.Random, depth: float, recall_items: int) -> Draft | None:
        """One item, or ``None`` for a family that this grammar lacks."""
        make = getattr(self, f"_{family}", None)
        return make(rng, depth, recall_items) if make else None

    def _statement(self, key: str, value: str) -> str:
        return f"{key} {self.marks['statement']} {value} {self.marks['end']}"

    def _answer(self, targets: list[str], end: str = "end", order: str = "exact") -> Answer:
        # Whatever word stands in the answer's place is the answer: in a closed grammar there is no other wording.
        return Answer(tuple(targets), pattern=r"\S+", order=order, terminator=self.marks[end])

    def _facts(self, rng: random.Random, depth: float, count: int) -> Draft:
        keys, values = rng.sample(self.keys, count), [rng.choice(self.values) for _ in range(count)]
        needles = [Needle(depth, self._statement(keys[0], values[0]))]
        needles += [Needle(rng.random(), self._statement(k, v)) for k, v in zip(keys[1:], values[1:], strict=True)]
        question = f"{self.marks['query']} {keys[0]} {self.marks['statement']}"
        return Draft(needles, question, self._answer([values[0]]), answer_tokens=2)

    def _single(self, rng: random.Random, depth: float, _: int) -> Draft:
        return self._facts(rng, depth, 1)

    def _multi_key(self, rng: random.Random, depth: float, _: int) -> Draft:
        return self._facts(rng, depth, STATEMENTS)

    def _multi_value(self, rng: random.Random, depth: float, _: int) -> Draft:
        keys, values = rng.sample(self.keys, 1 + DISTRACTORS), rng.sample(self.values, VALUES_PER_KEY)
        places = sorted([depth, *(rng.random() for _ in values[1:])])
        needles = [Needle(at, self._statement(keys[0], value)) for at, value in zip(places, values, strict=True)]
        needles += [Needle(rng.random(), self._statement(key, rng.choice(self.values))) for key in keys[1:]]
        question = f"{self.marks['query']} {keys[0]} {self.marks['multi_value']}"
        return Draft(needles, question, self._answer(values), answer_tokens=len(values) + 1)

    def _multi_query(self, rng: random.Random, depth: float, _: int) -> Draft:
        keys = rng.sample(self.keys, STATEMENTS)
        facts = {key: rng.choice(self.values) for key in keys}
        needles = [
            Needle(depth if i == 0 else rng.random(), self._statement(*fact)) for i, fact in enumerate(facts.items())
        ]
        asked = rng.sample(keys[:KEYS_PER_QUERY], KEYS_PER_QUERY)
        question = f"{self.marks['query']} {' '.join(asked)} {self.marks['multi_query']}"
        return Draft(needles, question, self._answer([facts[key] for key in asked]), answer_tokens=len(asked) + 1)

    def _variable_tracking(self, rng: random.Random, depth: float, _: int) -> Draft:
        """Chains of two: each source has a value and one alias after it; the first chain's alias is asked."""
        sources, aliases = (keys := rng.sample(self.keys, 2 * CHAINS))[:CHAINS], keys[CHAINS:]
        values, needles = [rng.choice(self.values) for _ in sources], []
        for i, (source, alias, value) in enumerate(zip(sources, aliases, values, strict=True)):
            place = depth if i == 0 else rng.random()
            needles += [
                Needle(place, self._statement(source, value)),
                Needle(rng.uniform(place, 1), self._statement(alias, f"{self.marks['alias']} {source}")),
            ]
        question = f"{self.marks['query']} {aliases[0]} {self.marks['statement']}"
        return Draft(needles, question, self._answer([values[0]]), answer_tokens=2)

    def _frequent_words(self, rng: random.Random, depth: float, _: int) -> Draft:
        """One word is marked more than twice as often as any other."""
        words = rng.sample(self.keys, 1 + OTHER_WORDS)
        times = [FREQUENT_TIMES, *(rng.randint(1, FREQUENT_TIMES // 2) for _ in range(OTHER_WORDS))]
        needles = [
            Needle(rng.random(), f"{self.marks['count']} {word} {self.marks['end']}")
            for word, count in zip(words, times, strict=True)
            for _ in range(count)
        ]
        question = f"{self.marks['query']} {self.marks['count']}"
        return Draft(needles, question, self._answer([words[0]]), answer_tokens=2, has_depth=False)

    def _ordered_recall(self, rng: random.Random, depth: float, recall_items: int) -> Draft:
        words = rng.sample([*self.keys, *self.values], recall_items)
        needle = f"{self.marks['list_open']} {' '.join(words)} {self.marks['list_close']}"
        question = f"{self.marks['query']} {self.marks['list_open']}"
        return Draft(
            [Needle(depth, needle)],
            question,
            self._answer(words, "list_close", "sequence"),
            answer_tokens=len(words) + 1,
        )
