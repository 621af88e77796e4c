"""Whether outputs are being stored: then a widget shows what can be read without a kernel."""

import os


def storing_outputs() -> bool:
    """True in a kernel that `tools/run_notebooks.py` started to store a notebook's outputs."""
    return os.environ.get("LESSONLIB_STORE_OUTPUTS") == "1"
