"""Make exercises/ from solutions/, the only source that is edited by hand.

usage: python -m tools.build_exercises [--check]

In a code cell, the lines from `# BEGIN SOLUTION: hint` to `# END SOLUTION` become a TODO with the hint and a
NotImplementedError. Cells tagged `solution` are left out; cells tagged `check` may raise; outputs go.

An exercise belongs to whoever works in it. Its metadata says what its cells were when it was made: a file whose cells
are still those is made anew, with or without outputs; any other is left alone. --check writes nothing and fails
unless every exercise is what its solution makes of it.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.run_notebooks import METADATA

ROOT = Path(__file__).resolve().parent.parent
BEGIN = re.compile(r"(\s*)# BEGIN SOLUTION(?:: (.+))?")
END = re.compile(r"\s*# END SOLUTION")
MARKER = re.compile(r"#.*\b(BEGIN|END)\s+SOLUTION", re.IGNORECASE)
FRESH_COPY = "for a fresh copy, rename yours and run `make exercises`"


class MarkerError(ValueError):
    """A solution's region is not closed, not opened, or not spelled as it must be."""


def strip_solutions(source: str, where: str = "cell") -> str:
    """A code cell without its solutions: each region becomes a TODO and a NotImplementedError, as far indented."""
    kept: list[str] = []
    inside = False
    for number, line in enumerate(source.splitlines(), 1):
        begin, end = BEGIN.fullmatch(line), END.fullmatch(line)
        if MARKER.search(line) and not (begin or end):
            raise MarkerError(f"{where}, line {number}: write '# BEGIN SOLUTION: hint' or '# END SOLUTION'")
        if (begin and inside) or (end and not inside):
            raise MarkerError(f"{where}, line {number}: {line.strip()!r} {'inside' if inside else 'outside'} a region")
        if begin:
            indent, hint = begin[1], begin[2] or "your lines"
            kept += [f"{indent}# TODO: {hint}", f'{indent}raise NotImplementedError("your code goes here")']
        if begin or end:
            inside = bool(begin)
        elif not inside:
            kept.append(line)
    if inside:
        raise MarkerError(f"{where}: the last '# BEGIN SOLUTION' has no '# END SOLUTION'")
    return "\n".join(kept)


def make_exercise(solution: NotebookNode, name: str) -> NotebookNode:
    """The exercise that a solution notebook makes; cells keep their ids. Raises MarkerError, naming the cell."""
    exercise = nbformat.from_dict({**solution, "cells": []})
    for cell in solution.cells:
        tags = cell.metadata.get("tags", [])
        if "solution" in tags:
            continue
        copy = nbformat.from_dict({"id": cell.id, "cell_type": cell.cell_type, "metadata": {}, "source": cell.source})
        if "check" in tags:
            copy.metadata.tags = [*tags, "raises-exception"]
        elif tags:
            copy.metadata.tags = list(tags)
        if cell.cell_type == "code":
            copy.source = strip_solutions(cell.source, f"{name}, cell {cell.id}")
            copy.execution_count, copy.outputs = None, []
        exercise.cells.append(copy)
    made = {"from": f"solutions/{name}", "cells": fingerprint(exercise)}
    exercise.metadata = nbformat.from_dict({**METADATA, "exercise": made})
    return exercise


def fingerprint(notebook: NotebookNode) -> str:
    """A hash of what a learner can have written: the cells' kinds and sources, not their outputs or metadata."""
    cells = [[cell.cell_type, cell.source] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def as_text(notebook: NotebookNode) -> str:
    """The notebook as its file holds it."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def is_edited(path: Path) -> bool:
    """Whether somebody has changed a cell since the file was made. What cannot be read or told is somebody's work."""
    try:
        notebook = nbformat.read(path, as_version=4)
        return bool(notebook.metadata["exercise"]["cells"] != fingerprint(notebook))
    except Exception:  # whatever is wrong with the file, it is not ours to replace
        return True


def write_exercise(path: Path, exercise: NotebookNode) -> str:
    """Write an exercise unless somebody works in it; what was done, in words ("" if nothing was to be done)."""
    text = as_text(exercise)
    if path.exists():
        if path.read_text(encoding="utf-8") == text:
            return ""
        if is_edited(path):
            return f"{path.name} left alone: it holds somebody's work; {FRESH_COPY}"
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text, encoding="utf-8", newline="\n")
    draft.replace(path)
    return f"{path.name} written"


def differs(path: Path, exercise: NotebookNode) -> str:
    """What keeps a file from being the exercise its solution makes ("" if nothing does)."""
    if not path.exists():
        return f"{path.name} is missing: run `make exercises`"
    if path.read_text(encoding="utf-8") == as_text(exercise):
        return ""
    if is_edited(path):
        return f"{path.name} has been worked in: keep that out of a commit; {FRESH_COPY}"
    return f"{path.name} is not what its solution makes: run `make exercises`"


def build(root: Path = ROOT, check: bool = False) -> list[str]:
    """Write every exercise, or with `check` only compare; what was done or is wrong. Raises MarkerError."""
    solutions = sorted(root.glob("solutions/*.ipynb"))
    exercises = {path.name: make_exercise(nbformat.read(path, as_version=4), path.name) for path in solutions}
    act = differs if check else write_exercise
    said = [act(root / "exercises" / name, exercise) for name, exercise in exercises.items()]
    orphans = sorted(path.name for path in root.glob("exercises/*.ipynb") if path.name not in exercises)
    return [line for line in said if line] + ([f"no solution makes {', '.join(orphans)}"] if check and orphans else [])


def main() -> None:
    """Build the exercises, or check them."""
    parser = argparse.ArgumentParser(description="Make exercises/ from solutions/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail unless exercises/ is as made")
    check = parser.parse_args().check
    said = build(ROOT, check)
    print("\n".join(said) if said else "exercises are in step with solutions")
    sys.exit(bool(check and said))


if __name__ == "__main__":
    main()
