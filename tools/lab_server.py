"""JupyterLab as `make lab` starts it, on a copy of the notebooks, and the browser that looks at it."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import nbformat
from playwright.sync_api import Browser, Page, TimeoutError, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM_FILES = (  # where Chrome lies on macOS and Windows, which do not put it on the path
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "C:/Program Files/Google/Chrome/Application/chrome.exe",
)
CHROMIUM_OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
RUN_ALL_TIMEOUT_MS = 300_000
EXPLORER = ".lessonlib-explorer"


def chromium_path() -> str | None:
    """The system's Chromium, or None."""
    found = [path for name in CHROMIUM_NAMES if (path := shutil.which(name))]
    return next(iter(found + [path for path in CHROMIUM_FILES if Path(path).exists()]), None)


@contextlib.contextmanager
def jupyterlab(
    *extra_notebooks: Path,
    config_path: Path = ROOT / "jupyter",
    sections: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[str]:
    """The address of a JupyterLab on a copy of the course's notebooks; it ends with the block.

    Of the notebooks named in `sections` only the code of these sections is there ("1.3"), and the first cell.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in ("notebooks", "exercises", "solutions"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        for notebook in extra_notebooks:
            shutil.copy(notebook, Path(folder) / "notebooks")
        for name, kept in sections.items():
            _keep_sections(Path(folder) / "notebooks" / name, kept)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # a fresh data folder: no predictions, no measurements, no settings or workspaces of anybody
        environment = os.environ | {"JUPYTER_CONFIG_PATH": str(config_path), "LESSONLIB_DATA": folder,
                                    "JUPYTER_CONFIG_DIR": folder, "JUPYTER_RUNTIME_DIR": folder}  # fmt: skip
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
        command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}", "--allow-root"]
        with (Path(folder) / "server.log").open("w+", encoding="utf-8") as log:
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                _wait(server, f"http://127.0.0.1:{port}/api", Path(log.name))
                yield f"http://127.0.0.1:{port}"
            finally:
                server.terminate()
                server.wait(30)


def _keep_sections(path: Path, sections: Sequence[str]) -> None:
    """Leave the code of other sections out. Every section works after the first cell alone (a test holds that)."""
    notebook = nbformat.read(path, as_version=4)
    cells, section = [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            section = cell.source.split()[1]
        if cell.cell_type == "markdown" or not section or section in sections:
            cells.append(cell)
    notebook.cells = cells
    nbformat.write(notebook, path)


def _wait(server: subprocess.Popen, address: str, log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(address, timeout=2):
            return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """The system's Chromium, headless. Raises RuntimeError where there is none."""
    executable = chromium_path()
    if executable is None:
        raise RuntimeError(f"no Chromium found: install one of {', '.join(CHROMIUM_NAMES)}")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_OPTIONS)
        try:
            yield chromium
        finally:
            chromium.close()


def open_notebook(page: Page, address: str, name: str, folder: str = "notebooks") -> None:
    """Open a notebook in JupyterLab and wait until its cells and its kernel are there."""
    page.goto(f"{address}/lab/tree/{folder}/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)


def run_all(page: Page) -> None:
    """Run all cells and wait until the last one is done. (A click on the menu of a page still busy may be lost.)"""
    page.locator(".jp-Notebook .jp-Cell").first.click()
    for _ in range(5):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        try:
            page.get_by_text("Python 3 (ipykernel) | Busy").wait_for(timeout=5_000)
            break
        except TimeoutError:
            page.keyboard.press("Escape")
    page.wait_for_function(
        "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.textContent.includes('*'))",
        timeout=RUN_ALL_TIMEOUT_MS,
    )
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=RUN_ALL_TIMEOUT_MS)


def explorer_state(page: Page) -> tuple[str, str, bytes]:
    """What the page's first explorer shows: its points, its sentence, its pixels."""
    explorer = page.locator(EXPLORER).first
    picture = explorer.locator(".js-plotly-plot")
    points = picture.evaluate(
        "plot => JSON.stringify(plot._fullData.map(trace => [Array.from(trace.x || []), Array.from(trace.y || [])]))"
    )
    return points, explorer.locator("[role=status]").inner_text(), picture.screenshot()


def press_slider(page: Page, name: str, key: str) -> None:
    """Move a slider of the first explorer by one key; raises AssertionError unless everything it shows changes."""
    points, said, picture = explorer_state(page)
    handle = page.locator(EXPLORER).first.get_by_role("slider", name=name)
    value = handle.get_attribute("aria-valuetext")
    handle.focus()
    page.keyboard.press(key)
    page.wait_for_function(
        "([selector, said]) => document.querySelector(selector + ' [role=status]').innerText !== said",
        arg=[EXPLORER, said],
    )
    page.wait_for_timeout(300)
    now = explorer_state(page)
    assert now[0] != points and now[1] != said and now[2] != picture
    assert handle.get_attribute("aria-valuetext") != value
    label = page.locator(f"{EXPLORER} .js-plotly-plot").first.get_attribute("aria-label")
    assert label == now[1]
