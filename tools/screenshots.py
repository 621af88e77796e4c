"""Take the README's pictures: lessons 1 and 5 in JupyterLab, run on this machine, in Chromium."""

from playwright.sync_api import Page

from tools.lab_server import ROOT, browser, jupyterlab, open_notebook, run_all

PICTURES = ROOT / "docs"
EXPLORER = ".lessonlib-explorer"


def shoot(page: Page, selector: str, name: str) -> None:
    """The first element of a kind, as a PNG of its own."""
    element = page.locator(selector).first
    element.scroll_into_view_if_needed()
    page.wait_for_timeout(1_000)
    element.screenshot(path=PICTURES / name)


def lesson_1(page: Page, address: str) -> None:
    """The page, the explorer and the measurement."""
    open_notebook(page, address, "01_bandwidth_bound.ipynb")
    run_all(page)
    page.wait_for_selector(f"{EXPLORER} .js-plotly-plot .scatterlayer", timeout=30_000)
    page.get_by_role("heading", name="1.3 Explore").scroll_into_view_if_needed()
    page.wait_for_timeout(1_000)
    page.screenshot(path=PICTURES / "lesson_1.png")
    slider = page.locator(EXPLORER).first.get_by_role("slider", name="Batch size")
    slider.focus()
    for _ in range(19):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(60)
    page.locator(EXPLORER).first.get_by_label("Show operators").check()
    shoot(page, EXPLORER, "roofline_explorer.png")
    shoot(page, ".js-plotly-plot:has(.xtitle:text('batch size')) .svg-container", "measured.png")


def lesson_5(page: Page, address: str) -> None:
    """The explorer, and the tokens of a real engine as they arrive."""
    open_notebook(page, address, "05_serving_stack.ipynb")
    run_all(page)
    page.wait_for_selector(f"{EXPLORER} .js-plotly-plot .scatterlayer", timeout=30_000)
    shoot(page, EXPLORER, "serving_explorer.png")
    shoot(page, ".js-plotly-plot:has(.xtitle:text('since the first was sent')) .svg-container", "arrivals.png")


def main() -> None:
    """Run the lessons, each in a page of its own."""
    PICTURES.mkdir(exist_ok=True)
    with jupyterlab(sections={"05_serving_stack.ipynb": ("5.3", "5.5")}) as address, browser() as chromium:
        for lesson in (lesson_1, lesson_5):
            page = chromium.new_page(viewport={"width": 1400, "height": 1150})
            lesson(page, address)
            page.close()


if __name__ == "__main__":
    main()
