"""Coding tasks of lesson 4: static and continuous batching, latencies, goodput, and a percentile of the wrong thing."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lessonlib import batching
from lessonlib.batching.traffic import Traffic
from lessonlib.practice.tasks.task import Task, rows


def _lanes(policy: Any, order: Callable[[Sequence[int]], Sequence[int]] = tuple) -> Callable[..., tuple[int, float]]:
    def run(output_lens: Sequence[int], lanes: int) -> tuple[int, float]:
        timeline = batching.simulate(order(output_lens), lanes, policy)
        return timeline.steps, timeline.utilization

    return run


def _dealt_out(output_lens: Sequence[int], lanes: int) -> tuple[int, float]:
    steps = max(sum(output_lens[lane::lanes]) for lane in range(lanes))
    return steps, sum(output_lens) / lanes / steps


def _perfect(output_lens: Sequence[int], lanes: int) -> tuple[int, float]:
    steps = -(-sum(output_lens) // lanes)
    return steps, sum(output_lens) / lanes / steps


def _idle(policy: Any) -> Callable[..., tuple[int, float]]:
    return lambda *g: (_lanes(policy)(*g)[0], 1 - _lanes(policy)(*g)[1])


def _per_batch(output_lens: Sequence[int], lanes: int) -> tuple[int, float]:
    batches = [output_lens[i : i + lanes] for i in range(0, len(output_lens), lanes)]
    shares = [sum(batch) / (lanes * max(batch)) for batch in batches]
    return _lanes("static")(output_lens, lanes)[0], float(np.mean(shares))


def _lengths(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).geometric(0.02, count).tolist())


_QUEUES = rows(
    "output_lens lanes",
    (batching.REFERENCE_LENS, 4),
    (_lengths(11, 0), 3),
    (_lengths(24, 1), 8),
    (_lengths(30, 2), 1),
    (_lengths(3, 3), 5),  # more lanes than requests
)
_STEPS = ("steps", "used share")

_STATIC = Task(
    "04/static",
    "the number of steps, and the share of all lanes' steps that made a token",
    _lanes("static"),
    _QUEUES,
    {
        "continuous batching; here the next requests wait until the whole batch has ended": _lanes("continuous"),
        "all tokens divided by the lanes; a batch takes as long as its longest request": _perfect,
        "the longest request of all; each batch has its own": lambda output_lens, lanes: (
            max(output_lens),
            sum(output_lens) / lanes / max(output_lens),
        ),
        "the idle share; the used one is asked for": _idle("static"),
        "an average over the batches; a long batch counts for more steps": _per_batch,
        "sorted by length; requests are served in the order in which they came": _lanes(
            "static", lambda lens: sorted(lens, reverse=True)
        ),
    },
    parts=_STEPS,
)

_CONTINUOUS = Task(
    "04/continuous",
    "the number of steps, and the share of all lanes' steps that made a token",
    _lanes("continuous"),
    _QUEUES,
    {
        "static batching; here a lane that ends takes the next request at once": _lanes("static"),
        "all tokens divided by the lanes; that needs every lane busy to the very end": _perfect,
        "the idle share; the used one is asked for": _idle("continuous"),
        "the longest request first; they are served in the order in which they came": _lanes(
            "continuous", lambda lens: sorted(lens, reverse=True)
        ),
        "the shortest request first; they are served in the order in which they came": _lanes("continuous", sorted),
        "requests dealt out beforehand; the next request goes to the lane that is free first": _dealt_out,
    },
    parts=_STEPS,
)


def _report(arrivals_s: Sequence[float], token_times_s: Sequence[Sequence[float]]) -> batching.Report:
    """A report on requests whose tokens came at these times."""
    lengths = [len(times) for times in token_times_s]
    first, last = (np.array([times[place] for times in token_times_s]) for place in (0, -1))
    gaps = np.concatenate([np.diff(times) for times in token_times_s])
    ones = np.ones_like(gaps)
    return batching.Report(
        traffic=Traffic(np.array(arrivals_s), np.ones(len(lengths), dtype=int), np.array(lengths)),
        first_token_s=first,
        finish_s=last,
        admissions_s=np.array(arrivals_s),
        preemptions_s=np.array([]),
        gap_runs=np.column_stack([gaps, 0 * ones, ones, ones]),
        busy_s=1.0,
        num_steps=1,
    )


def _times(arrival_s: float, token_times_s: Sequence[float]) -> tuple[float, ...]:
    report = _report([arrival_s], [token_times_s])
    longest_gap = report.percentiles("itl_s", [100])["p100"]
    return float(report.ttft_s[0]), float(report.tpot_s[0]), longest_gap, float(report.e2e_s[0])


def _times_slip(place: int, value: Callable[[float, np.ndarray], float]) -> Callable[..., tuple[float, ...]]:
    """The right times but one."""

    def slip(arrival_s: float, token_times_s: Sequence[float]) -> tuple[float, ...]:
        times = _times(arrival_s, token_times_s)
        return (*times[:place], value(arrival_s, np.array(token_times_s)), *times[place + 1 :])

    return slip


def _tokens_at(start_s: float, count: int, seed: int) -> tuple[float, ...]:
    """Times of a request's tokens: a wait, then gaps of which some are long (another prompt came between)."""
    rng = np.random.default_rng(seed)
    gaps = rng.uniform(0.02, 0.05, count) + (rng.random(count) < 0.2) * rng.uniform(0.1, 0.4, count)
    gaps[0] = rng.uniform(0.1, 1.0)
    return tuple((start_s + np.cumsum(gaps)).round(3).tolist())


_TIMES = Task(
    "04/times",
    "TTFT, TPOT, the longest gap between two tokens, and the whole time from arrival to last token, in seconds",
    _times,
    rows(
        "arrival_s token_times_s",
        (0.0, (0.5, 0.54, 0.58, 0.75)),
        (12.5, _tokens_at(12.5, 8, 1)),
        (3.25, _tokens_at(3.25, 5, 2)),
        (100.0, (100.2, 100.9)),
    ),
    {
        "TTFT on the clock; it counts from the request's arrival": _times_slip(0, lambda arrival, times: times[0]),
        "TPOT over all tokens; between n tokens there are n - 1 gaps": _times_slip(
            1, lambda arrival, times: (times[-1] - times[0]) / len(times)
        ),
        "TPOT with the wait for the first token in it; it is the mean over the tokens after the first": _times_slip(
            1, lambda arrival, times: (times[-1] - arrival) / len(times)
        ),
        "the median gap; TPOT is the mean": _times_slip(1, lambda arrival, times: float(np.median(np.diff(times)))),
        "the wait for the first token counted as a gap; a gap lies between two tokens": _times_slip(
            2, lambda arrival, times: float(np.diff([arrival, *times]).max())
        ),
        "the whole time counts from the arrival": _times_slip(3, lambda arrival, times: times[-1] - times[0]),
    },
    "s",
    ("TTFT", "TPOT", "longest gap", "whole time"),
)


def _goodput(
    arrivals_s: Sequence[float], token_times_s: Sequence[Sequence[float]], ttft_limit_s: float, tpot_limit_s: float
) -> float:
    return _report(arrivals_s, token_times_s).goodput_per_s(batching.SLO(ttft_limit_s, tpot_limit_s))


def _goodput_slip(
    good: Callable[..., Any] = lambda ttft, tpot, **_: ttft & tpot, over: Callable[..., float] | None = None
) -> Callable[..., float]:
    """Count other requests as good (arrays of bool for each limit are given), or divide by another time."""

    def slip(
        arrivals_s: Sequence[float], token_times_s: Sequence[Sequence[float]], ttft_limit_s: float, tpot_limit_s: float
    ) -> float:
        report, lengths = _report(arrivals_s, token_times_s), np.array([len(times) for times in token_times_s])
        decode_s = report.finish_s - report.first_token_s
        worst = np.array([max(np.diff(times), default=0.0) for times in token_times_s])
        counted = good(
            ttft=report.ttft_s <= ttft_limit_s,
            tpot=decode_s <= tpot_limit_s * (lengths - 1),
            per_token=decode_s <= tpot_limit_s * lengths,
            worst=worst <= tpot_limit_s,
            lengths=lengths,
        )
        return float(np.sum(counted)) / (over(report) if over else report.duration_s)

    return slip


def _served(num_requests: int, gap_s: float, seed: int) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    rng = np.random.default_rng(seed)
    arrivals = tuple((7.0 + np.cumsum(rng.exponential(gap_s, num_requests))).round(2).tolist())
    counts = rng.integers(3, 7, num_requests)
    return arrivals, tuple(
        _tokens_at(at, int(n), seed + i) for i, (at, n) in enumerate(zip(arrivals, counts, strict=True))
    )


_GOODPUT = Task(
    "04/goodput",
    "requests per second that meet both limits, from the first arrival to the last token",
    _goodput,
    rows(
        "arrivals_s token_times_s ttft_limit_s tpot_limit_s",
        (*_served(4, 0.5, 10), 0.7, 0.09),
        (*_served(6, 0.3, 20), 0.5, 0.1),
        (*_served(7, 0.2, 33), 0.8, 0.05),
        ((2.0, 2.5), ((2.3,), (2.7, 2.9, 3.0)), 0.25, 0.2),  # the first has no gap, but comes too late
    ),
    {
        "throughput: requests that miss a limit count as well": _goodput_slip(lambda ttft, **_: np.ones_like(ttft)),
        "TTFT alone; both limits have to be met": _goodput_slip(lambda ttft, **_: ttft),
        "TPOT alone; both limits have to be met": _goodput_slip(lambda tpot, **_: tpot),
        "either limit; both have to be met": _goodput_slip(lambda ttft, tpot, **_: ttft | tpot),
        "a share of the requests; divide by the time, not by how many they are": _goodput_slip(
            over=lambda report: len(report.traffic)
        ),
        "the time counted from 0; it runs from the first arrival": _goodput_slip(
            over=lambda report: float(report.finish_s.max())
        ),
        "the time ends with the last token, not with the last arrival": _goodput_slip(
            over=lambda report: float(np.ptp(report.traffic.arrival_s))
        ),
        "TPOT over all tokens; between n tokens there are n - 1 gaps": _goodput_slip(
            lambda ttft, per_token, **_: ttft & per_token
        ),
        "the longest gap held against the limit; TPOT is a request's mean gap": _goodput_slip(
            lambda ttft, worst, **_: ttft & worst
        ),
        "tokens; goodput counts requests": _goodput_slip(lambda ttft, tpot, lengths, **_: (ttft & tpot) * lengths),
    },
    "request/s",
)


def _p99_itl(token_times_s: Sequence[Sequence[float]]) -> float:
    return _report([0.0] * len(token_times_s), token_times_s).percentiles("itl_s", [99])["p99"]


def _per_request(token_times_s: Sequence[Sequence[float]], of_gaps: Callable[..., Any]) -> list[float]:
    return [float(of_gaps(np.diff(times))) for times in token_times_s]


_ITL = Task(
    "04/p99-itl",
    "the 99th percentile of all gaps between two tokens of one request, in seconds",
    _p99_itl,
    tuple(
        {"token_times_s": tuple(_tokens_at(0.5 * i, count, seed + i) for i, count in enumerate(counts))}
        for seed, counts in ((40, (3, 9, 5)), (50, (12, 4)), (61, (6, 6, 6, 6)))
    ),
    {
        "a percentile of TPOT: a mean gap hides the long ones; pool all gaps, then take the percentile": (
            lambda times: float(np.percentile(_per_request(times, np.mean), 99))
        ),
        "a mean of percentiles, which is no percentile of anything: pool all gaps first": (
            lambda times: float(np.mean(_per_request(times, lambda gaps: np.percentile(gaps, 99))))
        ),
        "the longest gap; the 99th percentile lies just below it": lambda times: max(_per_request(times, np.max)),
        "from one request's last token to another's first is no gap": (
            lambda times: float(np.percentile(np.diff(np.concatenate(times)), 99))
        ),
        "the median; the 99th percentile is asked for": (
            lambda times: float(np.percentile(np.concatenate([np.diff(t) for t in times]), 50))
        ),
    },
    "s",
)


TASKS = (_STATIC, _CONTINUOUS, _TIMES, _GOODPUT, _ITL)
