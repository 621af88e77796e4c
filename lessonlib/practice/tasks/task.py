"""What a coding task is made of. The tasks of lesson 1 are in `lesson_1`, and so on; `exercises` checks them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Task:
    """A function to write. Inputs are tables by argument name, handed over in that order."""

    id: str
    returns: str
    """what the function returns, in words"""
    reference: Callable[..., Any]
    """the library's own answer: a number, an array, or a tuple of these"""
    inputs: tuple[Mapping[str, Any], ...]
    slips: Mapping[str, Callable[..., Any]]
    """wrong formulas that people write and tools have shipped, under what they mean"""
    unit: str = ""
    """of a number, as pint names it"""
    parts: tuple[str, ...] = ()
    """names of the values, where there are several"""


def rows(names: str, *values: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """Inputs as a table: the names of the columns, then a row for each input."""
    return tuple(dict(zip(names.split(), row, strict=True)) for row in values)
