"""Exercises: made from the solutions, never over somebody's work, checked without giving the answer away."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from lessonlib.practice import QUESTIONS, check_task, exercises
from lessonlib.practice.exercises import TASKS, NotRightYet
from lessonlib.practice.tasks.task import Task
from tools import build_exercises
from tools.build_exercises import MarkerError, build, make_exercise, strip_solutions

ROOT = Path(__file__).resolve().parent.parent
SOLUTIONS = sorted(ROOT.glob("solutions/*.ipynb"))
CHECK_CALL = re.compile(r'check_task\("([^"]+)", (\w+)\)')


def tagged(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def code_cells(notebook: Any) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# --- solutions become exercises -------------------------------------------------------------------------------------


def test_a_solution_becomes_a_todo_as_far_indented():
    source = """def f(x):
    if x:
        # BEGIN SOLUTION: think of x
        y = x
        return y
        # END SOLUTION
    return 0
# BEGIN SOLUTION
z = f(1)
# END SOLUTION"""
    assert (
        strip_solutions(source)
        == """def f(x):
    if x:
        # TODO: think of x
        raise NotImplementedError("your code goes here")
    return 0
# TODO: your lines
raise NotImplementedError("your code goes here")"""
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("# BEGIN SOLUTION\nx", "has no '# END SOLUTION'"),
        ("x\n# END SOLUTION", "line 2: '# END SOLUTION' outside a region"),
        ("# BEGIN SOLUTION\n# BEGIN SOLUTION\n# END SOLUTION\n# END SOLUTION", "line 2: '# BEGIN SOLUTION' inside"),
        ("# BEGIN SOLUTION\n# END SOLUTION\n# END SOLUTION", "line 3"),
        ("# BEGIN SOLUTIONS\nx\n# END SOLUTION", "line 1: write '# BEGIN SOLUTION: hint'"),
        ("# begin solution\nx\n# END SOLUTION", "line 1: write"),
        ("x  # BEGIN SOLUTION\n# END SOLUTION", "line 1: write"),
        ("# BEGIN SOLUTION\nx\n# END SOLUTION.", "line 3: write"),
    ],
)
def test_markers_that_do_not_pair_are_refused(source, said):
    with pytest.raises(MarkerError, match=re.escape(said)):
        strip_solutions(source)
    solution = a_solution()
    solution.cells[2].source = source
    with pytest.raises(MarkerError, match=r"1\.ipynb, cell work"):
        make_exercise(solution, "1.ipynb")


def a_solution() -> Any:
    """A little notebook with each kind of cell, as it looks after a run."""
    v4 = nbformat.v4
    output = v4.new_output("stream", text="42\n")
    work = "def f():\n    # BEGIN SOLUTION: six times seven\n    return 42\n    # END SOLUTION"
    cells = [
        v4.new_markdown_cell("# 1. A title", id="title"),
        v4.new_markdown_cell("This is the solved copy.", id="dropped", metadata={"tags": ["solution"]}),
        v4.new_code_cell(work, id="work", execution_count=1),
        v4.new_code_cell("f()", id="check", execution_count=2, outputs=[output], metadata={"tags": ["check"]}),
        v4.new_code_cell("print(1)", id="other", execution_count=3, metadata={"tags": ["x"], "scrolled": True}),
    ]
    return v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "my-env", "display_name": "mine"}})


def test_what_is_left_out_of_an_exercise_and_what_is_kept():
    exercise = make_exercise(a_solution(), "1.ipynb")
    assert [cell.id for cell in exercise.cells] == ["title", "work", "check", "other"]
    assert [cell.metadata for cell in exercise.cells] == [
        {},
        {},
        {"tags": ["check", "raises-exception"]},
        {"tags": ["x"]},
    ]
    assert all(cell.execution_count is None and cell.outputs == [] for cell in code_cells(exercise))
    assert exercise.metadata.kernelspec.name == "python3"
    assert "42" not in re.sub(r'"cells": "\w+"', "", json.dumps(exercise))
    assert "six times seven" in exercise.cells[1].source


# --- never over somebody's work -------------------------------------------------------------------------------------


@pytest.fixture
def course(tmp_path) -> Path:
    """A folder with one solution and the exercise it makes."""
    (tmp_path / "solutions").mkdir()
    nbformat.write(a_solution(), tmp_path / "solutions" / "1.ipynb")
    assert build(tmp_path) == ["1.ipynb written"]
    return tmp_path


def change(path: Path, edit: Any) -> str:
    """Apply `edit` to a notebook's file; return the file's text."""
    notebook = nbformat.read(path, as_version=4)
    edit(notebook)
    nbformat.write(notebook, path)
    return path.read_text(encoding="utf-8")


def new_title(notebook: Any) -> None:
    notebook.cells[0].source = "# 1. Another title"


def test_an_exercise_in_step_is_not_written_again(course):
    before = (course / "exercises" / "1.ipynb").stat().st_mtime_ns
    assert build(course) == build(course, check=True) == []
    assert (course / "exercises" / "1.ipynb").stat().st_mtime_ns == before


def answered(notebook: Any) -> None:
    notebook.cells[1].source = "def f():\n    return 41"


def noted(notebook: Any) -> None:
    notebook.cells.append(nbformat.v4.new_markdown_cell("My note"))


def shortened(notebook: Any) -> None:
    del notebook.cells[3]


def reordered(notebook: Any) -> None:
    notebook.cells.reverse()


def without_fingerprint(notebook: Any) -> None:
    del notebook.metadata["exercise"]


@pytest.mark.parametrize("edit", [answered, noted, shortened, reordered, without_fingerprint])
def test_work_is_left_alone_and_the_way_to_a_fresh_copy_is_told(course, edit):
    path = course / "exercises" / "1.ipynb"
    work = change(path, edit)
    change(course / "solutions" / "1.ipynb", new_title)
    [said] = build(course)
    assert "1.ipynb left alone" in said and "rename yours and run `make exercises`" in said
    assert path.read_text(encoding="utf-8") == work
    assert "has been worked in" in build(course, check=True)[0]
    path.rename(path.with_name("mine.ipynb"))
    assert build(course) == ["1.ipynb written"]
    assert nbformat.read(path, as_version=4).cells[0].source == "# 1. Another title"
    assert path.with_name("mine.ipynb").read_text(encoding="utf-8") == work


def test_a_file_that_is_no_notebook_is_left_alone(course):
    path = course / "exercises" / "1.ipynb"
    path.write_text("{ half a file", encoding="utf-8")
    assert "left alone" in build(course)[0]
    assert path.read_text(encoding="utf-8") == "{ half a file"


def saved_by_jupyterlab(notebook: Any) -> None:
    """Run all cells without changing one: outputs, counts and metadata are saved."""
    for count, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = count
        cell.outputs = [nbformat.v4.new_output("stream", text="an output\n")]
        cell.metadata["collapsed"] = False
    notebook.metadata["language_info"] = {"name": "python", "version": "3.12.1"}
    notebook.metadata["widgets"] = {}


def test_a_file_that_was_only_run_is_made_anew(course):
    path = course / "exercises" / "1.ipynb"
    fresh = path.read_text(encoding="utf-8")
    assert change(path, saved_by_jupyterlab) != fresh
    assert build(course, check=True) == ["1.ipynb is not what its solution makes: run `make exercises`"]
    assert build(course) == ["1.ipynb written"]
    assert path.read_text(encoding="utf-8") == fresh
    change(path, answered)
    change(path, lambda notebook: setattr(notebook.cells[1], "source", make_exercise(a_solution(), "").cells[1].source))
    change(course / "solutions" / "1.ipynb", new_title)
    assert build(course) == ["1.ipynb written"]  # an answer that was taken back is no work


def test_check_names_what_is_missing_or_has_no_solution(course):
    path = course / "exercises" / "1.ipynb"
    path.rename(path.with_name("2.ipynb"))
    assert build(course, check=True) == ["1.ipynb is missing: run `make exercises`", "no solution makes 2.ipynb"]
    assert not path.exists()


def test_the_command_fails_where_something_is_wrong(course, monkeypatch, capsys):
    monkeypatch.setattr(build_exercises, "ROOT", course)
    for arguments, status in (["--check"], 0), ([], 0):
        monkeypatch.setattr("sys.argv", ["build_exercises", *arguments])
        with pytest.raises(SystemExit) as ended:
            build_exercises.main()
        assert ended.value.code == status
        assert "in step" in capsys.readouterr().out
    change(course / "exercises" / "1.ipynb", answered)
    monkeypatch.setattr("sys.argv", ["build_exercises", "--check"])
    with pytest.raises(SystemExit) as ended:
        build_exercises.main()
    assert ended.value.code == 1


def test_the_committed_exercises_are_what_their_solutions_make():
    assert build(check=True) == []


# --- the notebooks --------------------------------------------------------------------------------------------------


def stem(path: Path) -> str:
    return path.stem


@pytest.fixture(scope="module")
def attempts(tmp_path_factory) -> dict[str, Any]:
    """Every exercise as it is after Run All with nothing filled in."""
    folder, ran = tmp_path_factory.mktemp("exercises"), {}
    for path in SOLUTIONS:
        notebook = make_exercise(nbformat.read(path, as_version=4), path.name)
        NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
        ran[path.stem] = notebook
    return ran


@pytest.mark.parametrize("path", SOLUTIONS, ids=stem)
def test_every_stub_fails_its_check(attempts, path):
    for cell in code_cells(attempts[path.stem]):
        raised = [output.ename for output in cell.outputs if output.output_type == "error"]
        assert raised == (["NotImplementedError"] if tagged(cell, "check") else []), cell.source


@pytest.mark.parametrize("path", SOLUTIONS, ids=stem)
def test_every_solution_passes(path, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LESSONLIB_DATA", str(tmp_path))
    names: dict[str, Any] = {}
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        exec(compile(cell.source, f"{path.name} {cell.id}", "exec"), names)
    checked = CHECK_CALL.findall("\n".join(cell.source for cell in code_cells(notebook)))
    said = capsys.readouterr().out
    assert all(f"{task_id}: right on all" in said for task_id, _ in checked)
    for task_id, function in checked:
        if function.startswith("fixed_"):  # what is to be repaired must be broken, in a way that is known
            shipped = names[function.replace("fixed_", "shipped_")]
            with pytest.raises(NotRightYet) as refused:
                check_task(task_id, shipped)
            assert any(f"it looks like  {meaning}" in str(refused.value) for meaning in TASKS[task_id].slips)


def test_each_lesson_has_three_to_five_functions_to_write_and_a_bug_to_find():
    checked = []
    for path in SOLUTIONS:
        notebook = nbformat.read(path, as_version=4)
        calls = CHECK_CALL.findall("\n".join(cell.source for cell in notebook.cells if tagged(cell, "check")))
        regions = sum(cell.source.count("# BEGIN SOLUTION: ") for cell in notebook.cells)
        if path.stem == "practice_questions":
            assert not calls and not regions
            continue
        bugs = [function for _, function in calls if function.startswith("fixed_")]
        assert 3 <= len(calls) - len(bugs) <= 5 and len(bugs) == 1
        assert regions == len(calls)
        assert all(task_id.startswith(f"{path.stem[:2]}/") for task_id, _ in calls)
        assert sum("## " in cell.source and "Find the bug" in cell.source for cell in notebook.cells) == 1
        checked += [task_id for task_id, _ in calls]
    assert sorted(checked) == sorted(TASKS)


def test_all_eight_questions_are_asked_and_worked():
    solution = nbformat.read(ROOT / "solutions" / "practice_questions.ipynb", as_version=4)
    exercise = make_exercise(solution, "practice_questions.ipynb")
    for notebook in (solution, exercise):
        source = "\n".join(cell.source for cell in notebook.cells)
        assert re.findall(r'practice_widget\("(q\d)"\)', source) == list(QUESTIONS)
        assert "calibration()" in source
    worked = "\n".join(cell.source for cell in solution.cells if tagged(cell, "solution"))
    assert all(f'check(f"{question_id}.{{part}}", answer).correct' in worked for question_id in QUESTIONS)


# --- the checks -----------------------------------------------------------------------------------------------------


def refusal(task: Task, function: Any) -> str:
    with pytest.raises(NotRightYet) as refused:
        check_task(task.id, function)
    return str(refused.value)


SLIPS = [(task, meaning) for task in TASKS.values() for meaning in task.slips]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.id)
def test_the_reference_is_right_and_every_input_is_its_own(task, capsys):
    check_task(task.id, task.reference)
    assert capsys.readouterr().out == f"{task.id}: right on all {len(task.inputs)} inputs.\n"
    assert len(task.inputs) >= 3 and len({repr(given) for given in task.inputs}) == len(task.inputs)


@pytest.mark.parametrize(("task", "meaning"), SLIPS, ids=[f"{task.id} {meaning[:30]}" for task, meaning in SLIPS])
def test_every_known_slip_is_told_what_it_is(task, meaning):
    said = refusal(task, task.slips[meaning])
    assert said.splitlines()[0].startswith(f"{task.id} is not right yet: ")
    assert f"  asked for      {task.returns}\n" in said
    assert said.endswith(f"  it looks like  {meaning}")


class Spiteful:
    """An object that breaks when it is looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __array__(self, *_: object) -> Any:
        raise RuntimeError("no")


STRANGE = (
    *(None, math.nan, math.inf, -1.0, 10**400, 1j, "524288", True, [[1], [2, 3]], {}, Spiteful(), np.zeros((3, 0))),
    *(np.array([None]), np.array("x"), [Spiteful()], object),
)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.id)
def test_whatever_comes_back_is_refused_in_words(task):
    for value in STRANGE:
        said = [refusal(task, lambda *_, value=value: value)]
        if task.parts:
            said.append(refusal(task, lambda *given, value=value: (*task.reference(*given)[:-1], value)))
            assert f"  you return     {task.parts[-1]}: " in said[1]
        assert all("it looks like" in message and len(message) < 2500 for message in said)
        assert value is not None or all("nothing came back" in message for message in said)


@pytest.mark.parametrize(
    ("task_id", "wrong", "words"),
    [
        ("01/sparse-peak", lambda right: right / 1000, "a factor of 1,000 too small: check the prefix of the unit"),
        ("01/step-time", lambda right: right * 1.01, "close, but not the same"),
        ("01/step-time", lambda right: math.nan, "finite number: was something divided by 0?"),
        ("01/step-time", lambda right: -right, "The sign is wrong"),
        ("01/step-time", lambda right: [right], "one number is asked for, and that is a list"),
        ("02/kv-bytes", lambda right: right * 1.024**3, "times too much: GB and GiB were mixed up"),
        ("02/windows", str, "one number is asked for, and that is a str"),
        ("03/zero-range", lambda right: 4 * right, "every value is 4 times what it should be"),
        ("03/pack-int4", lambda right: right[:1], "the shape should be (2,), and it is (1,)"),
        ("03/pack-int4", lambda right: right + (right == right[0]), "1 of 2 values are different, the first at (0,)"),
        ("03/zero-range", lambda right: right / 0, "was something divided by 0?"),
        ("03/zero-range", lambda right: "no", "an array of numbers is asked for, and that is a str"),
        ("04/static", lambda right: right[0], "2 values are asked for: steps, used share"),
        ("04/static", lambda right: (right[0] + 1000, right[1]), "steps: About 3.1 times too large"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_other_mistakes_are_judged_by_what_they_give(task_id, wrong, words):
    task = TASKS[task_id]
    assert words in refusal(task, lambda *given: wrong(task.reference(*given)))


def test_a_function_may_use_any_kind_of_number(capsys):
    for kind in (int, float, np.float64, np.float32, np.array):
        check_task("02/kv-bytes", lambda config, kind=kind: kind(TASKS["02/kv-bytes"].reference(config)))
    check_task("04/static", lambda *given: list(TASKS["04/static"].reference(*given)))
    check_task("03/pack-int4", lambda codes: TASKS["03/pack-int4"].reference(codes).astype(np.uint8).tolist())
    assert capsys.readouterr().out.count("right on all") == 7


def test_the_first_input_that_went_wrong_is_shown():
    reference = TASKS["02/kv-bytes"].reference
    said = refusal(TASKS["02/kv-bytes"], lambda config: reference(config) / (1 + 2 * ("head_dim" in config)))
    assert "2 of 5 inputs" in said and "'head_dim': 128" in said and "'num_hidden_layers': 36" in said
    assert "  you return     49,152\n" in said


def test_two_mistakes_at_once_are_named_by_the_first_input_that_went_wrong():
    def query_heads_of_128(config: dict) -> float:
        return 2 * config["num_hidden_layers"] * config["num_attention_heads"] * 128 * 2

    said = refusal(TASKS["02/kv-bytes"], query_heads_of_128)
    assert "4 of 5 inputs" in said and "it looks like  query heads for KV heads" in said


def test_an_input_that_was_changed_is_whole_again():
    def spoil(config: dict) -> float:
        right = TASKS["02/kv-bytes"].reference(config)
        config.clear()
        return right

    check_task("02/kv-bytes", spoil)
    check_task("02/kv-bytes", spoil)


def test_what_the_function_raises_reaches_the_learner_with_the_input():
    def broken(config: dict) -> float:
        return config["num_key_value_heads"]

    with pytest.raises(KeyError, match="num_key_value_heads") as raised:
        check_task("02/kv-bytes", broken)
    assert raised.traceback[-1].name == "broken"
    assert "02/kv-bytes: that was with config = {" in raised.value.__notes__[0]
    with pytest.raises(TypeError, match="positional argument"):
        check_task("02/kv-bytes", lambda: 1)


def endless(*_: object) -> None:
    while True:
        pass


def endless_in_a_call(*_: object) -> None:
    for _number in iter(lambda: 1, 2):
        pass


@pytest.mark.parametrize("function", [endless, endless_in_a_call])
def test_a_function_that_hangs_is_stopped(function, monkeypatch):
    monkeypatch.setattr(exercises, "TIME_LIMIT_S", 0.1)
    with pytest.raises(TimeoutError, match=r"stopped after 0\.1 s: does a loop never end\?"):
        check_task("02/kv-bytes", function)


def test_a_call_instead_of_a_function_and_an_unknown_task():
    assert "hand over the function itself" in refusal(TASKS["02/kv-bytes"], 5)
    with pytest.raises(ValueError, match="task_id must be one of 01/critical-batch, "):
        check_task("02/kv", len)


# --- nothing gives the answer away ----------------------------------------------------------------------------------


def forms(value: float) -> Iterator[str]:
    """How a number may be written: digits, groups of three, scientific, with a prefix of its unit, as a percentage."""
    prefixes = [unit for unit in (1e-6, 1e-3, 1e3, 1e6, 1e9, 2**10, 2**20, 2**30) if 1 <= abs(value) / unit < 1024]
    for number in [value, 100 * value, *(value / unit for unit in prefixes)]:
        for digits in range(7):
            for text in (f"{number:,.{digits}f}", f"{number:_.{digits}f}", f"{number:.{digits}f}"):
                yield text
                yield text.rstrip("0").rstrip(".") if "." in text else text
    for digits in range(2, 7):
        yield f"{value:.{digits}e}"
        yield re.sub(r"0*e\+?(-?)0*", r"e\1", f"{value:.{digits}e}")
    yield repr(value)


def is_telling(text: str) -> bool:
    """Whether a number has so many digits that it is hardly there by chance: three that count."""
    return len(re.sub(r"e.*|\D", "", text).strip("0")) >= 3


def found(value: float, text: str) -> set[str]:
    """The forms of a value that a text holds, as numbers of their own."""
    telling = {form for form in forms(value) if is_telling(form) and form in text}
    return {form for form in telling if re.search(rf"(?<![\w.,]){re.escape(form)}(?![.,_]?\d)", text)}


def numbers(answer: Any) -> Iterator[float]:
    """The numbers that an answer consists of."""
    if isinstance(answer, (tuple, list, np.ndarray)):
        for part in answer:
            yield from numbers(part)
    elif not isinstance(answer, str):
        yield float(answer)


def everything(notebook: Any) -> str:
    """All that can be read in a notebook, tracebacks and widgets too, without terminal colors and hashes."""
    return re.sub(r"(\\u001b|\x1b)\[[\d;]*m|\b[0-9a-f]{32,64}\b", "", json.dumps(notebook, ensure_ascii=False))


def expected_values(name: str) -> dict[str, list[float]]:
    """The numbers that one exercise notebook must not give away, by task or part."""
    if name == "practice_questions":
        parts = [part for question in QUESTIONS.values() for part in question.parts]
        return {part.id: list(numbers(part.answer)) for part in parts}
    tasks = [task for task in TASKS.values() if task.id.startswith(f"{name[:2]}/")]
    return {task.id: [n for given in task.inputs for n in numbers(task.reference(*given.values()))] for task in tasks}


@pytest.mark.parametrize("path", SOLUTIONS, ids=stem)
def test_no_expected_value_can_be_read_in_an_exercise(attempts, path):
    expected = expected_values(path.stem)
    prompts = " ".join(f"{q.prompt} {' '.join(part.ask for part in q.parts)}" for q in QUESTIONS.values())
    for notebook in (nbformat.read(ROOT / "exercises" / path.name, as_version=4), attempts[path.stem]):
        text = everything(notebook)
        for name, values in expected.items():
            told = [form for value in values for form in found(value, text) - found(value, prompts)]
            assert not told, name
    distinctive = [v for values in expected.values() for v in values if any(map(is_telling, forms(v)))]
    assert len(distinctive) > 15  # of a value with one or two digits nobody can tell whether it is there


def test_a_value_that_was_given_away_would_be_found():
    notebook = make_exercise(a_solution(), "1.ipynb")
    for place in ("131072", "131,072", "131_072", "128.0 KiB = 131.1 kB", "1.31072e5", "-> 131072."):
        notebook.cells[0].source = f"It is {place}"
        assert found(131072.0, everything(notebook)), place
    notebook.cells[0].source = "1310720, 2131072, 0.131072, 131.0725"
    assert not found(131072.0, everything(notebook))
    notebook.cells[2].outputs = [
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=["\x1b[31m70272\x1b[0m"])
    ]
    notebook.metadata["note"] = "41.397 %"
    assert found(70272.0, everything(notebook)) and found(0.4139651, everything(notebook))
    assert found(math.pi, "pi is 3.14159, or so") and not found(math.pi, "3.15")


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.id)
def test_no_message_gives_the_answer_away(task):
    wrong = [lambda *given, f=f: f(task.reference(*given)) for f in (lambda right: 3.7, lambda right: None)]
    if not task.parts and not isinstance(task.reference(*task.inputs[0].values()), np.ndarray):
        wrong += [lambda *given, f=f: task.reference(*given) * f for f in (2, 0.5, 1.003, 1e3, 7.77, -1)]
    for function in [*task.slips.values(), *wrong]:
        said = refusal(task, function)
        said = re.sub(r"\n  with .*?\n  you return .*?\n", "\n", said, flags=re.DOTALL)  # the learner's own values
        for given in task.inputs:
            assert not [found(n, said) for n in numbers(task.reference(*given.values())) if found(n, said)]
