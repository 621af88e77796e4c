"""Lesson 2 in the browser: the KV-growth explorer by keyboard, and the pictures below it."""

import pytest

from tools.lab_server import EXPLORER, press_slider

pytestmark = pytest.mark.browser
NOTEBOOK = "02_kv_cache.ipynb"
SECTIONS = ("2.5", "2.8", "2.9")


@pytest.mark.parametrize("name", ["Context (tokens)", "Batch size", "KV bits", "Weight bits"])
def test_each_slider_redraws_by_keyboard(lesson, shots, name):
    page, _ = lesson
    press_slider(page, name, "ArrowLeft" if name.endswith("bits") else "ArrowRight")
    page.screenshot(path=shots / f"lesson_2_{name.split()[0].lower()}.png")


def test_another_model_by_keyboard(lesson):
    page, _ = lesson
    explorer = page.locator(EXPLORER).first
    explorer.get_by_label("Model").select_option("Gemma 3 27B")
    explorer.get_by_text("52 of its 62 layers look back 1,024 tokens only").wait_for(timeout=5_000)
    explorer.get_by_label("Model").select_option("Llama 3.1 8B")
    explorer.get_by_text("Llama 3.1 8B (GQA").wait_for(timeout=5_000)


def test_the_table_on_request(lesson):
    page, _ = lesson
    explorer = page.locator(EXPLORER).first
    explorer.get_by_role("button", name="Data table").press("Enter")
    explorer.get_by_role("row", name="131,072 tokens").wait_for(timeout=5_000)
    explorer.get_by_role("button", name="Data table").press("Enter")


def test_the_other_pictures_are_there(lesson, shots):
    page, _ = lesson
    for title in ("prompt length (tokens)", "block size (tokens)"):
        picture = page.locator(".js-plotly-plot", has=page.locator(".xtitle", has_text=title))
        picture.scroll_into_view_if_needed()
        assert picture.locator(".legend .traces").count() == 4
        page.screenshot(path=shots / f"lesson_2_{title.split()[0]}.png")
    page.get_by_text("32 physical blocks of 16 tokens").scroll_into_view_if_needed()
    page.screenshot(path=shots / "lesson_2_blocks.png")


def test_the_console_holds_no_error_and_nothing_left_the_machine(lesson):
    _, errors = lesson
    assert errors == []
