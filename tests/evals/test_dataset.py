"""The data set: sized in served tokens, deterministic, independent of what else is selected."""

import json

import pytest

from pipeline.errors import Refused, Unreadable
from pipeline.evals import dataset
from pipeline.evals import settings as settings_module
from pipeline.evals.tokens import ServedTokenizer, tokenizer_sha256
from tests.evals.support import TOKENIZER, make, settings

ALL = ["single", "multi_key", "multi_value", "multi_query", "variable_tracking", "frequent_words", "ordered_recall"]


@pytest.fixture(scope="module")
def tokenizer():
    return ServedTokenizer(TOKENIZER)


def test_every_prompt_has_the_wanted_length_in_served_tokens(tmp_path, tokenizer):
    items = make(tmp_path, settings(items={family: 4 for family in ALL}))
    assert {item.family for item in items} == set(ALL)
    for item in items:
        assert len(tokenizer.encode(item.prompt)) == item.prompt_tokens == item.length


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_natural_language_is_within_two_percent_in_both_scripts(tmp_path, tokenizer, endpoint):
    raw = settings(
        items={family: 6 for family in [*ALL, "qa"]},
        languages=["en", "zh"],
        lengths=[1536],
        recall_items=12,
        endpoint=endpoint,
    )
    items = make(tmp_path, raw)
    assert {(item.family, item.language) for item in items} == {
        (f, lang) for f in [*ALL, "qa"] for lang in ("en", "zh")
    }
    for item in items:
        assert abs(tokenizer.count(item.prompt, chat=endpoint == "chat") - 1536) <= 0.02 * 1536
        assert all(target in item.prompt for target in item.targets)


def test_the_answer_follows_from_the_prompt_alone(tmp_path):
    """A reader that knows nothing but the grammar solves every item, so targets, order and aliases are right."""
    for item in make(tmp_path, settings(items={family: 5 for family in ALL})):
        assert solve(item.prompt.split()) == list(item.targets), item.id


def solve(words: list[str]) -> list[str]:
    """The closed grammar, read left to right."""
    start = len(words) - 1 - words[::-1].index("?")
    facts: dict[str, list[str]] = {}
    marked: dict[str, int] = {}
    listed: list[str] = []
    for i, word in enumerate(words[:start]):
        if word == "=":
            value = facts[words[i + 2]][0] if words[i + 1] == "@" else words[i + 1]
            facts.setdefault(words[i - 1], []).append(value)
        elif word == "#":
            marked[words[i + 1]] = marked.get(words[i + 1], 0) + 1
        elif word == "[":
            listed = words[i + 1 : words.index("]", i)]
    match words[start + 1 :]:
        case ["["]:
            return listed
        case ["#"]:
            return [max(marked, key=marked.get)]
        case [*keys, ":"]:
            return [facts[key][0] for key in keys]
        case [key, "+"]:
            return facts[key]
        case [key, "="]:
            return [facts[key][0]]


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_needle_lies_at_its_depth(tmp_path, depth):
    item = make(tmp_path, settings(depths=[depth], items={"single": 1}, lengths=[512]))[0]
    words = item.prompt.split()
    # BOS, statement (4 words) and question (3) are no filler.
    assert words.index("=") - 1 == pytest.approx(depth * (512 - 1 - 4 - 3), abs=1)


def test_the_same_settings_give_the_same_bytes_and_other_tasks_change_nothing(tmp_path):
    few = make(tmp_path / "a", settings(items={"multi_key": 4}))
    again = make(tmp_path / "b", settings(items={"multi_key": 4}))
    more = make(tmp_path / "c", settings(items={"single": 3, "multi_key": 9, "ordered_recall": 2}, lengths=[384, 256]))
    assert few == again
    assert (tmp_path / "a/items.jsonl").read_bytes() == (tmp_path / "b/items.jsonl").read_bytes()
    assert {item.prompt_hash for item in few} <= {item.prompt_hash for item in more}


def test_key_changes_with_tokenizer_length_seed_and_count_but_not_with_the_runner():
    def key(tokenizer="t", **changes):
        return dataset.key(tokenizer, settings_module.parse(settings(**changes)))

    base = key()
    others = [
        key("u"),
        key(lengths=[256, 385]),
        key(seeds=[0, 2]),
        key(items={"single": 6, "multi_key": 6, "ordered_recall": 4}),
    ]
    assert len({base, *others}) == 5
    assert key(concurrency=1, deadline_s=1.0, retries=0) == base


def test_the_key_covers_the_code_that_tokenizes(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(b"ranks")
    before = tokenizer_sha256(tmp_path)
    (tmp_path / "modeling_k3.py").write_text("")
    assert tokenizer_sha256(tmp_path) == before
    (tmp_path / "tokenization_k3.py").write_text("split = 1")
    with_code = tokenizer_sha256(tmp_path)
    (tmp_path / "tokenization_k3.py").write_text("split = 2")
    assert len({before, with_code, tokenizer_sha256(tmp_path)}) == 3


def test_a_tokenizer_with_code_of_its_own_neither_runs_it_nor_waits_for_an_answer_unless_allowed(tmp_path, monkeypatch):
    """transformers may ask "do you trust this?" on stdin; in CI nobody answers."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3_of_nobody"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}})
    )
    (tmp_path / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(Unreadable, match="set eval.trust_remote_code: true"):
        ServedTokenizer(tmp_path).encode("a")
    assert not (tmp_path / "ran").exists()


def test_depths_and_seeds_are_dealt_out_evenly(tmp_path):
    items = make(tmp_path, settings(items={"single": 12}, lengths=[256]))
    cells = [(item.depth, item.seed) for item in items]
    assert {cell: cells.count(cell) for cell in cells} == {(d, s): 2 for d in (0.0, 0.5, 1.0) for s in (0, 1)}


def test_a_family_that_does_not_fit_is_refused_with_numbers(tmp_path):
    with pytest.raises(Refused, match=r"ordered_recall.*takes \d+ tokens.*128 were asked"):
        make(tmp_path, settings(items={"ordered_recall": 1}, lengths=[128], recall_items=200))


def test_a_damaged_or_foreign_file_is_unreadable(tmp_path):
    make(tmp_path, settings(items={"single": 2}))
    path = tmp_path / "items.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(Unreadable, match="generate the data set again"):
        dataset.load(tmp_path)


def test_lexicon_asked_of_a_model_without_one_is_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    with pytest.raises(Refused, match="lexicon"):
        dataset.generate(folder, settings(languages=["lexicon"]), tmp_path / "out")
    meta = dataset.generate(folder, settings(lengths=[1536], recall_items=8), tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out/items.jsonl").read_text().splitlines()]
    assert meta["items_total"] == 15 and {row["language"] for row in rows} == {"en", "zh"}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"lenghts": [512]}, "lenghts"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"thresholds": {"empty": float("nan")}}, "thresholds.empty"),
        ({"concurrency": "many"}, "concurrency"),
        ({"items": {"needle": 3}}, "items"),
        ({"depths": [1.5]}, "depths"),
        ({"lengths": []}, "lengths"),
        ({"items": {"single": {"512": 3}}}, "512"),
        ({"lengths": [256, 256]}, "duplicates"),
        ({"thinking": "always"}, "fires inside the thinking"),
        ({"thinking": "always", "stop": False}, "thinking_budget_tokens"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong, message):
    with pytest.raises(Refused, match=message):
        settings_module.parse(settings(**wrong))


def test_a_chat_prompt_begins_with_one_bos(tokenizer):
    """The template writes BOS itself; the tokenizer must not add another."""
    assert tokenizer.count(" tiki = 123 ;", chat=True) == tokenizer.count(" tiki = 123 ;")
    assert tokenizer.bos_count([1, 1, 5]) == 2
