"""From a key press on a slider to the repainted picture, in JupyterLab in Chromium: our explorer beside `interact`.

Both draw the same roofline. The peer is what most notebooks do: `interact` and a new figure for every value.
"""

import statistics
import tempfile
from pathlib import Path

import nbformat
from playwright.sync_api import Page

from tools.lab_server import ROOT, browser, jupyterlab, open_notebook, run_all
from tools.run_notebooks import METADATA

MOVES = 40

OURS = """
from lessonlib.explorers.roofline import RooflineExplorer
RooflineExplorer()
"""
PEER = """
import plotly.io
from ipywidgets import SelectionSlider, interact
from lessonlib.accelerators import get_accelerator
from lessonlib.explorers.base import BATCH_SIZES
from lessonlib.explorers.roofline import Setting, describe, roofline_figure
from lessonlib.models import get_model

plotly.io.renderers.default = "plotly_mimetype"

@interact(batch_size=SelectionSlider(options=BATCH_SIZES))
def draw(batch_size):
    setting = Setting(get_model("llama-2-7b"), get_accelerator("a100-80gb-sxm"), batch_size=batch_size)
    roofline_figure(setting).show()
    print(describe(setting))
"""
# The decode point's place on the page: it changes when the new picture is there, and the next frame shows it.
MEASURE = """
moves => new Promise(resolve => {
  const handle = document.querySelector('.jp-OutputArea .widget-slider [role=slider]');
  const place = () => {
    const points = document.querySelectorAll('.jp-OutputArea .js-plotly-plot .scatterlayer .trace path.point');
    return points.length ? points[0].getAttribute('transform') : null;
  };
  const times = [];
  const move = () => {
    if (times.length === moves) { resolve(times); return; }
    const before = place(), start = performance.now();
    const key = times.length < moves / 2 ? 'ArrowRight' : 'ArrowLeft';
    handle.dispatchEvent(new KeyboardEvent('keydown', { key, code: key, bubbles: true, cancelable: true }));
    const look = () => {
      const now = place();
      if (now !== null && now !== before) {
        requestAnimationFrame(() => { times.push(performance.now() - start); setTimeout(move, 100); });
      } else if (performance.now() - start > 5000) {
        times.push(5000);
        setTimeout(move, 100);
      } else setTimeout(look, 1);
    };
    look();
  };
  handle.focus();
  move();
})
"""


def measure(page: Page, address: str, name: str) -> list[float]:
    """Milliseconds of each of MOVES key presses, sorted."""
    open_notebook(page, address, name)
    run_all(page)
    page.wait_for_selector(".jp-OutputArea .js-plotly-plot .scatterlayer path.point", timeout=60_000)
    page.wait_for_timeout(2_000)
    page.evaluate(MEASURE, 6)  # warm up
    return sorted(page.evaluate(MEASURE, MOVES))


def notebook(folder: Path, name: str, source: str) -> Path:
    """A notebook of one cell."""
    path = folder / name
    cells = [nbformat.v4.new_code_cell(source.strip())]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=METADATA), path)
    return path


def main() -> None:
    """Print median and 95th percentile of both, and their ratio."""
    medians = {}
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "explorer": ("ours.ipynb", OURS, ROOT / "jupyter"),
            "explorer, TCP_NODELAY off": ("ours.ipynb", OURS, Path(folder)),
            "interact + new figure": ("peer.ipynb", PEER, ROOT / "jupyter"),
        }
        print(f"key press to repainted picture, {MOVES} moves")
        for label, (name, source, config_path) in cases.items():
            path = notebook(Path(folder), name, source)
            with jupyterlab(path, config_path=config_path) as address, browser() as chromium:
                times = measure(chromium.new_page(viewport={"width": 1400, "height": 1000}), address, name)
            medians[label] = statistics.median(times)
            p95 = times[round(0.95 * (MOVES - 1))]
            print(f"{label:<28} median {medians[label]:6.1f} ms   95th percentile {p95:6.1f} ms", flush=True)
    print(f"interact takes {medians['interact + new figure'] / medians['explorer']:.1f} times as long")


if __name__ == "__main__":
    main()
