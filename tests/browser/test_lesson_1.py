"""Lesson 1 as a learner has it: JupyterLab in a real Chromium, everything run, every slider moved by keyboard."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tools.lab_server import browser, chromium_path, jupyterlab, open_notebook, run_all

pytestmark = pytest.mark.browser

if chromium_path() is None and not os.environ.get("CI"):
    pytest.skip("no Chromium on this machine: the browser test is left out", allow_module_level=True)

SHOTS = Path(__file__).resolve().parents[2] / "test-results"
SLIDERS = ["Batch size", "Context (tokens)", "Weight bits", "KV bits"]
EXPLORER = ".lessonlib-explorer"


@pytest.fixture(scope="module")
def lesson():
    """Lesson 1 with all cells run, and what the browser's console said by then and later."""
    SHOTS.mkdir(exist_ok=True)
    errors: list[str] = []
    with jupyterlab() as address, browser() as chromium:
        page = chromium.new_page(viewport={"width": 1400, "height": 1150})
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: errors.append(request.url) if address not in request.url else None)
        open_notebook(page, address, "01_bandwidth_bound.ipynb")
        page.screenshot(path=SHOTS / "lesson_1_stored.png")
        run_all(page)
        page.locator(EXPLORER).first.scroll_into_view_if_needed()
        page.wait_for_selector(f"{EXPLORER} .js-plotly-plot .scatterlayer", timeout=30_000)
        page.wait_for_selector(f"{EXPLORER} [role=slider][aria-label]", timeout=30_000)
        yield page, errors


def state(page: Page) -> tuple[str, str, bytes]:
    """What the first explorer shows: its points, its sentence, its pixels."""
    explorer = page.locator(EXPLORER).first
    points = explorer.locator(".js-plotly-plot").evaluate(
        "plot => JSON.stringify([plot._fullData[2].x, plot._fullData[2].y].map(values => Array.from(values)))"
    )
    picture = explorer.locator(".js-plotly-plot")
    return points, explorer.locator("[role=status]").inner_text(), picture.screenshot()


@pytest.mark.parametrize("name", SLIDERS)
def test_each_slider_redraws_by_keyboard(lesson, name):
    page, _ = lesson
    points, said, picture = state(page)
    handle = page.locator(EXPLORER).first.get_by_role("slider", name=name)
    value = handle.get_attribute("aria-valuetext")
    handle.focus()
    page.keyboard.press("ArrowLeft" if name in ("Weight bits", "KV bits") else "ArrowRight")
    page.wait_for_function(
        "([selector, said]) => document.querySelector(selector + ' [role=status]').innerText !== said",
        arg=[EXPLORER, said],
    )
    page.wait_for_timeout(300)
    now = state(page)
    assert now[0] != points and now[1] != said and now[2] != picture
    assert handle.get_attribute("aria-valuetext") != value
    label = page.locator(f"{EXPLORER} .js-plotly-plot").first.get_attribute("aria-label")
    assert label == now[1]
    page.screenshot(path=SHOTS / f"lesson_1_{name.split()[0].lower()}.png")


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


def test_the_measured_pictures_are_there(lesson):
    page, _ = lesson
    for title in ("batch size (requests)", "prompt length (tokens)"):
        picture = page.locator(".js-plotly-plot", has=page.locator(".xtitle", has_text=title))
        picture.scroll_into_view_if_needed()
        assert picture.locator(".legend").text_content().count("predicted") == 2  # with and without the overhead
    page.screenshot(path=SHOTS / "lesson_1_measured.png")


def test_the_console_holds_no_error_and_nothing_left_the_machine(lesson):
    _, errors = lesson
    assert errors == []
