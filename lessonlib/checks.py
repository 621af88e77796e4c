"""One way to refuse a bad argument: say its name, its value and what is allowed."""

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import TypeVar

import numpy as np

T = TypeVar("T")
LARGEST_WHOLE = 2**53  # up to here a float holds every whole number


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


def check_share(name: str, value: object) -> float:
    """`value` as a float above 0 and at most 1. Raises ValueError otherwise."""
    share = check_number(name, value, exclusive=True)
    if share > 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}")
    return share


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


def check_lengths(name: str, values: object) -> np.ndarray:
    """`values` as an array of whole numbers, at least one of them, each at least 1, or ValueError."""
    lengths = np.asarray(values)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not lengths.size:
        said = "an empty list" if not lengths.size else f"{lengths.dtype} values in {lengths.ndim} dimensions"
        raise ValueError(f"{name} must be a list of whole numbers, at least one of them, got {said}")
    if lengths.min() < 1:
        first = int(np.argmax(lengths < 1))
        raise ValueError(f"{name} must be at least 1 each, got {lengths[first]} at position {first}")
    if lengths.astype(float).sum() > LARGEST_WHOLE:
        raise ValueError(f"{name} must add up to at most 2^53, got {lengths.astype(float).sum():g}")
    return lengths.astype(np.int64)
