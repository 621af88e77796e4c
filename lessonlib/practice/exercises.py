"""Checking the coding tasks of the exercises: does a learner's function do it, and if not, what does it look like?

A check cell hands over the function: `check_task("02/kv-bytes", kv_bytes_per_token)`. It runs on every input of the
task; what it should return is computed at that moment by the library, and never shown. A wrong result is held against
the task's own slips, then judged by its ratio to the right one.

A new lesson needs a notebook in solutions/ and a module in tasks/, named there.
"""

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from lessonlib.checks import check_choice
from lessonlib.practice.checker import grade
from lessonlib.practice.tasks import TASKS
from lessonlib.practice.tasks.task import Task

TIME_LIMIT_S = 20.0  # for all inputs of a task together
_SAME = 1e-6  # relative; every reference is exact to far more digits
_CLOSE = 0.02
_LONGEST = 600  # characters of an input or a result that are shown


class NotRightYet(Exception):
    """A function does not do what its task asks; the message says what was asked and what the mistake looks like."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message alone, for our own lines would not help anybody."""
        return str(self).splitlines()


def check_task(task_id: str, function: Callable[..., Any]) -> None:
    """Run a learner's function on every input of a task and print that it is right, or raise NotRightYet.

    What the function itself raises goes on to the learner, with the input added; so does a TimeoutError if it takes
    longer than TIME_LIMIT_S. Raises ValueError for an unknown task.
    """
    __tracebackhide__ = True  # IPython shows the learner's lines, not ours
    task = TASKS[check_choice("task_id", task_id, TASKS)]
    if not callable(function):
        raise NotRightYet(f"{task.id}: hand over the function itself, without parentheses behind its name.")
    results = []
    with _time_limit(TIME_LIMIT_S):
        for given in task.inputs:
            try:
                results.append(function(*copy.deepcopy(list(given.values()))))
            except NotImplementedError:  # nothing is there yet that an input could have broken
                raise
            except Exception as error:
                error.add_note(f"{task.id}: that was with {_show_input(given)}")
                raise
    references = [task.reference(*given.values()) for given in task.inputs]
    wrong = [not _same(got, right) for got, right in zip(results, references, strict=True)]
    if any(wrong):
        raise NotRightYet(_explain(task, results, references, wrong))
    print(f"{task.id}: right on all {len(results)} inputs.")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in Python code that runs for longer. (A trace works on every platform and in any thread.)"""
    deadline, before = time.monotonic() + seconds, sys.gettrace()

    def watch(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > deadline:
            raise TimeoutError(f"stopped after {seconds:g} s: does a loop never end?")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


# --- comparing ------------------------------------------------------------------------------------------------------


def _number(value: object) -> float | None:
    """A number of any kind as a float; None for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _array(value: object) -> np.ndarray | None:
    """An array of numbers as floats; None for anything else."""
    try:
        array = np.asarray(value)
    except Exception:  # a ragged list, or an object that breaks when it is looked at
        return None
    return array.astype(float) if array.dtype.kind in "iuf" else None


def _same(got: object, right: object) -> bool:
    if isinstance(right, tuple):
        if not isinstance(got, (tuple, list)) or len(got) != len(right):
            return False
        return all(_same(g, r) for g, r in zip(got, right, strict=True))
    if isinstance(right, np.ndarray):
        array = _array(got)
        return array is not None and array.shape == right.shape and bool(_near(array, right).all())
    number, wanted = _number(got), _number(right)
    return number is not None and wanted is not None and math.isclose(number, wanted, rel_tol=_SAME)


def _near(array: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.isclose(array, right, rtol=_SAME, atol=1e-9 * float(np.abs(right).max(initial=0)))


# --- explaining -----------------------------------------------------------------------------------------------------


def _explain(task: Task, results: Sequence[Any], references: Sequence[Any], wrong: Sequence[bool]) -> str:
    """What was asked, the first input that went wrong, what came back, and what that looks like."""
    first = wrong.index(True)
    got, right, name = results[first], references[first], ""
    if task.parts and isinstance(got, (tuple, list)) and len(got) == len(task.parts):
        part = next(i for i, (g, r) in enumerate(zip(got, right, strict=True)) if not _same(g, r))
        got, right, name = got[part], right[part], f"{task.parts[part]}: "
    looks = _name_slip(task, results) or _name_slip(task, results, first) or name + _judge(got, right, task)
    lines = {
        "asked for": task.returns,
        "with": _show_input(task.inputs[first]),
        "you return": name + _show(got),
        "it looks like": looks,
    }
    head = f"{task.id} is not right yet: {sum(wrong)} of {len(wrong)} inputs give something else."
    return "\n".join([head, *(f"  {label:14} {text}" for label, text in lines.items())])


def _name_slip(task: Task, results: Sequence[Any], only: int | None = None) -> str:
    """The wrong formula that gives what the learner's function gave, on every input or `only` on one; "" if none."""
    places = range(len(results)) if only is None else [only]
    for meaning, slip in task.slips.items():
        if all(_same(results[place], slip(*task.inputs[place].values())) for place in places):
            return meaning
    return ""


def _judge(got: Any, right: Any, task: Task) -> str:
    """What a wrong result gives away, without the right one in it."""
    if got is None:
        return "nothing came back: does the function end with return?"
    if isinstance(right, tuple):
        return f"{len(right)} values are asked for: {', '.join(task.parts)}; return them with commas between"
    if isinstance(right, np.ndarray):
        return _judge_array(got, right)
    number = _number(got)
    if number is None:
        return f"one number is asked for, and that is {_kind(got)}"
    if math.isfinite(number) and right and abs(number / right - 1) <= _CLOSE:
        return "close, but not the same: something small is missing, counted twice or rounded away"
    said = grade(repr(number), float(right), task.unit, tolerance=0, unit_optional=True).message
    return said.removeprefix("That is ").rstrip(".") if math.isfinite(number) else _NOT_FINITE


_NOT_FINITE = "not every value is a finite number: was something divided by 0?"


def _judge_array(got: Any, right: np.ndarray) -> str:
    array = _array(got)
    if array is None:
        return f"an array of numbers is asked for, and that is {_kind(got)}"
    if array.shape != right.shape:
        return f"the shape should be {right.shape}, and it is {array.shape}"
    if not np.isfinite(array).all():
        return _NOT_FINITE
    ratios = array[right != 0] / right[right != 0]
    if not array[right == 0].any() and ratios.size > 1 and np.allclose(ratios, ratios[0], rtol=_SAME):
        return f"every value is {ratios[0]:.4g} times what it should be"
    wrong = ~_near(array, right)
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{wrong.sum()} of {wrong.size} values are different, the first at {place}, where yours is {array[place]:g}"


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _show(value: object) -> str:
    """A value for a message: short, and never an error."""
    number = _number(value)
    if number is not None:
        return f"{number:,.0f}" if number.is_integer() and abs(number) < 1e15 else f"{number:.7g}"
    try:
        text = np.array2string(value, precision=5, threshold=64) if isinstance(value, np.ndarray) else repr(value)
    except Exception:  # an object that breaks when it is looked at
        text = _kind(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _show_input(given: Mapping[str, Any]) -> str:
    shown = {name: f"{value:.6g}" if isinstance(value, float) else _show(value) for name, value in given.items()}
    return ", ".join(f"{name} = {text}" for name, text in shown.items())
