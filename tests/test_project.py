"""Rules of the project itself: who may import whom, what is pinned, how notebooks are stored."""

import ast
import builtins
import json
import re
import tomllib
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("solutions/*.ipynb")])
GROUND_FLOOR = sorted(ROOT.glob("lessonlib/*.py"))
LONGEST_CELL = 25
ABSOLUTE_PATH = r"(?<![\w.:/])/\w[\w.-]*/\w|\b[A-Za-z]:\\"  # of any machine


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def begins(names: set[str], *forbidden: str) -> set[str]:
    return {name for name in names if name.startswith(forbidden)}


@pytest.mark.parametrize("path", GROUND_FLOOR, ids=lambda path: path.stem)
def test_the_ground_floor_stands_alone(path):
    heavy = (
        "torch",
        "plotly",
        "ipywidgets",
        "tqdm",
        "gguf",
        "lessonlib.lab",
        "lessonlib.explorers",
        "lessonlib.practice",
    )
    assert not begins(imports(path), *heavy)


def test_lab_and_explorers_do_not_know_each_other():
    for path in ROOT.glob("lessonlib/lab/*.py"):
        assert not begins(imports(path), "plotly", "ipywidgets", "lessonlib.explorers", "lessonlib.practice"), path
    for path in ROOT.glob("lessonlib/explorers/*.py"):
        assert not begins(imports(path), "torch", "lessonlib.lab", "lessonlib.practice"), path
    for path in ROOT.glob("lessonlib/practice/*.py"):
        assert not begins(imports(path), "torch", "lessonlib.lab", "lessonlib.explorers"), path


def named(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ;]", requirement)[0].lower().replace("_", "-")


def test_every_dependency_is_pinned_and_no_address_is_given():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {named(r) for r in [*project["dependencies"], *extras["lab"], *extras["test"]]} - {project["name"]}
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = {named(line) for line in lines if re.fullmatch(r"[\w.-]+==[\w.!+]+", line)}
    assert not [line for line in lines if "://" in line or " @ " in line]
    assert wanted <= pins
    assert all(line.startswith("#") or named(line) in pins for line in lines)


def test_conda_describes_the_same_environment():
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert "-e .[lab]" in text  # everything that pyproject.toml names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [torch] = [r for r in project["optional-dependencies"]["lab"] if named(r) == "torch"]
    assert f"pytorch-cpu{torch.removeprefix('torch')}" in text
    oldest = re.search(r">=3\.(\d+)", project["requires-python"])[1]
    assert int(re.search(r"python=3\.(\d+)", text)[1]) >= int(oldest)


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def ignored(cell) -> bool:
    return "nbval-ignore-output" in cell.metadata.get("tags", [])


def text_of(cell) -> str:
    return " ".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def test_notebooks_are_stored_whole(notebook):
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert re.match(r"# [^#\s]", notebook.cells[0].source)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    for cell in code_cells(notebook):
        assert len(cell.source.splitlines()) <= LONGEST_CELL
        assert not re.search(r"https?://|cdn\.|np\.float|widget-view|Traceback|;base64", json.dumps(cell.outputs))
        assert not re.search(ABSOLUTE_PATH, text_of(cell))


def test_most_numbers_are_compared(notebook):
    numeric = [cell for cell in code_cells(notebook) if re.search(r"\d", text_of(cell))]
    compared = [cell for cell in numeric if not ignored(cell)]
    assert len(compared) > len(numeric) / 2


def test_what_depends_on_the_machine_is_followed_by_what_holds_on_any(notebook):
    cells = code_cells(notebook)
    assert not ignored(cells[-1])
    for index, cell in enumerate(cells):
        if ignored(cell) and "measure_" in cell.source:
            assert any("assert " in later.source for later in cells[index + 1 : index + 6]), cell.source


def test_pictures_have_words(notebook):
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                assert output.metadata["image/png"]["alt"] == output.data["text/plain"]


def names_used_and_made(cells: list) -> tuple[set[str], set[str]]:
    tree = ast.parse("\n".join(cell.source for cell in cells))
    nodes = list(ast.walk(tree))
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    made = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    made |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler)} | {
        n.arg for n in nodes if isinstance(n, ast.arg)
    }
    return used, made | {
        alias.asname or alias.name for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names
    }


def test_each_section_works_after_only_the_first_cell(notebook):
    first, *rest = code_cells(notebook)
    known = names_used_and_made([first])[1] | set(dir(builtins))
    section: list = []
    for cell in [*notebook.cells, nbformat.v4.new_markdown_cell("## end")]:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            used, made = names_used_and_made(section)
            assert used <= known | made, f"before {cell.source.splitlines()[0]!r}"
            section = []
        elif cell in rest:
            section.append(cell)


PAGES = [*NOTEBOOKS, *sorted(ROOT.glob("exercises/*.ipynb")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_link_leads_somewhere(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = nbformat.reads(text, as_version=4).cells
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "#"))]
    assert [link for link in links if not (path.parent / link.partition("#")[0]).exists()] == []
