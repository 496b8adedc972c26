"""The same task families in natural language, for every model that has no lexicon of its own: English and Chinese.

The sentences are plain on purpose: what is measured is retrieval over distance, not knowledge of the language.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.evals.draft import Answer, Draft, Needle

VALUES_PER_KEY = 4
KEYS_PER_QUERY = 4
STATEMENTS = 16
FREQUENT_TIMES = 8
OTHER_TIMES = (4, 3, 3, 2, 2, 1)
PEOPLE = 12
NUMBER = r"(?<!\d)\d{7}(?!\d)"


@dataclass(frozen=True)
class Wording:
    """Every string of one language.  ``{k}``, ``{v}``, ``{ks}`` are filled in."""

    name: str
    separator: str
    sentence_words: str
    """Regular expression that cuts a filler sentence into pieces for the last few tokens of sizing."""
    full_stop: str
    filler: tuple[str, ...]
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    places: tuple[str, ...]
    preamble: str
    fact: str
    alias: str
    frequent: str
    born: str
    listed: str
    ask_one: str
    ask_values: str
    ask_keys: str
    ask_frequent: str
    ask_born: str
    ask_list: str
    cue: str
    join: str


ENGLISH = Wording(
    name="en",
    separator="\n",
    sentence_words=r"\S+\s*",
    full_stop=".",
    filler=(
        "The train left the station on time.",
        "Rain fell on the quiet harbour.",
        "A dog slept near the open door.",
        "The baker opened the shop at dawn.",
        "Two boats crossed the wide river.",
        "Leaves turned red along the road.",
        "The lamp on the desk was switched off.",
        "Someone painted the old fence white.",
        "The clock in the hall struck nine.",
        "Children played in the sunny yard.",
        "A letter arrived late in the day.",
        "The kettle began to sing again.",
    ),
    adjectives=tuple(
        "amber brisk calm dusty eager faint gentle hollow icy jolly keen lively mellow noble olive plain quiet "
        "rapid silent tidy urban vivid witty young".split()
    ),
    nouns=tuple(
        "anchor basket candle desert engine falcon garden hammer island jacket kettle ladder mirror needle orchard "
        "pencil quarry river saddle temple umbrella valley window zebra".split()
    ),
    places=tuple(
        "Aldermoor Brightwick Coldstone Dunharrow Eastmere Fernhill Greyford Highcliff Ivydale Kingsbarrow Longmarsh "
        "Millbrook Northgate Oakhurst Pinewood Redwater".split()
    ),
    preamble="Read the text below carefully. A question about it follows at the end.",
    fact="The access code of {k} is {v}.",
    alias="The access code of {k} is the same as that of {v}.",
    frequent="The word of the hour is {k}.",
    born="The explorer {k} was born in {v}.",
    listed="The packing list, in order: {k}.",
    ask_one="What is the access code of {k}? Answer with the code only.",
    ask_values="What are all {n} access codes of {k}? Answer with the codes only.",
    ask_keys="What are the access codes of {ks}, in this order? Answer with the codes only.",
    ask_frequent="Which word was the word of the hour most often? Answer with the word only.",
    ask_born="In which place was the explorer {k} born? Answer with the place only.",
    ask_list="Repeat the packing list, all {n} words in order, separated by commas. Answer with the list only.",
    cue="Answer:",
    join=", ",
)
CHINESE = Wording(
    name="zh",
    separator="",
    sentence_words=r".",
    full_stop="。",
    filler=(
        "火车准时离开了车站。",
        "细雨落在安静的港口。",
        "一只狗睡在门边。",
        "面包店在清晨开门。",
        "两条小船过了大河。",
        "路边的树叶变红了。",
        "桌上的灯已经关了。",
        "有人把旧栏杆刷白了。",
        "大厅的钟敲了九下。",
        "孩子们在院子里玩。",
        "一封信很晚才送到。",
        "水壶又响了起来。",
    ),
    adjectives=tuple("红色 蓝色 绿色 白色 黑色 金色 银色 灰色 古老 安静 明亮 快速 温和 坚固 轻巧 圆形".split()),
    nouns=tuple(
        "灯塔 花园 铁锤 小岛 外套 水壶 梯子 镜子 果园 铅笔 河流 马鞍 寺庙 雨伞 山谷 窗户 风筝 钢琴 书桌 帆船 竹篮 蜡烛 船锚 骆驼".split()
    ),
    places=tuple("青石镇 白水村 长松县 北门镇 南湖村 东岭县 西沙镇 金桥村 银杏镇 红枫县 大柳村 小河镇".split()),
    preamble="请仔细阅读下面的文字，最后有一个问题。",
    fact="{k}的口令是{v}。",
    alias="{k}的口令与{v}的口令相同。",
    frequent="此刻的词是{k}。",
    born="探险家{k}出生在{v}。",
    listed="行李清单依次是：{k}。",
    ask_one="{k}的口令是什么？只回答口令。",
    ask_values="{k}的全部{n}个口令是什么？只回答口令。",
    ask_keys="依次写出{ks}的口令。只回答口令。",
    ask_frequent="哪个词最常成为此刻的词？只回答这个词。",
    ask_born="探险家{k}出生在哪里？只回答地名。",
    ask_list="按顺序重复行李清单的全部{n}个词，用逗号分开。只回答清单。",
    cue="答案：",
    join="、",
)
WORDINGS = {wording.name: wording for wording in (ENGLISH, CHINESE)}


class Natural:
    """Drafts items in one natural language."""

    prefix = ""

    def __init__(self, wording: Wording) -> None:
        self.words, self.name, self.separator = wording, wording.name, wording.separator

    def filler(self, rng: random.Random) -> Iterator[str]:
        """Endless filler sentences."""
        while True:
            yield rng.choice(self.words.filler)

    def shorter(self, unit: str) -> list[str]:
        """Shortened forms of a sentence, shortest first: they make up the last few tokens of a prompt's length."""
        pieces = re.findall(self.words.sentence_words, unit)
        return ["".join(pieces[:cut]).rstrip() + self.words.full_stop for cut in range(1, len(pieces))]

    def draft(self, family: str, rng: random.Random, depth: float, recall_items: int) -> Draft | None:
        """One item of ``family``."""
        make = getattr(self, f"_{family}", None)
        return make(rng, depth, recall_items) if make else None

    def _names(self, rng: random.Random, count: int) -> list[str]:
        glue = "-" if self.words.name == "en" else ""
        pool = [f"{a}{glue}{n}" for a in self.words.adjectives for n in self.words.nouns]
        return rng.sample(pool, count)

    @staticmethod
    def _numbers(rng: random.Random, count: int) -> list[str]:
        return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]

    def _pool_pattern(self, words: list[str]) -> str:
        edge = r"\b" if self.words.name == "en" else ""
        return edge + "(?:" + "|".join(sorted(map(re.escape, words), key=len, reverse=True)) + ")" + edge

    def _draft(self, needles: list[Needle], question: str, answer: Answer, has_depth: bool = True) -> Draft:
        return Draft(
            needles,
            f"{question}\n{self.words.cue}",
            answer,
            answer_tokens=0,
            preamble=self.words.preamble,
            has_depth=has_depth,
        )

    def _facts(self, rng: random.Random, depth: float, count: int) -> Draft:
        keys, values = self._names(rng, count), self._numbers(rng, count)
        needles = [
            Needle(depth if i == 0 else rng.random(), self.words.fact.format(k=k, v=v))
            for i, (k, v) in enumerate(zip(keys, values, strict=True))
        ]
        return self._draft(needles, self.words.ask_one.format(k=keys[0]), Answer((values[0],), NUMBER, "set"))

    def _single(self, rng: random.Random, depth: float, _: int) -> Draft:
        return self._facts(rng, depth, 1)

    def _multi_key(self, rng: random.Random, depth: float, _: int) -> Draft:
        return self._facts(rng, depth, STATEMENTS)

    def _multi_value(self, rng: random.Random, depth: float, _: int) -> Draft:
        (key,), values = self._names(rng, 1), self._numbers(rng, VALUES_PER_KEY)
        needles = [
            Needle(depth if i == 0 else rng.random(), self.words.fact.format(k=key, v=v)) for i, v in enumerate(values)
        ]
        question = self.words.ask_values.format(k=key, n=len(values))
        return self._draft(needles, question, Answer(tuple(values), NUMBER, "set"))

    def _multi_query(self, rng: random.Random, depth: float, _: int) -> Draft:
        keys, values = self._names(rng, STATEMENTS), self._numbers(rng, STATEMENTS)
        facts = dict(zip(keys, values, strict=True))
        needles = [
            Needle(depth if i == 0 else rng.random(), self.words.fact.format(k=k, v=v))
            for i, (k, v) in enumerate(facts.items())
        ]
        asked = rng.sample(keys[:KEYS_PER_QUERY], KEYS_PER_QUERY)
        question = self.words.ask_keys.format(ks=self.words.join.join(asked))
        return self._draft(needles, question, Answer(tuple(facts[key] for key in asked), NUMBER, "exact"))

    def _variable_tracking(self, rng: random.Random, depth: float, _: int) -> Draft:
        keys, values = self._names(rng, STATEMENTS), self._numbers(rng, STATEMENTS)
        needles = [
            Needle(depth, self.words.fact.format(k=keys[0], v=values[0])),
            Needle(rng.uniform(depth, 1), self.words.alias.format(k=keys[1], v=keys[0])),
        ]
        needles += [
            Needle(rng.random(), self.words.fact.format(k=k, v=v)) for k, v in zip(keys[2:], values[2:], strict=True)
        ]
        return self._draft(needles, self.words.ask_one.format(k=keys[1]), Answer((values[0],), NUMBER, "set"))

    def _frequent_words(self, rng: random.Random, depth: float, _: int) -> Draft:
        words = rng.sample(self.words.nouns, 1 + len(OTHER_TIMES))
        needles = [
            Needle(rng.random(), self.words.frequent.format(k=word))
            for word, count in zip(words, (FREQUENT_TIMES, *OTHER_TIMES), strict=True)
            for _ in range(count)
        ]
        answer = Answer((words[0],), self._pool_pattern(words), "set")
        return self._draft(needles, self.words.ask_frequent, answer, has_depth=False)

    def _qa(self, rng: random.Random, depth: float, _: int) -> Draft:
        people, places = self._names(rng, PEOPLE), rng.sample(self.words.places, PEOPLE)
        needles = [
            Needle(depth if i == 0 else rng.random(), self.words.born.format(k=k, v=v))
            for i, (k, v) in enumerate(zip(people, places, strict=True))
        ]
        answer = Answer((places[0],), self._pool_pattern(list(self.words.places)), "set")
        return self._draft(needles, self.words.ask_born.format(k=people[0]), answer)

    def _ordered_recall(self, rng: random.Random, depth: float, recall_items: int) -> Draft:
        words = self._names(rng, recall_items)
        question = self.words.ask_list.format(n=len(words))
        answer = Answer(tuple(words), self._pool_pattern(words), "sequence")
        return self._draft([Needle(depth, self.words.listed.format(k=self.words.join.join(words)))], question, answer)
