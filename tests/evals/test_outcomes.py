"""Each canned answer has one class; the wording around a right value never changes it."""

import pytest

from pipeline.evals.outcomes import classify, degeneration
from pipeline.evals.scoring import score
from tests.evals.support import item

LIST = tuple(f"w{i}" for i in range(64))
RECALL = item(family="ordered_recall", targets=LIST, order="sequence", terminator="]", correct_at=0.95, until=("]",))
NUMBER = item(language="en", targets=("1234567",), pattern=r"(?<!\d)\d{7}(?!\d)", order="set", terminator=None)
FOUR = item(
    language="en",
    targets=("1111111", "2222222", "3333333", "4444444"),
    pattern=NUMBER.pattern,
    order="set",
    terminator=None,
)


@pytest.mark.parametrize(
    "of, text, finish, more, kind",
    [
        (item(), " 123 ", "stop", {}, "correct"),
        (item(), " 124 ", "stop", {}, "incorrect"),
        (item(), " 123 123 ;", "length", {}, "correct"),
        (item(), "", "stop", {}, "empty"),
        (item(), None, "length", {}, "empty"),
        (item(), " ;", "stop", {}, "incorrect"),
        (item(), "!!!!!!!!", "length", {}, "degenerate"),
        (item(), "\ufffd\ufffd\ufffd a", "length", {}, "degenerate"),
        (item(), " 7 7 7 7 7 7 7 7", "length", {}, "degenerate"),
        (item(prompt=" kumu tiki = 77 ; lapa 78 ;"), " kumu tiki = 77 ; lap", "length", {}, "degenerate"),
        (item(prompt=" kumu tiki = 77 ; lapa 78 ;"), " kumu", "stop", {}, "incorrect"),
        (item(), None, None, {"stuck": True}, "stuck"),
        (item(), None, None, {"error": "HTTP 500"}, "error"),
        # The limit cut a list that was right so far: the budget's fault.  Wrong already: the model's.
        (RECALL, " ".join(LIST[:40]), "length", {}, "unfinished"),
        (RECALL, " ".join(LIST[:39]) + " x", "length", {}, "incorrect"),
        (RECALL, " ".join(LIST[:40]), "stop", {}, "incorrect"),
        (RECALL, " ".join(LIST[:40] + ("the",) * 24), "length", {}, "degenerate"),
        # Thinking: raw reasoning is no answer, even when the right value occurs in it.
        (NUMBER, "<think>maybe 1234567, or not", "length", {}, "unfinished"),
        (NUMBER, "maybe 1234567, or not", "length", {"thinking": True}, "unfinished"),
        (NUMBER, "", "length", {"reasoning": "maybe 1234567"}, "unfinished"),
        (NUMBER, None, "length", {"reasoning": "so " * 50}, "degenerate"),
        (NUMBER, "<think>7654321?</think>1234567", "stop", {}, "correct"),
        (NUMBER, "<think>1234567</think>", "stop", {}, "empty"),
        (NUMBER, "1234567", "stop", {"thinking": True, "reasoning": "x"}, "correct"),
        # Wording.
        (NUMBER, "The code is **1234567**.", "stop", {}, "correct"),
        (NUMBER, r"\boxed{1234567}", "stop", {}, "correct"),
        (NUMBER, "口令是1234567。", "stop", {}, "correct"),
        (NUMBER, "I do not know.", "stop", {}, "incorrect"),
        (NUMBER, "1234567 or 7654321", "stop", {}, "incorrect"),
        (FOUR, "4444444, 3333333 and 2222222, also 1111111", "stop", {}, "correct"),
        (FOUR, "1111111, 2222222, 3333333", "stop", {}, "incorrect"),
    ],
)
def test_class_of_an_answer(of, text, finish, more, kind):
    assert classify(of, text, finish, **more).kind == kind


def test_a_right_answer_that_looks_like_repetition_is_no_degeneration():
    assert classify(FOUR.__class__(**FOUR.__dict__ | {"targets": ("1111111",)}), "1111111", "stop").kind == "correct"
    assert degeneration("1111111", item(targets=("1111111",))) is None
    assert degeneration("1111111", item()) is not None


def test_periods_are_found_and_plain_lists_are_not():
    assert degeneration("a b c d " * 5 + "a b")
    assert degeneration("口令是灯塔，" * 12)
    assert degeneration(" ".join(LIST)) is None
    assert degeneration("the cat and the dog and the bird and the fish and the frog and the cow") is None


def test_a_list_with_one_item_left_out_keeps_the_rest():
    result = score(" ".join(LIST[:10] + LIST[11:]) + " ]", RECALL)
    assert result.correct and result.score == pytest.approx(63 / 64) and not result.hits[10]
    assert not score(" ".join(LIST[:30] + LIST[34:]) + " ]", RECALL).correct  # 60 of 64 is below 95 %


def test_naming_everything_is_diluted():
    result = score("1234567 7654321 1000000 2000000", NUMBER)
    assert result.score == 0.25 and not result.correct


def test_what_could_not_be_read_is_told_apart_from_what_is_wrong():
    assert classify(NUMBER, "I do not know.", "stop").score.extraction_failed
    assert not classify(NUMBER, "7654321", "stop").score.extraction_failed
