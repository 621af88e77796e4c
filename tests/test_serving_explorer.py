"""The serving explorer without a browser: what it draws, what it says, how many messages it takes."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessonlib.accelerators import Accelerator, get_accelerator, list_accelerators
from lessonlib.capacity import SLO, Service, batch_under_slo, cost_per_million_tokens, plan
from lessonlib.explorers.serving import (
    PARTS,
    TPOT_LIMITS,
    TTFT_LIMITS,
    ServingExplorer,
    Setting,
    describe,
    serving_figure,
    table,
    update_serving_figure,
)
from lessonlib.models import ModelConfig, get_model, list_models

LLAMA_3, H100 = get_model("llama-3.1-8b"), get_accelerator("h100-sxm")
TINY = ModelConfig(name="Tiny", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
                   intermediate_size=128, vocab_size=100, max_context=1000)  # fmt: skip
SLOW = Accelerator(
    key="s", name="Slow", memory_bandwidth=1e7, peak_flops={"bf16": 1e9}, memory_bytes=1e7, source="made up"
)
DEFAULT = (
    "Llama 3.1 8B fits on 1 x H100 SXM5 80GB: 52.1 GiB are left for the KV cache, room for 355 requests of 1,000 "
    "prompt and 200 output tokens. At 10 requests/s it has 11.7 in flight: TTFT 19.4 ms, TPOT 5.87 ms (76% weights); "
    "170 tokens/s for each user, 2,000 in all; 0.05 and 0.24 USD per million input and output tokens, at 3.49 USD an "
    "hour for all. The knee, the cheapest point within the SLO (TTFT up to 1 s, TPOT up to 25 ms), is 178 at once (179 "
    "break the TPOT limit): 35.8 requests/s, 40.1 tokens/s for each user, 7,156 in all; 0.014 and 0.066 USD per "
    "million input and output tokens. This rate is at 28% of that."
)


@pytest.fixture(scope="module")
def only_explorer() -> ServingExplorer:
    return ServingExplorer()


@pytest.fixture
def explorer(only_explorer) -> Iterator[ServingExplorer]:
    """The explorer at its default, to which it goes back."""
    defaults = {name: control.value for name, control in only_explorer.controls.items()}
    yield only_explorer
    only_explorer._show_table.value = False
    only_explorer.set(**defaults)
    assert only_explorer.readout == DEFAULT


def messages(explorer: ServingExplorer) -> list[str]:
    """Every message the figure sends to the browser from now on, as it is sent."""
    sent: list[str] = []
    for name in ("_py2js_update", "_py2js_restyle", "_py2js_relayout", "_py2js_addTraces", "_py2js_deleteTraces"):
        explorer.live.observe(lambda change: change["new"] and sent.append(change["name"]), names=name)
    return sent


def traces(explorer: ServingExplorer) -> dict:
    """The traces by what they show."""
    names = ["region", "limit", "in time", "late", "knee", "now", *PARTS, "TPOT limit"]
    return dict(zip(names, explorer.figure.data, strict=True))


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("model", "qwen3-8b"),
        ("accelerator", "H200 SXM 141GB"),
        ("num_accelerators", 4),
        ("usd_per_hour", 2),
        ("weight_bits", 4),
        ("kv_bits", 8),
        ("prompt_len", 8000),
        ("output_len", 50),
        ("ttft_limit_s", 0.02),
        ("tpot_limit_ms", 10),
        ("rate_per_s", 100),
    ],
)
def test_each_control_is_one_message_and_changes_picture_and_readout(explorer, control, value):
    before, said, sent = explorer.figure.to_json(), explorer.readout, messages(explorer)
    kept = explorer.controls[control].value
    explorer.controls[control].value = value
    assert len(sent) == 1
    assert explorer.readout != said
    assert explorer.figure.to_json() != before
    explorer.controls[control].value = kept
    assert explorer.readout == said and explorer.figure.to_json() == before  # nothing is left behind


def test_every_control_follows_the_slider_and_has_a_name(explorer):
    assert len(explorer.controls) == 11
    for control in explorer.controls.values():
        assert control.description
        assert getattr(control, "continuous_update", True)


def test_the_default_in_words(explorer):
    assert repr(explorer) == explorer.readout == DEFAULT


def test_it_draws_the_library_s_numbers(explorer):
    explorer.set(prompt_len=2000, output_len=100, tpot_limit_ms=30, rate_per_s=20, num_accelerators=2, kv_bits=8)
    slo = SLO(1, 0.03)
    found = plan(LLAMA_3, H100, tensor_parallel=2, kv_bits=8)
    knee = batch_under_slo(found, 2000, 100, slo)
    drawn = traces(explorer)
    points = [*drawn["in time"].x], [*drawn["in time"].y]
    assert points[0][-1] == drawn["late"].x[0] == drawn["knee"].x[0] == 1 / knee.cost.tpot_s
    assert points[1][-1] == drawn["late"].y[0] == drawn["knee"].y[0] == knee.cost.tokens_per_s / 2
    first, last = (cost_per_million_tokens(found, 2000, 100, batch) for batch in (1, found.requests_at(2100)))
    assert (points[0][0], points[1][0]) == (1 / first.tpot_s, first.tokens_per_s / 2)
    assert (drawn["late"].x[-1], drawn["late"].y[-1]) == (1 / last.tpot_s, last.tokens_per_s / 2)
    assert np.all(np.array(points[0]) >= 1 / 0.03) and np.all(np.array(drawn["late"].x[1:]) < 1 / 0.03)
    assert list(drawn["limit"].x) == pytest.approx([1 / 0.03] * 2) and drawn["limit"].name == "TPOT limit 30 ms"
    assert max(drawn["region"].x) == pytest.approx(1 / 0.03)
    now = Service(found, 2000, 100).at_rate(20, slo)
    assert (drawn["now"].x[0], drawn["now"].y[0]) == (1 / now.tpot_s, 20 * 100 / 2)
    for part in PARTS:
        assert list(drawn[part].x) == [getattr(point.token_time, part) for point in (first, now, knee.cost)]
    assert (
        f"{knee.batch_size} at once" in explorer.readout and f"{knee.batch_size + 1} break the TPOT" in explorer.readout
    )
    assert f"<b>knee</b>, {knee.batch_size} at once" in drawn["knee"].customdata[0]
    assert "source: NVIDIA H100 datasheet" in drawn["now"].hovertemplate


def test_axes_have_units_and_every_color_a_second_cue(explorer):
    layout, drawn = explorer.figure.layout, traces(explorer)
    assert layout.xaxis.title.text == "tokens/s for each user (1 / TPOT)"
    assert layout.yaxis.title.text == "output tokens/s per accelerator"
    assert layout.xaxis2.title.text == "time per output token (TPOT)"
    assert list(layout.xaxis2.ticktext) == ["0 s", "10 ms", "20 ms"]
    assert len({drawn[part].marker.pattern.shape for part in PARTS}) == len(PARTS)
    assert drawn["in time"].line.dash != drawn["late"].line.dash
    assert drawn["knee"].marker.symbol != drawn["now"].marker.symbol
    assert drawn["region"].fillpattern.shape == "/"
    said = ["alone<br>batch 1<br>4.52 ms", "now<br>batch 12.7<br>5.87 ms", "knee<br>batch 178<br>24.9 ms"]
    assert list(layout.yaxis2.ticktext) == said
    assert list(drawn["weights_s"].text) == ["4.5 ms"] * 3 and drawn["kv_s"].text[2] == "7.7 ms"


def test_what_does_not_fit_says_by_how_much_and_comes_back(explorer):
    before, sent = explorer.figure.to_json(), messages(explorer)
    explorer.set(model="llama-3.1-70b")
    assert explorer.readout == (
        "This cannot be served: Llama 3.1 70B on 1 x H100 SXM5 80GB: does not fit, short by 64.73 GiB (weights 131.4 "
        "GiB, activations 0 B, other 0 B of 67.06 GiB usable). It would fit with weights of 8 bits, or 2 accelerators."
    )
    assert len(sent) == 1
    assert not any(len(trace.x) for trace in explorer.figure.data)
    assert list(explorer.figure.layout.yaxis2.ticktext) == ["alone", "now", "knee"]
    explorer._show_table.value = True
    assert explorer._table_box.value == ""
    explorer.set(num_accelerators=2)
    assert explorer.readout.startswith("Llama 3.1 70B fits on 2 x H100 SXM5 80GB: 1")
    assert len(explorer.figure.data[2].x) and "<table>" in explorer._table_box.value
    explorer._show_table.value = False
    explorer.set(model="llama-3.1-8b", num_accelerators=1)
    assert explorer.figure.to_json() == before


def test_it_can_start_with_what_does_not_fit():
    explorer = ServingExplorer("llama-3.1-405b")
    assert "does not fit, short by 689.5 GiB" in explorer.readout
    explorer.set(accelerator="B300 (HGX)", num_accelerators=4)
    assert explorer.figure.data[2].x == serving_figure(explorer.setting).data[2].x


def test_heads_that_cannot_be_divided_are_said(explorer):
    explorer.set(model="smollm2-135m", num_accelerators=8)
    assert explorer.readout == (
        "This cannot be served: the number of accelerators must divide the 9 query heads of SmolLM2 135M, and divide "
        "the 3 KV heads or be a multiple of them, got 8: use 1, 3, 9."
    )


def test_limits_that_nothing_meets(explorer):
    explorer.set(tpot_limit_ms=2)
    assert "Even alone a request breaks the SLO (TTFT up to 1 s, TPOT up to 2 ms): TTFT 18.9 ms, TPOT 4.52 ms" in (
        explorer.readout
    )
    drawn = traces(explorer)
    assert drawn["knee"].x[0] is drawn["now"].x[0] is drawn["limit"].x[0] is None
    assert drawn["in time"].x == (None,) and drawn["late"].x[0] > 0
    assert max(drawn["region"].x) == explorer.figure.layout.xaxis.range[1]  # all of it
    assert list(explorer.figure.layout.yaxis2.ticktext) == [
        "alone<br>batch 1<br>4.52 ms",
        *(f"{name}<br>never in time" for name in ("now", "knee")),
    ]
    assert drawn["weights_s"].x[0] > 0 == drawn["weights_s"].x[1]
    explorer._show_table.value = True
    assert "knee" not in explorer._table_box.value and "alone" in explorer._table_box.value


def test_a_limit_of_ttft_is_a_place_on_the_curve(explorer):
    explorer.set(ttft_limit_s=0.02)
    drawn, knee = traces(explorer), explorer.setting.knee
    assert knee.limited_by == "TTFT" and "break the TTFT limit" in explorer.readout
    assert drawn["limit"].name == "TTFT limit 20 ms"
    assert drawn["late"].x[1] < drawn["limit"].x[0] <= drawn["knee"].x[0]


def test_memory_that_ends_before_the_limit(explorer):
    explorer.set(tpot_limit_ms=100)
    drawn = traces(explorer)
    assert "is 355 at once (more do not fit)" in explorer.readout
    assert "From 296 at once arithmetic takes longer than reading the weights" in explorer.readout
    assert drawn["late"].x == (None,) and drawn["limit"].x[0] == pytest.approx(10)
    assert drawn["TPOT limit"].x[0] is None and drawn["TPOT limit"].name == "TPOT limit outside"


def test_a_rate_beyond_one_deployment_takes_copies(explorer):
    explorer.set(rate_per_s=100)
    assert "100 requests/s are 2.79 times what one can serve in time: it takes 3 copies." in explorer.readout
    assert "at 10.47 USD an hour for all" in explorer.readout and "Each copy is at 93% of that." in explorer.readout
    assert traces(explorer)["now"].name == "now 100/s, 3 copies"


def test_an_accelerator_without_a_price(explorer):
    explorer.set(accelerator="L40", tpot_limit_ms=100, rate_per_s=1)
    assert "no price is known for L40: set one." in explorer.readout and "USD" not in explorer.readout
    explorer._show_table.value = True
    assert "<td" in explorer._table_box.value
    explorer.set(usd_per_hour=0.5)
    assert "0.50 USD an hour" in explorer.readout


def test_the_data_table(explorer):
    explorer._show_table.value = True
    shown = explorer._table_box.value
    assert shown.count("<tr>") == 1 + len(explorer.setting.curve) + 2 + 1 + 3
    assert "Where the time of a token goes" in shown
    assert "<caption>Llama 3.1 8B on 1 x H100 SXM5 80GB" in shown and "knee: 178" in shown and "now: 12.7" in shown


def test_values_of_one_s_own_and_values_that_are_none():
    own = ServingExplorer(model=TINY, machine=SLOW, prompt_len=50, output_len=20, tpot_limit_ms=500, rate_per_s=0.1)
    assert own.readout.startswith("Tiny fits on 1 x Slow: ") and "no price is known for Slow" in own.readout
    timed = ServingExplorer(efficiency=0.5, overhead_s=1e-3)
    assert timed.setting.service.prefill_s > ServingExplorer().setting.service.prefill_s * 1.9
    assert list(traces(timed)["overhead_s"].x) == [1e-3] * 3
    with pytest.raises(ValueError, match="machine must have memory_bytes and a peak for bf16, Blind lacks one"):
        ServingExplorer(machine=Accelerator(key="b", name="Blind", memory_bandwidth=1e9, peak_flops={}))
    with pytest.raises(ValueError, match="num_accelerators must be one of 1, 2, 4, 8, got 3"):
        own.set(num_accelerators=3)
    with pytest.raises(ValueError, match="efficiency must be above 0 and at most 1"):
        ServingExplorer(efficiency=2)


def test_what_lesson_5_says_of_its_experiments():
    default = Setting(LLAMA_3, H100)

    def price(**changes) -> float:
        setting = dataclasses.replace(default, **changes)
        return setting.knee.cost.output

    slow, quick = default.knee, dataclasses.replace(default, tpot_limit_ms=10).knee
    assert 0.25 < quick.batch_size / slow.batch_size < 0.3
    assert quick.cost.output == pytest.approx(2 * slow.cost.output, rel=0.02)
    assert price(kv_bits=8) < price(weight_bits=4) < price()  # at the knee caches are read longer than weights
    assert slow.cost.token_time.kv_s > slow.cost.token_time.weights_s
    rare = {bits: dataclasses.replace(default, rate_per_s=1, weight_bits=bits).now.tpot_s for bits in (16, 4)}
    assert rare[4] < rare[16] / 2 and rare[4] < dataclasses.replace(default, rate_per_s=1, kv_bits=8).now.tpot_s
    larger = {"model": get_model("llama-3.1-70b")}
    barely = dataclasses.replace(default, **larger, weight_bits=8)
    assert barely.service.most == 3 and round(barely.knee.cost.output / slow.cost.output, -1) == 100
    for changes in ({"num_accelerators": 2, "weight_bits": 8}, {"num_accelerators": 4}):
        assert round(price(**larger, **changes) / slow.cost.output) == 10


FIGURE = serving_figure(Setting(LLAMA_3, H100))
USABLE = [a for a in map(get_accelerator, list_accelerators()) if a.memory_bytes and "bf16" in a.peak_flops]


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        Setting,
        model=st.sampled_from([get_model(key) for key in list_models()]),
        accelerator=st.sampled_from(USABLE),
        num_accelerators=st.sampled_from([1, 2, 4, 8]),
        weight_bits=st.sampled_from([4, 8, 16]),
        kv_bits=st.sampled_from([8, 16]),
        prompt_len=st.sampled_from([50, 2000, 64000]),
        output_len=st.sampled_from([10, 300, 8000]),
        rate_per_s=st.sampled_from([0.01, 5, 1000]),
        ttft_limit_s=st.sampled_from(TTFT_LIMITS),
        tpot_limit_ms=st.sampled_from(TPOT_LIMITS),
    )
)
def test_every_setting_is_drawn_or_refused_in_words(setting):
    figure = FIGURE
    try:
        update_serving_figure(figure, setting)
    except ValueError as error:
        assert "fit" in str(error) or "must divide" in str(error)
        return
    said, rows = describe(setting), table(setting)
    assert "nan" not in said + rows and "inf" not in said + rows
    low, high = figure.layout.xaxis.range
    in_time, late, knee, now = figure.data[2:6]
    for x in (*in_time.x, *late.x, *knee.x, *now.x):
        assert x is None or low < x < high
    for y in (*in_time.y, *late.y, *knee.y, *now.y):
        assert y is None or figure.layout.yaxis.range[0] < np.log10(y) < figure.layout.yaxis.range[1]
