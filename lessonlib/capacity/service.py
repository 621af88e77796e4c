"""Requests of one shape on one deployment: how long they take and what they cost, at a batch and at an arrival rate.

A busy accelerator costs its price per hour whatever it does, so a token costs its share of the time. A request takes
its prompt's prefill, and of every decode step the share of one request in the batch:

seconds per request = prefill + (output tokens - 1) x decode step / batch
TPOT                = decode step + (batch - 1) x prefill / (output tokens - 1)

since decode stands still while a prompt is prefilled, and in the time of a request each of the others is replaced once.

A larger batch makes more tokens a second, so that each is cheaper, and every user waits longer for the next one, until
arithmetic takes longer than reading the weights: `Service.curve` is that trade, `Service.knee` the cheapest point of it
that keeps a promise, `Service.at_rate` the point at which requests that arrive at random settle. Where several
accelerators share each layer, the time to pass results between them is left out; `overhead_s` can stand for it.
Sources: the step-time equation (`latency`), Little's law, and mean value analysis (Reiser and Lavenberg, J. ACM 1980).
"""

import dataclasses
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lessonlib import latency
from lessonlib.capacity.memory import MemoryPlan
from lessonlib.checks import check_count, check_number, check_share
from lessonlib.latency import SLO, StepTime
from lessonlib.units import fmt

_NOISE = 1e-9  # a rate of exactly two deployments' most does not need a third


class Amount(float):
    """A number that prints its unit: 0.45 USD/million output tokens. In arithmetic it is a plain float."""

    unit: str

    def __new__(cls, value: float, unit: str) -> "Amount":
        amount = super().__new__(cls, value)
        amount.unit = unit
        return amount

    def __getnewargs__(self) -> tuple[float, str]:  # type: ignore[override]
        return float(self), self.unit

    def __repr__(self) -> str:
        return fmt(self, self.unit)

    __str__ = __repr__


# --- at a batch -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenTime:
    """Where the time of an output token goes: the parts of TPOT, in seconds.

    Arithmetic runs while memory is read, so `compute_s` is only what it takes beyond the reads.
    """

    weights_s: float
    kv_s: float
    compute_s: float
    overhead_s: float
    prefill_s: float
    """prefills of other requests, for which decode stands still"""

    @classmethod
    def of_step(cls, step: StepTime, prefill_s: float) -> "TokenTime":
        """The parts of a decode step and of the prefills that come between two steps (seconds)."""
        beyond = max(0.0, step.linear_compute_s - step.weights_s) + max(0.0, step.attention_compute_s - step.kv_s)
        return cls(step.weights_s, step.kv_s, beyond, step.overhead_s, prefill_s)

    @property
    def total_s(self) -> float:
        """TPOT."""
        return self.weights_s + self.kv_s + self.compute_s + self.overhead_s + self.prefill_s


@dataclass(frozen=True)
class ServingCost:
    """What requests of one shape cost on one deployment with always `batch_size` there, and how long they take."""

    batch_size: int
    num_accelerators: int
    prompt_len: int
    output_len: int
    usd_per_hour: float | None
    """of all accelerators; None: not known, and nothing can be said of costs"""
    utilization: float
    """share of the paid time in which there is work"""
    step: StepTime
    """the mean decode step"""
    ttft_s: float
    """one decode step of waiting, then prefill"""
    tpot_s: float
    """mean time per output token after the first, prefills of other requests included"""
    prefill_busy_s: float
    """time for which one prompt occupies the deployment"""
    decode_busy_s: float
    """a request's share of all its decode steps"""

    @property
    def requests_per_s(self) -> float:
        """Requests per second while there is work."""
        return 1 / (self.prefill_busy_s + self.decode_busy_s)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second while there is work."""
        return self.requests_per_s * self.output_len

    @property
    def tokens_per_s_per_accelerator(self) -> float:
        """The same for each accelerator."""
        return self.tokens_per_s / self.num_accelerators

    @property
    def tokens_per_s_per_user(self) -> float:
        """Output tokens per second that one request sees after its first: 1 / TPOT."""
        return 1 / self.tpot_s

    @property
    def token_time(self) -> TokenTime:
        """The parts of TPOT."""
        return TokenTime.of_step(self.step, (self.batch_size - 1) / (self.output_len - 1) * self.prefill_busy_s)

    def _usd(self, busy_s: float) -> float:
        if self.usd_per_hour is None:
            raise ValueError("usd_per_hour must be given for a cost: the catalog has no price, got None")
        return busy_s * self.usd_per_hour / 3600 / self.utilization

    @property
    def input(self) -> Amount:
        """USD per million input tokens: prefill."""
        return Amount(self._usd(self.prefill_busy_s) / self.prompt_len * 1e6, "USD/million input tokens")

    @property
    def output(self) -> Amount:
        """USD per million output tokens: decode."""
        return Amount(self._usd(self.decode_busy_s) / self.output_len * 1e6, "USD/million output tokens")

    @property
    def request(self) -> Amount:
        """USD per request."""
        return Amount(self._usd(self.prefill_busy_s + self.decode_busy_s), "USD/request")


@dataclass(frozen=True)
class BatchChoice:
    """The knee: the largest batch that keeps its promise, 0 if none does, and what stops a larger one."""

    batch_size: int
    limited_by: Literal["memory", "TTFT", "TPOT"]
    message: str
    slo: SLO
    cost: ServingCost | None = None
    """of that batch; None where there is none"""
    beyond: ServingCost | None = None
    """the next batch, cheaper (or no dearer) and too slow; None where memory ends first"""

    @property
    def longest_tpot_s(self) -> float:
        """The TPOT up to which both limits are met, 0 if that is never so: TPOT's limit, or where TTFT reaches its own.

        TTFT grows with the batch as TPOT does; between two batches it is interpolated.
        """
        if self.beyond is None:
            return self.slo.tpot_s  # memory ends first, or nothing fits
        if self.cost is None:
            return 0.0
        ttft, tpot = ((self.cost.ttft_s, self.beyond.ttft_s), (self.cost.tpot_s, self.beyond.tpot_s))
        return min(self.slo.tpot_s, float(np.interp(self.slo.ttft_s, ttft, tpot)))


@dataclass(frozen=True)
class OperatingPoint:
    """Where requests settle that arrive at random at `rate_per_s`, divided evenly among `copies` of a deployment.

    Times are means and without a queue: near a utilization of 1 requests also wait (`Server` simulates that).
    """

    rate_per_s: float
    """of all requests"""
    copies: int
    """deployments, the fewest that finish this rate under the SLO"""
    load: float
    """the rate as a multiple of the most that one deployment finishes under the SLO"""
    in_flight: float
    """requests that decode on one copy at a time, on average"""
    batch_size: float
    """requests in the steps that a request sees: itself and those in flight, at most the knee's batch"""
    step: StepTime
    """that decode step"""
    ttft_s: float
    """one decode step of waiting, then prefill"""
    tpot_s: float
    """prefills of other requests included"""
    cost: ServingCost
    """the bill over what is served: the knee's costs, at the utilization of each copy"""

    @property
    def utilization(self) -> float:
        """The share of the most it could finish under the SLO that each copy does finish, 0 to 1."""
        return self.cost.utilization

    @property
    def num_accelerators(self) -> int:
        """Accelerators of all copies."""
        return self.copies * self.cost.num_accelerators

    @property
    def usd_per_hour(self) -> float | None:
        """USD per hour for all copies, where the price is known."""
        return None if self.cost.usd_per_hour is None else self.copies * self.cost.usd_per_hour

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all copies."""
        return self.rate_per_s * self.cost.output_len

    @property
    def tokens_per_s_per_accelerator(self) -> float:
        """The same for each accelerator."""
        return self.tokens_per_s / self.num_accelerators

    @property
    def tokens_per_s_per_user(self) -> float:
        """Output tokens per second that one request sees after its first: 1 / TPOT."""
        return 1 / self.tpot_s

    @property
    def token_time(self) -> TokenTime:
        """The parts of TPOT."""
        return TokenTime.of_step(self.step, self.tpot_s - self.step.total_s)


# --- a deployment and a shape of requests ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Service:
    """Requests of `prompt_len` and `output_len` tokens on the accelerators of a plan.

    `usd_per_hour` is the price of one accelerator; None takes the catalog's, which may not be known. `efficiency` is
    the share of the peak that prefill reaches; it, `overhead_s` and `dtype` are as in `latency`. Pipeline stages work
    on different parts of the batch at the same time. Raises ValueError for fewer than two output tokens, and for what
    is out of range.
    """

    plan: MemoryPlan
    prompt_len: int
    output_len: int
    usd_per_hour: float | None = None
    efficiency: float = 1.0
    overhead_s: float = 0.0
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_count("prompt_len", self.prompt_len)
        check_count("output_len", self.output_len, 2)
        if self.usd_per_hour is not None:
            check_number("usd_per_hour", self.usd_per_hour, exclusive=True)
        _ = self.prefill_s, self._decode_step(1, 0)  # refuses what the equation refuses

    @cached_property
    def most(self) -> int:
        """Requests that fit in memory at once; 0 if none does."""
        return self.plan.requests_at(self.prompt_len + self.output_len)

    @cached_property
    def total_usd_per_hour(self) -> float | None:
        """USD per hour for all accelerators, where the price is known."""
        price = self.plan.accelerator.usd_per_hour if self.usd_per_hour is None else self.usd_per_hour
        return None if price is None else price * self.plan.num_accelerators

    @cached_property
    def _options(self) -> dict[str, Any]:
        return {
            "weight_bits": self.plan.weight_bits,
            "kv_bits": self.plan.kv_bits,
            "group_size": self.plan.group_size,
            "num_accelerators": self.plan.tensor_parallel,
            "overhead_s": self.overhead_s,
            "dtype": self.dtype,
        }

    @cached_property
    def prefill_s(self) -> float:
        """Seconds from the first to the last of one prompt's prefill."""
        accelerator, efficiency = self.plan.accelerator, self.efficiency
        return latency.ttft(self.plan.model, accelerator, self.prompt_len, efficiency=efficiency, **self._options)

    @property
    def prefill_busy_s(self) -> float:
        """Seconds for which one prompt occupies the deployment."""
        return self.prefill_s / self.plan.pipeline_parallel

    def _decode_step(self, batch_size: int, context_len: int) -> StepTime:
        return latency.decode_step(self.plan.model, self.plan.accelerator, batch_size, context_len, **self._options)

    @cached_property
    def _mean_context(self) -> float:
        """Cached tokens per layer to which a request attends, averaged over its output: `latency.tpot`, solved."""
        where = self.plan.model, self.plan.accelerator, self.prompt_len, self.output_len
        mean_s = latency.tpot(*where, **self._options)
        return (mean_s - self._decode_step(1, 0).total_s) / self._decode_step(1, 1).attention_s

    def step(self, batch_size: float) -> StepTime:
        """The mean decode step with `batch_size` requests, which need not be whole: a mean of two steps then."""
        below = math.floor(batch_size)
        if below == batch_size:
            step = self._decode_step(-(-below // self.plan.pipeline_parallel), 1)  # only attention depends on contexts
            return dataclasses.replace(
                step,
                attention_compute_s=step.attention_compute_s * self._mean_context,
                kv_s=step.kv_s * self._mean_context,
            )
        parts = zip(*(dataclasses.astuple(self.step(size)) for size in (below, below + 1)), strict=True)
        return StepTime(*(low + (high - low) * (batch_size - below) for low, high in parts))

    def cost(self, batch_size: int, utilization: float = 1.0) -> ServingCost:
        """Always `batch_size` requests there, for a share of the paid time. Raises ValueError for more than fit."""
        if check_count("batch_size", batch_size) > self.most:
            raise ValueError(
                f"batch_size must be at most {self.most}, the requests of {self.prompt_len + self.output_len:,} tokens "
                f"that fit, got {batch_size}"
            )
        step, busy_s = self.step(batch_size), self.prefill_busy_s
        return ServingCost(
            batch_size,
            self.plan.num_accelerators,
            self.prompt_len,
            self.output_len,
            self.total_usd_per_hour,
            check_share("utilization", utilization),
            step,
            ttft_s=step.total_s + self.prefill_s,
            tpot_s=step.total_s + (batch_size - 1) / (self.output_len - 1) * busy_s,
            prefill_busy_s=busy_s,
            decode_busy_s=(self.output_len - 1) * step.total_s / batch_size,
        )

    @cached_property
    def flat_from(self) -> int | None:
        """The batch from which arithmetic takes longer than reading the weights; None if memory ends first.

        From there a request's share of a step no longer shrinks: more at once is slower for all, and no cheaper.
        """

        def busy(batch_size: int) -> bool:
            step = self.step(batch_size)
            return step.linear_compute_s >= step.weights_s

        found = 1 + bisect_left(range(1, self.most + 1), True, key=busy)
        return found if found <= self.most else None

    def curve(self, num_points: int = 40) -> tuple[ServingCost, ...]:
        """At most `num_points` batches from 1 to the most that fit, each about as many times the one before.

        Both TPOT and throughput grow with the batch, up to `flat_from`: until then all of them are on the Pareto front
        of latency against throughput. Empty where not even one request fits. Raises ValueError for fewer than 2 points.
        """
        check_count("num_points", num_points, 2)
        if not self.most:
            return ()
        batches = np.unique(np.geomspace(1, self.most, num_points).round().astype(int))
        return tuple(self.cost(batch) for batch in batches.tolist())

    def knee(self, slo: SLO) -> BatchChoice:
        """The largest batch that fits and meets the SLO: TTFT and TPOT (as `ServingCost` has them) grow with the batch.

        None in time is cheaper: weight reads are divided among more requests (from `flat_from` on it stays the same).
        """
        if not self.most:
            tokens = self.prompt_len + self.output_len
            return BatchChoice(0, "memory", f"no request of {tokens:,} tokens fits: {self.plan.message}", slo)

        def misses(batch_size: int) -> bool:
            found = self.cost(batch_size)
            return found.ttft_s > slo.ttft_s or found.tpot_s > slo.tpot_s

        best = bisect_left(range(1, self.most + 1), True, key=misses)
        cost = self.cost(best) if best else None
        if best == self.most:
            return BatchChoice(best, "memory", f"{best} requests at once: more do not fit in memory", slo, cost)
        beyond = self.cost(best + 1)
        late = beyond.ttft_s > slo.ttft_s
        name, found, allowed = ("TTFT", beyond.ttft_s, slo.ttft_s) if late else ("TPOT", beyond.tpot_s, slo.tpot_s)
        message = f"with {best + 1} at once {name} is {fmt(found, 's')}, more than {fmt(allowed, 's')}"
        message = f"{best} requests at once: {message}"
        return BatchChoice(best, "TTFT" if late else "TPOT", message, slo, cost, beyond)

    # --- at an arrival rate

    def at_rate(self, rate_per_s: float, slo: SLO) -> OperatingPoint | None:
        """Where requests that arrive at random settle, on as few copies of the deployment as meet the SLO.

        None where no batch meets it: copies make nothing faster. Per copy, with `rate` its share of the requests,

        requests in flight = rate x (output tokens - 1) x TPOT      Little's law
        TPOT               = TPOT of a batch of 1 + requests in flight

        since a request that arrives at random finds on average those in flight, and shares its steps with them (mean
        value analysis; exact where a step grows evenly with the batch). The knee's batch is the limit of requests at
        once, as engines have one: the others wait. Raises ValueError for a rate that is not above 0.
        """
        check_number("rate_per_s", rate_per_s, exclusive=True)
        knee = self.knee(slo)
        if knee.cost is None:
            return None
        load = rate_per_s / knee.cost.requests_per_s
        copies = max(1, math.ceil(load - _NOISE))
        rate = rate_per_s / copies
        batch = self._seen_at(rate, knee.batch_size)
        step = self.step(batch)
        tpot_s = step.total_s + (batch - 1) / (self.output_len - 1) * self.prefill_busy_s
        return OperatingPoint(
            rate_per_s,
            copies,
            load,
            in_flight=rate * (self.output_len - 1) * tpot_s,
            batch_size=batch,
            step=step,
            ttft_s=step.total_s + self.prefill_s,
            tpot_s=tpot_s,
            cost=dataclasses.replace(knee.cost, utilization=min(1.0, load / copies)),
        )

    def _seen_at(self, rate_per_s: float, most: int) -> float:
        """The batch whose rate this is, between 1 and `most`: its other requests are those in flight."""

        def decode_s(batch_size: int) -> float:
            return (self.output_len - 1) * self.step(batch_size).total_s

        def rate_at(batch_size: int) -> float:
            others = batch_size - 1
            return others / (decode_s(batch_size) + others * self.prefill_busy_s)

        above = 1 + bisect_left(range(1, most + 1), rate_per_s, key=rate_at)
        if above > most:
            return float(most)
        # Between two batches a step is a mean of both: rate x (decode + others x prefill) = others is linear there.
        low, others = decode_s(above - 1), above - 2
        missing = rate_per_s * (low + others * self.prefill_busy_s) - others
        share = missing / (1 - rate_per_s * (self.prefill_busy_s + decode_s(above) - low))
        return above - 1 + min(max(share, 0.0), 1.0)


# --- the same as functions ------------------------------------------------------------------------------------------


def cost_per_million_tokens(
    plan: MemoryPlan,
    prompt_len: int,
    output_len: int,
    batch_size: int,
    *,
    usd_per_hour: float | None = None,
    utilization: float = 1.0,
    efficiency: float = 1.0,
    overhead_s: float = 0.0,
    dtype: str = "bf16",
) -> ServingCost:
    """What requests of `prompt_len` and `output_len` tokens cost on the plan's accelerators, always `batch_size` there.

    Args:
        usd_per_hour: USD for one accelerator; None takes the catalog's
        utilization: share of the paid time in which there is work, above 0 and at most 1
        efficiency, overhead_s, dtype: as in `Service`

    Raises ValueError for a batch that does not fit, a price that is not known, and what `Service` refuses.
    """
    service = Service(plan, prompt_len, output_len, usd_per_hour, efficiency, overhead_s, dtype)
    found = service.cost(batch_size, utilization)
    if found.usd_per_hour is None:
        raise ValueError(f"usd_per_hour must be given for {plan.accelerator.name}, got None")
    return found


def batch_under_slo(
    plan: MemoryPlan,
    prompt_len: int,
    output_len: int,
    slo: SLO,
    *,
    usd_per_hour: float | None = None,
    efficiency: float = 1.0,
    overhead_s: float = 0.0,
    dtype: str = "bf16",
) -> BatchChoice:
    """The largest batch that fits and meets the SLO: `Service.knee`. Raises ValueError as `Service` does."""
    return Service(plan, prompt_len, output_len, usd_per_hour, efficiency, overhead_s, dtype).knee(slo)
