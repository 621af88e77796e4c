"""Lesson 3 in the browser: the quantization-error explorer by keyboard, on the reference matrix and on a real layer."""

import pytest

from tools.lab_server import EXPLORER, press_slider

pytestmark = pytest.mark.browser
NOTEBOOK = "03_quantization.ipynb"
SECTIONS = ("3.2", "3.4", "3.5")


@pytest.mark.parametrize(("name", "key"), [("Bits", "ArrowLeft"), ("Look at channel", "ArrowRight")])
def test_each_slider_redraws_by_keyboard(lesson, shots, name, key):
    page, _ = lesson
    if name == "Look at channel":  # another channel changes the picture, not the sentence about the whole matrix
        explorer = page.locator(EXPLORER).first
        before = explorer.locator(".js-plotly-plot").screenshot()
        explorer.get_by_role("slider", name=name).focus()
        page.keyboard.press(key)
        page.wait_for_timeout(500)
        assert explorer.locator(".js-plotly-plot").screenshot() != before
    else:
        press_slider(page, name, key)
    page.screenshot(path=shots / f"lesson_3_{name.split()[0].lower()}.png")


def test_scales_and_group_size(lesson):
    page, _ = lesson
    explorer = page.locator(EXPLORER).first
    explorer.get_by_role("combobox", name="Scales").select_option("one per channel")
    explorer.get_by_text("one scale per channel").wait_for(timeout=5_000)
    explorer.get_by_role("combobox", name="Scales").select_option("one per group")
    explorer.get_by_text("one scale per group of 32").wait_for(timeout=5_000)
    press_slider(page, "Group size", "ArrowLeft")
    explorer.get_by_text("one scale per group of 16").wait_for(timeout=5_000)


def test_a_layer_of_the_real_model(lesson, shots):
    page, _ = lesson
    second = page.locator(EXPLORER).nth(1)
    second.scroll_into_view_if_needed()
    second.get_by_text("Layer 15, down (576 x 1536)").wait_for(timeout=10_000)
    page.screenshot(path=shots / "lesson_3_layer.png")


def test_the_ladder_is_drawn(lesson, shots):
    page, _ = lesson
    pictures = page.locator(".js-plotly-plot", has=page.locator(".ytitle", has_text="KL divergence"))
    assert pictures.count() == 2
    for number, lines in ((0, 4), (1, 3)):
        pictures.nth(number).scroll_into_view_if_needed()
        assert pictures.nth(number).locator(".legend .traces").count() == lines
        page.screenshot(path=shots / f"lesson_3_ladder_{number + 1}.png")


def test_the_console_holds_no_error_and_nothing_left_the_machine(lesson):
    _, errors = lesson
    assert errors == []
