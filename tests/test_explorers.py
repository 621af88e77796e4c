"""Explorers without a browser: what a control changes, and how many messages it takes."""

import numpy as np
import plotly.graph_objects as go
import pytest

from lessonlib import roofline
from lessonlib.accelerators import Accelerator, get_accelerator
from lessonlib.explorers import base
from lessonlib.explorers.measured import Point, roofline_picture, times_picture
from lessonlib.explorers.roofline import RooflineExplorer, Setting, roofline_figure, update_roofline_figure
from lessonlib.models import get_model

MACHINE = Accelerator(key="m", name="This machine", memory_bandwidth=30e9, peak_flops={"fp32": 2e11}, source="measured")


def messages(explorer: RooflineExplorer) -> list[str]:
    """Every message the figure sends to the browser from now on, as it is sent."""
    sent: list[str] = []
    for name in ("_py2js_update", "_py2js_restyle", "_py2js_relayout", "_py2js_addTraces", "_py2js_deleteTraces"):
        explorer.live.observe(lambda change: change["new"] and sent.append(change["name"]), names=name)
    return sent


@pytest.mark.parametrize(
    ("control", "value", "trace"),
    [
        ("batch_size", 64, "phases"),
        ("context_len", 8192, "phases"),
        ("weight_bits", 4, "phases"),
        ("kv_bits", 8, "phases"),
        ("model", "llama-3.1-8b", "phases"),
        ("accelerator", "H100 SXM5 80GB", "roof"),
        ("dtype", "int8", "roof"),
    ],
)
def test_each_control_is_one_message_and_changes_picture_and_readout(control, value, trace):
    explorer = RooflineExplorer()
    before = {t.name: (np.array(t.x), np.array(t.y)) for t in explorer.figure.data if t.x is not None}
    said, sent = explorer.readout, messages(explorer)
    explorer.controls[control].value = value
    assert len(sent) == 1
    assert explorer.readout != said
    after = next(t for t in explorer.figure.data if t.name == trace)
    assert not np.array_equal(before[trace], (np.array(after.x), np.array(after.y)))


def test_the_points_are_the_library_s():
    explorer = RooflineExplorer(model="llama-3.1-8b", batch_size=16, context_len=4096, weight_bits=8)
    model, a100 = get_model("llama-3.1-8b"), get_accelerator("a100-80gb-sxm")
    expected = roofline.total(roofline.decode_operators(model, 16, 4096, 8)).intensity
    phases = next(t for t in explorer.figure.data if t.name == "phases")
    assert phases.x[0] == expected
    assert phases.y[0] == roofline.attainable_flops_per_s(expected, a100)


def test_a_preset_is_one_redraw_and_bad_ones_are_refused():
    explorer = RooflineExplorer()
    sent = messages(explorer)
    explorer.set(accelerator="H100 SXM5 80GB", dtype="fp8", model="mixtral-8x7b", batch_size=32)
    assert len(sent) == 1
    assert repr(explorer) == explorer.readout
    assert "Mixtral" in explorer.readout and "fp8" in explorer.readout
    with pytest.raises(ValueError, match="batch_size must be one of 1, 2"):
        explorer.set(batch_size=0)
    with pytest.raises(ValueError, match="context_len must be one of"):
        explorer.set(context_len=-1)
    with pytest.raises(ValueError, match="weight_bits must be one of 2, 3, 4, 6, 8, 16, 32, got 5"):
        explorer.set(weight_bits=5)
    with pytest.raises(ValueError, match="no control named batch"):
        explorer.set(batch=3)
    with pytest.raises(ValueError, match="weight_bits"):
        explorer.set(batch_size=16, weight_bits=5)
    assert explorer.controls["batch_size"].value == 32  # all or nothing
    assert "32 requests" in explorer.readout


def test_operators_and_table_on_request():
    explorer = RooflineExplorer()
    operators = next(t for t in explorer.figure.data if t.name == "operators")
    assert not operators.visible
    explorer.controls["show_operators"].value = True
    assert operators.visible
    assert len(operators.x) == len(operators.marker.color) == sum(map(len, explorer.setting.phases.values()))
    assert explorer._table_box.value == ""
    explorer._show_table.value = True
    assert "<caption>" in explorer._table_box.value and "decode: attention" in explorer._table_box.value


def test_this_machine_joins_the_accelerators():
    explorer = RooflineExplorer(machine=MACHINE, accelerator="This machine", weight_bits=32)
    assert explorer.controls["dtype"].value == "fp32"
    assert "This machine" in explorer.readout
    explorer.set(accelerator="A100 80GB SXM")
    assert explorer.setting.accelerator == get_accelerator("a100-80gb-sxm")


def test_what_does_not_fit_is_said():
    assert "would not fit" in RooflineExplorer(model="llama-3.1-405b").readout
    assert "would not fit" not in RooflineExplorer(model="llama-3.1-8b").readout
    assert "made for 4,096 tokens at most" in RooflineExplorer(context_len=131072).readout


def test_every_control_has_a_description_and_every_axis_a_unit():
    explorer = RooflineExplorer()
    assert all(control.description for control in explorer.controls.values())
    assert "FLOP/byte" in explorer.figure.layout.xaxis.title.text
    assert all("FLOP/s" in text for text in explorer.figure.layout.yaxis.ticktext)


def test_a_plain_figure_can_be_updated_too():
    setting = Setting(get_model("llama-2-7b"), MACHINE, dtype="fp32")
    figure = roofline_figure(setting)
    update_roofline_figure(figure, Setting(get_model("llama-2-7b"), get_accelerator("l4")))
    assert isinstance(figure, go.Figure) and figure.layout.title.text == "L4, bf16"


def test_without_anywidget_there_is_a_message_and_the_rest_works(monkeypatch):
    def refuse(*_, **__):
        raise ImportError("Please install anywidget to use the FigureWidget class")  # what plotly says

    monkeypatch.setattr(base.go, "FigureWidget", type("FigureWidget", (), {"__init__": refuse}))
    explorer = RooflineExplorer()
    assert "anywidget" in explorer.live.value and "make lab" in explorer.live.value
    explorer.controls["batch_size"].value = 64
    assert "64 requests" in explorer.readout


def test_measured_beside_predicted():
    points = [Point(1, 0.03, 0.028, 0.033, 0.017), Point(2, 0.04, 0.038, 0.044, 0.017)]
    picture = times_picture(points, "batch size (requests)", overhead_s=0.018)
    assert [trace.mode for trace in picture.figure.data] == ["lines", "lines", "markers"]
    assert repr(picture) == (
        "Batch size (requests): 1: 30 ms measured, 17 ms predicted; 2: 40 ms measured, 17 ms predicted."
    )
    with pytest.raises(ValueError, match="at least one measurement"):
        times_picture([], "x")
    with pytest.raises(ValueError, match="overhead_s"):
        times_picture(points, "x", float("nan"))
    with pytest.raises(ValueError, match="at least one measurement"):
        roofline_picture(MACHINE, "fp32", [], (0.1, 1e4))
    with pytest.raises(ValueError, match="intensity"):
        roofline_picture(MACHINE, "fp32", [("none", 0, 1e9)], (0.1, 1e4))
    roof = roofline_picture(MACHINE, "fp32", [("decode", 0.5, 9e9)], (0.1, 1e4))
    assert "decode reaches 9 GFLOP/s, 60% of its roof" in repr(roof)
