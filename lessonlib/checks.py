"""One way to refuse a bad argument: say its name, its value and what is allowed."""

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """`value` as an int of at least `minimum`. Raises ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return int(value)


def check_number(name: str, value: object, minimum: float = 0.0, exclusive: bool = False) -> float:
    """`value` as a finite float of at least (`exclusive`: above) `minimum`. Raises ValueError otherwise."""
    allowed = f"a finite number {'above' if exclusive else 'of at least'} {minimum:g}"
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < minimum or (exclusive and number == minimum):
        raise ValueError(f"{name} must be {allowed}, got {str(value)[:80]}")
    return number


def check_choice(name: str, value: T, allowed: Collection[T]) -> T:
    """`value` if it is one of `allowed`. Raises ValueError otherwise."""
    if isinstance(value, bool) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    return value


def check_values(name: str, value: object, minimum: float = 0.0) -> np.ndarray:
    """`value`, a number or an array of them, as a float array, all finite and at least `minimum`, or ValueError."""
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or not np.all(np.isfinite(array)) or np.any(array < minimum):
        raise ValueError(f"{name} must hold finite numbers of at least {minimum:g}, got {value!r}")
    return array.astype(float)
