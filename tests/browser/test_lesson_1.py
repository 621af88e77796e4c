"""Lesson 1 in the browser: every slider moved by keyboard, predictions kept, the measured pictures there."""

import pytest

from tools.lab_server import EXPLORER, press_slider

pytestmark = pytest.mark.browser
NOTEBOOK = "01_bandwidth_bound.ipynb"
SECTIONS = ("1.1", "1.3", "1.6")


@pytest.mark.parametrize("name", ["Batch size", "Context (tokens)", "Weight bits", "KV bits"])
def test_each_slider_redraws_by_keyboard(lesson, shots, name):
    page, _ = lesson
    press_slider(page, name, "ArrowLeft" if name.endswith("bits") else "ArrowRight")
    page.screenshot(path=shots / f"lesson_1_{name.split()[0].lower()}.png")


def test_fifty_quick_moves_end_at_the_last_value(lesson):
    page, _ = lesson
    explorer = page.locator(EXPLORER).first
    explorer.get_by_role("slider", name="Batch size").focus()
    for _ in range(50):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        f"() => document.querySelector('{EXPLORER} [role=status]').innerText.includes('512 requests')", timeout=5_000
    )


def test_a_cell_run_again_leaves_one_picture_that_answers(lesson):
    page, _ = lesson
    cell = page.locator(".jp-CodeCell", has=page.locator(EXPLORER)).first
    for _ in range(3):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+Enter")
        page.wait_for_timeout(1_500)
    assert cell.locator(".js-plotly-plot").count() == 1
    said = cell.locator("[role=status]").inner_text()
    assert "1 request of 2,048 tokens" in said
    cell.get_by_role("slider", name="Batch size").focus()
    page.keyboard.press("ArrowRight")
    cell.get_by_text("2 requests of 2,048 tokens").wait_for(timeout=5_000)


def test_a_prediction_is_typed_and_kept(lesson):
    page, _ = lesson
    box = page.get_by_placeholder("for example 5000 tokens/s")
    box.fill("100 tokens/s")
    box.press("Enter")
    page.get_by_text("Kept: 100 tokens/s. Now find out.").wait_for(timeout=5_000)
    box.fill("100 apples")
    box.press("Enter")
    page.get_by_text("'apples' is not a unit known here").wait_for(timeout=5_000)


def test_the_measured_pictures_are_there(lesson, shots):
    page, _ = lesson
    for title in ("batch size (requests)", "prompt length (tokens)"):
        picture = page.locator(".js-plotly-plot", has=page.locator(".xtitle", has_text=title))
        picture.scroll_into_view_if_needed()
        assert picture.locator(".legend").text_content().count("predicted") == 2  # with and without the overhead
    page.screenshot(path=shots / "lesson_1_measured.png")


def test_the_console_holds_no_error_and_nothing_left_the_machine(lesson):
    _, errors = lesson
    assert errors == []
