"""Take the README's pictures: lesson 1 in JupyterLab, run on this machine, in Chromium."""

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


def main() -> None:
    """Run lesson 1 and photograph the page, the explorer and the measurement."""
    PICTURES.mkdir(exist_ok=True)
    with jupyterlab() as address, browser() as chromium:
        page = chromium.new_page(viewport={"width": 1400, "height": 1150})
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


if __name__ == "__main__":
    main()
