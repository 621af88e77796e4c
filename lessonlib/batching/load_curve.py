"""How much load a server stands: goodput against arrival rate, the most it can serve, and the knee.

The same requests arrive at several rates: only the gaps between them change, so that what is seen between two rates
is due to the rate alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lessonlib.batching.report import Report
from lessonlib.batching.server import Server
from lessonlib.batching.traffic import Lognormal, Traffic, poisson_traffic
from lessonlib.checks import check_count, check_number, check_share, check_values
from lessonlib.latency import SLO

LOADS = (0.3, 0.6, 0.8, 0.9, 1, 1.1, 1.3, 2)  # arrival rates, as multiples of the capacity
SPAN_S = 20  # a run at capacity lasts about this long ...
BATCHES = 4  # ... or has this many times the requests of a full batch, if that is longer ...
FEWEST, MOST = 400, 1000  # ... within these bounds: fewer are too noisy, more take too long to simulate
KNEE_SHARE = 0.9


def at_rate(requests: Traffic, rate_per_s: float) -> Traffic:
    """The same requests arriving at another mean rate. Raises ValueError for a rate that is not above 0."""
    check_number("rate_per_s", rate_per_s, exclusive=True)
    gaps = np.diff(requests.arrival_s, prepend=0)
    mean_s = float(gaps.mean())
    if mean_s == 0:
        raise ValueError("requests must not all arrive at time 0: such arrivals have no rate to change")
    return Traffic(np.cumsum(gaps / (mean_s * rate_per_s)), requests.prompt_lens, requests.output_lens)


def capacity_per_s(server: Server, requests: Traffic) -> float:
    """Requests per second that the server finishes while more wait than it can take, in the middle half of the run.

    The start, when all lanes begin together, and the end, when they empty, are left out. No rate above this can last.
    Raises ValueError as `Server.run` does, and for fewer than 8 requests.
    """
    check_count("number of requests", len(requests), 8)
    return _middle_rate_per_s(_saturated(server, requests))


def _saturated(server: Server, requests: Traffic) -> Report:
    """All requests are there at the start."""
    return server.run(Traffic(np.zeros(len(requests)), requests.prompt_lens, requests.output_lens))


def _middle_rate_per_s(report: Report) -> float:
    finish_s = np.sort(report.finish_s)
    first, last = len(finish_s) // 4, 3 * len(finish_s) // 4
    return float((last - first) / (finish_s[last] - finish_s[first]))


@dataclass(frozen=True, eq=False)
class LoadCurve:
    """One server with the same requests at rising arrival rates."""

    server: Server
    requests: Traffic
    capacity_per_s: float
    """requests per second that the server can finish at most"""
    rates_per_s: np.ndarray
    reports: tuple[Report, ...]
    """one for each rate"""

    def slo_shares(self, slo: SLO) -> np.ndarray:
        """Share of the requests that meet `slo`, at each rate."""
        return np.array([report.slo_share(slo) for report in self.reports])

    def goodput_per_s(self, slo: SLO) -> np.ndarray:
        """Of the requests that arrive in a second, how many meet `slo`, at each rate.

        (Counted over the arrivals: the last requests' own time, in which no more arrive, would make a short run look
        worse than a long one.)
        """
        return self.rates_per_s * self.slo_shares(slo)

    def goodput_at(self, rate_per_s: float, slo: SLO) -> float:
        """Goodput at a rate between two of those simulated, interpolated."""
        rates, goodput = [0, *self.rates_per_s], [0, *self.goodput_per_s(slo)]
        return float(np.interp(check_number("rate_per_s", rate_per_s), rates, goodput))

    def knee_per_s(self, slo: SLO, share: float = KNEE_SHARE) -> float:
        """The highest arrival rate up to which `share` of the requests meet `slo`, and that can last; 0 if none does.

        Between two rates the share is interpolated. Near the capacity a longer run would find it up to about a tenth
        lower, since queues have more time to grow. Raises ValueError for a share outside 0 to 1.
        """
        check_share("share", share)
        shares = self.slo_shares(slo)
        failing = np.flatnonzero(shares < share)
        if not failing.size:
            return self.capacity_per_s
        at = int(failing[0])
        if at == 0:
            return 0.0
        met, missed = shares[at - 1], shares[at]
        below, above = self.rates_per_s[at - 1], self.rates_per_s[at]
        return min(float(below + (above - below) * (met - share) / (met - missed)), self.capacity_per_s)


def load_curve(
    server: Server,
    prompt_len: int | Lognormal,
    output_len: int | Lognormal,
    loads: Sequence[float] = LOADS,
    seed: int = 0,
) -> LoadCurve:
    """Run the server at `loads` times its capacity, with a number of requests that suits its speed.

    Raises ValueError as `Server.run` does, and for loads that are not above 0 and rising.
    """
    factors = check_values("loads", loads)
    if not factors.size or factors[0] <= 0 or np.any(np.diff(factors) <= 0):
        raise ValueError(f"loads must be above 0 and rising, got {list(loads)}")
    most = poisson_traffic(1, MOST, prompt_len, output_len, seed)
    saturated = _saturated(server, most)
    capacity = _middle_rate_per_s(saturated)
    count = int(np.clip(max(SPAN_S * capacity, BATCHES * saturated.mean_batch_size), FEWEST, MOST))
    requests = Traffic(most.arrival_s[:count], most.prompt_lens[:count], most.output_lens[:count])
    rates = factors * capacity
    return LoadCurve(server, requests, capacity, rates, tuple(server.run(at_rate(requests, rate)) for rate in rates))
