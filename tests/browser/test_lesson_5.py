"""Lesson 5 in the browser: the serving explorer by keyboard, a model that does not fit, and the load test's cell."""

import pytest

from tools.lab_server import EXPLORER, press_slider

pytestmark = pytest.mark.browser
NOTEBOOK = "05_serving_stack.ipynb"
SECTIONS = ("5.3", "5.5")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Requests/s", "ArrowRight"),
        ("TPOT limit (ms)", "ArrowLeft"),
        ("Weight bits", "ArrowRight"),
        ("Prompt (tokens)", "ArrowRight"),
    ],
)
def test_each_slider_redraws_by_keyboard(lesson, shots, name, key):
    page, _ = lesson
    press_slider(page, name, key)
    page.screenshot(path=shots / f"lesson_5_{name.split()[0].lower().replace('/', '_')}.png")


def test_a_model_that_does_not_fit_and_one_that_does(lesson, shots):
    page, _ = lesson
    explorer = page.locator(EXPLORER).first
    explorer.get_by_role("combobox", name="Model").select_option("Llama 3.1 405B")
    explorer.get_by_text("does not fit, short by").wait_for(timeout=5_000)
    page.screenshot(path=shots / "lesson_5_short.png")
    explorer.get_by_role("combobox", name="Model").select_option("Llama 3.1 8B")
    explorer.get_by_text("Llama 3.1 8B fits on 1 x H100").wait_for(timeout=5_000)
    names = explorer.locator(".js-plotly-plot .legend").text_content()
    assert "knee" in names and "trace" not in names


def test_the_table_on_request(lesson):
    page, _ = lesson
    explorer = page.locator(EXPLORER).first
    explorer.get_by_role("button", name="Data table").press("Enter")
    explorer.get_by_role("row", name="knee").first.wait_for(timeout=5_000)
    explorer.get_by_role("button", name="Data table").press("Enter")


def test_the_load_test_shows_its_table_and_its_picture(lesson, shots):
    page, _ = lesson
    cell = page.locator(".jp-CodeCell", has_text="lab.load_test(url").first
    said = cell.locator(".jp-OutputArea-output").all_inner_texts()
    table = next(text for text in said if "TTFT p50" in text)
    rows = [line for line in table.splitlines() if " client" in line]
    assert len(rows) == 4 and all(row.rstrip().endswith("0 of 16") for row in rows)
    arrivals = page.locator(".js-plotly-plot", has=page.locator(".xtitle", has_text="time since the first was sent"))
    arrivals.scroll_into_view_if_needed()
    assert arrivals.locator(".legend .traces").count() == 2
    page.screenshot(path=shots / "lesson_5_arrivals.png")
    picture = page.locator(".js-plotly-plot", has=page.locator(".xtitle", has_text="clients"))
    picture.scroll_into_view_if_needed()
    assert picture.locator(".legend").text_content().count("predicted") == 2  # with and without the overhead
    page.screenshot(path=shots / "lesson_5_measured.png")


def test_the_console_holds_no_error_and_nothing_left_the_machine(lesson):
    _, errors = lesson
    assert errors == []
