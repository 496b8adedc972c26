"""Verdicts over canned sample pairs: harm, noise, churn, hidden harm, and everything that must not be compared."""

import gc
import json
import random

import pytest
from statsmodels.stats.proportion import proportions_ztest

from pipeline.errors import Unreadable
from pipeline.evals.compare import compare, noise
from pipeline.evals.runs import Run, load_run
from pipeline.evals.settings import GateSettings
from pipeline.stats.paired import no_flip_bound

FAMILIES = ("single", "multi_key", "multi_value", "multi_query", "ordered_recall")
LENGTHS = (512, 1024, 2048, 4096)
GATES = GateSettings(bootstrap_resamples=500)
HEADER = {
    "kind": "header",
    "dataset_key": "k",
    "status": "valid",
    "reason": None,
    "conditions": {"tensor_parallel_size": 1, "software": "s"},
}


def sample(
    family: str, length: int, index: int, right: bool, generated: int | None = None, outcome: str | None = None
) -> dict:
    name = f"{family}-{length}-{index}"
    return {
        "id": name,
        "family": family,
        "length": length,
        "cluster": name,
        "prompt_hash": name,
        "depth": 0.5,
        "outcome": outcome or ("correct" if right else "incorrect"),
        "score": float(right),
        "hits": [int(right)],
        "generated_tokens": generated or (66 if family == "ordered_recall" else 3),
    }


def run(rule=lambda family, length, index: True, per_cell: int = 20, **header) -> Run:
    rows = [sample(f, n, i, rule(f, n, i)) for f in FAMILIES for n in LENGTHS for i in range(per_cell)]
    return Run(HEADER | header, tuple(rows))


def noisy(accuracy: float, seed: int, base=lambda *_: True):
    def rule(*cell):
        return random.Random(f"{seed}{cell}").random() < accuracy and base(*cell)

    return rule


def test_equal_runs_pass():
    result = compare(run(), run(), GATES)
    assert result["verdict"] == "pass" and result["reason"] is None
    assert (
        result["overall"]["n"] == 400 and result["overall"]["mcnemar_p"] == 1.0 and result["overall"]["recovery"] == 1.0
    )
    assert set(result["by_length"]) == {"512", "1024", "2048", "4096"}
    assert result["long_output"]["n"] == 80


def test_equal_runs_are_bounded_by_their_number_not_declared_equal():
    overall = compare(run(), run(), GATES)["overall"]
    assert overall["bootstrap"] == [0, 0]
    assert overall["lower"] == pytest.approx(-no_flip_bound(400, 0.05)) == -overall["upper"]
    assert compare(run(per_cell=2), run(per_cell=2), GATES)["verdict"] == "inconclusive"


def test_p_values_of_many_cells_are_adjusted():
    result = compare(run(), run(lambda f, n, i: n != 4096 or i % 3), GATES)
    cells = [*result["by_length"].values(), result["long_output"]]
    smallest = min(cells, key=lambda cell: cell["inferiority_p"])
    assert smallest["inferiority_p_holm"] == pytest.approx(len(cells) * smallest["inferiority_p"])
    assert all(cell["inferiority_p_holm"] >= cell["inferiority_p"] for cell in cells)
    assert result["overall"]["inferiority_p_holm"] == result["overall"]["inferiority_p"]


def test_plain_harm_fails():
    result = compare(run(), run(noisy(0.7, 1)), GATES)
    assert result["verdict"] == "fail" and result["overall"]["mcnemar_p"] < 1e-9
    assert "overall" in result["reason"] and "margin 0.050" in result["reason"]


def test_harm_at_the_longest_length_alone_fails_though_the_mean_is_inside_the_margin():
    gates = GateSettings(bootstrap_resamples=500, accuracy_margin=0.12)
    result = compare(run(), run(lambda f, n, i: n != 4096 or i % 3), gates)
    assert result["overall"]["verdict"] == "pass"
    assert [result["by_length"][n]["verdict"] for n in ("512", "1024", "2048", "4096")] == ["pass"] * 3 + ["fail"]
    assert result["verdict"] == "fail" and result["reason"].startswith("length 4096")


def test_answers_that_rot_with_output_length_fail_though_the_short_mean_passes():
    result = compare(run(), run(lambda f, n, i: f != "ordered_recall" or i % 3), GATES)
    assert result["long_output"]["verdict"] == "fail" and result["verdict"] == "fail"
    assert all(result["by_family"][family]["variant"] == 1.0 for family in FAMILIES[:-1])


def test_too_few_items_are_inconclusive_and_say_how_many_it_takes():
    result = compare(run(per_cell=2), run(lambda f, n, i: (f, n, i) != ("single", 512, 0), per_cell=2), GATES)
    assert result["verdict"] == "inconclusive"
    assert not result["overall"]["margin_supported"] and result["overall"]["n_needed"] > result["overall"]["n"] == 40
    assert f"and {result['overall']['n_needed']} the margin" in result["reason"]


def test_equal_means_with_churn_show_as_flips():
    native = run(lambda f, n, i: i % 10 != 0)
    variant = run(lambda f, n, i: i % 10 != 1)
    overall = compare(native, variant, GATES)["overall"]
    assert overall["difference"] == 0 and overall["flip_rate"] == pytest.approx(0.2)
    assert overall["right_to_wrong"] == overall["wrong_to_right"] == 40 and overall["mcnemar_p"] == 1.0


def test_a_against_a_never_fails_in_a_hundred(monkeypatch):
    """The baseline against itself, 4 % of all answers differing by chance, at the size of eval=quick."""
    monkeypatch.setattr(
        gc, "collect", lambda *_: 0
    )  # statsmodels collects garbage in every call, most of the time here
    gates = GateSettings(bootstrap_resamples=100)
    verdicts = [
        compare(run(noisy(0.98, 2 * seed), 13), run(noisy(0.98, 2 * seed + 1), 13), gates)["verdict"]
        for seed in range(100)
    ]
    assert verdicts.count("fail") == 0
    assert verdicts.count("pass") + verdicts.count("inconclusive") == 100
    assert verdicts.count("pass") >= 50


def test_cells_where_native_is_weak_are_not_gateable_and_never_pass_vacuously():
    def weak(f, n, i):
        return i % 5 == 0 if f in ("single", "multi_key") else True

    result = compare(run(weak), run(lambda *_: True), GATES)
    assert result["verdict"] == "not_gateable" and "3 families" in result["reason"]
    assert {(cell["family"], cell["verdict"]) for cell in result["excluded_cells"]} == {
        ("single", "not_gateable"),
        ("multi_key", "not_gateable"),
    }
    assert result["overall"]["n"] == 240
    nothing = compare(run(lambda *_: False), run(lambda *_: False), GATES)
    assert nothing["verdict"] == "not_gateable" and nothing["overall"] is None


def lists(rule, per_cell: int = 20) -> Run:
    """As :func:`run`, but ordered recall has 64 values of which ``rule(place)`` are found, and is right from 58 on."""
    rows = []
    for row in run(per_cell=per_cell).rows:
        if row["family"] == "ordered_recall":
            number = int(row["id"].rsplit("-")[-1])
            hits = [int(rule(place, number)) for place in range(64)]
            row = row | {"hits": hits, "outcome": "correct" if sum(hits) >= 58 else "incorrect"}
        rows.append(row)
    return Run(HEADER, tuple(rows))


def test_late_values_of_lists_show_rot_even_where_no_list_is_ever_right():
    """Native gets 45 of 64 values of each list: not one list is right, and still losing the last quarter must show."""

    def native(place, number):
        return place % 10 < 7

    same = compare(lists(native), lists(native), GATES)
    assert same["verdict"] == "pass" and "ordered_recall" in same["gateable_families"]
    assert same["long_output"] is None and same["late_values"]["native"] == pytest.approx(0.7, abs=0.02)
    assert same["late_values"]["clusters"] == 80 and same["late_values"]["mcnemar_p"] is None
    rotten = compare(lists(native), lists(lambda place, number: native(place, number) and place < 48), GATES)
    assert (
        rotten["verdict"] == "fail"
        and rotten["reason"].startswith("late_values")
        and rotten["overall"]["verdict"] == "pass"
    )


def test_a_dozen_lists_decide_little_about_late_values():
    def whole(place, number):
        return True

    few = compare(lists(whole, 3), lists(lambda place, number: number or place < 32, 3), GATES)["late_values"]
    assert few["n"] == 12 * 32 and few["clusters"] == 12 and few["effective_n"] < 20
    assert not few["margin_supported"]


def test_without_long_outputs_nothing_passes():
    def no_recall(f, n, i):
        return f != "ordered_recall"

    gates = GateSettings(bootstrap_resamples=500)
    result = compare(run(no_recall), run(no_recall), gates)
    assert result["verdict"] == "not_gateable" and "ordered_recall" in result["reason"]
    relaxed = GateSettings(bootstrap_resamples=500, required_families=())
    assert compare(run(no_recall), run(no_recall), relaxed)["verdict"] == "pass"


@pytest.mark.parametrize(
    "native, variant, status, words",
    [
        (
            {},
            {"status": "invalid", "reason": "12 answers are stuck"},
            "invalid",
            "variant run is invalid: 12 answers are stuck",
        ),
        ({"status": "invalid", "reason": "r"}, {}, "invalid", "native run is invalid"),
        ({}, {"dataset_key": "other"}, "not_comparable", "different data sets"),
        (
            {},
            {"conditions": {"tensor_parallel_size": 2, "software": "s"}},
            "not_comparable",
            "tensor_parallel_size: native ran with 1",
        ),
        ({}, {"conditions": {"tensor_parallel_size": 1}}, "not_comparable", "software"),
        (
            {"conditions": {"serving": {"max_num_seqs": 16, "extra_args": []}}},
            {"conditions": {"serving": {"max_num_seqs": 8, "extra_args": []}}},
            "not_comparable",
            "serving.max_num_seqs: native ran with 16, the variant with 8",
        ),
    ],
)
def test_runs_that_must_not_be_compared(native, variant, status, words):
    result = compare(run(**native), run(**variant), GATES)
    assert result["status"] == result["verdict"] == status and words in result["reason"]


def test_comparing_across_tensor_parallel_sizes_when_asked():
    other = run(conditions={"tensor_parallel_size": 2, "software": "s"})
    assert (
        compare(run(), other, GateSettings(conditions_must_match=["software"], bootstrap_resamples=500))["verdict"]
        == "pass"
    )


def test_missing_and_doubled_prompts_are_not_comparable():
    whole = run()
    short, double = Run(whole.header, whole.rows[:-3]), Run(whole.header, (*whole.rows, whole.rows[0]))
    assert "3 prompts are in one run only" in compare(whole, short, GATES)["reason"]
    assert "prompts occur twice" in compare(whole, double, GATES)["reason"]
    assert compare(whole, short, GATES)["status"] == "not_comparable"


def test_pairs_go_by_prompt_not_by_order():
    native = run(lambda f, n, i: i % 2 == 0)
    shuffled = Run(native.header, tuple(random.Random(0).sample(native.rows, len(native.rows))))
    assert compare(native, shuffled, GATES)["overall"]["flip_rate"] == 0


def test_questions_about_one_document_count_as_one():
    def clustered(rule):
        rows = [row | {"cluster": f"{row['length']}-{row['id'].rsplit('-')[-1]}"} for row in run(rule).rows]
        return Run(HEADER, tuple(rows))

    def lost_documents(f, n, i):
        return i not in (0, 1)

    alone = compare(run(), run(lost_documents), GATES)["overall"]
    together = compare(clustered(lambda *_: True), clustered(lost_documents), GATES)["overall"]
    assert together["effective_n"] < alone["effective_n"] / 3 and together["lower"] < alone["lower"]


def test_much_better_than_native_is_a_question_not_an_improvement():
    result = compare(run(noisy(0.7, 3)), run(), GATES)
    assert result["verdict"] == "pass"
    assert any(alarm.startswith("overall: better than native by more than the margin") for alarm in result["alarms"])
    assert not compare(run(noisy(0.98, 1)), run(noisy(0.98, 2)), GATES)["alarms"], "chance is none"


def test_alarms_never_decide():
    alarming = {"status": "valid", "kl_mean": 0.5, "top1_agreement": 0.95, "top1_decided": 0.7}
    result = compare(run(), run(), GATES, fidelity=alarming)
    assert result["verdict"] == "pass" and len(result["alarms"]) == 2
    floor = compare(run(), run(), GateSettings(noise_floor=0.06, bootstrap_resamples=500))
    assert floor["overall"]["below_noise_floor"] and "noise floor of 0.060" in floor["alarms"][0]
    assert floor["verdict"] == "pass"


def test_the_noise_floor_is_that_of_the_baseline_against_itself():
    first, second = run(noisy(0.98, 1)), run(noisy(0.98, 2))
    floor = noise(first, second, GATES)
    assert floor["status"] == "valid" and 0.02 < floor["flip_rate"] < 0.06
    assert abs(floor["difference"]) < floor["floor"] < 0.05
    assert noise(first, run(dataset_key="other"), GATES)["status"] == "not_comparable"


def test_every_gated_cell_is_told_apart_from_what_native_shows_against_itself():
    """Native twice, 4 % of its answers differing: the same churn in a variant is noise, harm is not."""
    native, again = run(noisy(0.98, 1)), run(noisy(0.98, 2))
    floors = noise(native, again, GATES)
    quiet = compare(native, run(noisy(0.98, 3)), GATES, noise=floors)
    harmed = compare(native, run(noisy(0.8, 4)), GATES, noise=floors)
    cells = {"length 2048": quiet["by_length"]["2048"]} | {name: quiet[name] for name in ("overall", "long_output")}
    assert set(floors["cells"]) == {"overall", "long_output", *(f"length {n}" for n in LENGTHS)}
    for name, cell in cells.items():
        assert cell["noise_floor"] == floors["cells"][name]["floor"] and cell["within_noise"]
    assert cells["length 2048"]["noise_floor"] > cells["overall"]["noise_floor"]  # fewer items, less that is excluded
    assert harmed["verdict"] == "fail" and harmed["overall"]["within_noise"] is False
    assert compare(native, again, GATES)["overall"]["within_noise"] is None  # no A/A run: nothing is said
    by_hand = compare(native, again, GateSettings(bootstrap_resamples=500, noise_floor=0.5), noise=floors)
    assert by_hand["overall"]["noise_floor"] == 0.5


def test_a_margin_below_what_native_shows_against_itself_is_reported():
    floors = noise(run(noisy(0.9, 1)), run(noisy(0.9, 2)), GATES)
    tight = GateSettings(bootstrap_resamples=500, accuracy_margin=0.02)
    alarms = compare(run(), run(), tight, noise=floors)["alarms"]
    assert any(alarm.startswith("overall: the margin of 0.020 is below the noise floor") for alarm in alarms)


def test_a_second_run_that_was_never_made_gives_no_floor():
    header = HEADER | {"status": "not_comparable", "reason": "gates.noise_concurrency is null"}
    absent = noise(run(), Run(header, ()), GATES)
    assert absent["floor"] is None and absent["cells"] == {} and absent["reason"].startswith("the second run is not_comparable")
    assert compare(run(), run(), GATES, noise=absent)["overall"]["noise_floor"] is None


def test_a_small_loss_that_only_pairing_sees_is_called_right():
    """14 lost and 2 won of 400: p < .05 paired, > .05 unpaired.  Seen, and inside a margin of 8 points all the same."""
    lost = {("single", n, i) for n in LENGTHS for i in range(4)} - {("single", 512, 0), ("single", 1024, 0)}
    wrong_before = {("multi_key", n, i) for n in LENGTHS for i in range(15)}
    native = run(lambda *cell: cell not in wrong_before)
    won = {("multi_key", 512, 0), ("multi_key", 1024, 0)}
    variant = run(lambda *cell: cell not in lost and (cell not in wrong_before or cell in won))
    gates = GateSettings(bootstrap_resamples=500, accuracy_margin=0.08, length_margin=0.2, native_floor=0.2)
    result = compare(native, variant, gates)
    overall = result["overall"]
    assert (overall["right_to_wrong"], overall["wrong_to_right"], overall["n"]) == (14, 2, 400)
    right = [round(400 * overall[side]) for side in ("native", "variant")]
    assert overall["mcnemar_p"] < 0.05 < proportions_ztest(right, [400, 400])[1]
    assert overall["verdict"] == result["verdict"] == "pass"
    strict = compare(native, variant, GateSettings(bootstrap_resamples=500, accuracy_margin=0.01, native_floor=0.2))
    assert strict["overall"]["verdict"] == strict["verdict"] == "fail"


def test_damage_to_one_script_one_depth_and_long_answers_shows_where_it_is():
    def dressed(which: Run) -> Run:
        scripts = ("cjk", "latin", "latin", "latin")
        return Run(HEADER, tuple(row | {"script": scripts[i % 4]} for i, row in enumerate(which.rows)))

    native = dressed(run())
    rows = [row | {"outcome": "degenerate", "repeats": True} if row["script"] == "cjk" else row for row in native.rows]
    result = compare(native, Run(HEADER, tuple(rows)), GATES)
    assert [result["by_script"][script]["variant"] for script in ("cjk", "latin")] == [0, 1]
    assert [result["by_script"]["cjk"][f"{what}_rate_variant"] for what in ("repetition", "unscored")] == [1, 1]
    assert result["all_items"]["repetition_rate_native"] == 0
    assert {name: cell["n"] for name, cell in result["by_generated_tokens"].items()} == {"0-8": 320, "32-128": 80}
    assert list(result["by_length_and_depth"]) == ["512", "1024", "2048", "4096"]
    assert result["by_length_and_depth"]["512"]["0.5"]["difference"] == pytest.approx(-0.25)


def test_samples_that_cannot_be_read_name_the_line(tmp_path):
    path = tmp_path / "samples.jsonl"
    with pytest.raises(Unreadable, match="samples.jsonl"):
        load_run(path)
    path.write_text('{"kind": "header"}\n{"id": 1}\n')
    with pytest.raises(Unreadable, match="line 2: lacks"):
        load_run(path)
    row = json.dumps(sample("single", 512, 0, True) | {"outcome": "fine"})
    path.write_text('{"kind": "header"}\n' + row + "\n")
    with pytest.raises(Unreadable, match="line 2: outcome 'fine' is none of correct, incorrect"):
        load_run(path)
    path.write_text('{"id": 1}\n')
    with pytest.raises(Unreadable, match="header"):
        load_run(path)
