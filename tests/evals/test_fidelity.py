"""KL and agreement from recorded log-probabilities; recording against a server that has them."""

import gzip
import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline.errors import Invalid, Unreadable
from pipeline.evals import dataset, endpoint, fidelity
from tests.evals.support import TOKENIZER, make, settings

VOCABULARY = 12


def distribution(seed: str, noise: float = 0.0) -> list[float]:
    rng, other = random.Random(seed), random.Random(f"{seed}+{noise}")
    logits = [rng.gauss(0, 2) + noise * other.gauss(0, 1) for _ in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


def exact_kl(p: list[float], q: list[float]) -> float:
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def top(values: list[float], k: int) -> dict[int, float]:
    return dict(sorted(enumerate(values), key=lambda pair: -pair[1])[:k])


def test_bucketed_kl_is_exact_with_the_whole_vocabulary_and_a_lower_bound_below():
    for seed in range(50):
        p, q = distribution(f"{seed}"), distribution(f"{seed}", 0.7)
        exact = exact_kl(p, q)
        assert fidelity.bucketed_kl(top(p, VOCABULARY), top(q, VOCABULARY))[0] == pytest.approx(exact, abs=1e-6)
        previous = 0.0
        for k in (2, 4, 8):
            told, tail = fidelity.bucketed_kl(top(p, k), top(q, k))
            assert 0 <= told <= exact + 1e-9 and 0 <= tail <= 1
        assert previous <= told
        assert fidelity.bucketed_kl(top(p, 4), top(p, 4))[0] == pytest.approx(0, abs=1e-9)


def write(path, noise: float, k: int = VOCABULARY, prompts: int = 4, length: int = 40, **header):
    rows = []
    for prompt in range(prompts):
        ids = [random.Random(f"{prompt}/{place}").randrange(VOCABULARY) for place in range(length)]
        logprobs, tops = [None], [[[], []]]
        for place in range(1, length):
            values = distribution(f"{prompt}/{place}", noise)
            logprobs.append(values[ids[place]])
            best = top(values, k)
            tops.append([list(best), list(best.values())])
        rows.append(
            {
                "prompt_hash": str(prompt),
                "id": str(prompt),
                "prompt_tokens": 30,
                "ids": ids,
                "logprobs": logprobs,
                "top": tops,
            }
        )
    with gzip.open(path, "wt") as stream:
        for row in ({"kind": "logprobs", "k": k, "dataset_key": "d"} | header, *rows):
            stream.write(json.dumps(row) + "\n")
    return path


def test_native_against_itself_and_against_noise(tmp_path):
    native = write(tmp_path / "n", 0.0)
    same = fidelity.compare_logprobs(native, write(tmp_path / "same", 0.0), (10, 20))
    assert same["kl_mean"] == pytest.approx(0, abs=1e-9) and same["top1_agreement"] == 1.0
    assert same["perplexity_native"] == same["perplexity_variant"]
    small = fidelity.compare_logprobs(native, write(tmp_path / "small", 0.1), (10, 20))
    large = fidelity.compare_logprobs(native, write(tmp_path / "large", 1.0), (10, 20))
    assert 0 < small["kl_mean"] < large["kl_mean"] and small["top1_agreement"] > large["top1_agreement"]
    # Where native is decided, noise changes its first choice less often than where it wavers.
    assert large["top1_agreement"] < large["top1_decided"] <= 1.0 and 0 < large["decided_share"] < 1
    assert set(large["by_position"]) == {"0-10", "10-20", "20+"}
    assert (large["positions"], large["answers"]["n"], large["prompts"]) == (4 * 39, 4 * 10, 4)
    expected = [
        exact_kl(distribution(f"{p}/{i}"), distribution(f"{p}/{i}", 1.0)) for p in range(4) for i in range(1, 40)
    ]
    assert large["kl_mean"] == pytest.approx(sum(expected) / len(expected), abs=1e-6)


@pytest.mark.parametrize("change", [{"k": 4}, {"dataset_key": "e"}, {"prompts": 3}, {"length": 39}])
def test_unlike_records_are_not_comparable(tmp_path, change):
    other = write(tmp_path / "o", 0.0, **change)
    result = fidelity.compare_logprobs(write(tmp_path / "n", 0.0), other)
    assert result["status"] == "not_comparable" and result["reason"]


def test_unreadable_records(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"no gzip")
    with pytest.raises(Unreadable, match="x"):
        fidelity.read(path)
    with gzip.open(path, "wt") as stream:
        stream.write('{"kind": "header"}\n')
    with pytest.raises(Unreadable, match="no record of log-probabilities"):
        fidelity.read(path)


class Scoring(BaseHTTPRequestHandler):
    """Answers ``prompt_logprobs`` as vLLM does; ``shift`` makes it score other tokens, ``short`` cuts."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, k = body["prompt"], body["prompt_logprobs"]
        self.server.asked.append(ids)
        places = [None]
        for place, token in enumerate(ids[1:], 1):
            entries = {str((place + rank) % 1024): {"logprob": -1.0 - rank, "rank": rank + 1} for rank in range(k)}
            places.append(entries | {str(token + self.server.shift): {"logprob": self.server.scored, "rank": 99}})
        data = json.dumps(
            {"choices": [{"text": "", "prompt_logprobs": places[: len(places) - self.server.short]}]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def scoring():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scoring)
    server.asked, server.shift, server.short, server.scored = [], 0, 0, -9.0
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_recording_scores_prompts_and_right_answers(tmp_path, scoring):
    raw = settings(fidelity={"prompts_per_length": 2, "top_k": 3})
    items = make(tmp_path / "data", raw)
    url = f"http://127.0.0.1:{scoring.server_address[1]}"
    path = fidelity.record(url, "m", TOKENIZER, tmp_path / "data", raw, tmp_path / "l.gz")
    header, rows = fidelity.read(path)
    assert header["k"] == 3 and len(rows) == 4
    by_hash = {item.prompt_hash: item for item in items}
    assert [by_hash[row["prompt_hash"]].family for row in rows] == ["ordered_recall", "multi_key"] * 2
    for row in rows:
        item = by_hash[row["prompt_hash"]]
        assert row["prompt_tokens"] == item.length and len(row["ids"]) == item.length + len(item.targets) + 1
        assert row["ids"].count(1) == 1  # one BOS, none before the answer
        assert all(len(place[0]) == 3 for place in row["top"][1:])
    before = path.read_bytes()
    assert fidelity.record(url, "m", TOKENIZER, tmp_path / "data", raw, tmp_path / "l.gz").read_bytes() == before
    assert fidelity.compare_logprobs(path, path)["kl_mean"] == 0.0


@pytest.mark.parametrize(
    "lie, words",
    [
        ({"shift": 1}, "the prompt was changed"),
        ({"short": 5}, "log-probabilities came for"),
        ({"scored": math.nan}, "at place 1 is nan"),
        ({"scored": None}, "at place 1 is None"),
    ],
)
def test_a_server_that_scores_something_else_is_invalid(tmp_path, scoring, lie, words):
    raw = settings(fidelity={"prompts_per_length": 1, "top_k": 3})
    make(tmp_path / "data", raw)
    for name, value in lie.items():
        setattr(scoring, name, value)
    with pytest.raises(Invalid, match=words):
        fidelity.record(
            f"http://127.0.0.1:{scoring.server_address[1]}", "m", TOKENIZER, tmp_path / "data", raw, tmp_path / "l.gz"
        )


def test_a_server_that_dies_over_them_keeps_the_answers_for_the_next_run(tmp_path):
    """Asked for all prompt tokens it needs more memory than for an answer."""
    from tests.evals.support import run

    raw = settings(fidelity={"prompts_per_length": 1})
    where = {"conditions": {"c": 1}, "journal_dir": tmp_path / "journal"}
    with pytest.raises(endpoint.ServerDied, match="died over the log-probabilities of ordered_recall") as death:
        run(tmp_path, raw, behaviour={"die_after": 1 + 30}, **where)
    assert death.value.result["items_answered"] == 30 and death.value.result["server_died_at_length"] in (256, 384)
    result, _, state = run(tmp_path, raw, **where)
    assert result["requests_resumed"] == 30 and result["status"] == "valid"


def test_a_server_without_log_probabilities_costs_no_accuracy(tmp_path):
    from tests.evals.support import run

    result, _, _ = run(tmp_path, settings(fidelity={"prompts_per_length": 1}))
    assert result["status"] == "valid" and result["accuracy"] == 1.0
    assert result["logprobs"]["status"] == "not_comparable" and "log-probabilities" in result["logprobs"]["reason"]


def test_chosen_prompts_do_not_depend_on_the_order_of_families(tmp_path):
    items = make(tmp_path / "a", settings())
    other = make(tmp_path / "b", settings(items=dict(reversed(settings()["items"].items()))))
    assert [i.id for i in fidelity.chosen(items, 3)] == [i.id for i in fidelity.chosen(other, 3)]
    assert isinstance(dataset.load(tmp_path / "a")[0], list)
