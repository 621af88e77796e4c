"""Speculative decoding: a small model drafts tokens, the large one checks them all in one step.

A decode step waits for the weights, so checking a few tokens takes hardly longer than making one. That holds as long
as the step is memory bound: with many requests in the batch the checks cost arithmetic, and the gain is gone.
Source: Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (2023), for the
expected tokens; the step-time equation (`latency`) for the time.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from lessonlib.accelerators import Accelerator
from lessonlib.checks import check_count, check_number
from lessonlib.kv_cache import attention_flops_per_token_layer, cache_bytes, cached_token_layers, kv_shards
from lessonlib.latency import StepTime, decode_step, step_time
from lessonlib.models import ModelConfig

MAX_BATCH_SIZE = 65_536


def expected_tokens(acceptance: float, draft_tokens: int) -> float:
    """Tokens that one check yields on average: 1 + a + ... + a^g = (1 - a^(g+1)) / (1 - a), and g + 1 for a = 1.

    `acceptance` a is the chance that a drafted token is kept, each by itself; g is `draft_tokens`. The check always
    yields one token of its own. Raises ValueError for a chance outside [0, 1] or a negative g.
    """
    if check_number("acceptance", acceptance) > 1:
        raise ValueError(f"acceptance must be at least 0 and at most 1, got {acceptance!r}")
    return float(sum(acceptance**i for i in range(check_count("draft_tokens", draft_tokens, 0) + 1)))


def verify_step(
    model: ModelConfig,
    accelerator: Accelerator,
    draft_tokens: int,
    batch_size: int = 1,
    context_len: int = 0,
    weight_bits: int = 16,
    kv_bits: float = 16,
    num_accelerators: int = 1,
    overhead_s: float = 0.0,
    dtype: str = "bf16",
    group_size: int | None = None,
) -> StepTime:
    """One step that checks `draft_tokens` tokens of each request and makes one more: with 0 it is a decode step.

    Weights and cache are read once, the arithmetic is that of draft_tokens + 1 tokens. Arguments as in
    `latency.decode_step`. Raises ValueError for what is out of range.
    """
    tokens = check_count("batch_size", batch_size) * (check_count("draft_tokens", draft_tokens, 0) + 1)
    attended = float(cached_token_layers(model, context_len))
    return step_time(
        2 * tokens * model.matmul_params / num_accelerators,
        model.streamed_weight_bytes(weight_bits, group_size, num_tokens=tokens) / num_accelerators,
        tokens * attention_flops_per_token_layer(model) * attended / num_accelerators,
        cache_bytes(model, context_len, batch_size, kv_bits) / kv_shards(model, num_accelerators),
        accelerator.peak(dtype),
        accelerator.memory_bandwidth,
        overhead_s,
        tokens,
    )


@dataclass(frozen=True)
class Speculation:
    """One round: `draft_tokens` steps of the draft model and one check, against as many plain steps as tokens."""

    expected_tokens: float
    """of one request in one round"""
    draft_s: float
    verify_s: float
    plain_step_s: float

    @property
    def round_s(self) -> float:
        """Seconds of the round."""
        return self.draft_s + self.verify_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token of one request."""
        return self.round_s / self.expected_tokens

    @property
    def speedup(self) -> float:
        """How many times faster than plain decoding; below 1 it is slower."""
        return self.plain_step_s / self.tpot_s

    @property
    def pays(self) -> bool:
        """Whether it is faster than plain decoding."""
        return self.speedup > 1


def speculate(
    model: ModelConfig,
    draft: ModelConfig,
    accelerator: Accelerator,
    acceptance: float,
    draft_tokens: int,
    batch_size: int = 1,
    context_len: int = 0,
    **options: Any,
) -> Speculation:
    """Speculative decoding of `model` with `draft` on one deployment, from the step-time equation.

    `options` are those of `verify_step`, the same for both models. Left out: the draft's prefill, and that a round's
    tokens lengthen the context. Raises ValueError for what is out of range.
    """
    return Speculation(
        expected_tokens(acceptance, draft_tokens),
        draft_tokens * decode_step(draft, accelerator, batch_size, context_len, **options).total_s,
        verify_step(model, accelerator, draft_tokens, batch_size, context_len, **options).total_s,
        decode_step(model, accelerator, batch_size, context_len, **options).total_s,
    )


def stops_paying(
    model: ModelConfig,
    draft: ModelConfig,
    accelerator: Accelerator,
    acceptance: float,
    draft_tokens: int,
    context_len: int = 0,
    max_batch_size: int = MAX_BATCH_SIZE,
    **options: Any,
) -> int | None:
    """The batch from which on speculation is no faster than plain decoding; 1 if it never is, None if it always is.

    With a long context it may always pay: cache reads, which a check does once for all its tokens, then take longer
    than any arithmetic. Looked for among the powers of two up to `max_batch_size`, then in between. Raises ValueError
    as `speculate` does.
    """

    def pays(batch_size: int) -> bool:
        return speculate(model, draft, accelerator, acceptance, draft_tokens, batch_size, context_len, **options).pays

    steps = [2**i for i in range(check_count("max_batch_size", max_batch_size).bit_length())]
    last = next((size for size in reversed(steps) if pays(size)), 0)
    if last == steps[-1]:
        return None
    return last + 1 + bisect_left(range(last + 1, max(2 * last, 1)), True, key=lambda size: not pays(size))
