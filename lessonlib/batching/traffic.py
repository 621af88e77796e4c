"""Requests as a server sees them: when each arrives, how long its prompt is, how many tokens it asks for."""

import csv
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from lessonlib.checks import LARGEST_WHOLE, check_count, check_lengths, check_number, check_values

# Our names, and those of the public Azure LLM inference traces (github.com/Azure/AzurePublicDataset).
COLUMNS = {
    "arrival_s": ("arrival_s", "TIMESTAMP"),
    "prompt_lens": ("prompt_len", "ContextTokens"),
    "output_lens": ("output_len", "GeneratedTokens"),
}


@dataclass(frozen=True, eq=False)
class Traffic:
    """Requests in order of arrival: seconds, prompt tokens and output tokens, one entry each.

    Raises ValueError for no requests, arrays of different sizes, lengths below 1 and times that are negative or fall.
    """

    arrival_s: np.ndarray
    prompt_lens: np.ndarray
    output_lens: np.ndarray

    def __post_init__(self) -> None:
        columns = {
            "arrival_s": check_values("arrival_s", self.arrival_s),
            "prompt_lens": check_lengths("prompt_lens", self.prompt_lens),
            "output_lens": check_lengths("output_lens", self.output_lens),
        }
        sizes = {name: column.shape for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"arrival_s, prompt_lens and output_lens must have one size, got {sizes}")
        falls = np.flatnonzero(np.diff(columns["arrival_s"]) < 0)
        if falls.size:
            raise ValueError(f"arrival_s must not fall, but request {falls[0] + 1} arrives before request {falls[0]}")
        for name, column in columns.items():
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __repr__(self) -> str:
        tokens = f"{self.prompt_lens.sum():,} prompt and {self.output_lens.sum():,} output tokens"
        return f"Traffic of {len(self):,} requests in {self.arrival_s[-1] - self.arrival_s[0]:.4g} s: {tokens}"


@dataclass(frozen=True)
class Lognormal:
    """Lengths of `mean` tokens whose spread is `cv` times the mean: many short, a few very long.

    Rounded to whole tokens, at least 1. Those above `maximum` (the model's longest, say) are cut to it, as an engine
    would. Raises ValueError for numbers that are not above 0.
    """

    mean: float
    cv: float = 1.0
    maximum: int | None = None

    def __post_init__(self) -> None:
        check_number("mean", self.mean, exclusive=True)
        check_number("cv", self.cv, exclusive=True)
        if self.maximum is not None:
            check_count("maximum", self.maximum)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` lengths in tokens."""
        variance = np.log1p(self.cv**2)  # of the logarithm: exp(mu + variance / 2) is the mean, exp(variance) - 1 cv^2
        drawn = rng.lognormal(np.log(self.mean) - variance / 2, np.sqrt(variance), count)
        return np.clip(np.rint(drawn), 1, self.maximum or LARGEST_WHOLE // count).astype(np.int64)


def poisson_traffic(
    rate_per_s: float,
    num_requests: int,
    prompt_len: int | Lognormal,
    output_len: int | Lognormal,
    seed: int = 0,
) -> Traffic:
    """Independent users: the time to the next request is exponential, with mean 1 / `rate_per_s`.

    Lengths (tokens) are fixed, or drawn. Raises ValueError for a rate that is not above 0 and counts below 1.
    """
    return bursty_traffic(rate_per_s, num_requests, prompt_len, output_len, cv=1.0, seed=seed)


def bursty_traffic(
    rate_per_s: float,
    num_requests: int,
    prompt_len: int | Lognormal,
    output_len: int | Lognormal,
    cv: float = 3.0,
    seed: int = 0,
) -> Traffic:
    """Requests in bursts: gamma distributed gaps whose standard deviation is `cv` times their mean 1 / `rate_per_s`.

    With `cv` 1 the gaps are exponential (Poisson), near 0 they are all equal. Raises ValueError as `poisson_traffic`.
    """
    check_number("rate_per_s", rate_per_s, exclusive=True)
    check_count("num_requests", num_requests)
    check_number("cv", cv, exclusive=True)
    rng = np.random.default_rng(check_count("seed", seed, 0))
    gaps = rng.gamma(1 / cv**2, cv**2 / rate_per_s, num_requests)
    lengths = []
    for name, length in (("prompt_len", prompt_len), ("output_len", output_len)):
        if isinstance(length, Lognormal):
            lengths.append(length.draw(rng, num_requests))
        else:
            lengths.append(np.full(num_requests, check_count(name, length)))
    return Traffic(np.cumsum(gaps), *lengths)


def read_traffic(source: str | os.PathLike[str], sort: bool = False) -> Traffic:
    """Traffic from a CSV file: its path, or its text (recognized by its line breaks).

    The header names the columns arrival_s, prompt_len and output_len, or TIMESTAMP, ContextTokens and GeneratedTokens
    as in the Azure LLM inference traces; others are left alone. Arrivals are seconds, or ISO 8601 times, which are
    counted from the earliest. Times that fall are refused, unless `sort` asks for the rows to be sorted by arrival.
    Raises FileNotFoundError, or ValueError that names the line and what is allowed in it.
    """
    text, name = _read_text(source)
    rows = _rows(text.removeprefix("\ufeff"), name)
    header = next(rows, (0, []))[1]
    if not header:
        raise ValueError(f"{name} is empty: it must have a header and a row for each request")
    found = [cell.strip().lower() for cell in header]
    places = {key: found.index(n.lower()) for key, names in COLUMNS.items() for n in names if n.lower() in found}
    missing = [" or ".join(names) for key, names in COLUMNS.items() if key not in places]
    if missing:
        raise ValueError(f"{name} has no column {' and no column '.join(missing)}; it has {', '.join(header)[:200]}")
    columns: dict[str, list[float]] = {key: [] for key in COLUMNS}
    lines: list[int] = []
    for line, row in rows:
        if len(row) != len(header):
            raise ValueError(f"{name}, line {line} has {len(row)} columns, the header has {len(header)}")
        if not lines:
            converters = {"arrival_s": _clock(row[places["arrival_s"]]), "prompt_lens": _tokens, "output_lens": _tokens}
        for key, convert in converters.items():
            cell = row[places[key]]
            try:
                columns[key].append(convert(cell))
            except (ValueError, TypeError, OverflowError):
                raise ValueError(f"{name}, line {line}: {cell[:80]!r} is not {_WANTED[key]}") from None
        lines.append(line)
    if not lines:
        raise ValueError(f"{name} has a header but no requests")
    arrival_s = np.array(columns["arrival_s"])
    arrival_s -= min(arrival_s.min(), 0)  # a time before the first row's, where `sort` allows one
    late = np.flatnonzero(np.diff(arrival_s) < 0)
    if late.size and not sort:
        raise ValueError(
            f"{name}, line {lines[late[0] + 1]} arrives before line {lines[late[0]]}: rows must be in order of "
            "arrival; read_traffic(..., sort=True) sorts them"
        )
    order = np.argsort(arrival_s, kind="stable")
    prompts, outputs = (np.array(columns[key], dtype=np.int64)[order] for key in ("prompt_lens", "output_lens"))
    return Traffic(arrival_s[order], prompts, outputs)


_WANTED = {
    "arrival_s": "a finite number of seconds of at least 0, or a time such as 2023-11-16 18:15:46.68 in every row",
    "prompt_lens": "a whole number of prompt tokens of at least 1",
    "output_lens": "a whole number of output tokens of at least 1",
}


def _read_text(source: str | os.PathLike[str]) -> tuple[str, str]:
    """The CSV text, and what to call it in a message."""
    if isinstance(source, str) and ("\n" in source or "\r" in source):
        return source, "the text"
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"source must be a CSV file's path or its text, got {type(source).__name__}")
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"no traffic file at {str(source)[:200]!r}: give a CSV file's path, or its text")
    try:
        return path.read_text(encoding="utf-8"), path.name
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not UTF-8 text: a CSV file is wanted, unpacked") from None


def _rows(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with the line it ends on."""
    reader = csv.reader(io.StringIO(text))
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"{name}, line {reader.line_num} is not CSV: {error}") from None


def _tokens(cell: str) -> int:
    try:
        number = int(cell)
    except ValueError:
        number = int(float(cell))  # some tools write a column of counts as 12.0
        if number != float(cell):
            raise
    if not 1 <= number <= LARGEST_WHOLE:
        raise ValueError
    return number


def _seconds(cell: str) -> float:
    number = float(cell)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def _clock(first_cell: str) -> Callable[[str], float]:
    """What turns a column's cells into seconds: numbers as they are, times counted from the first row's."""
    try:
        float(first_cell)
        return _seconds
    except ValueError:
        pass
    try:
        start = datetime.fromisoformat(first_cell.strip())
    except ValueError:
        return _seconds  # which refuses it
    return lambda cell: (datetime.fromisoformat(cell.strip()) - start).total_seconds()
