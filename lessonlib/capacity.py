"""What fits, how many requests, what a million tokens costs, and what an engine's start-up log says about it.

A busy accelerator costs its price per hour whatever it does, so a token costs its share of the time. A request takes
its prompt's prefill, and of every decode step the share of one request in the batch:

seconds per request = prefill + (output tokens - 1) x decode step / batch

`memory_plan` says what fits, `engine_logs` reads what engines print; their public names are also here.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Literal

from lessonlib import latency
from lessonlib.accelerators import Accelerator
from lessonlib.batching import SLO
from lessonlib.checks import check_count, check_number
from lessonlib.engine_logs import EngineLog, LogRow, compare_log, read_engine_log
from lessonlib.memory_plan import (
    DoesNotFitError,
    MemoryPlan,
    Rank,
    Remedy,
    WeightPart,
    kv_budget_bytes,
    max_batch_size,
    plan,
    split_layers,
)
from lessonlib.units import fmt

__all__ = [
    "SLO",
    "Amount",
    "BatchChoice",
    "BreakEven",
    "DoesNotFitError",
    "Energy",
    "EngineLog",
    "LogRow",
    "MemoryPlan",
    "Rank",
    "Remedy",
    "ServingCost",
    "WeightPart",
    "batch_under_slo",
    "break_even",
    "compare_log",
    "cost_from_rate",
    "cost_per_correct_answer",
    "cost_per_million_tokens",
    "energy_per_token",
    "kv_budget_bytes",
    "max_batch_size",
    "plan",
    "read_engine_log",
    "split_layers",
]

JOULES_PER_KWH = 3.6e6


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


def _utilization(value: object) -> float:
    if check_number("utilization", value, exclusive=True) > 1:
        raise ValueError(f"utilization must be above 0 and at most 1, got {value!r}")
    return float(value)  # type: ignore[arg-type]


# --- money ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServingCost:
    """What requests of one shape cost on one deployment, and how long they take."""

    batch_size: int
    num_accelerators: int
    prompt_len: int
    output_len: int
    usd_per_hour: float
    """of all accelerators"""
    utilization: float
    """share of the paid time in which there is work"""
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

    def _usd(self, busy_s: float) -> float:
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
        efficiency, overhead_s, dtype: as in `latency`

    Pipeline stages work on different parts of the batch at the same time. Raises ValueError for a batch that does not
    fit, fewer than two output tokens, a price that is not known, and what is out of range.
    """
    check_count("output_len", output_len, 2)
    fit = plan.requests_at(check_count("prompt_len", prompt_len) + output_len)
    if check_count("batch_size", batch_size) > fit:
        raise ValueError(
            f"batch_size must be at most {fit}, the requests of {prompt_len + output_len:,} tokens that fit, "
            f"got {batch_size}"
        )
    if (price := plan.accelerator.usd_per_hour if usd_per_hour is None else usd_per_hour) is None:
        raise ValueError(f"usd_per_hour must be given for {plan.accelerator.name}, got None")
    check_number("usd_per_hour", price, exclusive=True)
    timing: dict[str, Any] = {"efficiency": efficiency, "overhead_s": overhead_s, "dtype": dtype}
    prefill_s, step_s = _times(plan, prompt_len, output_len, batch_size, **timing)
    busy_s = prefill_s / plan.pipeline_parallel
    return ServingCost(
        batch_size,
        plan.num_accelerators,
        prompt_len,
        output_len,
        price * plan.num_accelerators,
        _utilization(utilization),
        ttft_s=step_s + prefill_s,
        tpot_s=step_s + batch_size / (output_len - 1) * busy_s,
        prefill_busy_s=busy_s,
        decode_busy_s=(output_len - 1) * step_s / batch_size,
    )


def _times(
    plan: MemoryPlan,
    prompt_len: int,
    output_len: int,
    batch_size: int,
    efficiency: float,
    overhead_s: float,
    dtype: str,
) -> tuple[float, float]:
    """Seconds of one prompt's prefill and of the mean decode step."""
    options: dict[str, Any] = {
        "weight_bits": plan.weight_bits,
        "kv_bits": plan.kv_bits,
        "group_size": plan.group_size,
        "num_accelerators": plan.tensor_parallel,
        "overhead_s": overhead_s,
        "dtype": dtype,
    }
    first = latency.ttft(plan.model, plan.accelerator, prompt_len, efficiency=efficiency, **options)
    in_flight = -(-batch_size // plan.pipeline_parallel)
    return first, latency.tpot(plan.model, plan.accelerator, prompt_len, output_len, in_flight, **options)


@dataclass(frozen=True)
class BatchChoice:
    """The largest batch that keeps its promise, 0 if none does, and what stops a larger one."""

    batch_size: int
    limited_by: Literal["memory", "TTFT", "TPOT"]
    message: str


def batch_under_slo(
    plan: MemoryPlan,
    prompt_len: int,
    output_len: int,
    slo: SLO,
    *,
    efficiency: float = 1.0,
    overhead_s: float = 0.0,
    dtype: str = "bf16",
) -> BatchChoice:
    """The largest batch that fits and meets the SLO: as `ServingCost` has TTFT and TPOT, both grow with the batch.

    It is also the cheapest: weight reads are divided among more requests. Raises ValueError as
    `cost_per_million_tokens` does.
    """
    timing: dict[str, Any] = {"efficiency": efficiency, "overhead_s": overhead_s, "dtype": dtype}
    most = plan.requests_at(check_count("prompt_len", prompt_len) + check_count("output_len", output_len, 2))
    if not most:
        return BatchChoice(0, "memory", f"no request of {prompt_len + output_len:,} tokens fits: {plan.message}")

    def times(batch_size: int) -> ServingCost:
        return cost_per_million_tokens(plan, prompt_len, output_len, batch_size, usd_per_hour=1.0, **timing)

    def misses(batch_size: int) -> bool:
        found = times(batch_size)
        return found.ttft_s > slo.ttft_s or found.tpot_s > slo.tpot_s

    best = bisect_left(range(1, most + 1), True, key=misses)
    if best == most:
        return BatchChoice(best, "memory", f"{best} requests at once: more do not fit in memory")
    next_one = times(best + 1)
    late = next_one.ttft_s > slo.ttft_s
    name, found, allowed = ("TTFT", next_one.ttft_s, slo.ttft_s) if late else ("TPOT", next_one.tpot_s, slo.tpot_s)
    message = f"with {best + 1} at once {name} is {fmt(found, 's')}, more than {fmt(allowed, 's')}"
    return BatchChoice(best, "TTFT" if late else "TPOT", f"{best} requests at once: {message}")


def cost_from_rate(usd_per_hour: float, tokens_per_s: float, utilization: float = 1.0) -> Amount:
    """USD per million tokens at a measured rate (tokens/s while there is work), at a share of busy time.

    Raises ValueError for amounts that are not above 0 or a utilization outside (0, 1].
    """
    price = check_number("usd_per_hour", usd_per_hour, exclusive=True)
    rate = check_number("tokens_per_s", tokens_per_s, exclusive=True)
    return Amount(price / 3600 / rate / _utilization(utilization) * 1e6, "USD/million tokens")


def cost_per_correct_answer(usd_per_million_tokens: float, tokens_per_answer: float, accuracy: float) -> Amount:
    """USD per correct answer: wrong answers (accuracy is the share of right ones) are paid for as well.

    Raises ValueError for amounts that are not above 0 or an accuracy above 1.
    """
    usd = check_number("usd_per_million_tokens", usd_per_million_tokens, exclusive=True)
    tokens = check_number("tokens_per_answer", tokens_per_answer, exclusive=True)
    if check_number("accuracy", accuracy, exclusive=True) > 1:
        raise ValueError(f"accuracy must be above 0 and at most 1, got {accuracy!r}")
    return Amount(usd * tokens / 1e6 / accuracy, "USD/correct answer")


@dataclass(frozen=True)
class BreakEven:
    """From when an accelerator of one's own is cheaper than paying for each token."""

    tokens_per_s: Amount
    """mean rate, day and night, at which both cost the same"""
    utilization: float
    """the same as a share of the busy rate; above 1 it never pays"""
    message: str

    @property
    def possible(self) -> bool:
        """Whether the deployment is fast enough to get there."""
        return self.utilization <= 1


def break_even(usd_per_hour: float, tokens_per_s: float, usd_per_million_tokens: float) -> BreakEven:
    """Hold a deployment (USD per hour, tokens/s while there is work) against a price per million tokens (USD).

    Raises ValueError for amounts that are not above 0.
    """
    price = check_number("usd_per_hour", usd_per_hour, exclusive=True)
    rate = check_number("tokens_per_s", tokens_per_s, exclusive=True)
    needed = price / 3600 / check_number("usd_per_million_tokens", usd_per_million_tokens, exclusive=True) * 1e6
    share = needed / rate
    said = f"both cost the same at {fmt(needed)} tokens/s on average"
    never = f", but at most {fmt(rate)} are possible: it never pays"
    said += f", {share:.1%} of the busy rate" if share <= 1 else never
    return BreakEven(Amount(needed, "tokens/s"), share, f"{said}.")


# --- energy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Energy:
    """What a token takes if the accelerators draw their thermal design power; the rest of the machine is left out."""

    per_token: Amount
    per_million_tokens: Amount


def energy_per_token(accelerator: Accelerator, tokens_per_s: float, num_accelerators: int = 1) -> Energy:
    """J per token and kWh per million tokens of accelerators that together make `tokens_per_s`.

    Raises ValueError for an accelerator whose power is not known, and for a rate that is not above 0.
    """
    if accelerator.tdp_w is None:
        raise ValueError(f"accelerator must have a known tdp_w, got {accelerator.name} with None")
    watts = accelerator.tdp_w * check_count("num_accelerators", num_accelerators)
    joules = watts / check_number("tokens_per_s", tokens_per_s, exclusive=True)
    return Energy(Amount(joules, "J/token"), Amount(joules * 1e6 / JOULES_PER_KWH, "kWh/million tokens"))
