"""The practice questions by keyboard alone: answers, diagnosis, hint, working, and all of it after a kernel restart."""

from collections.abc import Iterator

import nbformat
import pytest
from playwright.sync_api import Page

from tools.build_exercises import fingerprint
from tools.lab_server import open_notebook

pytestmark = pytest.mark.browser
NOTEBOOK = "practice_questions.ipynb"
CELLS_TO_QUESTION_1 = 7
FOCUSED = """() => {
    const focused = document.activeElement;
    return focused.labels?.[0]?.textContent || focused.innerText || focused.tagName;
}"""


@pytest.fixture(scope="module")
def practice(laboratory) -> Iterator[tuple[Page, list[str]]]:
    """The practice notebook, run by keyboard up to question 1, and what the browser's console says."""
    address, chromium = laboratory
    errors: list[str] = []
    page = chromium.new_page(viewport={"width": 1400, "height": 1150})
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if address not in request.url else None)
    open_notebook(page, address, NOTEBOOK, "exercises")
    run_to_question_1(page)
    yield page, errors
    page.close()


def run_to_question_1(page: Page) -> None:
    """From the first cell on, which has the focus; it ends on the cell after the question."""
    for _ in range(CELLS_TO_QUESTION_1):
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(200)
    page.get_by_text("Question 1: One step of decode").wait_for(timeout=60_000)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)


def move_to(page: Page, name: str, key: str = "Shift+Tab") -> None:
    """Press a key until the control, or the cell, that begins with `name` has the focus."""
    for _ in range(40):
        if page.evaluate(FOCUSED).strip().startswith(name):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{name!r} cannot be reached with {key}")


def answer(page: Page, letter: str, text: str, says: str) -> None:
    """Type an answer, press Enter, and wait for what the checker says."""
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    said = page.locator(".widget-hbox", has=page.get_by_label(f"Answer {letter}")).get_by_role("status")
    said.get_by_text(says).wait_for(timeout=10_000)


def test_a_wrong_answer_is_diagnosed_and_a_right_one_counts(practice):
    page, _ = practice
    move_to(page, "Answer b")
    answer(page, "b", "312 FLOP/byte", "Twice: the peak with sparsity")
    move_to(page, "Answer d", "Tab")
    answer(page, "d", "142.9 tokens/s", "Right: 142.9 tokens/s.")
    page.get_by_text("Question 1: 1 of 4 answers right.").wait_for(timeout=10_000)


def test_hint_and_working_come_on_request(practice, shots):
    page, _ = practice
    hint, step = "Hint 1: Every weight is read once a step", "FLOPs of a step: 2 × 7 billion"
    assert page.get_by_text(hint).count() == page.get_by_text(step).count() == 0
    move_to(page, "Hint 1 of 3", "Tab")
    page.keyboard.press("Enter")
    page.get_by_text(hint).wait_for(timeout=10_000)
    move_to(page, "Show working", "Tab")
    page.keyboard.press("Space")
    page.get_by_text(step).wait_for(timeout=10_000)
    page.screenshot(path=shots / "practice.png")


def test_what_was_answered_is_there_after_a_restart(practice, shots):
    page, _ = practice
    move_to(page, "[")  # the question's cell: from its widget back to the notebook
    page.keyboard.press("0")
    page.keyboard.press("0")
    page.get_by_role("dialog").wait_for(timeout=10_000)
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="detached", timeout=10_000)
    page.wait_for_timeout(1_000)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    for _ in range(CELLS_TO_QUESTION_1):
        page.keyboard.press("ArrowUp")
    run_to_question_1(page)
    page.get_by_text("Twice: the peak with sparsity").wait_for(timeout=10_000)
    page.get_by_text("Right: 142.9 tokens/s.").wait_for(timeout=10_000)
    assert [page.get_by_label(f"Answer {letter}").input_value() for letter in "abcd"] == [
        "",
        "312 FLOP/byte",
        "",
        "142.9 tokens/s",
    ]
    page.screenshot(path=shots / "practice_restarted.png")


def test_an_exercise_that_was_run_and_saved_does_not_count_as_worked_in(practice):
    page, _ = practice
    page.keyboard.press("Control+s")
    page.wait_for_function(
        "() => !document.querySelector('.jp-mod-dirty, .lm-TabBar-tab.jp-mod-dirty')", timeout=10_000
    )
    page.wait_for_timeout(1_000)
    kept = page.request.get(f"{page.url.split('/lab/')[0]}/api/contents/exercises/{NOTEBOOK}").json()["content"]
    notebook = nbformat.from_dict(kept)
    assert any(cell.get("outputs") for cell in notebook.cells)
    assert notebook.metadata.exercise.cells == fingerprint(notebook)


def test_the_console_holds_no_error_and_nothing_left_the_machine(practice):
    _, errors = practice
    assert errors == []
