"""What a learner typed, kept on the learner's disk: one small JSON file, replaced as a whole at every change."""

import json
import os
import time
from pathlib import Path
from typing import Any

import platformdirs


def progress_path() -> Path:
    """Where progress is kept; the environment variable LESSONLIB_DATA names another folder."""
    folder = os.environ.get("LESSONLIB_DATA") or platformdirs.user_data_path("lessonlib")
    return Path(folder) / "progress.json"


def load() -> dict[str, Any]:
    """Everything kept so far, by section. A damaged file is set aside under a new name, never deleted."""
    path = progress_path()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or not all(isinstance(section, dict) for section in kept.values()):
            raise ValueError("not a table of sections")
    except OSError:  # none yet, or nothing that can be read
        return {}
    except ValueError:
        path.replace(path.with_name(f"progress-damaged-{time.time_ns()}.json"))
        return {}
    return kept


def keep(section: str, key: str, value: Any) -> None:
    """Keep a value. The file is written beside the old one and takes its place only when it is complete."""
    kept = load()
    kept.setdefault(section, {})[key] = value
    path = progress_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"progress-{os.getpid()}.tmp")
    draft.write_text(json.dumps(kept, indent=1, sort_keys=True), encoding="utf-8")
    draft.replace(path)


def recall(section: str, key: str) -> Any:
    """The value kept under a key, or None."""
    return load().get(section, {}).get(key)
