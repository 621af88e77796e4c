"""A lesson as a learner has it: JupyterLab in a real Chromium, with the cells run of the sections that are looked at.

(nbval runs all cells of all notebooks.)
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tools.lab_server import EXPLORER, browser, chromium_path, jupyterlab, open_notebook, run_all

SHOTS = Path(__file__).resolve().parents[2] / "test-results"


@pytest.fixture(scope="session")
def laboratory(request) -> Iterator[tuple[str, Browser]]:
    """One JupyterLab and one browser for all lessons."""
    if chromium_path() is None and not os.environ.get("CI"):
        pytest.skip("no Chromium on this machine: the browser tests are left out")
    SHOTS.mkdir(exist_ok=True)
    modules = {item.module for item in request.session.items}
    sections = {module.NOTEBOOK: module.SECTIONS for module in modules if hasattr(module, "SECTIONS")}
    with jupyterlab(sections=sections) as address, browser() as chromium:
        yield address, chromium


@pytest.fixture(scope="module")
def lesson(laboratory, request) -> Iterator[tuple[Page, list[str]]]:
    """The module's NOTEBOOK with the cells of its SECTIONS run, and what the browser's console said until the end."""
    address, chromium = laboratory
    name = request.module.NOTEBOOK
    errors: list[str] = []
    page = chromium.new_page(viewport={"width": 1400, "height": 1150})
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if address not in request.url else None)
    open_notebook(page, address, name)
    page.screenshot(path=SHOTS / f"{name}_stored.png")
    run_all(page)
    page.locator(EXPLORER).first.scroll_into_view_if_needed()
    page.wait_for_selector(f"{EXPLORER} .js-plotly-plot .main-svg", timeout=30_000)
    page.wait_for_selector(f"{EXPLORER} [role=slider][aria-label]", timeout=30_000)
    yield page, errors
    page.close()


@pytest.fixture(scope="session")
def shots() -> Path:
    """Where screenshots go, for people to look at."""
    return SHOTS
