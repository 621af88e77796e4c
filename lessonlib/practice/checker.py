"""Grading that says what went wrong: the question's own wrong answers first, then what a ratio gives away.

What is typed is read as a number with a unit, as one of a few words, or as a row of whole numbers. It is matched and
looked up, never evaluated, and nothing that can be typed raises.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from lessonlib.checks import check_number
from lessonlib.practice.questions import LARGEST_TOLERANCE, Mistake, Part, get_part, get_question, show_answer
from lessonlib.units import UnitError, fmt, parse, parse_number

LONGEST = 200  # characters; a longer text is no answer
_SAME = 1e-9  # floating-point noise
_SLIP_MATCH = 0.008  # how near a ratio must be to a known one: 1,000 and 1,024 are 2.4 % apart
_CLOSE = 0.1
_NO_NUMBER = "Write one number, with its unit where it has one, such as 14 GB."


@dataclass(frozen=True)
class Feedback:
    """Whether an answer is right, what it means if it is not, and a hint ("" where none is needed)."""

    correct: bool
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


def check(question_id: str, answer: object, variant: int | None = None) -> Feedback:
    """Grade an answer to a question ("q3": its last part) or to one of its parts ("q3.b").

    `answer` is what a learner types ("0.5 GiB", "memory"), a number in the part's unit, or a list or array of codes.
    `variant` is the seed of the numbers (None: the course's own). Every answer gets feedback, with the first hint if
    it is wrong. Raises ValueError for an unknown question or a variant below 0.
    """
    part = get_part(question_id, variant)
    return grade_part(part, answer, get_question(part.id.partition(".")[0], variant).hints[0])


def grade_part(part: Part, answer: object, hint: str = "") -> Feedback:
    """Grade an answer to one part; `hint` goes with an answer that can be read and is wrong."""
    try:
        text = _typed(answer)
        if isinstance(part.answer, str):
            return _grade_word(part, text, hint)
        if isinstance(part.answer, tuple):
            return _grade_codes(part, part.answer, text, hint)
    except UnitError as error:
        return Feedback(False, _sentence(error), f"Write {part.form}.")
    # a number handed over as a number is in the part's unit
    optional = part.unit_optional or not isinstance(answer, str)
    return grade(text, part.answer, part.unit, part.tolerance, optional, part.mistakes, part.per, hint)


def grade(
    text: str,
    expected: float,
    unit: str = "",
    tolerance: float = LARGEST_TOLERANCE,
    unit_optional: bool = False,
    mistakes: Iterable[Mistake] = (),
    per: str = "",
    hint: str = "",
) -> Feedback:
    """Grade a typed number against `expected`, in `unit` (a pint unit such as "byte", or "" for a plain number).

    `tolerance` is relative, 0 for a whole number that must be exact. `unit_optional`: the question fixes the unit.
    `mistakes` are the question's own wrong answers; `per` may follow the unit ("token" allows "4 kB per token").
    Raises ValueError for an `expected` that is not finite and for a tolerance outside 0 to 0.02; never for `text`.
    """
    right = check_number("expected", expected, -math.inf)
    if check_number("tolerance", tolerance) > LARGEST_TOLERANCE:
        raise ValueError(f"tolerance must be from 0 to {LARGEST_TOLERANCE:g}, got {tolerance!r}")
    try:
        readings = _read(text, unit, unit_optional, per)
    except UnitError as error:
        return Feedback(False, _sentence(error), hint=_NO_NUMBER)
    if any(_near(value, right, tolerance) for value in readings):
        return Feedback(True, f"Right: {show_answer(right, unit, exact=tolerance == 0)}.")
    known = [(m.value, m.meaning) for m in mistakes if isinstance(m.value, (int, float))]
    named = [(value, wrong, said) for value in readings for wrong, said in known if _near(value, wrong, tolerance)]
    if named:
        nearest = min(named, key=lambda match: abs(match[0] - match[1]) / (abs(match[1]) or 1))
        return Feedback(False, nearest[2], hint)
    return Feedback(False, _diagnose(readings[0], right, unit, tolerance), hint)


# --- reading --------------------------------------------------------------------------------------------------------


def _typed(answer: object) -> str:
    """An answer as text: what was typed, or a number or a row of whole numbers as one would type it."""
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    if isinstance(answer, str):
        if len(answer) > LONGEST:
            raise UnitError(f"that is {len(answer):,} characters long")
        return answer.strip()
    if isinstance(answer, Real) and not isinstance(answer, bool):
        try:
            return repr(float(answer))
        except OverflowError:
            raise UnitError("that number is too large to be an answer here") from None
    if isinstance(answer, (list, tuple)) and all(isinstance(c, Integral) and abs(int(c)) < 10**6 for c in answer):
        return " ".join(str(int(code)) for code in answer[:LONGEST])
    raise UnitError(f"that is no answer but a {type(answer).__name__}")


def _read(text: str, unit: str, unit_optional: bool, per: str) -> list[float]:
    """The values that a text may mean, in `unit`: one, or two for a bare share such as 0.9 where percent is asked."""
    text = _typed(text)
    if text.startswith("$"):
        text = f"{text[1:]} USD"
    if per:
        text = re.sub(rf"\s*(?:/|\bper\b)\s*{re.escape(per)}s?$", "", text, flags=re.IGNORECASE)
    value, typed = parse_number(text)
    if typed or not unit:
        return [parse(text, unit)]
    if not unit_optional:
        asked = "GB, GiB, MB, kB or bytes" if unit == "byte" else unit
        raise UnitError(f"{text!r} of what? The answer needs its unit: {asked}")
    return [value * 100, value] if unit == "percent" and abs(value) <= 1 else [value]


def _near(value: float, other: float, tolerance: float) -> bool:
    return abs(value - other) <= max(tolerance, _SAME) * abs(other)


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


# --- what a ratio gives away ----------------------------------------------------------------------------------------

_MACS = "MACs for FLOPs: a multiply and an add are two"
_TWICE_AND_HALF = {
    "byte": (
        "twice as much: a number was given twice its bytes, or counted twice",
        "half: K or V was forgotten, or a number was given half its bytes",
    ),
    "FLOP": (
        "twice as much: something was counted twice (a multiply and an add are two FLOPs, not four)",
        f"half: {_MACS}",
    ),
    "FLOP/s": ("twice as much: the sparse peak, which a language model cannot use", f"half: {_MACS}"),
    "FLOP/byte": (
        "twice as much: the sparse peak, or 1-byte weights for 2-byte ones",
        f"half: {_MACS}; or 4-byte weights for 2-byte ones",
    ),
    "token/s": ("twice as much: a weight was given half its bytes", "half: a weight was given twice its bytes"),
}
_OTHER_TWICE_AND_HALF = ("twice as much: something was counted twice", "half: something was left out")


def _slips(unit: str) -> Iterable[tuple[float, str]]:
    """Ratios of typed to right that have a name."""
    twice, half = _TWICE_AND_HALF.get(unit, _OTHER_TWICE_AND_HALF)
    yield 2, twice
    yield 1 / 2, half
    if unit.startswith("byte"):
        for power, (decimal, binary) in enumerate((("kB", "KiB"), ("MB", "MiB"), ("GB", "GiB"), ("TB", "TiB")), 1):
            factor = 1.024**power
            yield factor, f"{factor:.4g} times too much: {decimal} and {binary} were mixed up ({binary} is the larger)"
            yield 1 / factor, f"{factor:.4g} times too little: {decimal} for {binary} ({binary} is the larger)"
            yield 1024.0**power, f"a factor of {_power(1024, power)} too large: check the prefix of the unit"
            yield 1024.0**-power, f"a factor of {_power(1024, power)} too small: check the prefix of the unit"
    if "byte" in unit:
        yield 8, "eight times too much: bits and bytes were mixed up"
        yield 1 / 8, "an eighth: bits and bytes were mixed up"
    if unit == "percent":
        yield 100, "100 times too large: a share of 0.5 is 50 %"
        yield 1 / 100, "100 times too small: a share of 0.5 is 50 %"
    if unit == "USD" or unit.endswith("/s"):
        yield 3600, "a factor of 3,600 too large: hours and seconds were mixed up"
        yield 1 / 3600, "a factor of 3,600 too small: hours and seconds were mixed up"
    for power in (1, 2, 3, 4):
        yield 1000.0**power, f"a factor of {_power(1000, power)} too large: check the prefix of the unit"
        yield 1000.0**-power, f"a factor of {_power(1000, power)} too small: check the prefix of the unit"
    for factor in (10, 100):
        yield factor, f"a factor of {factor} too large: count the zeros"
        yield 1 / factor, f"a factor of {factor} too small: count the zeros"


def _power(base: int, power: int) -> str:
    return " × ".join([f"{base:,}"] * power)


def _diagnose(value: float, right: float, unit: str, tolerance: float) -> str:
    ratio = value / right if right else math.inf
    if not 0 <= ratio < math.inf:
        return "The sign is wrong." if _near(-value, right, LARGEST_TOLERANCE) else "That cannot be: look again."
    factor, meaning = min(_slips(unit), key=lambda slip: abs(ratio / slip[0] - 1))
    if abs(ratio / factor - 1) <= _SLIP_MATCH:
        said = f"That is {meaning}."
    elif _near(value * right, 1, LARGEST_TOLERANCE):
        said = "Upside down: divide the other way round."
    elif unit == "percent" and _near(100 - value, right, LARGEST_TOLERANCE):
        said = "That is the rest: 100 % minus the answer."
    elif abs(ratio - 1) <= _CLOSE and tolerance == 0:
        said = "Close, but this is a whole number and must be exact."
    elif abs(ratio - 1) <= _CLOSE:
        said = f"Close, but more than {tolerance:.0%} off: carry more digits to the end."
    else:
        side, size = ("large", ratio) if ratio > 1 else ("small", 1 / ratio if ratio else math.inf)
        said = f"About {fmt(size, '', 2)} times too {side}." if size < 1e6 else f"Far too {side}."
    return said


# --- words and codes ------------------------------------------------------------------------------------------------


def _grade_word(part: Part, text: str, hint: str) -> Feedback:
    words = re.findall(r"[a-z]+", text.casefold())
    chosen = {part.choices[word] for word in words if word in part.choices}
    if len(chosen) != 1 or {"not", "never", "isn", "doesn", "t"} & set(words):
        raise UnitError("that cannot be read as one of the choices")
    [choice] = chosen
    if choice == part.answer:
        return Feedback(True, f"Right: {choice}.")
    return Feedback(False, next(mistake.meaning for mistake in part.mistakes if mistake.value == choice), hint)


def _grade_codes(part: Part, right: tuple[int, ...], text: str, hint: str) -> Feedback:
    pieces = re.split(r"[\s,;]+", text.replace("−", "-").strip("[](){} \t\r\n,;"))
    if not all(re.fullmatch(r"[+-]?\d{1,6}", piece, re.ASCII) for piece in pieces):
        raise UnitError("those are not all whole numbers")
    codes = tuple(int(piece) for piece in pieces)
    if len(codes) != len(right):
        raise UnitError(f"{len(right)} codes are asked for, and there are {len(codes)}")
    if codes == right:
        return Feedback(True, f"Right: {show_answer(right)}.")
    for mistake in part.mistakes:
        if mistake.value == codes:
            return Feedback(False, mistake.meaning, hint)
    wrong = [str(place) for place, (code, wanted) in enumerate(zip(codes, right, strict=True), 1) if code != wanted]
    places = f"place {wrong[0]} is" if len(wrong) == 1 else f"places {', '.join(wrong)} are"
    return Feedback(False, f"Not all: {places} different.", hint)
