"""What users of a server saw and what the server did, from the times at which its tokens appeared.

TTFT is the time from a request's arrival to its first token: queue and prefill. ITL is every gap between two tokens
of one request, so that its percentiles are over gaps; TPOT is one request's mean gap, so that its percentiles are
over requests. End to end = TTFT + (output tokens - 1) x TPOT.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lessonlib.batching.traffic import Traffic
from lessonlib.checks import check_choice, check_number
from lessonlib.latency import SLO
from lessonlib.units import fmt

MEASURES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


class Gaps(NamedTuple):
    """Times between two tokens of one request (seconds), and how many requests had each in one step."""

    gap_s: np.ndarray
    requests: np.ndarray


class Load(NamedTuple):
    """Requests waiting and requests running, from each time (seconds) until the next."""

    time_s: np.ndarray
    waiting: np.ndarray
    running: np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """The outcome of `Server.run`. Times are in seconds on the clock of the traffic's arrivals."""

    traffic: Traffic
    first_token_s: np.ndarray
    finish_s: np.ndarray
    admissions_s: np.ndarray
    """when a request got a lane; once for each request, and again after each preemption"""
    preemptions_s: np.ndarray
    gap_runs: np.ndarray
    """a row (gap, growth, steps, requests): in each of `steps` steps all of `requests` requests had the same gap, which
    grew by `growth` from step to step"""
    busy_s: float
    """time spent in steps"""
    num_steps: int

    @property
    def ttft_s(self) -> np.ndarray:
        """Time to first token of each request."""
        return self.first_token_s - self.traffic.arrival_s

    @property
    def e2e_s(self) -> np.ndarray:
        """Time from arrival to last token of each request."""
        return self.finish_s - self.traffic.arrival_s

    @property
    def tpot_s(self) -> np.ndarray:
        """Time per output token after the first, of each request that has at least two tokens."""
        gaps = self.traffic.output_lens - 1
        return (self.finish_s - self.first_token_s)[gaps > 0] / gaps[gaps > 0]

    @cached_property
    def itl_s(self) -> Gaps:
        """Inter-token latencies: every gap, with the number of requests that had it at that step."""
        gap, growth, steps, requests = self.gap_runs.T
        steps = steps.astype(int)
        step_in_run = np.arange(steps.sum()) - np.repeat(np.cumsum(steps) - steps, steps)
        return Gaps(np.repeat(gap, steps) + np.repeat(growth, steps) * step_in_run, np.repeat(requests, steps))

    def percentiles(self, measure: str, percents: Iterable[float] = (50, 90, 95, 99)) -> dict[str, float]:
        """Percentiles of "ttft_s", "tpot_s", "itl_s" or "e2e_s", as {"p50": seconds, ...}.

        Between two values the percentile is interpolated, as numpy does it. Empty if nothing was measured: requests
        of one token have no gaps. Raises ValueError for another measure, or a percent outside 0 to 100.
        """
        values = getattr(self, check_choice("measure", measure, MEASURES))
        gaps = values if isinstance(values, Gaps) else Gaps(values, np.ones(len(values)))
        percents = [check_number("percents", percent) for percent in percents]
        if max(percents, default=0) > 100:
            raise ValueError(f"percents must be at most 100, got {max(percents):g}")
        if not len(gaps.gap_s):
            return {}
        order = np.argsort(gaps.gap_s)
        ranked, ends = gaps.gap_s[order], np.cumsum(gaps.requests[order])
        place = np.array(percents) / 100 * (ends[-1] - 1)
        below = ranked[np.searchsorted(ends, np.floor(place), side="right")]
        above = ranked[np.searchsorted(ends, np.ceil(place), side="right")]
        found = below + (above - below) * (place % 1)
        return {f"p{percent:g}": float(value) for percent, value in zip(percents, found, strict=True)}

    @property
    def output_tokens(self) -> int:
        """Tokens delivered: each request's first, and one for each gap."""
        return int(np.isfinite(self.first_token_s).sum() + self.gap_runs[:, 2] @ self.gap_runs[:, 3])

    @property
    def num_preemptions(self) -> int:
        """How often a running request lost its lane and its cache."""
        return len(self.preemptions_s)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last token."""
        return float(self.finish_s.max() - self.traffic.arrival_s[0])

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of `duration_s`."""
        return self.output_tokens / self.duration_s

    @property
    def requests_per_s(self) -> float:
        """Requests finished per second of `duration_s`."""
        return len(self.traffic) / self.duration_s

    @property
    def utilization(self) -> float:
        """Share of `duration_s` in which a step was running, 0 to 1."""
        return min(1.0, self.busy_s / self.duration_s)  # the two sums are rounded differently

    def slo_share(self, slo: SLO) -> float:
        """Share of the requests that meet both limits, 0 to 1. A request of one token has only a TTFT to meet."""
        gaps = self.traffic.output_lens - 1
        return float(np.mean((self.ttft_s <= slo.ttft_s) & (self.finish_s - self.first_token_s <= slo.tpot_s * gaps)))

    def goodput_per_s(self, slo: SLO) -> float:
        """Goodput: requests per second that meet both limits of `slo`."""
        return self.slo_share(slo) * self.requests_per_s

    @cached_property
    def load(self) -> Load:
        """The queue and the batch over time."""
        moves = (  # (when, change in waiting, change in running)
            (self.traffic.arrival_s, 1, 0),
            (self.admissions_s, -1, 1),
            (self.preemptions_s, 1, -1),
            (self.finish_s, 0, -1),
        )
        times = np.concatenate([when for when, _, _ in moves])
        changes = np.concatenate([np.tile((waiting, running), (len(when), 1)) for when, waiting, running in moves])
        order = np.argsort(times)
        times, counts = times[order], np.cumsum(changes[order], axis=0)
        last = np.append(np.diff(times) > 0, True)  # of the changes at one time
        return Load(times[last], counts[last, 0], counts[last, 1])

    def _mean(self, counts: np.ndarray, over_s: float) -> float:
        return float(np.diff(self.load.time_s) @ counts[:-1]) / over_s

    @property
    def mean_waiting(self) -> float:
        """Requests in the queue, averaged over `duration_s`."""
        return self._mean(self.load.waiting, self.duration_s)

    @property
    def mean_batch_size(self) -> float:
        """Requests with a lane, averaged over the time in which a step was running."""
        return self._mean(self.load.running, self.busy_s)

    def __repr__(self) -> str:
        return (
            f"{len(self.traffic):,} requests in {fmt(self.duration_s, 's')}: {fmt(self.tokens_per_s, 'tokens/s')}, "
            f"median TTFT {fmt(self.percentiles('ttft_s')['p50'], 's')}, busy {self.utilization:.0%} of the time "
            f"with {fmt(self.mean_batch_size, digits=3)} requests a step, {self.num_preemptions} preemptions"
        )
