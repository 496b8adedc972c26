"""Synthetic retrieval documents in the lexicon's grammar: for training (many questions each) and for scoring (one each).

A document is a list of events, each with a time; sorted by time and separated by filler they make the text.  A question
always comes later than what it asks for.  Everything is token ids; one lexicon word is one token.

Grammar: ``K = V ;``  ``K2 = @ K1 ;``  ``[ W1 .. Wn ]``  ``# W ;`` and the questions ``? K = V ;``  ``? K + V1 V2 V3 ;``
``? K1 K2 K3 K4 : V1 V2 V3 V4 ;``  ``? [ W1 .. Wn ]``  ``? # W ;``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("single", "multi_key", "tracking", "multi_value", "multi_query", "ordered", "frequent")
TRAINING_SHARES = {"pairs": 0.22, "tracking": 0.2, "multi_query": 0.12, "multi_value": 0.12, "ordered": 0.14,
                   "frequent": 0.08, "mixed": 0.12}
STREAM = 1 << 20
NOTHING, ANSWER, ITEM = 0, 1, 2  # loss classes of a predicted token: plain text, an answer, one item of a long answer


@dataclass
class Words:
    """The lexicon as token ids."""

    keys: np.ndarray
    values: np.ndarray
    filler: np.ndarray
    successors: np.ndarray
    mark: dict[str, int]
    bos: int

    @classmethod
    def load(cls, directory: Path = ROOT) -> Words:
        lexicon = json.loads((directory / "lexicon.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

        def token(word: str) -> int:
            ids = tokenizer.encode(" " + word, add_special_tokens=False).ids
            if len(ids) != 1:
                raise ValueError(f"{directory}/tokenizer.json: {word!r} is {len(ids)} tokens, not one")
            return ids[0]

        lists = {name: np.array([token(word) for word in lexicon[name]]) for name in ("keys", "values", "filler")}
        return cls(**lists, successors=np.array(lexicon["filler_successors"]),
                   mark={name: token(word) for name, word in lexicon["marks"].items()}, bos=tokenizer.token_to_id("<bos>"))

    def filler_stream(self, draw: np.random.Generator) -> np.ndarray:
        """A long walk of the filler's Markov chain; documents take slices of it."""
        choices, walk, word = draw.integers(self.successors.shape[1], size=STREAM).tolist(), [], 0
        table = self.successors.tolist()
        for choice in choices:
            walk.append(word)
            word = table[word][choice]
        return self.filler[np.array(walk)]


@dataclass
class Event:
    """One statement or question at a time; ``classes`` are the loss classes of its tokens, ``hints`` see below."""

    time: float
    tokens: list[int]
    classes: list[int]
    hints: dict[int, int]


@dataclass
class Document:
    """Events under construction.

    A hint says which token the model should have in mind half-way (after the first attention layer) at a place: an alias
    statement's last name hints at the value it stands for, a repeated key's value at the value before.  Training reads
    hints with a head of its own, which is thrown away; it turns each two-step question into two one-step ones.
    """

    events: list[Event] = field(default_factory=list)
    room: int = 0  # tokens used so far

    def add(self, time: float, tokens: list[int], answers: range = range(0), kind: int = ANSWER,
            hints: dict[int, int] | None = None) -> None:
        classes = [kind if place in answers else NOTHING for place in range(len(tokens))]
        self.events.append(Event(time, tokens, classes, hints or {}))
        self.room += len(tokens)


class Source:
    """Draws documents.  One seed, one sequence of documents; ``shares`` replace those of ``TRAINING_SHARES``."""

    def __init__(self, words: Words, seed: int, shares: dict[str, float] | None = None):
        self.words, self.draw = words, np.random.default_rng(seed)
        if unknown := set(shares or {}) - set(TRAINING_SHARES):
            raise ValueError(f"unknown families {sorted(unknown)}; known: {', '.join(TRAINING_SHARES)}")
        self.shares = TRAINING_SHARES | (shares or {})
        self.stream = words.filler_stream(np.random.default_rng(seed + 1))

    # -- statements and questions ------------------------------------------------------------------------------------

    def _later(self, time: float, late: bool) -> float:
        """A question's time: after ``time``, or in the block of questions at the end."""
        return 1 + self.draw.random() if late else time + (1 - time) * self.draw.random()

    def _value(self) -> int:
        return int(self.draw.choice(self.words.values))

    def _pair(self, doc: Document, key: int, value: int, time: float, before: int | None = None) -> None:
        mark = self.words.mark
        doc.add(time, [key, mark["statement"], value, mark["end"]], hints={2: before or mark["multi_value"]})

    def _ask(self, doc: Document, key: int, value: int, time: float) -> None:
        mark = self.words.mark
        doc.add(time, [mark["query"], key, mark["statement"], value, mark["end"]], range(3, 4))

    def pairs(self, doc: Document, keys: list[int], late: bool, asked: float = 1.0, aliased: float = 0.0,
              fours: float = 0.0) -> None:
        """``K = V ;`` for every key, ``asked`` questions a key; a share ``aliased`` of the keys are aliases of others,
        ``fours`` a key ask for four values at once."""
        mark, aliases = self.words.mark, int(len(keys) * aliased / 2)
        plain, asking = [], []
        for key in keys[aliases:]:
            plain.append((key, self._value(), self.draw.random()))
            self._pair(doc, *plain[-1])
        for key in keys[:aliases]:
            source, value, time = plain[self.draw.integers(len(plain))]
            time = time + (1 - time) * self.draw.random()
            doc.add(time, [key, mark["statement"], mark["alias"], source, mark["end"]], hints={3: value})
            asking.append((key, value, time))
        asking = asking * 3 + plain if aliases else plain
        for index in self.draw.integers(len(asking), size=round(asked * len(keys))):
            key, value, time = asking[index]
            self._ask(doc, key, value, self._later(time, late))
        if len(plain) >= 4:
            for _ in range(round(fours * len(keys))):
                self.multi_query(doc, plain, late)

    def multi_query(self, doc: Document, plain: list[tuple[int, int, float]], late: bool) -> None:
        mark, chosen = self.words.mark, [plain[index] for index in self.draw.permutation(len(plain))[:4]]
        doc.add(self._later(max(item[2] for item in chosen), late),
                [mark["query"], *(item[0] for item in chosen), mark["multi_query"], *(item[1] for item in chosen),
                 mark["end"]], range(6, 11), hints={5 + place: item[0] for place, item in enumerate(chosen)})

    def multi_value(self, doc: Document, keys: list[int], late: bool, size: int = 0, asked: int = 1) -> None:
        mark = self.words.mark
        for key in keys:
            count = size or int(self.draw.integers(2, 5))
            values = self.draw.choice(self.words.values, count, replace=False).tolist()
            times = np.sort(self.draw.random(count)) * (1 if late else 0.7)
            for value, before, time in zip(values, [None, *values], times):
                self._pair(doc, key, value, time, before)
            for _ in range(asked):
                doc.add(self._later(times[-1], late), [mark["query"], key, mark["multi_value"], *values, mark["end"]],
                        range(3, 4 + count))

    def ordered(self, doc: Document, items: list[int], late: bool, after: float = 0.0, before: float = 1.0) -> None:
        mark, time = self.words.mark, after + (before - after) * 0.9 * self.draw.random()
        doc.add(time, [mark["list_open"], *items, mark["list_close"]])
        asked = 1 + self.draw.random() if late else time + (before - time) * self.draw.random()
        doc.add(asked, [mark["query"], mark["list_open"], *items, mark["list_close"]], range(2, 3 + len(items)), ITEM)

    def lists(self, doc: Document, pool: list[int], room: int, late: bool) -> None:
        """One list, or several short ones one after another, each asked before the next comes."""
        most = (room - 5) // 2
        if late or self.draw.random() < 0.4 or most < 12:
            size = min(110, most)
            return self.ordered(doc, pool[:int(self.draw.integers(min(size, 6), size + 1))], late)
        count, used = int(self.draw.integers(2, max(3, min(8, most // 5)))), 0
        for number in range(count):
            size = int(self.draw.integers(3, max(4, most // count - 2)))
            self.ordered(doc, pool[used:used + size], False, number / count, (number + 1) / count)
            used += size

    def frequent(self, doc: Document, items: list[int], most: int, late: bool) -> None:
        """``items[0]`` is marked ``most`` times, each other at most half as often."""
        mark = self.words.mark
        counts = [most, *self.draw.integers(1, max(2, most // 2 + 1), size=len(items) - 1)]
        for item, count in zip(items, counts):
            for time in self.draw.random(count) * (1 if late else 0.8):
                doc.add(time, [mark["count"], item, mark["end"]])
        doc.add(self._later(0.8, late), [mark["query"], mark["count"], items[0], mark["end"]], range(2, 3))

    # -- text --------------------------------------------------------------------------------------------------------

    def lay_out(self, doc: Document, length: int) -> np.ndarray:
        """-> [3, length]: token ids, the loss class of each token, the hint at each token (-1: none).

        Filler goes before events; between the questions at the end there is none.
        """
        events = sorted(doc.events, key=lambda event: event.time)
        free = length - 1 - doc.room
        if free < 0:
            raise ValueError(f"events of {doc.room} tokens do not fit into {length}")
        early = sum(event.time <= 1 for event in events)
        cuts = np.sort(self.draw.integers(0, free + 1, size=early))
        gaps, start = np.diff(cuts, prepend=0, append=free), int(self.draw.integers(STREAM - length))
        filler, rows, used, at = self.stream[start:start + free], np.zeros((3, length), dtype=np.int64), 0, 1
        rows[0, 0], rows[2] = self.words.bos, -1
        for number, event in enumerate([*events, Event(9.0, [], [], {})]):
            # The last gap goes in front of the questions at the end, or to the end where there are none.
            gap = int(gaps[number]) if number < len(gaps) else 0
            rows[0, at:at + gap] = filler[used:used + gap]
            at, used = at + gap, used + gap
            rows[0, at:at + len(event.tokens)], rows[1, at:at + len(event.tokens)] = event.tokens, event.classes
            for place, token in event.hints.items():
                rows[2, at + place] = token
            at += len(event.tokens)
        return rows

    # -- training ----------------------------------------------------------------------------------------------------

    def training_document(self, length: int) -> np.ndarray:
        """A document with many questions of one family, densely packed or spread, or of several families together."""
        doc, draw, room = Document(), self.draw, length - 4
        keys = draw.permutation(self.words.keys).tolist()
        pool = draw.permutation(np.concatenate([keys, self.words.values])).tolist()
        late = bool(draw.random() < 0.4)
        # `fill` of the room is events, the rest filler: mostly dense, because only answers teach.
        fill = float(draw.uniform(0.6, 1.0) if draw.random() < 0.8 else draw.uniform(0.1, 0.6)) * room
        weights = np.array(list(self.shares.values()))
        family = draw.choice(list(self.shares), p=weights / weights.sum())
        if family == "mixed" and length < 256:
            family = "pairs"

        def some(tokens_each: float, least: int, most: int = 120) -> list[int]:
            return keys[:int(min(most, max(least, fill // tokens_each)))]

        if family == "pairs":
            chosen = some(9, 2)
            self.pairs(doc, chosen, late, asked=max(0.5, (fill / len(chosen) - 4) / 5 if len(chosen) > 60 else 1.0))
        elif family == "tracking":
            self.pairs(doc, some(10, 4), late, asked=1.0, aliased=float(draw.choice([0.6, 1.0])))
        elif family == "multi_query":
            self.pairs(doc, some(9, 4, 60), late, asked=0.2, fours=0.35)
        elif family == "multi_value":
            self.multi_value(doc, some(19, 2, 50), late)
        elif family == "ordered":
            self.lists(doc, pool, room if draw.random() < 0.7 else int(fill), late)
        elif family == "frequent":
            most = int(draw.integers(3, 9))
            self.frequent(doc, keys[:int(draw.integers(2, 5))], max(3, min(most, length // 12)), late)
        else:
            size = min(110, (room - 180) // 2)
            if draw.random() < 0.6 and size > 8:
                self.ordered(doc, pool[:int(draw.integers(8, size))], late)
                keys = [key for key in keys if key not in set(pool[:size])]
            if draw.random() < 0.5:
                self.frequent(doc, keys[-4:], int(draw.integers(4, 8)), late)
            if draw.random() < 0.5:
                self.multi_value(doc, keys[-7:-5], late)
            self.pairs(doc, keys[:min(len(keys) - 8, int(draw.integers(3, 24)))], late, asked=0.6,
                       aliased=float(draw.choice([0, 0, 1])), fours=0.15)
        while doc.room > length - 1:  # too much: the latest events go, and those are questions
            latest = max(doc.events, key=lambda event: event.time)
            doc.room -= len(latest.tokens)
            doc.events.remove(latest)
        return self.lay_out(doc, length)

    def batch(self, length: int, size: int) -> np.ndarray:
        """-> [3, size, length]: token ids, loss classes, hints."""
        return np.stack([self.training_document(length) for _ in range(size)], 1)

    # -- scoring -----------------------------------------------------------------------------------------------------

    def question(self, family: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """One document of ``length`` tokens ending with one question and its answer: (prompt ids, answer ids)."""
        doc, words = Document(), self.words
        keys = self.draw.permutation(words.keys).tolist()
        if family in ("single", "multi_key", "tracking", "multi_query"):
            count = {"single": 1, "multi_key": 16, "tracking": 8, "multi_query": 16}[family]
            known = [(key, self._value(), self.draw.random()) for key in keys[:count]]
            for key, value, time in known:
                self._pair(doc, key, value, time)
            if family == "multi_query":
                self.multi_query(doc, known[:4], late=True)
            elif family == "tracking":  # every source gets one alias, one of them is asked
                for (source, _, time), alias in zip(known, keys[count:]):
                    doc.add(time + (1 - time) * self.draw.random(),
                            [alias, words.mark["statement"], words.mark["alias"], source, words.mark["end"]])
                self._ask(doc, keys[count], known[0][1], 1.5)
            else:
                self._ask(doc, *known[0][:2], 1.5)
        elif family == "multi_value":
            for key in keys[3:8]:  # other keys, one value each
                self._pair(doc, key, self._value(), self.draw.random())
            self.multi_value(doc, keys[:1], late=True, size=3)
        elif family == "ordered":
            self.ordered(doc, self.draw.permutation(np.concatenate([words.keys, words.values]))[:64].tolist(), late=True)
        elif family == "frequent":
            self.frequent(doc, keys[:4], 8, late=True)
        else:
            raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
        ids, classes, _ = self.lay_out(doc, length)
        start = int(np.flatnonzero(classes)[0])
        stop = int(np.flatnonzero(classes)[-1]) + 1
        return ids[:start], ids[start:stop]
