"""The practice widget without a browser: answers, hints, working, variants, progress, and the calibration plot."""

import re

import ipywidgets as widgets
import plotly.graph_objects as go
import pytest

from lessonlib.practice import QUESTIONS, calibration, compare, practice_widget, predict, progress
from lessonlib.practice.widgets import Practice, PracticeBox, solved_questions


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LESSONLIB_DATA", str(tmp_path / "data"))


def solve(box: PracticeBox) -> None:
    for row, part in zip(box.rows, box.question.parts, strict=True):
        row.box.value = f"{part.answer!r} byte" if part.unit == "byte" else part.shown.replace(" steps", "")


def every_widget(root: widgets.Widget) -> list[widgets.Widget]:
    found = [root]
    for child in getattr(root, "children", ()):
        found += every_widget(child)
    return found


def text_of(root: widgets.Widget) -> str:
    return " ".join(w.value for w in every_widget(root) if isinstance(w, widgets.HTML))


# --- answering ------------------------------------------------------------------------------------------------------


def test_enter_checks_one_answer_and_says_what_it_means():
    box = practice_widget("q3")
    box.rows[1].box.value = "524,288"  # a browser sets the value when Enter is pressed
    assert "4 times: query heads for KV heads" in text_of(box.rows[1])
    assert "✗" in text_of(box.rows[1])
    assert text_of(box.rows[0]).count("Nothing was typed") == 0
    box.rows[1].box.value = "128 KiB"
    assert "✓" in text_of(box.rows[1]) and "Right: 131,072 bytes (128 KiB)." in text_of(box.rows[1])
    assert box.progress.text == "0 of 8 solved. Question 3: 1 of 4 answers right."


def test_check_grades_every_answer():
    box = practice_widget("q1")
    box.rows[1].box.value = "156"
    box.check.click()
    assert [feedback.correct for feedback in box.feedback.values()].count(True) == 1
    assert len(box.feedback) == 4
    assert "Nothing was typed" in text_of(box.rows[0])
    assert "Write one word: memory or compute." in text_of(box.rows[2])


@pytest.mark.parametrize("question_id", QUESTIONS)
def test_every_question_can_be_solved(question_id):
    box = practice_widget(question_id)
    solve(box)
    assert all(feedback.correct for feedback in box.feedback.values())
    assert box.progress.text.startswith("1 of 8 solved.")
    assert solved_questions() == [question_id]


def test_hints_come_one_at_a_time():
    box = practice_widget("q2")
    hints = box.question.hints
    assert box.hint.description == "Hint 1 of 3" and hints[0] not in text_of(box)
    box.hint.click()
    assert hints[0] in text_of(box) and hints[1] not in text_of(box)
    for _ in range(5):
        box.hint.click()
    assert all(hint in text_of(box) for hint in hints)
    assert box.hint.description == "No more hints"


def test_the_working_is_shown_on_request():
    box = practice_widget("q7")
    steps = box.question.working
    assert steps[1] not in text_of(box)
    box.working.click()
    assert all(step in text_of(box) for step in steps) and box.working.description == "Hide working"
    box.working.click()
    assert steps[1] not in text_of(box) and box.working.description == "Show working"


def test_another_variant_has_other_numbers_and_empty_boxes():
    box = practice_widget("q1")
    solve(box)
    box.hint.click()
    box.working.click()
    box.another.click()
    assert "(variant 1)" in text_of(box) and box.question == QUESTIONS["q1"].variant(1)
    assert all(row.box.value == "" for row in box.rows) and not box.feedback
    assert box.question.hints[0] not in text_of(box) and box.question.working[0] not in text_of(box)
    box.rows[1].box.value = box.question.parts[1].shown
    assert box.feedback["q1.b"].correct
    box.another.click()
    assert "(variant 2)" in text_of(box)
    assert solved_questions() == ["q1"]  # once solved, it stays so


# --- progress -------------------------------------------------------------------------------------------------------


def test_answers_and_variant_are_there_after_a_restart():
    box = practice_widget("q4")
    box.another.click()
    box.rows[0].box.value = "5 FLOP"
    box.rows[2].box.value = box.question.parts[2].shown
    again = practice_widget("q4")
    assert again.question == box.question and again.question.seed == 1
    assert [row.box.value for row in again.rows] == [row.box.value for row in box.rows]
    assert again.feedback.keys() == {"q4.a", "q4.c"} and again.feedback["q4.c"].correct
    assert "✗" in text_of(again.rows[0]) and "✓" in text_of(again.rows[2])


def test_all_eight_share_one_progress():
    practice = practice_widget()
    assert isinstance(practice, Practice)
    assert practice.progress.text == "0 of 8 solved."
    solve(practice.questions[0])
    solve(practice.questions[7])
    assert practice.progress.text.startswith("2 of 8 solved. Question 8: 5 of 5")
    assert practice_widget().progress.text == "2 of 8 solved."


def test_reset_asks_once_more_and_leaves_predictions_alone():
    predict("t/speed", "How fast?", "token/s", "10 tokens/s").box.value = "7 tokens/s"
    practice = practice_widget()
    solve(practice.questions[2])
    practice.questions[3].another.click()
    bar = practice.progress
    bar.reset.click()
    assert bar.forget in bar.children and bar.reset not in bar.children
    assert "Forget the answers" in text_of(bar) and solved_questions() == ["q3"]
    bar.keep.click()
    assert bar.reset in bar.children and bar.forget not in bar.children and solved_questions() == ["q3"]
    bar.reset.click()
    bar.forget.click()
    assert bar.text == "0 of 8 solved. All answers are forgotten." and solved_questions() == []
    assert all(row.box.value == "" for row in practice.questions[2].rows)
    assert practice.questions[3].question.seed is None
    assert practice_widget("q3").rows[0].box.value == ""
    assert progress.recall("predictions", "t/speed")["text"] == "7 tokens/s"


@pytest.mark.parametrize(
    "entry",
    [5, None, [], {"seed": "x"}, {"seed": -1}, {"seed": True}, {"typed": 3}, {"typed": {"q1.a": 3}}, {"solved": "yes"}],
)
def test_a_damaged_entry_starts_over(entry):
    progress.keep("practice", "q1", entry)
    box = practice_widget("q1")
    assert box.question.seed is None and box.rows[0].box.value == "" and solved_questions() == []
    box.rows[1].box.value = "156"
    assert practice_widget("q1").feedback["q1.b"].correct


def test_a_damaged_file_is_set_aside():
    box = practice_widget("q1")
    box.rows[1].box.value = "156"
    progress.progress_path().write_text("{", encoding="utf-8")
    assert practice_widget("q1").rows[1].box.value == ""
    assert list(progress.progress_path().parent.glob("progress-damaged-*"))


def test_a_disk_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("LESSONLIB_DATA", str(tmp_path / "file"))
    box = practice_widget("q1")
    box.rows[1].box.value = "156"
    assert box.feedback["q1.b"].correct and "could not be kept on this disk" in box.progress.text
    box.progress.reset.click()
    box.progress.forget.click()
    assert "could not be forgotten" in box.progress.text


def test_a_very_long_answer_is_refused_and_not_kept():
    box = practice_widget("q1")
    box.rows[1].box.value = "1" * 100_000
    assert "100,000 characters" in text_of(box.rows[1])
    assert progress.recall("practice", "q1")["typed"] == {}


# --- for everybody --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["<script>alert(1)</script>", "5 <b>GB</b>", "<img src=x onerror=1> GB"])
def test_what_is_typed_is_escaped(typed):
    for question_id in ("q5", "q6", "q8"):
        box = practice_widget(question_id)
        for row in box.rows:
            row.box.value = typed
        box.progress.reset.click()
        assert not re.search(r"<(script|b|img)\b", text_of(box))


def test_every_control_has_a_description_and_every_verdict_is_announced():
    practice = practice_widget()
    controls = [w for w in every_widget(practice) if isinstance(w, (widgets.Button, widgets.Text))]
    assert len(controls) == 1 + 8 * 4 + sum(len(q.parts) for q in QUESTIONS.values())
    assert all(control.description and control.tooltip for control in controls)
    box = practice.questions[0]
    box.check.click()
    said = [row._said.value for row in box.rows] + [practice.progress._line.value]
    assert all("role='status' aria-live='polite'" in value for value in said)
    assert all(row.box.placeholder == part.form for row, part in zip(box.rows, box.question.parts, strict=True))
    assert not any(row.box.continuous_update for row in box.rows)


def test_what_a_notebook_stores(monkeypatch):
    box = practice_widget("q3")
    assert repr(box) == "Practice question 3: The KV cache of two models (4 answers)"
    assert repr(practice_widget()).splitlines()[2] == repr(box)
    assert "application/vnd.jupyter.widget-view+json" in box._repr_mimebundle_()
    monkeypatch.setenv("LESSONLIB_STORE_OUTPUTS", "1")
    assert box._repr_mimebundle_() == {"text/plain": repr(box)}
    assert list(practice_widget()._repr_mimebundle_()) == ["text/plain"]


def test_an_unknown_question_is_refused():
    with pytest.raises(ValueError, match="question_id must be one of q1, q2"):
        practice_widget("q9")


# --- calibration ----------------------------------------------------------------------------------------------------


def keep(key: str, value: object, actual: object, unit: object = "byte") -> None:
    progress.keep("predictions", key, {"text": "?", "value": value, "actual": actual, "unit": unit})


def test_calibration_shows_predicted_against_actual():
    predict("01/a", "How large?", "byte", "1 GB").box.value = "10 GB"
    compare("01/a", 15e9, "byte")
    keep("01/b", 5.0, 40.0, "token/s")
    keep("02/c", 3000, 10, "FLOP/byte")
    keep("02/d", 7.0, 7.0, "s")
    shown = calibration()
    assert [point.key for point in shown.points] == ["01/a", "01/b", "02/c", "02/d"]
    assert shown.points[1].factor == 8
    assert repr(shown) == (
        "4 predictions: 2 within a factor of 2, 3 within a factor of 10; 2 too small, 1 too large. "
        "The middle one is off by a factor of 4.8."
    )
    figure = shown.figure
    diagonal, near, middling, far = figure.data
    assert list(diagonal.x) == list(diagonal.y)
    assert sorted(near.x) == [7.0, 15e9] and list(middling.x) == [40.0] and list(far.y) == [3000.0]
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"
    assert figure.layout.xaxis.title.text and figure.layout.yaxis.title.text
    assert middling.hovertext == ("01/b: predicted 5 tokens/s, it is 40 tokens/s",)
    assert len({trace.marker.symbol for trace in figure.data[1:]}) == 3  # a second cue beside the color
    low, high = (10**end for end in figure.layout.xaxis.range)
    assert all(low < value < high for p in shown.points for value in (p.predicted, p.actual))


def test_calibration_without_answers():
    predict("01/a", "How large?", "byte", "1 GB").box.value = "10 GB"  # no answer yet
    shown = calibration()
    assert shown.points == [] and shown.figure is None
    assert repr(shown).startswith("No prediction has met its answer yet")
    assert shown._repr_mimebundle_() == {"text/plain": repr(shown)}


def test_calibration_leaves_out_what_has_no_logarithm_or_is_damaged():
    for index, (value, actual, unit) in enumerate(
        [(0, 5, "s"), (5, 0, "s"), (-1, 5, "s"), ("5", 5, "s"), (5, None, "s"), (5, 5, 3), (1e300, 1, "s")]
    ):
        keep(f"bad/{index}", value, actual, unit)
    progress.keep("predictions", "bad/x", 7)
    keep("good", 1, 2, "s")
    assert [point.key for point in calibration().points] == ["good"]
    assert repr(calibration()).startswith("1 prediction: 1 within a factor of 2")


def test_calibration_in_a_notebook(monkeypatch):
    keep("<b>key</b>", 1, 2, "s")
    bundle = calibration()._repr_mimebundle_()
    assert bundle["text/plain"].startswith("1 prediction")
    assert isinstance(go.Figure(bundle["application/vnd.plotly.v1+json"]), go.Figure)
    assert "<b>" not in str(bundle)
    monkeypatch.setenv("LESSONLIB_STORE_OUTPUTS", "1")
    assert list(calibration()._repr_mimebundle_()) == ["text/plain"]
