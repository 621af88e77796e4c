"""Settings for every test and every notebook that pytest runs."""

import os
import tempfile

import pytest

# Nobody's predictions or measurements: tests and notebooks start from an empty data folder, which they share.
_data = tempfile.TemporaryDirectory(prefix="lessonlib-test-", ignore_cleanup_errors=True)
os.environ["LESSONLIB_DATA"] = _data.name


def pytest_collectstart(collector: pytest.Collector) -> None:
    """A figure is stored as a picture and drawn live from JSON: nbval compares the readout, not the drawing."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("application/vnd.plotly.v1+json", "image/png")
