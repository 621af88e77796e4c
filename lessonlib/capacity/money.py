"""What tokens cost in money and energy, from rates that were measured."""

from dataclasses import dataclass

from lessonlib.accelerators import Accelerator
from lessonlib.capacity.service import Amount
from lessonlib.checks import check_count, check_number, check_share
from lessonlib.units import fmt

JOULES_PER_KWH = 3.6e6


# --- money ----------------------------------------------------------------------------------------------------------


def cost_from_rate(usd_per_hour: float, tokens_per_s: float, utilization: float = 1.0) -> Amount:
    """USD per million tokens at a measured rate (tokens/s while there is work), at a share of busy time.

    Raises ValueError for amounts that are not above 0 or a utilization outside (0, 1].
    """
    price = check_number("usd_per_hour", usd_per_hour, exclusive=True)
    rate = check_number("tokens_per_s", tokens_per_s, exclusive=True)
    return Amount(price / 3600 / rate / check_share("utilization", utilization) * 1e6, "USD/million tokens")


def cost_per_correct_answer(usd_per_million_tokens: float, tokens_per_answer: float, accuracy: float) -> Amount:
    """USD per correct answer: wrong answers (accuracy is the share of right ones) are paid for as well.

    Raises ValueError for amounts that are not above 0 or an accuracy above 1.
    """
    usd = check_number("usd_per_million_tokens", usd_per_million_tokens, exclusive=True)
    tokens = check_number("tokens_per_answer", tokens_per_answer, exclusive=True)
    return Amount(usd * tokens / 1e6 / check_share("accuracy", accuracy), "USD/correct answer")


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
