"""The library's own tables: read, and looked up by a key that forgives how it is written."""

import csv
import difflib
from collections.abc import Sequence
from importlib import resources


def look_up(kind: str, key: object, keys: Sequence[str]) -> str:
    """The catalog key meant by `key` (case, spaces and underscores forgiven). Raises ValueError, naming near ones."""
    wanted = str(key).strip().lower().replace(" ", "-").replace("_", "-")
    if wanted in keys:
        return wanted
    near = [k for k in keys if wanted and wanted in k] or difflib.get_close_matches(wanted, keys, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(keys)}"
    raise ValueError(f"no {kind} named {key!r}: {hint} (list_{kind}s() names all)")


def read_table(name: str) -> list[dict[str, str]]:
    """The rows of one of the library's own CSV files."""
    text = (resources.files("lessonlib") / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
