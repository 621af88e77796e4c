"""Batching: against closed forms of queueing theory, and against plain loops that take one token at a time."""

import dataclasses
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessonlib import latency
from lessonlib.accelerators import Accelerator, get_accelerator
from lessonlib.batching import (
    REFERENCE_LENS,
    SLO,
    Lognormal,
    Server,
    Traffic,
    batch_limits,
    bursty_traffic,
    compute_bound_batch,
    memory_ceiling,
    poisson_traffic,
    read_traffic,
    simulate,
    step_parts,
)
from lessonlib.kv_cache import (
    attention_flops_per_token_layer,
    bytes_per_token,
    cache_bytes,
    cached_token_layers,
    summed_token_layers,
)
from lessonlib.models import get_model

A100 = get_accelerator("a100-80gb-sxm")
H100 = get_accelerator("h100-sxm")
SMALL = get_model("smollm2-135m")
LLAMA_2 = get_model("llama-2-7b")
LLAMA_3 = get_model("llama-3.1-8b")
# one of each kind that the equation treats differently: plain, windows and experts, latent attention and experts
KINDS = [SMALL, get_model("gpt-oss-20b"), get_model("deepseek-v2-lite")]
LAPTOP = Accelerator(key="l", name="Laptop", memory_bandwidth=30e9, peak_flops={"bf16": 400e9}, memory_bytes=16e9)

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)
lanes = st.integers(1, 12)


def at_once(prompt_lens, output_lens) -> Traffic:
    return Traffic(np.zeros(len(prompt_lens)), prompt_lens, output_lens)


# --- lanes and steps ------------------------------------------------------------------------------------------------


def token_by_token(output_lens, num_lanes, policy):
    """The lane and the steps of each request, found by making every token."""
    waiting = list(enumerate(output_lens))
    running: dict[int, list] = {}  # lane -> [request, tokens left]
    lanes_of, steps_of, step = {}, {}, 0
    while waiting or running:
        if policy == "continuous" or not running:
            for lane in range(num_lanes):
                if waiting and lane not in running:
                    request, left = waiting.pop(0)
                    running[lane] = [request, left]
                    lanes_of[request], steps_of[request] = lane, []
        for lane, (request, _) in list(running.items()):
            steps_of[request].append(step)
            running[lane][1] -= 1
            if not running[lane][1]:
                del running[lane]
        step += 1
    return [(lanes_of[r], steps_of[r][0], steps_of[r][-1] + 1) for r in range(len(output_lens))], step


def test_the_reference_sixteen():
    static, continuous = (simulate(REFERENCE_LENS, 4, policy) for policy in ("static", "continuous"))
    assert (static.steps, continuous.steps) == (470, 200)
    assert static.utilization == pytest.approx(0.382, abs=5e-4)
    assert continuous.utilization == pytest.approx(0.899, abs=5e-4)
    assert static.steps / continuous.steps == pytest.approx(2.35)


@given(lengths, lanes, st.sampled_from(["static", "continuous"]))
def test_the_timeline_is_that_of_a_token_by_token_loop(output_lens, num_lanes, policy):
    timeline = simulate(output_lens, num_lanes, policy)
    spans, steps = token_by_token(output_lens, num_lanes, policy)
    assert [tuple(row)[1:] for row in timeline.spans.tolist()] == spans
    assert timeline.steps == steps
    assert timeline.utilization == pytest.approx(sum(output_lens) / (steps * num_lanes))


@given(lengths, lanes)
def test_what_holds_for_any_lengths(output_lens, num_lanes):
    static, continuous = (simulate(output_lens, num_lanes, policy) for policy in ("static", "continuous"))
    assert continuous.steps <= static.steps
    for timeline in (static, continuous):
        assert timeline.steps >= max(-(-sum(output_lens) // num_lanes), *output_lens)
        assert 0 < timeline.utilization <= 1
        assert (timeline.spans["end"] - timeline.spans["start"]).tolist() == output_lens
        for lane in range(num_lanes):  # no lane has two requests at once
            taken = timeline.spans[timeline.spans["lane"] == lane]
            taken = taken[np.argsort(taken["start"])]
            assert np.all(taken["start"][1:] >= taken["end"][:-1])
    one, same = (simulate(output_lens, 1, policy) for policy in ("static", "continuous"))
    assert one.spans.tolist() == same.spans.tolist()
    assert one.utilization == same.utilization == 1


def test_a_million_requests():
    output_lens = np.random.default_rng(0).integers(1, 500, 1_000_000)
    for policy in ("static", "continuous"):
        start = time.perf_counter()
        timeline = simulate(output_lens, 64, policy)
        assert time.perf_counter() - start < 3
        assert (timeline.spans["end"] - timeline.spans["start"]).sum() == output_lens.sum()
    assert timeline.utilization > 0.999


@pytest.mark.parametrize(
    ("output_lens", "num_lanes", "policy", "said"),
    [
        ([], 4, "static", "output_lens.*empty"),
        ([3, 0, 2], 4, "static", "output_lens.*at least 1.*got 0 at position 1"),
        ([3, -1], 4, "static", "got -1"),
        ([2.5], 4, "static", "output_lens.*whole numbers"),
        ([[1, 2], [3, 4]], 4, "static", "2 dimensions"),
        ([2**52, 2**53], 4, "static", "2\\^53"),
        ([3], 0, "static", "lanes"),
        ([3], 4, "dynamic", "policy must be one of static, continuous"),
    ],
)
def test_bad_timelines(output_lens, num_lanes, policy, said):
    with pytest.raises(ValueError, match=said):
        simulate(output_lens, num_lanes, policy)


# --- the server against a plain one ---------------------------------------------------------------------------------


def plain_step_s(server, decoding, chunks):
    """The step-time equation for contexts that decode and pieces (start, end, last) that are prefilled, summed up."""
    model, bits = server.model, server.kv_bits
    tokens = len(decoding) + sum(end - start for start, end, _ in chunks)
    logits = len(decoding) + sum(last for _, _, last in chunks)
    attended = sum(float(cached_token_layers(model, context)) for context in decoding)
    pairs = sum(summed_token_layers(model, end) - summed_token_layers(model, start) for start, end, _ in chunks)
    kv_bytes = sum(cache_bytes(model, context, 1, bits) for context in decoding)
    for start, end, _ in chunks:
        kv_bytes += cache_bytes(model, start, 1, bits) + (end - start) * bytes_per_token(model, bits)
    return latency.step_time(
        2 * (tokens * (model.matmul_params - model.head_params) + logits * model.head_params),
        model.streamed_weight_bytes(server.weight_bits, num_tokens=tokens),
        attention_flops_per_token_layer(model) * attended
        + attention_flops_per_token_layer(model, absorbed=False) * pairs,
        kv_bytes,
        server.accelerator.peak("bf16"),
        server.accelerator.memory_bandwidth,
        server.overhead_s,
    ).total_s


def plain_start_s(server, now, queue, pending):
    """When a server with free lanes only starts its next batch: the first moment at which the policy's rule holds."""
    moments = [now, *(r.arrival for r in pending), *(r.arrival + server.max_wait_s for r in [*queue, *pending])]
    for moment in sorted(m for m in moments if m >= now):
        here = [r for r in [*queue, *pending] if r.arrival <= moment]
        full, all_here = len(here) >= server.max_batch_size, len(here) == len(queue) + len(pending)
        waited = bool(here) and moment >= min(r.arrival for r in here) + server.max_wait_s
        if {"continuous": bool(here), "static": full or all_here, "dynamic": full or waited}[server.policy]:
            return moment
    raise AssertionError("a batch always starts")


def plain_run(server, traffic):
    """The same server with every step taken by itself and everything counted anew in every step."""
    rows = zip(traffic.arrival_s.tolist(), traffic.prompt_lens.tolist(), traffic.output_lens.tolist(), strict=True)
    requests = [
        SimpleNamespace(id=i, arrival=arrival, output=output, target=prompt, done=0, times=[])
        for i, (arrival, prompt, output) in enumerate(rows)
    ]
    pending, queue, running, now, preempted = list(requests), [], [], 0.0, 0
    busy = 0.0

    def blocks(tokens):
        return math.ceil(tokens / server.block_size)

    def decoders():
        return [r for r in running if r.done >= r.target]

    def lacking():
        held = sum(blocks(max(r.target, r.done)) for r in running)
        return held + sum(blocks(r.done + 1) - blocks(r.done) for r in decoders()) - server.num_blocks

    while pending or queue or running:
        if not running:
            now = plain_start_s(server, now, queue, pending)
        while pending and pending[0].arrival <= now:
            queue.append(pending.pop(0))
        while lacking() > 0:
            victim = max(running, key=lambda r: r.id)
            running.remove(victim)
            victim.target, victim.done = victim.target if victim.done < victim.target else victim.done + 1, 0
            queue.insert(0, victim)
            preempted += 1
        may_join = server.policy == "continuous" or not running
        while may_join and queue and len(running) < server.max_batch_size:
            if lacking() + blocks(queue[0].target) > 0:
                break
            running.append(queue.pop(0))
        decoding = decoders()
        prefilling = [r for r in running if r not in decoding]
        room = math.inf if server.token_budget is None else server.token_budget - len(decoding)
        chunks = []
        for r in prefilling:
            end = min(r.target, r.done + room)
            if end > r.done:
                chunks.append((r, r.done, end, end == r.target))
                room -= end - r.done
        if chunks and server.token_budget is None:
            decoding = []
        took = plain_step_s(server, [r.done + 1 for r in decoding], [chunk[1:] for chunk in chunks])
        now, busy = now + took, busy + took
        for r, _, end, last in chunks:
            r.done = end
            if last:
                r.times.append(now)
        for r in decoding:
            r.done += 1
            r.times.append(now)
        running = [r for r in running if len(r.times) < r.output]
    return requests, preempted, busy


def random_case(rng, policy, token_budget):
    """A small server, often short of memory, and a few requests that it can serve."""
    count = int(rng.integers(1, 15))
    model = KINDS[rng.integers(len(KINDS))]
    prompts, outputs = rng.integers(1, rng.choice([20, 180]), count), rng.integers(1, 60, count)
    block_size = int(rng.choice([1, 5, 16]))
    blocks = -(-(prompts + outputs - 1).max() // block_size) + int(rng.choice([0, 3, 20]))
    limited = rng.random() < 0.75
    server = Server(
        model,
        LAPTOP,
        policy,
        max_batch_size=int(rng.integers(1, 7)),
        token_budget=token_budget,
        kv_budget_bytes=(float(blocks) + 0.5) * block_size * bytes_per_token(model, 8) if limited else None,
        block_size=block_size,
        max_wait_s=float(rng.choice([0.0, 0.3])),
        weight_bits=8,
        kv_bits=8,
        overhead_s=1e-3,
    )
    gap_s = rng.choice([0.0, 0.05, 1.0, 30.0])
    return server, Traffic(np.cumsum(rng.exponential(1, count) * gap_s), prompts, outputs)


@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous"])
@pytest.mark.parametrize("token_budget", [None, 7, 64])
def test_the_server_is_a_step_by_step_one_made_fast(policy, token_budget):
    rng = np.random.default_rng(0)
    preemptions = 0
    for _ in range(60):
        server, traffic = random_case(rng, policy, token_budget)
        report = server.run(traffic)
        requests, preempted, busy = plain_run(server, traffic)
        assert report.first_token_s == pytest.approx([r.times[0] for r in requests], rel=1e-9)
        assert report.finish_s == pytest.approx([r.times[-1] for r in requests], rel=1e-9)
        assert report.num_preemptions == preempted
        assert report.busy_s == pytest.approx(busy, rel=1e-9)
        assert report.output_tokens == traffic.output_lens.sum() == sum(len(r.times) for r in requests)
        gaps = np.sort(np.concatenate([np.diff(r.times) for r in requests]))
        assert np.sort(every_gap(report)) == pytest.approx(gaps, rel=1e-9, abs=1e-12)
        if gaps.size:
            assert report.percentiles("itl_s", [37])["p37"] == pytest.approx(np.percentile(gaps, 37), abs=1e-9)
        assert report.load.waiting.min() >= 0 and report.load.waiting[-1] == 0
        assert report.load.running.min() >= 0 and report.load.running[-1] == 0
        assert report.load.running.max() <= server.max_batch_size
        preemptions += preempted
    assert preemptions > 10  # so that they were compared too


def every_gap(report):
    return np.repeat(report.itl_s.gap_s, report.itl_s.requests.astype(int))


# --- the server against the step-time equation ----------------------------------------------------------------------


@pytest.mark.parametrize("model", KINDS, ids=lambda model: model.name)
@pytest.mark.parametrize("budget", [None, 4096])
def test_a_batch_that_stays_is_prefill_and_tpot(model, budget):
    server = Server(model, A100, token_budget=budget, weight_bits=8, kv_bits=8, overhead_s=1e-4)
    report = server.run(at_once([100] * 8, [60] * 8))
    bits = {"weight_bits": 8, "kv_bits": 8, "overhead_s": 1e-4}
    assert report.ttft_s == pytest.approx(latency.prefill(model, A100, 100, 8, **bits).total_s, rel=1e-9)
    assert report.tpot_s == pytest.approx(latency.tpot(model, A100, 100, 60, batch_size=8, **bits), rel=1e-9)
    steps = [latency.decode_step(model, A100, 8, 100 + i, **bits).total_s for i in range(1, 60)]
    assert every_gap(report) == pytest.approx(np.repeat(steps, 8), rel=1e-9)
    assert report.e2e_s[:7] == pytest.approx(report.ttft_s[:7] + 59 * report.tpot_s[:7])
    assert report.num_steps == 60


def test_tensor_parallelism_is_that_of_the_equation():
    report = Server(LLAMA_3, A100, num_accelerators=4).run(at_once([500], [2]))
    assert report.ttft_s[0] == pytest.approx(latency.prefill(LLAMA_3, A100, 500, num_accelerators=4).total_s)
    assert report.tpot_s[0] == pytest.approx(latency.decode_step(LLAMA_3, A100, 1, 501, num_accelerators=4).total_s)


# --- the server against queueing theory -----------------------------------------------------------------------------


def one_at_a_time(output_len):
    """A server with one lane, and how long each request occupies it."""
    server = Server(SMALL, A100, max_batch_size=1)
    return server, float(server.run(at_once([100], [output_len])).e2e_s[0])


@pytest.mark.parametrize(("load", "count"), [(0.3, 60_000), (0.6, 60_000), (0.9, 400_000)])
def test_the_mean_wait_is_that_of_m_d_1(load, count):
    # Pollaczek-Khinchine with a constant service time s: load x s / (2 (1 - load))
    server, service_s = one_at_a_time(1)
    report = server.run(poisson_traffic(load / service_s, count, 100, 1, seed=5))
    wait_s = float(np.mean(report.e2e_s)) - service_s
    assert wait_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.03)
    assert report.utilization == pytest.approx(load, rel=0.02)


@pytest.mark.parametrize("cv", [0.2, 1.0, 4.0])
def test_each_wait_is_lindleys(cv):
    server, service_s = one_at_a_time(5)
    traffic = bursty_traffic(0.8 / service_s, 3000, 100, 5, cv=cv, seed=1)
    wait_s, expected = 0.0, []
    for gap in [*np.diff(traffic.arrival_s), 0.0]:
        expected.append(wait_s)
        wait_s = max(0.0, wait_s + service_s - gap)
    assert server.run(traffic).e2e_s - service_s == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("policy", "rate"), [("static", 5.0), ("dynamic", 5.0), ("continuous", 20.0)])
def test_littles_law(policy, rate):
    traffic = poisson_traffic(rate, 30_000, Lognormal(300), Lognormal(80), seed=3)
    report = Server(LLAMA_3, H100, policy, max_batch_size=32, kv_budget_bytes=1e9).run(traffic)
    # The time average is read off the trace in the middle of the run, the rate is the nominal one.
    time_s, waiting, running = report.load
    inside = np.linspace(100, traffic.arrival_s[-1] - 100, 200_000)
    in_system = (waiting + running)[np.searchsorted(time_s, inside, side="right") - 1].mean()
    assert in_system == pytest.approx(rate * report.e2e_s.mean(), rel=0.01)
    # And over the whole run, with the measured rate, to rounding.
    mean = report.mean_waiting + report.mean_batch_size * report.busy_s / report.duration_s
    assert mean == pytest.approx(report.requests_per_s * report.e2e_s.mean(), rel=1e-9)


def test_throughput_does_not_depend_on_the_length_of_the_run():
    server = Server(LLAMA_3, H100, max_batch_size=16)
    rates = [server.run(poisson_traffic(1000, n, 200, 100, seed=3)).tokens_per_s for n in (1000, 8000)]
    assert rates[0] == pytest.approx(rates[1], rel=0.02)


# --- policies, chunks, memory ---------------------------------------------------------------------------------------


def test_continuous_batching_serves_more_sooner():
    traffic = poisson_traffic(12, 2000, 200, Lognormal(150), seed=4)
    reports = {p: Server(LLAMA_3, H100, p, max_batch_size=16).run(traffic) for p in ("static", "dynamic", "continuous")}
    slo = SLO(ttft_s=0.5, tpot_s=0.02)
    assert reports["continuous"].tokens_per_s > 1.2 * reports["static"].tokens_per_s
    assert reports["continuous"].goodput_per_s(slo) > 2 * reports["dynamic"].goodput_per_s(slo)
    assert reports["continuous"].mean_waiting < reports["dynamic"].mean_waiting


def test_who_waits_for_whom():
    traffic = Traffic([0.0, 1.0, 10.0], [10, 10, 10], [3, 3, 3])

    def first_tokens(policy):
        server = Server(SMALL, A100, policy, max_batch_size=2, max_wait_s=0.2)
        return np.round(server.run(traffic).first_token_s, 1).tolist()

    assert first_tokens("continuous") == [0, 1, 10]
    assert first_tokens("dynamic") == [0.2, 1.2, 10.2]
    assert first_tokens("static") == [1, 1, 10]  # no one comes after the third


def test_larger_chunks_make_more_tokens_and_longer_gaps():
    """F24: 105.5, 144.9, 157.0 tokens/s and 30.4, 46.5, 76.0 ms at 32, 128 and 512 tokens; its shape is what holds.

    Like the source a small model on an Apple laptop. The tokens rise because a larger step divides its overhead and
    its weight read among more tokens.
    """
    traffic = poisson_traffic(1e6, 300, Lognormal(512), Lognormal(64))
    model, laptop = get_model("qwen3-0.6b"), get_accelerator("apple-m3-max")
    reports = [
        Server(model, laptop, max_batch_size=16, token_budget=budget, overhead_s=0.01).run(traffic)
        for budget in (32, 128, 512)
    ]
    rates = [report.tokens_per_s for report in reports]
    gaps = [report.percentiles("itl_s")["p95"] for report in reports]
    assert rates[0] < 0.9 * rates[1] < 0.9 * rates[2]
    assert gaps[0] < 0.9 * gaps[1] < 0.9**2 * gaps[2]


def test_chunks_keep_a_long_prompt_from_stopping_everyone():
    traffic = Traffic([0.0, 0.05], [100, 20_000], [200, 2])
    whole, chunked = (Server(LLAMA_3, H100, token_budget=budget).run(traffic) for budget in (None, 512))
    assert whole.percentiles("itl_s", [100])["p100"] > 10 * chunked.percentiles("itl_s", [100])["p100"]
    assert whole.ttft_s[1] < chunked.ttft_s[1]


@pytest.mark.parametrize("budget", [None, 128])
def test_preemption_costs_time_and_no_tokens(budget):
    traffic = poisson_traffic(20, 800, 300, Lognormal(200), seed=6)
    room = Server(LLAMA_3, H100, token_budget=budget).run(traffic)
    tight = Server(LLAMA_3, H100, token_budget=budget, kv_budget_bytes=1.5e9).run(traffic)
    assert room.num_preemptions == 0
    assert tight.num_preemptions > 20
    assert tight.output_tokens == room.output_tokens == traffic.output_lens.sum()
    assert np.all(tight.tpot_s > 0)
    assert tight.mean_batch_size < room.mean_batch_size
    assert len(tight.admissions_s) == len(traffic) + tight.num_preemptions
    gaps = traffic.output_lens - 1  # each request has its own gaps, all of them
    assert tight.itl_s.requests.sum() == gaps.sum()
    assert tight.itl_s.gap_s @ tight.itl_s.requests == pytest.approx((tight.finish_s - tight.first_token_s).sum())


def test_a_request_that_can_never_fit():
    block_bytes = 16 * bytes_per_token(LLAMA_3)
    server = Server(LLAMA_3, H100, kv_budget_bytes=10 * block_bytes)
    assert server.run(at_once([100], [61])).num_preemptions == 0  # 160 tokens: the last is not cached
    with pytest.raises(ValueError, match=r"request 1 can never be served.*100 prompt and 62 output.*11 blocks.*10 blo"):
        server.run(at_once([10, 100], [10, 62]))


def test_one_token_has_a_ttft_and_no_gap():
    report = Server(LLAMA_3, H100).run(at_once([100, 100], [1, 1]))
    assert len(report.tpot_s) == 0 and report.percentiles("tpot_s") == {} and report.percentiles("itl_s") == {}
    assert report.slo_share(SLO(ttft_s=1, tpot_s=1e-9)) == 1
    assert report.slo_share(SLO(ttft_s=1e-9, tpot_s=1)) == 0


def test_the_report():
    traffic = poisson_traffic(10, 500, 200, Lognormal(100), seed=7)
    report = Server(LLAMA_3, H100).run(traffic)
    for measure, values in (("ttft_s", report.ttft_s), ("tpot_s", report.tpot_s), ("e2e_s", report.e2e_s)):
        expected = np.percentile(values, [50, 90, 95, 99])
        assert list(report.percentiles(measure).values()) == pytest.approx(expected)
    good = [
        first <= 0.008 and (n == 1 or (end - first) / (n - 1) <= 0.0048)
        for first, end, n in zip(report.ttft_s, report.e2e_s, traffic.output_lens, strict=True)
    ]
    assert 0 < sum(good) < 500
    assert report.goodput_per_s(SLO(0.008, 0.0048)) == pytest.approx(sum(good) / report.duration_s)
    assert report.goodput_per_s(SLO(100, 100)) == report.requests_per_s
    assert 0 < report.utilization <= 1 <= report.mean_batch_size <= 64
    assert "500 requests" in repr(report) and "0 preemptions" in repr(report)
    with pytest.raises(ValueError, match="measure must be one of ttft_s"):
        report.percentiles("speed")
    with pytest.raises(ValueError, match="percents"):
        report.percentiles("ttft_s", [101])


def test_no_more_requests_run_than_there_are_lanes():
    report = Server(LLAMA_3, H100, max_batch_size=8).run(poisson_traffic(50, 3000, Lognormal(100), Lognormal(60)))
    assert report.load.running.max() == 8
    assert report.load.waiting.max() > 8
    assert np.isfinite(report.finish_s).all()


def test_the_same_seed_gives_the_same_report():
    reports = [Server(LLAMA_3, H100).run(poisson_traffic(10, 200, 50, Lognormal(40), seed=8)) for _ in range(2)]
    assert reports[0].finish_s.tolist() == reports[1].finish_s.tolist()
    assert poisson_traffic(10, 200, 50, 40, seed=9).arrival_s[0] != poisson_traffic(10, 200, 50, 40).arrival_s[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "magic"}, "policy must be one of static, dynamic, continuous"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"token_budget": 0}, "token_budget"),
        ({"kv_budget_bytes": -1.0}, "kv_budget_bytes"),
        ({"kv_budget_bytes": math.nan}, "kv_budget_bytes"),
        ({"block_size": 0}, "block_size"),
        ({"max_wait_s": -1}, "max_wait_s"),
        ({"overhead_s": math.nan}, "overhead_s"),
        ({"weight_bits": 5}, "weight_bits"),
        ({"kv_bits": 0}, "kv_bits"),
        ({"num_accelerators": 3}, "num_accelerators"),
        ({"dtype": "fp64"}, "no published peak"),
    ],
)
def test_bad_servers(options, said):
    with pytest.raises(ValueError, match=said):
        Server(LLAMA_3, H100, **options)


def test_a_server_wants_traffic_and_an_slo_times():
    with pytest.raises(ValueError, match="requests must be a Traffic"):
        Server(LLAMA_3, H100).run([1, 2, 3])
    with pytest.raises(ValueError, match="tpot_s"):
        SLO(ttft_s=1, tpot_s=0)


# --- traffic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_spread_asked_for(cv):
    gaps = np.diff(bursty_traffic(4.0, 200_000, 10, 10, cv=cv).arrival_s)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)
    if cv == 1:
        assert np.mean(gaps > 0.25) == pytest.approx(math.exp(-1), rel=0.02)


def test_drawn_lengths():
    drawn = Lognormal(mean=400, cv=0.8).draw(np.random.default_rng(0), 100_000)
    assert drawn.mean() == pytest.approx(400, rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(0.8, rel=0.03)
    assert drawn.min() >= 1
    assert Lognormal(400, 0.8, maximum=500).draw(np.random.default_rng(0), 1000).max() == 500


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_bad_rates(rate):
    for traffic in (poisson_traffic, bursty_traffic):
        with pytest.raises(ValueError, match="rate_per_s must be a finite number above 0"):
            traffic(rate, 10, 10, 10)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: poisson_traffic(1, 0, 10, 10), "num_requests"),
        (lambda: poisson_traffic(1, 5, 0, 10), "prompt_len"),
        (lambda: poisson_traffic(1, 5, 10, -3), "output_len"),
        (lambda: bursty_traffic(1, 5, 10, 10, cv=0), "cv"),
        (lambda: Lognormal(mean=0), "mean"),
        (lambda: Lognormal(mean=10, maximum=0), "maximum"),
        (lambda: Traffic([], [], []), "prompt_lens.*empty"),
        (lambda: Traffic([0, 1], [5], [5, 5]), "one size"),
        (lambda: Traffic([0, 2, 1], [5] * 3, [5] * 3), "request 2 arrives before request 1"),
        (lambda: Traffic([0, math.nan], [5] * 2, [5] * 2), "arrival_s"),
        (lambda: Traffic([-1, 0], [5] * 2, [5] * 2), "arrival_s"),
    ],
)
def test_bad_traffic(make, said):
    with pytest.raises(ValueError, match=said):
        make()


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109

2023-11-17 00:00:00.0000000,879,55
"""


def test_both_headers_are_read(tmp_path):
    azure = read_traffic(AZURE)
    assert azure.arrival_s == pytest.approx([0, 4.314579, 20653.31941])
    assert azure.prompt_lens.tolist() == [374, 396, 879]
    assert azure.output_lens.tolist() == [44, 109, 55]
    zoned = read_traffic(AZURE.replace("0,", "+00:00,", 1).replace("0,396", "+00:00,396").replace("0,879", "Z,879"))
    assert zoned.arrival_s == pytest.approx(azure.arrival_s, abs=1e-5)
    path = tmp_path / "traffic.csv"
    path.write_bytes(b"\xef\xbb\xbfuser, output_len ,Arrival_s,prompt_len\r\nann,7,0.5,3\r\nbob,8.0,0.5,4\r\n")
    for source in (path, str(path)):
        plain = read_traffic(source)
        assert plain.arrival_s.tolist() == [0.5, 0.5]
        assert plain.prompt_lens.tolist() == [3, 4] and plain.output_lens.tolist() == [7, 8]
        assert plain.prompt_lens.dtype == np.int64


HEADER = "arrival_s,prompt_len,output_len\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n", "empty"),
        (HEADER, "header but no requests"),
        ("time,prompt_len,output_len\n0,1,1\n", "no column arrival_s or TIMESTAMP.*it has time, prompt_len"),
        ("arrival_s;prompt_len\n0;1\n", "TIMESTAMP and no column prompt_len or ContextTokens and no column output_len"),
        (HEADER + "0,5,5\n1,-5,5\n", "line 3: '-5' is not a whole number of prompt tokens of at least 1"),
        (HEADER + "0,5,0\n", "line 2: '0' is not a whole number of output tokens"),
        (HEADER + "0,5,5\n\n1,many,5\n", "line 4: 'many' is not a whole number of prompt"),
        (HEADER + "0,5,2.5\n", "'2.5' is not"),
        (HEADER + "0,5,1e400\n", "'1e400' is not"),
        (HEADER + "0,nan,5\n", "'nan' is not"),
        (HEADER + "nan,5,5\n", "'nan' is not a finite number of seconds"),
        (HEADER + "-1,5,5\n", "'-1' is not a finite number of seconds of at least 0"),
        (HEADER + "noon,5,5\n", "'noon' is not a finite number of seconds of at least 0, or a time such as"),
        (HEADER + "0,5,5\n2023-11-16 18:15:46,5,5\n", "line 3: '2023-11-16 18:15:46' is not"),
        (HEADER + "2023-11-16 18:15:46,5,5\n2023-11-16 18:15:47Z,5,5\n", "line 3.*in every row"),
        (HEADER + "0,5\n", "line 2 has 2 columns, the header has 3"),
        (HEADER + "0,5,5\n2,5,5\n1,5,5\n", "line 4 arrives before line 3.*sort=True"),
        (HEADER + '0,5,"' + "5" * 200_000 + "\n", "line 2 is not CSV"),
    ],
)
def test_bad_files(text, said):
    with pytest.raises(ValueError, match=said):
        read_traffic(text)


def test_files_that_are_not_there_or_not_text(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no traffic file at 'nowhere\.csv'"):
        read_traffic("nowhere.csv")
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(ValueError, match=r"trace\.csv\.gz is not UTF-8 text"):
        read_traffic(path)
    with pytest.raises(ValueError, match="source must be a CSV file"):
        read_traffic(None)


def test_sorting_on_request():
    traffic = read_traffic(HEADER + "3,30,5\n1,10,6\n2,20,7\n1,11,8\n", sort=True)
    assert traffic.arrival_s.tolist() == [1, 1, 2, 3]
    assert traffic.prompt_lens.tolist() == [10, 11, 20, 30]
    times = read_traffic(HEADER + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:40,2,2\n", sort=True)
    assert times.arrival_s.tolist() == [0, 6] and times.prompt_lens.tolist() == [2, 1]


def test_a_million_rows():
    text = HEADER + "".join(f"{i / 8},{i % 900 + 1},{i % 70 + 1}\n" for i in range(1_000_000))
    start = time.perf_counter()
    traffic = read_traffic(text)
    assert time.perf_counter() - start < 15
    assert len(traffic) == 1_000_000 and traffic.arrival_s[-1] == 999_999 / 8


# --- cost per token, and what ends it -------------------------------------------------------------------------------


def test_the_parts_of_a_token():
    sizes = [1, 2, 8, 64, 200, 512]
    parts = step_parts(LLAMA_3, A100, sizes, 1000)
    for i, size in enumerate(sizes):
        step = latency.decode_step(LLAMA_3, A100, size, 1000)
        assert parts.total_s[i] == pytest.approx(step.total_s / size)
        assert parts.marginal_tokens_per_s[i] == pytest.approx(
            latency.decode_step(LLAMA_3, A100, size + 1, 1000).tokens_per_s - step.tokens_per_s
        )
    assert parts.weights_s * sizes == pytest.approx(np.full(6, parts.weights_s[0]))  # one read, divided
    assert np.ptp(parts.kv_s) == pytest.approx(0, abs=1e-15)  # each request has its own cache
    assert np.ptp(parts.compute_s) == pytest.approx(0, abs=1e-15)
    assert np.all(parts.total_s <= parts.weights_s + parts.kv_s + parts.compute_s)
    assert np.all(np.diff(parts.marginal_tokens_per_s) < 1e-9)  # ever less for one more
    with pytest.raises(ValueError, match="batch_sizes"):
        step_parts(LLAMA_3, A100, [0], 1000)


def test_a_mixture_reads_more_experts_with_every_request():
    model = get_model("mixtral-8x7b")
    parts = step_parts(model, H100, [1, 2, 4, 64], 100)
    read = parts.weights_s * parts.batch_sizes
    assert read[1] > 1.5 * read[0] and read[3] < 1.2 * read[2] * 8 / model.distinct_experts(4)


def test_the_memory_ceiling():
    # (80 GB - 13.48 GB of weights) / 2048 tokens of 524,288 bytes = 61.9
    assert memory_ceiling(LLAMA_2, A100, 2048) == 61
    assert memory_ceiling(LLAMA_2, A100, 2048, kv_bits=8) == 123
    assert memory_ceiling(get_model("llama-3.1-70b"), A100, 2048) == 0  # the weights alone do not fit
    assert memory_ceiling(get_model("llama-3.1-70b"), A100, 2048, weight_bits=4) > 0
    for count in (61, 62):
        used = LLAMA_2.weight_bytes() + cache_bytes(LLAMA_2, 2048, count)
        assert (used <= 80e9) == (count == 61)
    with pytest.raises(ValueError, match="memory_bytes"):
        memory_ceiling(LLAMA_2, dataclasses.replace(A100, memory_bytes=None), 2048)


@pytest.mark.parametrize("model", [LLAMA_2, LLAMA_3, *KINDS], ids=lambda model: model.name)
@pytest.mark.parametrize("context_len", [0, 1, 100, 4000])
def test_the_compute_bound_batch_is_the_first(model, context_len):
    def bound_by(size):
        return latency.decode_step(model, A100, size, context_len).bound_by

    found = compute_bound_batch(model, A100, context_len, overhead_s=1.0)
    if found is None:
        assert {bound_by(size) for size in (1, 100, 10_000, 10**6)} == {"memory"}
    else:
        assert bound_by(found) == "compute"
        assert found == 1 or bound_by(found - 1) == "memory"


def test_which_limit_comes_first():
    long, short = batch_limits(LLAMA_2, A100, 2048), batch_limits(LLAMA_2, A100, 10)
    assert (long.memory, long.compute, long.first) == (61, None, "memory")
    assert (short.compute, short.first) == (154, "compute")  # 312e12 / 2.039e12 = 153.02 at 2 bytes a weight
    assert batch_limits(LLAMA_2, A100, 100, weight_bits=8).compute == 77
    none_fits = batch_limits(get_model("llama-3.1-405b"), A100, 100)
    assert (none_fits.memory, none_fits.first) == (0, "memory")
