"""Lesson 4 in the browser: lanes and load by keyboard, and the measured picture below them."""

import pytest

from tools.lab_server import EXPLORER, press_slider

pytestmark = pytest.mark.browser
NOTEBOOK = "04_batching.ipynb"
SECTIONS = ("4.3", "4.4", "4.7")


def test_lanes_by_keyboard(lesson, shots):
    page, _ = lesson
    press_slider(page, "Lanes", "ArrowRight")
    page.screenshot(path=shots / "lesson_4_lanes.png")


def test_random_lengths_and_a_list_of_one_s_own(lesson):
    page, _ = lesson
    explorer = page.locator(EXPLORER).first
    explorer.get_by_role("combobox", name="Lengths").select_option("random")
    press_slider(page, "Seed", "ArrowRight")
    explorer.get_by_role("combobox", name="Lengths").select_option("your own list")
    box = explorer.get_by_role("textbox", name="Your own list")
    box.fill("5, 3, apples")
    box.press("Enter")
    explorer.get_by_text("entry 3 is 'apples'").wait_for(timeout=5_000)
    box.fill("5, 3, 2")
    box.press("Enter")
    explorer.get_by_text("3 requests of 2 to 5 tokens").wait_for(timeout=5_000)


def test_load_by_keyboard(lesson, shots):
    page, _ = lesson
    explorer = page.locator(EXPLORER).nth(1)
    explorer.scroll_into_view_if_needed()
    explorer.get_by_text("15 requests/s").first.wait_for(timeout=10_000)
    explorer.get_by_role("slider", name="Requests/s").focus()
    page.keyboard.press("ArrowRight")
    explorer.get_by_text("A100 80GB SXM, 20 requests/s").wait_for(timeout=10_000)
    names = explorer.locator(".js-plotly-plot .legend").text_content()
    assert "goodput" in names and "trace" not in names  # every line is still called what it was
    page.screenshot(path=shots / "lesson_4_load.png")


def test_the_measured_picture_is_there(lesson, shots):
    page, _ = lesson
    picture = page.locator(".js-plotly-plot", has=page.locator(".legend", has_text="measured here"))
    picture.scroll_into_view_if_needed()
    assert picture.locator(".legend .traces").count() == 2
    page.screenshot(path=shots / "lesson_4_measured.png")


def test_the_console_holds_no_error_and_nothing_left_the_machine(lesson):
    _, errors = lesson
    assert errors == []
