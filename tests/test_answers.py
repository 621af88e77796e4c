"""Right answers of a running server, counted."""

from collections import Counter

import pytest

from lessonlib.lab import LlamaCppServer
from lessonlib.lab.answers import Answers, Difference, compare_answers, is_right, measure_answers
from lessonlib.lab.quality import ClozeItem, load_cloze


@pytest.mark.parametrize(
    ("text", "right"),
    [(" Paris.", True), (" paris, of course", True), ("\n- Paris", True), (" Parisian", False), (" not Paris", False),
     ("", False)],
)  # fmt: skip
def test_an_answer_is_right_if_it_begins_with_the_ending(text, right):
    assert is_right(text, "Paris") is right


def test_a_real_server_is_asked():
    nonsense = ClozeItem("The capital of France is", "xyzzy", ("a", "b", "c"))
    with LlamaCppServer(slots=2) as server:
        found = measure_answers(server.url, [*load_cloze()[:5], nonsense], clients=2)
        again = measure_answers(f"{server.url}/v1/", load_cloze()[:1], clients=1)
        url = server.url
    assert found.right[0] and not found.right[5] and again.right == found.right[:1]
    assert not found.errors and 6 <= found.output_tokens <= 36
    assert found.accuracy == sum(found.right) / 6
    assert found.usd_per_correct(3600) == pytest.approx(found.wall_s / sum(found.right))
    assert f"{sum(found.right)} of 6 right in " in repr(found)
    with pytest.raises(ConnectionError, match=r"no question was answered at .* start a server"):
        measure_answers(url, load_cloze()[:2])


def test_what_cannot_be_asked_or_priced():
    with pytest.raises(ValueError, match="number of items must be a whole number of at least 1, got 0"):
        measure_answers("http://127.0.0.1:9", [])
    with pytest.raises(ValueError, match="clients must be a whole number of at least 1, got 0"):
        measure_answers("http://127.0.0.1:9", clients=0)
    nothing = Answers((False, False), 12, 1.0, Counter({"HTTP 500": 1}))
    assert repr(nothing) == "0 of 2 right in 1 s, 1 requests failed (HTTP 500)"
    with pytest.raises(ValueError, match=r"at least one answer must be right .* got 0 of 2"):
        nothing.usd_per_correct(1.0)


def test_a_difference_may_be_chance():
    first, second = (
        Answers(right, 4, 1.0, Counter()) for right in ((True, True, True, False), (True, False, False, True))
    )
    assert compare_answers(first, second) == Difference(lost=2, won=1)
    assert Difference(0, 0).chance == Difference(1, 1).chance == 1
    assert Difference(5, 0).chance == Difference(0, 5).chance == 2 / 32
    assert Difference(8, 2).chance == pytest.approx(2 * (1 + 10 + 45) / 1024)
    with pytest.raises(ValueError, match="the same items, got 4 and 1"):
        compare_answers(first, Answers((True,), 1, 1.0, Counter()))
