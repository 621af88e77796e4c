"""The two explorers of lesson 4 without a browser: what they draw, what they say, how many messages it takes."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessonlib.accelerators import Accelerator, get_accelerator
from lessonlib.batching import (
    REFERENCE_LENS,
    SLO,
    Lognormal,
    Server,
    Traffic,
    at_rate,
    capacity_per_s,
    fewest_steps,
    load_curve,
    poisson_traffic,
    read_lengths,
    simulate,
)
from lessonlib.explorers import base
from lessonlib.explorers import load as load_module
from lessonlib.explorers.batching import BatchingExplorer, random_lengths
from lessonlib.explorers.load import LoadExplorer
from lessonlib.models import ModelConfig, get_model

LLAMA_3, H100 = get_model("llama-3.1-8b"), get_accelerator("h100-sxm")
TINY = ModelConfig(name="Tiny", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
                   intermediate_size=128, vocab_size=100, max_context=1000)  # fmt: skip
SLOW = Accelerator(
    key="s", name="Slow", memory_bandwidth=1e7, peak_flops={"bf16": 1e9}, memory_bytes=1e7, source="made up"
)


def messages(explorer: base.Explorer) -> list[str]:
    """Every message the figure sends to the browser from now on, as it is sent."""
    sent: list[str] = []
    for name in ("_py2js_update", "_py2js_restyle", "_py2js_relayout", "_py2js_addTraces", "_py2js_deleteTraces"):
        explorer.live.observe(lambda change: change["new"] and sent.append(change["name"]), names=name)
    return sent


def bars(explorer: BatchingExplorer, policy: str, name: str) -> list[tuple[int, int, int]]:
    """Lane, start and end of each bar as it is drawn."""
    [trace] = [t for t in explorer.figure.data[3 * (policy == "continuous") :][:3] if t.name.startswith(name)]
    return [(int(y), int(s), int(s + x)) for y, s, x in zip(trace.y, trace.base, trace.x, strict=True)]


# --- timelines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "value"),
    [("lanes", 8), ("lengths", "random"), ("lengths", "own"), ("num_requests", 64), ("seed", 3), ("own_list", "5, 9")],
)
def test_each_control_is_one_message_and_changes_picture_and_readout(control, value):
    lengths = {"num_requests": "random", "seed": "random", "own_list": "own"}.get(control, "reference")
    explorer = BatchingExplorer(lengths=lengths, own_list="7, 8, 9")
    before, said, sent = explorer.figure.to_json(), explorer.readout, messages(explorer)
    explorer.controls[control].value = value
    assert len(sent) == 1
    assert explorer.readout != said
    assert explorer.figure.to_json() != before


@pytest.mark.parametrize("lanes", [1, 4, 64])
@pytest.mark.parametrize("count", [16, 200])
def test_bars_cover_every_lane_s_every_step_once(lanes, count):
    explorer = BatchingExplorer(lengths="random", num_requests=count, seed=5, lanes=lanes)
    lens = random_lengths(count, 5)
    for policy in ("static", "continuous"):
        timeline = simulate(lens, lanes, policy)
        requests = bars(explorer, policy, "request")
        assert sorted(end - start for _, start, end in requests) == sorted(lens)
        drawn = np.zeros((lanes, timeline.steps), int)
        for lane, start, end in requests + bars(explorer, policy, "idle"):
            drawn[lane - 1, start:end] += 1
        assert np.all(drawn == 1)


def test_the_reference_in_words_and_in_the_picture():
    explorer = BatchingExplorer()
    assert repr(explorer) == explorer.readout == (
        "16 requests of 3 to 200 tokens (719 in all) on 4 lanes. Static batching takes 470 steps and uses 38.2% of "
        "what the lanes could make; continuous batching takes 200 steps and uses 89.9%. That is 2.35 times as many "
        "tokens a step. No order of the requests takes fewer than 200 (the longest request)."
    )  # fmt: skip
    titles = [note.text for note in explorer.figure.layout.annotations]
    assert "470 steps, 38.2%" in titles[0] and "200 steps, 89.9%" in titles[1]
    assert list(explorer.figure.data[0].text) == [str(number) for number in range(1, 17)]
    assert explorer.figure.data[0].customdata[4] == "<b>request 5</b>: 20 tokens<br>lane 1, steps 201 to 220"
    assert explorer.figure.data[1].marker.pattern.shape == "/"  # idle is hatched, not only gray
    assert [trace.x[0] for trace in explorer.figure.data[2::3]] == [470, 200]
    one = BatchingExplorer(lanes=1).readout
    assert "on 1 lane." in one and "Here both take equally long." in one


def test_neighbors_in_a_lane_differ_in_color():
    explorer = BatchingExplorer(lengths="random", num_requests=200, lanes=3)
    for trace in explorer.figure.data[::3]:
        order = np.lexsort((trace.base, trace.y))
        lane, color = np.array(trace.y)[order], np.array(trace.marker.color)[order]
        assert np.all((color[1:] != color[:-1]) | (lane[1:] != lane[:-1]))


def test_one_s_own_list():
    explorer = BatchingExplorer(lengths="own", own_list="[10; 2 3,\n4]", lanes=2)
    assert explorer.readout.startswith("4 requests of 2 to 10 tokens (19 in all) on 2 lanes.")
    before, sent = explorer.figure.to_json(), messages(explorer)
    explorer.controls["own_list"].value = "10, __import__('os').system('false')"
    assert explorer.readout.startswith(
        "Your own list cannot be used: the list must hold whole numbers from 1 to 100,000, but entry 2 is "
    )
    assert "4 requests of 2 to 10 tokens" in explorer.readout  # the picture is still that of the list before
    assert explorer.figure.to_json() == before and len(sent) <= 1
    explorer.controls["own_list"].value = "6"
    assert explorer.readout.startswith("1 request of 6 tokens (6 in all)")
    assert explorer.setting.output_lens == (6,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the list is empty"),
        (" , ; ", "the list is empty"),
        ("3, x", "entry 2 is 'x'"),
        ("0", "entry 1 is '0'"),
        ("4 -1", "entry 2 is '-1'"),
        ("1.5", "entry 1 is '1.5'"),
        ("1e3", "entry 1 is '1e3'"),
        ("100001", "entry 1 is '100001'"),
        ("٣", "entry 1 is '٣'"),
        ("9" * 5000, "entry 1 is '9999"),
        ("7 " * 201, "at most 200 requests, got 201"),
    ],
)
def test_lists_that_are_none(text, said):
    with pytest.raises(ValueError, match=said) as refused:
        read_lengths(text)
    assert len(str(refused.value)) < 150


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=200), st.sampled_from([", ", " ", ";", "\n", ",\t"]))
def test_lists_that_are_some(lens, between):
    assert read_lengths(between.join(map(str, lens))) == tuple(lens)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 12))
def test_no_policy_is_faster_than_the_bound(lens, lanes):
    assert fewest_steps(lens, lanes) <= simulate(lens, lanes, "continuous").steps
    assert fewest_steps(lens, len(lens)) == max(lens)
    assert fewest_steps(lens, 1) == sum(lens)


def test_table_and_presets_of_the_batching_explorer():
    explorer = BatchingExplorer()
    sent = messages(explorer)
    explorer.set(lengths="random", num_requests=8, seed=2, lanes=64)
    assert len(sent) == 1
    explorer._show_table.value = True
    table = explorer._table_box.value
    assert table.count("<tr>") == 1 + 8 and "request 8" in table and "<caption>8 requests on 64 lanes" in table
    assert all(control.description for control in explorer.controls.values())
    assert not explorer.controls["seed"].disabled and explorer.controls["own_list"].disabled
    with pytest.raises(ValueError, match="lanes must be one of 1, 2, 3"):
        explorer.set(lanes=0)
    with pytest.raises(ValueError, match="lengths must be one of reference, random, own, got 'all'"):
        explorer.set(lengths="all")


# --- load -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def load_explorer() -> LoadExplorer:
    return LoadExplorer()


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("rate_per_s", 70),
        ("max_batch_size", 4),
        ("token_budget", 0),
        ("kv_percent", 5),
        ("prompt_len", 1000),
        ("output_len", 50),
        ("ttft_limit_s", 0.1),
        ("tpot_limit_ms", 5),
        ("model", "qwen3-8b"),
        ("accelerator", "H200 SXM 141GB"),
    ],
)
def test_each_control_of_the_load_explorer_is_one_message(load_explorer, control, value):
    before, said, sent = load_explorer.figure.to_json(), load_explorer.readout, messages(load_explorer)
    kept = load_explorer.controls[control].value
    load_explorer.controls[control].value = value
    assert len(sent) == 1
    assert load_explorer.readout != said
    assert load_explorer.figure.to_json() != before
    load_explorer.controls[control].value = kept
    assert load_explorer.readout == said and load_explorer.figure.to_json() == before  # nothing is left behind


def test_sliders_simulate_on_release_and_say_that_they_do(load_explorer):
    sliders = [control for control in load_explorer.controls.values() if hasattr(control, "continuous_update")]
    assert len(sliders) == 8 and not any(slider.continuous_update for slider in sliders)
    shown = []
    load_explorer._readout_box.observe(lambda change: shown.append(change["new"]), names="value")
    load_explorer.set(rate_per_s=15)
    assert len(shown) == 2
    assert "Simulating ..." in shown[0] and "aria-busy" in shown[0]
    assert "Simulating" not in shown[1] and "15 requests/s" in shown[1]
    load_explorer._readout_box.unobserve_all("value")
    load_explorer.set(rate_per_s=10)


def test_the_load_explorer_draws_the_library_s_numbers(load_explorer):
    load_explorer.set(rate_per_s=50, ttft_limit_s=0.2, tpot_limit_ms=10)
    server = Server(LLAMA_3, H100, token_budget=512, kv_budget_bytes=0.9 * (80e9 - LLAMA_3.weight_bytes()))
    slo = SLO(0.2, 0.01)
    curve = load_curve(server, Lognormal(500, maximum=65536), Lognormal(150, maximum=65536))
    report = server.run(at_rate(curve.requests, 50))
    traces = {trace.name.split()[0] + " limit" * ("limit" in trace.name): trace for trace in load_explorer.figure.data}
    assert traces["TTFT"].x[50] == pytest.approx(np.median(report.ttft_s))
    assert traces["TPOT"].x[99] == pytest.approx(np.percentile(report.tpot_s, 99))
    assert list(traces["TTFT limit"].x) == [0.2, 0.2] and list(traces["TPOT limit"].x) == [0.01, 0.01]
    shares = [np.mean((r.ttft_s <= 0.2) & (r.e2e_s - r.ttft_s <= 0.01 * (r.traffic.output_lens - 1)))
              for r in curve.reports]  # fmt: skip
    assert traces["goodput"].y[1:] == pytest.approx(curve.rates_per_s * shares)
    assert traces["now"].x[0] == 50 and traces["now"].y[0] == pytest.approx(50 * report.slo_share(slo))
    assert traces["knee"].x[0] == pytest.approx(curve.knee_per_s(slo))
    assert traces["capacity"].x[0] == curve.capacity_per_s
    assert load_explorer.figure.layout.xaxis2.title.text == "arrival rate (requests/s)"
    assert all(text.endswith("s") for text in load_explorer.figure.layout.xaxis.ticktext)
    load_explorer._show_table.value = True
    assert load_explorer._table_box.value.count("<tr>") == 1 + len(curve.rates_per_s) + 1
    assert "50/s" in load_explorer._table_box.value
    load_explorer._show_table.value = False
    load_explorer.set(rate_per_s=10, ttft_limit_s=1, tpot_limit_ms=50)


def test_overload_and_limits_that_nobody_meets_are_said(load_explorer):
    load_explorer.set(rate_per_s=200)
    assert "more than it can ever serve" in load_explorer.readout
    now = load_explorer.figure.data[-1]
    assert now.x[0] < 200 and now.marker.symbol == "triangle-right" and "outside" in now.name
    load_explorer.set(rate_per_s=10, model="llama-2-7b", accelerator="L40S", tpot_limit_ms=5)
    assert "There is no knee" in load_explorer.readout  # reading the weights alone takes 16 ms
    assert load_explorer.figure.data[-2].x[0] is None
    load_explorer.set(model="llama-3.1-8b", accelerator="H100 SXM5 80GB", tpot_limit_ms=50)


def test_what_cannot_be_served_is_said_and_not_drawn(load_explorer):
    sent = messages(load_explorer)
    load_explorer.set(model="llama-3.1-405b")
    assert load_explorer.readout.startswith(
        "This cannot be served: the weights of Llama 3.1 405B are 732 GB larger than the memory of H100 SXM5 80GB."
    )
    assert len(sent) == 1
    assert not any(len(trace.x) for trace in load_explorer.figure.data)
    load_explorer.set(model="llama-2-7b", accelerator="T4", kv_percent=5)
    assert "can never be served" in load_explorer.readout and "shorter requests" in load_explorer.readout
    load_explorer.set(model="llama-3.1-8b", accelerator="H100 SXM5 80GB", kv_percent=90)
    assert all(len(trace.x) for trace in load_explorer.figure.data)


def test_a_start_with_what_cannot_be_served():
    explorer = LoadExplorer("llama-3.1-405b")
    assert explorer.readout.startswith("This cannot be served: the weights of Llama 3.1 405B")
    explorer.set(model="llama-3.1-8b")
    assert all(len(trace.x) for trace in explorer.figure.data)


def test_a_model_and_a_machine_of_one_s_own():
    explorer = LoadExplorer(model=TINY, machine=SLOW, prompt_len=50, output_len=20)
    assert explorer.readout.startswith("Tiny on Slow, 10 requests/s of about 50 prompt and 20 output tokens")
    with pytest.raises(ValueError, match="machine must have memory_bytes and a peak for bf16, Blind lacks one"):
        LoadExplorer(machine=Accelerator(key="b", name="Blind", memory_bandwidth=1e9, peak_flops={}))
    with pytest.raises(ValueError, match="token_budget must be one of 0, 64, 128"):
        explorer.set(token_budget=32)


def test_a_redraw_is_quick_and_what_was_simulated_is_kept(load_explorer):
    load_module._curve.cache_clear()
    load_explorer.set(kv_percent=50)
    runs = load_module._curve.cache_info().misses
    start = time.perf_counter()
    load_explorer.set(ttft_limit_s=0.3)
    load_explorer.set(rate_per_s=20)
    assert load_module._curve.cache_info().misses == runs  # limits and rate do not ask for another curve
    assert time.perf_counter() - start < 1
    load_explorer.set(kv_percent=90, ttft_limit_s=1, rate_per_s=10)


# --- the curve behind it --------------------------------------------------------------------------------------------


def test_at_rate_keeps_the_requests():
    requests = poisson_traffic(3, 2000, Lognormal(100), 20, seed=4)
    faster = at_rate(requests, 12)
    assert faster.arrival_s[-1] == pytest.approx(2000 / 12)
    assert np.diff(faster.arrival_s) / np.diff(requests.arrival_s) == pytest.approx(
        np.full(1999, faster.arrival_s[0] / requests.arrival_s[0])
    )
    assert np.array_equal(faster.prompt_lens, requests.prompt_lens)
    with pytest.raises(ValueError, match="rate_per_s must be a finite number above 0, got 0"):
        at_rate(requests, 0)
    with pytest.raises(ValueError, match="must not all arrive at time 0"):
        at_rate(Traffic(np.zeros(3), [1] * 3, [1] * 3), 1)


def test_capacity_is_lanes_over_service_time():
    """One lane and equal requests: a closed form. It finishes one after the other."""
    server = Server(LLAMA_3, H100, max_batch_size=1)
    one = server.run(Traffic(np.zeros(1), [300], [40])).duration_s
    assert capacity_per_s(server, poisson_traffic(1, 40, 300, 40)) == pytest.approx(1 / one)
    with pytest.raises(ValueError, match="number of requests"):
        capacity_per_s(server, poisson_traffic(1, 7, 300, 40))


def test_the_knee_of_a_queue_whose_waits_are_known():
    """M/D/1 through one lane: nine in ten wait less than the limit up to the rate that a long simulation finds."""
    server = Server(LLAMA_3, H100, max_batch_size=1)
    service_s = server.run(Traffic(np.zeros(1), [300], [40])).duration_s
    slo = SLO(2 * service_s, 1)
    curve = load_curve(server, 300, 40)

    def share(load):
        waits = np.zeros(20_000)
        gaps = np.random.default_rng(1).exponential(1 / load, len(waits))  # in service times
        for number in range(1, len(waits)):
            waits[number] = max(0, waits[number - 1] + 1 - gaps[number])
        first_token = server.run(Traffic(np.zeros(1), [300], [40])).ttft_s[0] / service_s
        return np.mean(waits + first_token <= 2)

    knee = curve.knee_per_s(slo) * service_s
    assert share(knee - 0.12) > 0.9 > share(knee + 0.12)
    assert curve.knee_per_s(slo, 0.99) < curve.knee_per_s(slo, 0.5) <= curve.capacity_per_s


def test_load_curve():
    server = Server(LLAMA_3, H100, token_budget=512)
    curve = load_curve(server, Lognormal(500), Lognormal(150), loads=(0.3, 0.9, 1.5))
    slo = SLO(1, 0.05)
    assert curve.rates_per_s == pytest.approx(np.array([0.3, 0.9, 1.5]) * curve.capacity_per_s)
    assert np.all(np.diff(curve.slo_shares(slo)) <= 0)
    assert curve.goodput_at(curve.rates_per_s[1], slo) == pytest.approx(curve.goodput_per_s(slo)[1])
    assert curve.goodput_at(0, slo) == 0
    assert curve.knee_per_s(SLO(1e-9, 1)) == 0
    for loads in ((), (0, 1), (1, 1), (2, 1)):
        with pytest.raises(ValueError, match="loads"):
            load_curve(server, 10, 10, loads)
    with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
        curve.knee_per_s(slo, 1.5)


def test_idle_and_turns_of_the_reference():
    static = simulate(REFERENCE_LENS, 4, "static")
    assert [tuple(row) for row in static.idle.tolist() if row[0] == 3] == [(3, 150, 200)]
    assert static.turns.tolist() == [n // 4 for n in range(16)]
    assert simulate([3], 3, "static").idle.tolist() == [(1, 0, 3), (2, 0, 3)]
    full = simulate([5, 5], 2)
    assert not len(full.idle) and full.turns.tolist() == [0, 0]
