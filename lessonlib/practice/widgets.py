"""The practice questions as a widget, and the predictions of the lessons held against their answers.

The widget only binds: `questions` draws the numbers, `checker` grades, `progress` keeps what was typed.
"""

import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from lessonlib.display.outputs import storing_outputs
from lessonlib.practice import predictions, progress
from lessonlib.practice.checker import LONGEST, Feedback, grade_part
from lessonlib.practice.predictions import show_value
from lessonlib.practice.questions import QUESTIONS, Part, get_question
from lessonlib.units import fmt

SECTION = "practice"


def _status(text: str) -> str:
    return f"<span role='status' aria-live='polite'>{html.escape(text)}</span>"


def _kept(question_id: str) -> dict[str, Any]:
    """What is kept about a question, every damaged piece left out: seed, typed (by part) and solved."""
    entry = progress.recall(SECTION, question_id)
    entry = entry if isinstance(entry, dict) else {}
    seed, typed = entry.get("seed"), entry.get("typed")
    return {
        "seed": seed if isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 else None,
        "typed": {k: v for k, v in typed.items() if isinstance(v, str)} if isinstance(typed, dict) else {},
        "solved": entry.get("solved") is True,
    }


def solved_questions() -> list[str]:
    """The ids of the questions that were once answered in full."""
    return [question_id for question_id in QUESTIONS if _kept(question_id)["solved"]]


class Progress(widgets.HBox):
    """How many of the eight are solved, and a reset that asks once more before it forgets."""

    def __init__(self) -> None:
        self.boxes: list[PracticeBox] = []
        self._line = widgets.HTML()
        self.reset = widgets.Button(description="Start over", tooltip="Forget the answers to all eight questions")
        self.forget = widgets.Button(
            description="Yes, forget all answers", button_style="danger", layout={"width": "auto"}
        )
        self.keep = widgets.Button(description="No, keep them")
        self.reset.on_click(lambda _: self._ask())
        self.keep.on_click(lambda _: self.show())
        self.forget.on_click(lambda _: self._forget())
        super().__init__([self._line, self.reset])
        self.show()

    def show(self, note: str = "") -> None:
        """Show how many are solved, as the learner's disk has it."""
        self.text = f"{len(solved_questions())} of {len(QUESTIONS)} solved. {note}".strip()
        self._line.value = _status(self.text)
        self.children = [self._line, self.reset]

    def _ask(self) -> None:
        self._line.value = _status("Forget the answers to all eight questions? Predictions stay.")
        self.children = [self._line, self.forget, self.keep]

    def _forget(self) -> None:
        try:
            for question_id in QUESTIONS:
                progress.keep(SECTION, question_id, {})
        except OSError as error:
            self.show(f"They could not be forgotten on this disk: {error}")
            return
        for box in self.boxes:
            box.ask(None)
        self.show("All answers are forgotten.")


class AnswerRow(widgets.VBox):
    """What one part asks, a box for the answer, and what the checker says about it. Enter checks."""

    def __init__(self, letter: str) -> None:
        self._ask = widgets.HTML()
        self.box = widgets.Text(
            description=f"Answer {letter}",
            continuous_update=False,
            style={"description_width": "80px"},
            layout={"width": "360px"},
        )
        self._said = widgets.HTML()
        super().__init__([self._ask, widgets.HBox([self.box, self._said])])

    def ask(self, part: Part, text: str) -> None:
        """Ask a part, with what was typed before."""
        self._ask.value = html.escape(part.ask)
        self.box.tooltip = part.ask
        self.box.placeholder = part.form
        self.box.value = text
        self._said.value = _status("")

    def say(self, feedback: Feedback) -> None:
        """Show what the checker says: in words, with a mark and a color."""
        mark, color = ("✓", "#006B4E") if feedback.correct else ("✗", "#A33C00")
        self._said.value = f"<span style='color:{color}'>{mark} {_status(str(feedback))}</span>"


class PracticeBox(widgets.VBox):
    """One practice question: its parts with their answer boxes, check, hints, working and another variant."""

    def __init__(self, question_id: str, shared: Progress | None = None) -> None:
        self.question = get_question(question_id)
        self.progress = shared or Progress()
        self.progress.boxes.append(self)
        self.feedback: dict[str, Feedback] = {}
        self.rows = [AnswerRow(part.id[-1]) for part in self.question.parts]
        self._head, self._hints, self._working = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.check = self._button("Check", "Grade every answer", self._check)
        self.hint = self._button("Hint", "Show the next hint", self._show_hint)
        self.working = self._button("Show working", "Show or hide the working, step by step", self._show_working)
        self.another = self._button("Another variant", "The same question with other numbers", self._next_variant)
        buttons = widgets.HBox([self.check, self.hint, self.working, self.another])
        own = [] if shared else [self.progress]
        super().__init__([self._head, *self.rows, buttons, self._hints, self._working, *own])
        kept = _kept(question_id)
        self.ask(kept["seed"], kept["typed"])
        for row in self.rows:
            row.box.observe(lambda _, row=row: self._entered(row), names="value")

    @staticmethod
    def _button(description: str, tooltip: str, action: Any) -> widgets.Button:
        button = widgets.Button(description=description, tooltip=tooltip, layout={"width": "auto"})
        button.on_click(lambda _: action())
        return button

    def ask(self, seed: int | None, typed: dict[str, str] | None = None) -> None:
        """Ask the question with the numbers of `seed` (None: the course's own) and what was typed before."""
        self._asking = True
        self.question = get_question(self.question.id, seed)
        self.feedback = {}
        numbers = "" if seed is None else f" (variant {seed})"
        title = f"Question {self.question.id[1:]}: {self.question.title}{numbers}"
        self._head.value = f"<h3>{html.escape(title)}</h3><p>{html.escape(self.question.prompt)}</p>"
        for row, part in zip(self.rows, self.question.parts, strict=True):
            row.ask(part, (typed or {}).get(part.id, ""))
            if row.box.value:
                self._grade(row, part)
        self._hints_shown = 0
        self._write_hints()
        self._working.value, self.working.description = "", "Show working"
        self._asking = False

    # --- checking

    def _grade(self, row: AnswerRow, part: Part) -> None:
        self.feedback[part.id] = grade_part(part, row.box.value)
        row.say(self.feedback[part.id])

    def _entered(self, row: AnswerRow) -> None:
        if not self._asking:
            self._check([row])

    def _check(self, rows: Sequence[AnswerRow] = ()) -> None:
        for row, part in zip(self.rows, self.question.parts, strict=True):
            if not rows or row in rows:
                self._grade(row, part)
        right = [part.id for part in self.question.parts if part.id in self.feedback and self.feedback[part.id].correct]
        solved = len(right) == len(self.rows)
        said = f"Question {self.question.id[1:]}: {len(right)} of {len(self.rows)} answers right."
        self.progress.show(said + self._keep(solved))

    def _keep(self, solved: bool = False) -> str:
        """Keep what is typed; return what to say if that fails."""
        pairs = zip(self.question.parts, self.rows, strict=True)
        typed = {part.id: row.box.value for part, row in pairs if 0 < len(row.box.value) <= LONGEST}
        entry = {
            "seed": self.question.seed,
            "typed": typed,
            "solved": solved or _kept(self.question.id)["solved"],
        }
        try:
            progress.keep(SECTION, self.question.id, entry)
        except OSError as error:
            return f" That could not be kept on this disk: {error}"
        return ""

    # --- hints, working, other numbers

    def _show_hint(self) -> None:
        self._hints_shown = min(self._hints_shown + 1, len(self.question.hints))
        self._write_hints()

    def _write_hints(self) -> None:
        shown, all_of_them = self._hints_shown, len(self.question.hints)
        lines = "<br>".join(f"Hint {i}: {html.escape(hint)}" for i, hint in enumerate(self.question.hints[:shown], 1))
        self._hints.value = f"<p role='status' aria-live='polite'>{lines}</p>" if lines else ""
        self.hint.description = f"Hint {shown + 1} of {all_of_them}" if shown < all_of_them else "No more hints"

    def _show_working(self) -> None:
        hidden = not self._working.value
        steps = "".join(f"<li>{html.escape(step)}</li>" for step in self.question.working)
        self._working.value = f"<ol role='status' aria-live='polite'>{steps}</ol>" if hidden else ""
        self.working.description = "Hide working" if hidden else "Show working"

    def _next_variant(self) -> None:
        self.ask(1 if self.question.seed is None else self.question.seed + 1)
        self.progress.show(self._keep().strip())

    def __repr__(self) -> str:
        return f"Practice question {self.question.id[1:]}: {self.question.title} ({len(self.rows)} answers)"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return _bundle(self, {} if storing_outputs() else super()._repr_mimebundle_(**kwargs))


class Practice(widgets.VBox):
    """All eight questions, one below the other, with the progress above them."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.questions = [PracticeBox(question_id, self.progress) for question_id in QUESTIONS]
        super().__init__([self.progress, *self.questions])

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.questions))

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return _bundle(self, {} if storing_outputs() else super()._repr_mimebundle_(**kwargs))


def _bundle(shown: object, rich: Any) -> dict[str, Any]:
    """What a notebook shows: the widget, and its one-line description as text (alone where outputs are stored)."""
    return {**(rich or {}), "text/plain": repr(shown)}


def practice_widget(question_id: str | None = None) -> PracticeBox | Practice:
    """One practice question ("q1" to "q8"), or all eight. Raises ValueError for an unknown id."""
    return Practice() if question_id is None else PracticeBox(question_id)


# --- calibration ----------------------------------------------------------------------------------------------------

_BLACK, _GREY = "#222222", "#777777"
# Okabe and Ito's colors, which people with any color vision tell apart; the marker repeats the cue.
_BANDS = (
    (2.0, "within a factor of 2", "#0072B2", "circle"),
    (10.0, "within a factor of 10", "#E69F00", "diamond"),
    (math.inf, "further off", "#D55E00", "x"),
)


@dataclass(frozen=True)
class CalibrationPoint:
    """A prediction and its answer, both in `unit` (a pint unit) and above 0."""

    key: str
    predicted: float
    actual: float
    unit: str

    @property
    def factor(self) -> float:
        """How far off, as a factor of at least 1."""
        return max(self.predicted / self.actual, self.actual / self.predicted)


class Calibration:
    """The kept predictions beside their answers: `points`, one sentence (`readout`), and a `figure` (None if empty)."""

    def __init__(self, points: Sequence[CalibrationPoint]) -> None:
        self.points = list(points)
        self.readout = _describe(self.points)
        self.figure = _calibration_figure(self.points) if self.points else None

    def __repr__(self) -> str:
        return self.readout

    def _repr_mimebundle_(self, **_: Any) -> Any:
        if self.figure is None or storing_outputs():
            return {"text/plain": self.readout}
        return {"application/vnd.plotly.v1+json": self.figure.to_plotly_json(), "text/plain": self.readout}


def calibration() -> Calibration:
    """The predictions of the lessons that have met their answer, predicted against actual on logarithmic axes."""
    kept = progress.load().get(predictions.SECTION, {})
    points = [_point(key, entry) for key, entry in sorted(kept.items())]
    return Calibration([point for point in points if point])


def _point(key: str, entry: Any) -> CalibrationPoint | None:
    """A kept entry as a point; None if it has no answer yet, is damaged, or is not above 0 (no logarithm)."""
    if not isinstance(entry, dict) or not isinstance(entry.get("unit"), str):
        return None
    value, actual = (entry.get(name) for name in ("value", "actual"))
    if not isinstance(value, (int, float)) or not isinstance(actual, (int, float)):
        return None
    if not all(1e-30 < v < 1e30 for v in (value, actual)):
        return None
    return CalibrationPoint(key, float(value), float(actual), entry["unit"])


def _describe(points: Sequence[CalibrationPoint]) -> str:
    if not points:
        return "No prediction has met its answer yet: type some in the lessons, and run the cells below them."
    counts = [f"{sum(p.factor <= limit for p in points)} {name}" for limit, name, *_ in _BANDS[:-1]]
    small = sum(p.predicted < p.actual for p in points)
    large = sum(p.predicted > p.actual for p in points)
    middle = fmt(statistics.median(p.factor for p in points), "", 2)
    return (
        f"{len(points)} prediction{'s' if len(points) > 1 else ''}: {', '.join(counts)}; {small} too small, "
        f"{large} too large. The middle one is off by a factor of {middle}."
    )


def _calibration_figure(points: Sequence[CalibrationPoint]) -> go.Figure:
    values = [value for p in points for value in (p.predicted, p.actual)]
    ends = [min(values) / 3, max(values) * 3]
    grid = {
        "type": "log",
        "range": [math.log10(end) for end in ends],
        "exponentformat": "power",
        "gridcolor": "#eeeeee",
    }
    figure = go.Figure(
        layout={
            "template": "simple_white",
            "font": {"size": 14, "color": _BLACK},
            "width": 820,
            "height": 460,
            "margin": {"l": 90, "r": 20, "t": 40, "b": 60},
            "xaxis": {**grid, "title": "answer (each in its own unit)", "showgrid": True},
            "yaxis": {**grid, "title": "your prediction (same unit)", "showgrid": True},
        }
    )
    line = {"color": _GREY, "width": 2, "dash": "dash"}
    figure.add_scatter(x=ends, y=ends, mode="lines", name="prediction = answer", line=line, hoverinfo="skip")
    nearer = 0.0
    for limit, name, color, symbol in _BANDS:
        band = [p for p in points if nearer < p.factor <= limit]
        nearer = limit
        figure.add_scatter(
            x=[p.actual for p in band],
            y=[p.predicted for p in band],
            mode="markers",
            name=name,
            marker={"color": color, "symbol": symbol, "size": 12},
            hoverinfo="text",
            hovertext=[_hover(p) for p in band],
        )
    return figure


def _hover(p: CalibrationPoint) -> str:
    predicted, actual = show_value(p.predicted, p.unit), show_value(p.actual, p.unit)
    return html.escape(f"{p.key}: predicted {predicted}, it is {actual}")
