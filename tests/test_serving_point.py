"""Serving at a batch and at an arrival rate, against brute force, closed forms, a birth-death chain and simulation."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessonlib import capacity, latency
from lessonlib.accelerators import Accelerator, get_accelerator
from lessonlib.batching import Server, Traffic, poisson_traffic
from lessonlib.capacity import SLO, Service, plan
from lessonlib.models import get_model, list_models

H100, L40 = get_accelerator("h100-sxm"), get_accelerator("l40")
LLAMA_3 = get_model("llama-3.1-8b")
IN_TIME = SLO(1, 0.025)


@pytest.fixture(scope="module")
def service() -> Service:
    return Service(plan(LLAMA_3, H100), 1000, 200)


# --- at a batch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["llama-3.1-8b", "gemma-3-27b", "deepseek-v2-lite", "qwen3-30b-a3b"])
@pytest.mark.parametrize("batch_size", [1, 7, 700])
def test_the_parts_of_a_token_s_time_are_the_mean_over_its_steps(key, batch_size):
    """Windows, MLA and experts; with 700 requests arithmetic takes longer than reads."""
    model, prompt_len, output_len = get_model(key), 1000, 60
    found = Service(plan(model, H100, memory_bytes=4e12), prompt_len, output_len, overhead_s=1e-3)
    time = found.cost(batch_size).token_time
    steps = [latency.decode_step(model, H100, batch_size, prompt_len + i) for i in range(1, output_len)]
    assert time.weights_s == pytest.approx(np.mean([step.weights_s for step in steps]))
    assert time.kv_s == pytest.approx(np.mean([step.kv_s for step in steps]))
    beyond = [step.total_s - step.weights_s - step.kv_s for step in steps]
    assert time.compute_s == pytest.approx(np.mean(beyond), rel=1e-6, abs=1e-15)
    assert (time.compute_s > 0) == (batch_size == 700 and not model.num_experts)  # of 700 few come to one expert
    assert time.overhead_s == 1e-3
    assert time.prefill_s == pytest.approx((batch_size - 1) / (output_len - 1) * found.prefill_s)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([get_model(key) for key in list_models()]), st.integers(1, 5000), st.integers(2, 500),
    st.integers(1, 300), st.floats(0, 0.01), st.integers(1, 3),
)  # fmt: skip
def test_parts_add_up_to_tpot(model, prompt_len, output_len, batch_size, overhead_s, stages):
    found = Service(plan(model, H100, memory_bytes=1e15, pipeline_parallel=stages), prompt_len, output_len,
                    overhead_s=overhead_s)  # fmt: skip
    cost = found.cost(batch_size)
    parts = dataclasses.astuple(cost.token_time)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(cost.tpot_s, rel=1e-9)
    assert cost.step.total_s == pytest.approx(
        latency.tpot(model, H100, prompt_len, output_len, -(-batch_size // stages), overhead_s=overhead_s)
    )


def test_the_curve_is_the_pareto_front_of_all_batches(service):
    curve = service.curve()
    assert curve[0].batch_size == 1 and curve[-1].batch_size == service.most and len(curve) <= 40
    everything = [service.cost(batch) for batch in range(1, service.most + 1)]
    assert {cost.batch_size: cost for cost in everything}[curve[20].batch_size] == curve[20]
    for point in curve:
        faster = [other for other in everything if other.tpot_s < point.tpot_s]
        best = max((other.tokens_per_s for other in faster), default=0)
        if point.batch_size <= service.flat_from:
            assert best < point.tokens_per_s
        else:  # more at once make all slower, and no more tokens
            assert best == pytest.approx(point.tokens_per_s)
    step = service.step(service.flat_from)
    assert step.linear_compute_s >= step.weights_s > service.step(service.flat_from - 1).linear_compute_s
    assert service.flat_from == 296  # 2 FLOPs for 2 bytes: above 989.4 TFLOP/s / 3.35 TB/s = 295.3
    assert Service(plan(LLAMA_3, H100), 8000, 200).flat_from is None
    same = capacity.cost_per_million_tokens(service.plan, 1000, 200, curve[9].batch_size)
    assert same == curve[9]


def test_rates_of_a_user_and_of_an_accelerator():
    found = Service(plan(get_model("llama-3.1-70b"), H100, tensor_parallel=4), 500, 101).cost(16)
    assert found.tokens_per_s_per_user == pytest.approx(1 / found.tpot_s)
    assert 4 * found.tokens_per_s_per_accelerator == pytest.approx(found.tokens_per_s)
    # sixteen users get one token with prefill and 100 one after another
    assert found.tokens_per_s == pytest.approx(16 * 101 / (found.prefill_busy_s + 100 * found.tpot_s))


def test_a_small_curve_has_every_batch_once():
    for most, points in ((1, 40), (3, 40), (1000, 2), (1000, 30)):
        found = Service(plan(LLAMA_3, H100, memory_bytes=1e12), 1000, 200)
        found.__dict__["most"] = most
        batches = [cost.batch_size for cost in found.curve(points)]
        assert batches == sorted(set(batches)) and batches[0] == 1 and batches[-1] == most and len(batches) <= points
    assert Service(plan(get_model("llama-3.1-70b"), H100), 1000, 200).curve() == ()


# --- the knee -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slo", [IN_TIME, SLO(0.02, 1), SLO(1, 0.2), SLO(0.0172, 1), SLO(1e-3, 1)])
def test_the_knee_is_the_cheapest_point_that_keeps_the_promise(service, slo):
    everything = [service.cost(batch) for batch in range(1, service.most + 1)]
    in_time = [cost for cost in everything if cost.ttft_s <= slo.ttft_s and cost.tpot_s <= slo.tpot_s]
    knee = service.knee(slo)
    assert knee.cost == max(in_time, key=lambda cost: cost.batch_size, default=None)
    assert knee.batch_size == len(in_time)
    if knee.cost:
        assert knee.cost.request == pytest.approx(min(cost.request for cost in in_time))
    if knee.batch_size < service.most:
        assert knee.beyond == everything[knee.batch_size]
        assert knee.cost is None or knee.beyond.request < knee.cost.request
        missed = "TTFT" if knee.beyond.ttft_s > slo.ttft_s else "TPOT"
        assert knee.limited_by == missed and missed in knee.message
    else:
        assert knee.beyond is None and knee.limited_by == "memory"


def test_where_on_the_curve_the_promise_breaks(service):
    assert service.knee(IN_TIME).longest_tpot_s == 0.025
    assert service.knee(SLO(1, 0.2)).longest_tpot_s == 0.2  # memory ends first
    assert service.knee(SLO(1e-3, 1)).longest_tpot_s == 0
    late = service.knee(SLO(0.022, 1))
    step_s = 0.022 - service.prefill_s
    assert late.cost.tpot_s <= late.longest_tpot_s < late.beyond.tpot_s
    assert late.cost.step.total_s <= step_s < late.beyond.step.total_s
    share = (step_s - late.cost.step.total_s) / (late.beyond.step.total_s - late.cost.step.total_s)
    assert late.longest_tpot_s == pytest.approx(late.cost.tpot_s + share * (late.beyond.tpot_s - late.cost.tpot_s))


# --- at an arrival rate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.001, 0.05, 0.4, 0.9])
def test_requests_in_flight_in_closed_form(service, share):
    """While memory bounds it, a step takes a + b x batch, and the equation for the requests in flight is linear."""
    rate = share * service.knee(IN_TIME).cost.requests_per_s
    one, two = (service.step(batch).total_s for batch in (1, 2))
    b, a = two - one, 2 * one - two
    tokens_per_s = 199 * rate / (1 - rate * service.prefill_s)  # while no prefill holds up decode
    found = service.at_rate(rate, IN_TIME)
    assert found.in_flight == pytest.approx(tokens_per_s * (a + b) / (1 - tokens_per_s * b))
    assert found.batch_size == pytest.approx(1 + found.in_flight)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.8])
def test_requests_in_flight_are_the_mean_of_a_birth_death_chain(service, share):
    """With n in flight one ends every step(n) x 199 / n seconds: processor sharing, whatever the lengths."""
    rate = share * service.knee(IN_TIME).cost.requests_per_s
    numbers = np.arange(1, 2000)
    # while no prefill holds up decode
    step_s = np.array([service.step(int(n)).total_s for n in numbers]) / (1 - rate * service.prefill_s)
    weights = np.concatenate([[0], np.cumsum(np.log(rate * 199 * step_s / numbers))])
    shares = np.exp(weights - weights.max())
    mean = shares[1:] @ numbers / shares.sum()
    assert service.at_rate(rate, IN_TIME).in_flight == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(("batch_size", "prompt_len", "output_len"), [(1, 2000, 40), (4, 2000, 40), (16, 1000, 100)])
def test_a_full_server_takes_these_times(batch_size, prompt_len, output_len):
    """Lanes that are never empty; lengths differ, or all would come and go together."""
    lens = np.random.default_rng(0).integers(output_len * 2 // 3, output_len * 4 // 3, 2000, endpoint=True)
    server = Server(LLAMA_3, H100, max_batch_size=batch_size)
    report = server.run(Traffic(np.zeros(2000), np.full(2000, prompt_len), lens))
    cost = Service(plan(LLAMA_3, H100), prompt_len, output_len).cost(batch_size)
    full = slice(50, 1900)
    decode_s = np.sum((report.finish_s - report.first_token_s)[full])
    assert decode_s / np.sum(lens[full] - 1) == pytest.approx(cost.tpot_s, rel=0.01)
    assert report.requests_per_s == pytest.approx(cost.requests_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("model", "accelerator", "prompt_len", "output_len", "slo"),
    [("llama-3.1-8b", "h100-sxm", 1000, 200, IN_TIME), ("llama-2-7b", "a100-80gb-sxm", 300, 100, SLO(1, 0.04)),
     ("llama-3.1-8b", "l4", 2000, 50, SLO(5, 0.2))],
)  # fmt: skip
@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_simulated_requests_settle_there(model, accelerator, prompt_len, output_len, slo, share):
    shape, device = get_model(model), get_accelerator(accelerator)
    found = Service(plan(shape, device), prompt_len, output_len)
    knee = found.knee(slo)
    rate = share * knee.cost.requests_per_s
    point = found.at_rate(rate, slo)
    server = Server(shape, device, max_batch_size=knee.batch_size)
    report = server.run(poisson_traffic(rate, 3000, prompt_len, output_len, seed=1))
    assert np.mean(report.tpot_s) == pytest.approx(point.tpot_s, rel=0.06)
    in_flight = np.sum(report.finish_s - report.first_token_s) / report.duration_s
    assert in_flight == pytest.approx(point.in_flight, rel=0.08)
    # a full step of waiting is too much where hardly anyone queues, and no queue is too little where many do
    assert np.median(report.ttft_s) == pytest.approx(point.ttft_s, rel=0.3)


def test_at_the_knee_s_rate_it_is_the_knee(service):
    knee = service.knee(IN_TIME)
    found = service.at_rate(knee.cost.requests_per_s, IN_TIME)
    assert (found.copies, found.batch_size) == (1, knee.batch_size)
    assert found.load == found.utilization == pytest.approx(1)
    assert found.tpot_s == pytest.approx(knee.cost.tpot_s)
    in_prefill = knee.cost.requests_per_s * service.prefill_s
    assert found.in_flight + in_prefill == pytest.approx(knee.batch_size)
    assert found.tokens_per_s_per_accelerator == pytest.approx(knee.cost.tokens_per_s_per_accelerator)
    assert found.cost.request == pytest.approx(knee.cost.request)
    rare = service.at_rate(1e-6, IN_TIME)  # a request is alone
    assert rare.tpot_s == pytest.approx(service.step(1).total_s, rel=1e-3)
    assert rare.batch_size == pytest.approx(1, abs=1e-3)


@settings(max_examples=80, deadline=None)
@given(st.floats(0.01, 3000), st.floats(0.005, 0.2), st.floats(0.03, 2), st.sampled_from([1, 2]))
def test_an_operating_point_adds_up(rate, tpot_limit_s, ttft_limit_s, stages):
    found = Service(plan(LLAMA_3, H100, pipeline_parallel=stages), 1000, 200)
    slo = SLO(ttft_limit_s, tpot_limit_s)
    knee, point = found.knee(slo), found.at_rate(rate, slo)
    most = knee.cost.requests_per_s
    copies = next(n for n in range(1, 10_000) if rate / n <= most * (1 + 1e-9))
    assert point.copies == copies and point.num_accelerators == copies * stages
    assert point.load == pytest.approx(rate / most) and point.utilization == pytest.approx(rate / most / copies)
    assert 0 < point.utilization <= 1 <= point.batch_size <= knee.batch_size
    assert point.tpot_s <= knee.cost.tpot_s * (1 + 1e-9) and point.ttft_s <= knee.cost.ttft_s * (1 + 1e-9)
    assert point.in_flight == pytest.approx(rate / copies * 199 * point.tpot_s)  # Little's law
    assert sum(dataclasses.astuple(point.token_time)) == pytest.approx(point.tpot_s)
    assert point.token_time.prefill_s >= 0
    assert point.tokens_per_s == pytest.approx(200 * rate)
    # the bill is paid by what is served: every copy's hour by its requests, and those by their tokens
    bill = copies * found.total_usd_per_hour
    assert point.cost.request * rate * 3600 == pytest.approx(bill)
    assert (1000 * point.cost.input + 200 * point.cost.output) / 1e6 == pytest.approx(point.cost.request)
    assert point.cost.output == pytest.approx(knee.cost.output / point.utilization)


def test_a_rate_by_hand():
    """A machine of 1 GB/s; 1 GB of weights takes a second to read, and no request's cache or arithmetic counts."""
    tiny = dataclasses.replace(get_model("smollm2-135m"), num_kv_heads=1, head_dim=2)
    slow = Accelerator(
        key="s", name="Slow", memory_bandwidth=tiny.streamed_weight_bytes(), peak_flops={"bf16": 1e18},
        memory_bytes=1e12, usd_per_hour=3.6,
    )  # fmt: skip
    found = Service(plan(tiny, slow), 1, 11)
    # Prefill of one token reads all weights as well: 1 s; ten steps of 1 s follow. With two at once a lane makes a
    # request in 12 s: 2 x 1 s of prefills and 10 s of steps.
    slo = SLO(10, 1.11)
    knee = found.knee(slo)
    assert knee.batch_size == 2
    assert knee.cost.tpot_s == pytest.approx(1.1, rel=1e-3)
    assert knee.cost.requests_per_s == pytest.approx(2 / 12, rel=1e-3)
    assert knee.cost.request == pytest.approx(0.001 * 6, rel=1e-3)  # 0.001 USD a second, 6 s of it
    point = found.at_rate(0.15, slo)
    assert (point.copies, point.load, point.utilization) == (1, pytest.approx(0.9, rel=1e-3), pytest.approx(0.9, 1e-3))
    assert point.batch_size == 2  # 1.76 would be in flight without a limit
    two = found.at_rate(0.25, SLO(10, 1.11))
    assert (two.copies, two.utilization) == (2, pytest.approx(0.75, rel=1e-3))
    few = found.at_rate(0.05, slo)
    assert few.tpot_s == pytest.approx(1 / (1 - 0.05), rel=1e-3)  # a twentieth of the time goes to prefills
    assert few.in_flight == pytest.approx(0.05 * 10 / 0.95, rel=1e-3)
    assert few.cost.request == pytest.approx(0.001 / 0.05, rel=1e-3)  # 0.001 USD a second, one request in 20 s


# --- what is not there ----------------------------------------------------------------------------------------------


def test_no_copies_help_where_no_batch_is_in_time(service):
    assert service.at_rate(1, SLO(1, 1e-3)) is None
    nothing_fits = Service(plan(get_model("llama-3.1-70b"), H100), 1000, 200)
    assert nothing_fits.at_rate(1, IN_TIME) is None
    assert nothing_fits.knee(IN_TIME).limited_by == "memory"


def test_without_a_price_there_are_times_and_no_costs():
    found = Service(plan(LLAMA_3, L40), 1000, 200)
    slo = SLO(2, 0.1)
    assert found.total_usd_per_hour is None and found.knee(slo).batch_size > 0 and found.at_rate(0.1, slo).tpot_s > 0
    with pytest.raises(ValueError, match="usd_per_hour must be given for a cost"):
        _ = found.curve()[0].output
    priced = Service(plan(LLAMA_3, L40), 1000, 200, usd_per_hour=0.5)
    assert priced.knee(slo).cost.output > 0 and priced.curve()[0].tpot_s == found.curve()[0].tpot_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_len": 0}, "prompt_len must be a whole number of at least 1, got 0"),
        ({"output_len": 1}, "output_len must be a whole number of at least 2, got 1"),
        ({"usd_per_hour": 0}, "usd_per_hour must be a finite number above 0, got 0"),
        ({"efficiency": 1.5}, "efficiency must be above 0 and at most 1, got 1.5"),
        ({"overhead_s": -1}, "overhead_s must be a finite number of at least 0, got -1"),
        ({"dtype": "fp4"}, "H100 SXM5 80GB has no published peak for dtype 'fp4'"),
    ],
)
def test_a_service_refuses_what_is_out_of_range(service, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(service, **change)


def test_methods_refuse_what_is_out_of_range(service):
    with pytest.raises(ValueError, match="batch_size must be at most 355, the requests of 1,200 tokens that fit"):
        service.cost(356)
    with pytest.raises(ValueError, match="utilization must be above 0 and at most 1, got 2"):
        service.cost(1, 2)
    with pytest.raises(ValueError, match="rate_per_s must be a finite number above 0, got 0"):
        service.at_rate(0, IN_TIME)
    with pytest.raises(ValueError, match="num_points must be a whole number of at least 2, got 1"):
        service.curve(1)
