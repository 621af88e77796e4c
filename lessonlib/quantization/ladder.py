"""The measured ladder: what every way to quantize SmolLM2-135M costs in quality, as it was once measured.

`python -m lessonlib.lab.ladder` measures it again, on this machine.
"""

import csv
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lessonlib.checks import check_choice, check_count, check_number


@dataclass(frozen=True, kw_only=True)
class LadderRow:
    """One way to quantize the model, what it takes and what it costs. Bits of 16 mean: left as it was."""

    name: str
    method: str
    bits: int
    granularity: str
    group_size: int | None
    symmetric: bool
    seed: int
    kv_bits: int
    matrix_bits: float
    """effective bits per weight of the blocks' matrices: scales and zero points included"""
    model_bits: float
    """effective bits per weight of the whole model: embedding (which is the head too) and norms at 16 bits"""
    num_bytes: int
    """of the whole model's weights"""
    cache_bits: float
    """effective bits of a value in the KV cache"""
    perplexity: float
    """per token, on the evaluation text in pieces of 512"""
    start_perplexity: float
    """the same on the first 512 tokens"""
    kl_divergence: float
    """nats per token, from the reference"""
    top1_agreement: float
    """share of positions whose likeliest token is the reference's"""
    task_accuracy: float
    """share of the cloze items"""
    rounding_cpu_s: float
    """processor time of one core"""
    evaluation_cpu_s: float


@dataclass(frozen=True)
class Ladder:
    """All rows, in the order in which they are taught, and where they come from."""

    rows: tuple[LadderRow, ...]
    provenance: Mapping[str, str]
    """processor, versions, date, command, texts"""

    def __getitem__(self, name: str) -> LadderRow:
        """The row of that name. Raises KeyError, with the names there are, for another."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r} is no row of the ladder; there are {', '.join(row.name for row in self.rows)}")


def read_ladder(path: str | os.PathLike[str] | None = None) -> Ladder:
    """The ladder stored with the course, or one that was measured here.

    Raises FileNotFoundError for no file, and ValueError naming the line for a damaged one.
    """
    stored = resources.files("lessonlib") / "data" / "quantization_ladder.csv"
    text = (stored if path is None else Path(path)).read_text(encoding="utf-8")
    ladder, problems = parse_ladder(text)
    if problems:
        raise ValueError(f"the ladder must be whole, {problems[0]}; measure it again: python -m lessonlib.lab.ladder")
    return ladder


def parse_ladder(text: str) -> tuple[Ladder, list[str]]:
    """The rows of a ladder's text that are whole, and what is wrong with the rest: lines `# key: value`, then CSV."""
    lines = text.splitlines(keepends=True)
    problems = []
    if not lines or not lines[-1].endswith("\n"):  # a row that was cut off may still look like one
        problems.append(f"line {len(lines)} is cut off")
        lines = lines[:-1]
    notes = [line[1:].strip().partition(": ") for line in lines if line.startswith("#")]
    rows: dict[str, LadderRow] = {}
    columns = [field.name for field in dataclasses.fields(LadderRow)]
    numbered = [(i, line) for i, line in enumerate(lines, 1) if not line.startswith("#")]
    if not numbered or next(csv.reader([numbered[0][1]])) != columns:
        problems.append(f"it must have the columns {', '.join(columns)}")
        numbered = []
    for number, line in numbered[1:]:
        try:
            row = _row(dict(zip(columns, next(csv.reader([line], strict=True)), strict=True)))
        except (ValueError, KeyError, StopIteration, csv.Error) as error:
            problems.append(f"line {number} is damaged ({error})")
            continue
        rows[row.name] = row
    return Ladder(tuple(rows.values()), {key: value for key, _, value in notes}), problems


def write_ladder_text(ladder: Ladder) -> str:
    """The text that `parse_ladder` reads."""
    notes = "".join(f"# {key}: {value}\n" for key, value in ladder.provenance.items())
    columns = [field.name for field in dataclasses.fields(LadderRow)]
    lines = [",".join(columns), *(",".join(_text(getattr(row, c)) for c in columns) for row in ladder.rows)]
    return notes + "\n".join(lines) + "\n"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _row(fields: dict[str, str]) -> LadderRow:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(LadderRow):
        text = fields[field.name]
        if field.type is float:
            values[field.name] = check_number(field.name, float(text))
        elif field.type is int:
            values[field.name] = check_count(field.name, int(text), 0)
        elif field.type is bool:
            values[field.name] = check_choice(field.name, text, ("yes", "no")) == "yes"
        elif field.type is str:
            if not text:
                raise ValueError(f"{field.name} is missing")
            values[field.name] = text
    for share in ("top1_agreement", "task_accuracy"):
        if values[share] > 1:
            raise ValueError(f"{share} must be at most 1, got {values[share]}")
    group_size = check_count("group_size", int(fields["group_size"])) if fields["group_size"] else None
    return LadderRow(**values, group_size=group_size)
