"""Predict before you look: a box that keeps the learner's number, and a sentence that holds it against the answer."""

import contextlib
import html
import math
from typing import Any

import ipywidgets as widgets

from lessonlib.display.outputs import storing_outputs
from lessonlib.practice import progress
from lessonlib.units import UnitError, fmt, parse

SECTION = "predictions"
_SHORT = {
    "byte": "B",
    "byte/s": "B/s",
    "FLOP/byte": "FLOP/B",
    "percent": "%",
    "token/s": "tokens/s",
    "token": "tokens",
    "request": "requests",
}


def show_value(value: float, unit: str) -> str:
    """A value in a pint unit as the course prints it: 14 GB, 142.9 tokens/s."""
    return fmt(value, _SHORT.get(unit, unit))


class Prediction(widgets.VBox):
    """A question with a box for a number and its unit. Enter keeps it, under `key`, on the learner's disk."""

    def __init__(self, key: str, question: str, unit: str, example: str) -> None:
        self.key, self.question, self.unit, self.example = key, question, unit, example
        parse(example, unit)  # an example that is not an answer would be our mistake
        kept = recall(key, unit)
        self.box = widgets.Text(
            value=kept["text"] if kept else "",
            placeholder=f"for example {example}",
            description="You predict",
            tooltip=question,
            continuous_update=False,
            style={"description_width": "90px"},
            layout={"width": "340px"},
        )
        self._status = widgets.HTML()
        number = "a number with its unit" if unit else "a number"
        self._say("Kept from before." if kept else f"Type {number} and press Enter. A guess is fine.")
        self.box.observe(lambda change: self._keep(change["new"]), names="value")
        super().__init__([widgets.HTML(f"<b>{html.escape(question)}</b>"), widgets.HBox([self.box, self._status])])

    def _keep(self, text: str) -> None:
        try:
            value = parse(text, self.unit)
        except UnitError as error:
            kept = recall(self.key, self.unit)
            self._say(f"{error}." + (f" (Still kept: {kept['text']}.)" if kept else ""))
            return
        if value < 0:
            self._say("A negative answer cannot be right here: type a number above 0.")
            return
        try:
            progress.keep(SECTION, self.key, {"text": text, "value": value, "unit": self.unit})
        except OSError as error:
            self._say(f"{show_value(value, self.unit)}, but it could not be kept on this disk: {error}")
            return
        self._say(f"Kept: {show_value(value, self.unit)}. Now find out.")

    def _say(self, text: str) -> None:
        self._status.value = f"<span role='status' aria-live='polite'>{html.escape(text)}</span>"

    def __repr__(self) -> str:
        return f"{self.question} (type your prediction, for example {self.example})"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = {} if storing_outputs() else super()._repr_mimebundle_(**kwargs)
        return {**bundle, "text/plain": repr(self)}


def predict(key: str, question: str, unit: str, example: str) -> Prediction:
    """Ask for a number in `unit` (a pint unit such as "byte" or "token/s") before it is worked out."""
    return Prediction(key, question, unit, example)


def compare(key: str, actual: float, unit: str, digits: int = 4) -> str:
    """One sentence: the prediction kept under `key` beside the actual value, and the factor between them.

    `digits` are those of the actual value: a measurement has two or three.
    """
    kept = recall(key, unit)
    answer = f"It is {fmt(actual, _SHORT.get(unit, unit), digits)}."
    if not kept:
        return f"{answer} (No prediction kept: type one above and run this cell again.)"
    predicted = kept["value"]
    with contextlib.suppress(OSError):  # the comparison counts, whether or not it can be kept
        progress.keep(SECTION, key, {**kept, "actual": actual})
    said = f"You predicted {show_value(predicted, unit)}. {answer}"
    factor = predicted / actual if actual > 0 else 0.0
    if 0.95 <= factor <= 1.05:
        return f"{said} Right on."
    if not 1e-12 < factor < 1e12:
        return f"{said} That is far off."
    size = factor if factor > 1 else 1 / factor
    return f"{said} Yours is {fmt(size, '', 3)} times too {'large' if factor > 1 else 'small'}."


def recall(key: str, unit: str) -> dict[str, Any] | None:
    """The prediction kept under `key`, if there is a sound one in this unit."""
    kept = progress.recall(SECTION, key)
    if not isinstance(kept, dict) or kept.get("unit") != unit or not isinstance(kept.get("text"), str):
        return None
    value = kept.get("value")
    return kept if isinstance(value, (int, float)) and math.isfinite(value) else None
