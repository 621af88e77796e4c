"""Execute notebooks from top to bottom and store their outputs, so that the course reads well without a kernel.

usage: python tools/run_notebooks.py [NOTEBOOK ...]      (all of notebooks/ and solutions/ if none is named)

Each widget is stored as a PNG of its figure with its readout (see lessonlib/explorers/base.py). The learner's own
predictions stay out: the kernels get an empty data folder.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run(path: Path) -> None:
    """Execute one notebook in place; an error leaves the file as it was."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = nbformat.from_dict(METADATA)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    client.execute()
    clean(notebook)
    nbformat.write(notebook, path)


def clean(notebook: nbformat.NotebookNode) -> None:
    """Leave out what only this run could use: progress bars, live widgets, times of execution."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if WIDGET_VIEW not in output.get("data", {}) and output.get("name") != "stderr"
            ]


def main() -> None:
    """Run the notebooks named, or all."""
    paths = [Path(name).resolve() for name in sys.argv[1:]]
    paths = paths or sorted([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("solutions/*.ipynb")])
    os.environ["LESSONLIB_STORE_OUTPUTS"] = "1"
    with tempfile.TemporaryDirectory() as data:
        os.environ["LESSONLIB_DATA"] = data
        for path in paths:
            print(f"running {path.relative_to(ROOT)}", flush=True)
            run(path)


if __name__ == "__main__":
    main()
