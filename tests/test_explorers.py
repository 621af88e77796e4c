"""Explorers without a browser: what a control changes, and how many messages it takes."""

import numpy as np
import plotly.graph_objects as go
import pytest

from lessonlib import kv_cache, quantization, roofline
from lessonlib.accelerators import Accelerator, get_accelerator
from lessonlib.explorers import base
from lessonlib.explorers.kv_growth import CURVE, KVGrowthExplorer
from lessonlib.explorers.measured import Point, compared_times_picture, ladder_picture, roofline_picture, times_picture
from lessonlib.explorers.pictures import arrivals_picture, blocks_picture, lines_picture, stages_picture
from lessonlib.explorers.quantization_error import QuantizationErrorExplorer
from lessonlib.explorers.roofline import RooflineExplorer, Setting, roofline_figure, update_roofline_figure
from lessonlib.models import ModelConfig, get_model
from lessonlib.paging import BlockTable
from lessonlib.quantization.ladder import read_ladder

MACHINE = Accelerator(key="m", name="This machine", memory_bandwidth=30e9, peak_flops={"fp32": 2e11}, source="measured")


def messages(explorer: base.Explorer) -> list[str]:
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


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("context_len", 32768),
        ("batch_size", 64),
        ("kv_bits", 8),
        ("weight_bits", 4),
        ("model", "gemma-3-27b"),
        ("accelerator", "L4"),
    ],
)
def test_kv_growth_each_control_is_one_message(control, value):
    explorer = KVGrowthExplorer()
    before, said, sent = explorer.figure.to_json(), explorer.readout, messages(explorer)
    explorer.controls[control].value = value
    assert len(sent) == 1
    assert explorer.readout != said
    assert explorer.figure.to_json() != before


def trace(explorer: KVGrowthExplorer, index: int) -> np.ndarray:
    return np.array(explorer.figure.data[index].y)


def test_kv_growth_draws_the_library_s_numbers():
    explorer = KVGrowthExplorer(model="gemma-3-27b", batch_size=16, kv_bits=8.5)
    model = get_model("gemma-3-27b")
    assert np.array_equal(trace(explorer, 0), kv_cache.cache_growth(model, CURVE, 16, 8.5))
    slopes = np.diff(np.log(trace(explorer, 0))) / np.diff(np.log(CURVE))
    assert slopes[0] == pytest.approx(1) and slopes.min() < 0.6  # it bends at the window
    for index, name in enumerate(("MHA", "GQA", "MLA", "MQA", "windowed"), 1):
        variant = kv_cache.attention_variants(model)[name]
        assert np.array_equal(trace(explorer, index), kv_cache.cache_growth(variant, CURVE, 16, 8.5))
    here, end = explorer.figure.data[-2:]
    assert here.y[0] == kv_cache.cache_bytes(model, 8192, 16, 8.5)
    budget = 80e9 - model.weight_bytes()
    assert end.x[0] == kv_cache.longest_context(model, budget, 16, 8.5) and end.y[0] == budget


def test_kv_growth_says_what_fits_and_what_does_not():
    assert KVGrowthExplorer().readout == (
        "Llama 3.1 8B (GQA, 8 KV heads for 32 query heads) adds 131.1 kB per token. 4 requests of 8,192 tokens keep "
        "4.29 GB, beside 16.1 GB of weights in the 80 GB of A100 80GB SXM. Memory ends at 121,954 tokens each. At "
        "8,192 tokens 59 requests fit."
    )
    too_large = KVGrowthExplorer(model="llama-3.1-405b").readout
    assert "The weights alone do not fit: they are 732 GB too large." in too_large and "-" not in too_large
    none_fits = KVGrowthExplorer(model="llama-2-7b", accelerator="T4", context_len=8192, batch_size=1)
    assert "Not one request of 8,192 tokens fits: 1.77 GB are missing." in none_fits.readout
    assert "made for 4,096 tokens at most" in none_fits.readout
    never = KVGrowthExplorer(model="mistral-7b-v0.1")
    assert "Memory never ends" in never.readout and never.figure.data[-1].name == "no end"
    assert "All its layers look back 4,096 tokens only." in never.readout
    assert "576 values a token and layer" in KVGrowthExplorer(model="deepseek-v3").readout


def test_kv_growth_table_and_a_model_of_one_s_own():
    mine = ModelConfig(name="Mine", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
                       intermediate_size=128, vocab_size=100, max_context=1000)  # fmt: skip
    explorer = KVGrowthExplorer(model=mine)
    assert explorer.readout.startswith("Mine (GQA, 2 KV heads for 4 query heads) adds 256 B per token.")
    explorer._show_table.value = True
    table = explorer._table_box.value
    assert "<th scope='row'" in table and "131,072 tokens" in table and "windowed" in table
    assert all(control.description for control in explorer.controls.values())
    assert all(" " in text for text in explorer.figure.layout.yaxis.ticktext)  # 10 MB: a number and its unit
    with pytest.raises(ValueError, match="must say how much memory it has"):
        KVGrowthExplorer(machine=MACHINE)
    with pytest.raises(ValueError, match="batch_size must be one of 1, 2, 3"):
        explorer.set(batch_size=-1)


def test_two_kinds_of_work_in_one_picture():
    slow, fast = [Point(64, 0.2, 0.1, 0.3, 0.15)], [Point(64, 0.03, 0.02, 0.04, 0.017)]
    picture = compared_times_picture({"without a cache": slow, "with a cache": fast}, "context (tokens)")
    assert [trace.name for trace in picture.figure.data] == [
        "without a cache, predicted", "without a cache, measured", "with a cache, predicted", "with a cache, measured",
    ]  # fmt: skip
    assert repr(picture) == (
        "Context (tokens): without a cache, 64: 200 ms measured, 150 ms predicted; "
        "with a cache, 64: 30 ms measured, 17 ms predicted."
    )
    with pytest.raises(ValueError, match="at least one measurement"):
        compared_times_picture({"without a cache": slow, "with a cache": []}, "x")
    with pytest.raises(ValueError, match="two kinds of work, got 1"):
        compared_times_picture({"without a cache": slow}, "x")


def test_lines():
    picture = lines_picture([1, 2, 4], {"paged": [1, 0.9, 0.8], "other": [0.2] * 3}, "block size", "use", "", True)
    assert repr(picture) == "Block size from 1 to 4: paged from 100.0% to 80.0%; other from 20.0% to 20.0%."
    assert picture.figure.data[0].y[1] == 90
    assert len({(trace.line.dash, trace.marker.symbol) for trace in picture.figure.data}) == 2
    growing = lines_picture([1, 10], {"a": [1e6, 1e9]}, "tokens", "size", "B")
    assert "a from 1 MB to 1 GB" in repr(growing) and growing.figure.layout.yaxis.type == "log"
    with pytest.raises(ValueError, match="lines must hold 1 to 5"):
        lines_picture([1], {}, "x", "y", "B")
    with pytest.raises(ValueError, match="above 0 on a logarithmic axis"):
        lines_picture([0, 1], {"a": [1, 2]}, "x", "y", "B")


def test_the_ladder_is_drawn_by_its_losses():
    ladder = read_ladder()
    lines = {name: [ladder[f"rtn {bits} bits {name}"] for bits in (8, 4)] for name in ("tensor", "channel")}
    picture = ladder_picture(lines)
    [tensor, channel] = picture.figure.data
    assert tensor.y == tuple(ladder[f"rtn {bits} bits tensor"].kl_divergence for bits in (4, 8))
    assert channel.x == tuple(ladder[f"rtn {bits} bits channel"].matrix_bits for bits in (4, 8))
    assert repr(picture).endswith("; channel from 0.0022 at 8.04 bits to 0.6 at 4.03 bits.")
    for wrong in ({}, {"none": []}):
        with pytest.raises(ValueError, match="lines must hold 1 to 5 lines of one row or more"):
            ladder_picture(wrong)
    with pytest.raises(ValueError, match="kl_divergence must be a finite number above 0, got 0"):
        ladder_picture({"no loss": [ladder["same grid"]]})


def test_stages_add_up_to_the_time_of_a_request():
    picture = stages_picture({"a": {"prefill": 0.5, "decode": 1.5}, "b<br>c": {"prefill": 0.5, "decode": 0.02}})
    prefill, decode = picture.figure.data
    assert list(prefill.x) == [0.5, 0.5] and list(decode.x) == [1.5, 0.02]
    assert decode.text == ("1.5 s", "")  # too narrow for a number
    assert prefill.marker.pattern.shape != decode.marker.pattern.shape
    assert repr(picture) == "a: prefill 500 ms, decode 1.5 s; b c: prefill 500 ms, decode 20 ms."
    for wrong in ({}, {"a": {"x": 1}, "b": {"y": 1}}, {"a": dict.fromkeys("abcdef", 1)}):
        with pytest.raises(ValueError, match="requests must all have the same 1 to 5 stages"):
            stages_picture(wrong)
    with pytest.raises(ValueError, match="prefill must be"):
        stages_picture({"a": {"prefill": -1}})


def test_arrivals_are_counted_from_the_first_request():
    picture = arrivals_picture([(10.5, [11, 11.25]), (10, [10.25, 12])])
    wait_1, tokens_1, wait_2, tokens_2 = picture.figure.data
    assert list(wait_1.x) == [0, 0.25] and list(tokens_1.x) == [0.25, 2]
    assert list(wait_2.x) == [0.5, 1] and list(tokens_2.x) == [1, 1.25] and list(tokens_2.y) == [2, 2]
    assert [trace.showlegend for trace in picture.figure.data] == [True, True, False, False]
    assert repr(picture).startswith(
        "Requests, 1: sent at 0 s, first token after 250 ms, last after 2 s; 2: sent at 500"
    )
    for wrong in ([], [(0, [])]):
        with pytest.raises(ValueError, match="at least one request, each with at least one token"):
            arrivals_picture(wrong)


def test_blocks_name_their_users_and_their_order():
    table = BlockTable(8, 4)
    table.append("A", 6)
    table.fork("A", "B")
    table.append("B", 3)
    picture = blocks_picture(table, columns=4)
    labels = [annotation.text for annotation in picture.figure.layout.annotations]
    assert labels == ["A+B<br>0", "A<br>1", "B<br>1", "B<br>2", "free", "free", "free", "free"]
    assert repr(picture) == "A (6 tokens) in blocks 0, 1; B (9 tokens) in blocks 0, 2, 3; 4 of 8 blocks are free."


LAYER = np.random.default_rng(0).normal(size=(40, 96))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({}, "off by 41.4% of its size"),  # the reference figures, at their settings
        ({"granularity": "channel"}, "off by 1.118% of its size"),
        ({"granularity": "channel", "bits": 4}, "off by 16.14% of its size"),
        ({"granularity": "channel", "bits": 4}, "With its 16 scales of 16 bits it takes 4.25 bits a weight: 544 B"),
        ({"weights": "a layer", "granularity": "group", "group_size": 64}, "of 2 groups in a row the last holds 32"),
    ],
)
def test_quantization_error_in_words(setting, said):
    assert said in QuantizationErrorExplorer({"a layer": LAYER}, **setting).readout


@pytest.mark.parametrize(
    ("control", "value"),
    [("weights", "a layer"), ("granularity", "channel"), ("bits", 3), ("group_size", 16), ("symmetric", False)],
)
def test_quantization_error_each_control_is_one_message(control, value):
    explorer = QuantizationErrorExplorer({"a layer": LAYER}, granularity="group")
    said, sent = explorer.readout, messages(explorer)
    explorer.controls[control].value = value
    assert len(sent) == 1
    assert explorer.readout != said
    explorer.controls["channel"].value = 5
    assert len(sent) == 2


def test_quantization_error_draws_the_library_s_numbers():
    explorer = QuantizationErrorExplorer({"a layer": LAYER}, weights="a layer", granularity="group", bits=4, channel=39)
    approx = quantization.quantize(LAYER, 4, "group", 32).dequantize()
    values, channels, looked_at = explorer.figure.data[1:]
    assert np.array_equal(values.x, LAYER[39]) and np.array_equal(values.y, approx[39])
    assert np.array_equal(channels.y, 100 * quantization.channel_errors(LAYER, approx))
    assert looked_at.y[0] == channels.y[39]
    explorer.set(weights="the reference matrix")  # 16 channels of 64 weights
    assert explorer.setting.channel == 15
    assert max(value for _, value in explorer.controls["group_size"].options) == 64
    explorer._show_table.value = True
    assert "channel 15" in explorer._table_box.value


def test_quantization_error_of_strange_layers():
    zeros = QuantizationErrorExplorer({"zeros": np.zeros((3, 5))}, weights="zeros", granularity="group")
    assert "a weight is off by 0% of its size on average." in zeros.readout
    for layer in (np.ones(5), np.full((2, 2), np.nan)):
        with pytest.raises(ValueError, match="layers must hold matrices of finite numbers, broken is not one"):
            QuantizationErrorExplorer({"broken": layer})
