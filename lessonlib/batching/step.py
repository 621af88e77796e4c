"""What one more request in a step costs, and what stops the batch from growing: memory or arithmetic."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lessonlib.accelerators import Accelerator
from lessonlib.checks import check_lengths
from lessonlib.kv_cache import requests_that_fit
from lessonlib.latency import decode_step
from lessonlib.models import ModelConfig


@dataclass(frozen=True, eq=False)
class StepParts:
    """A decode step's time for each token it makes, against the batch: arrays, an entry for each of `batch_sizes`.

    `weights_s`, `kv_s` and `compute_s` (seconds per token) are what each part takes by itself. `total_s` is less than
    their sum where arithmetic and reads overlap: see the step-time equation in `latency`.
    """

    batch_sizes: np.ndarray
    weights_s: np.ndarray
    kv_s: np.ndarray
    compute_s: np.ndarray
    total_s: np.ndarray
    tokens_per_s: np.ndarray
    marginal_tokens_per_s: np.ndarray
    """tokens/s that one more request adds"""


def step_parts(
    model: ModelConfig,
    accelerator: Accelerator,
    batch_sizes: Sequence[int] | np.ndarray,
    context_len: int,
    **options: Any,
) -> StepParts:
    """What a token costs in batches of these sizes, with `context_len` tokens in each request's cache.

    `options` are those of `latency.decode_step`. Raises ValueError for what is out of range.
    """
    sizes = check_lengths("batch_sizes", batch_sizes)
    steps = [decode_step(model, accelerator, size, context_len, **options) for size in sizes.tolist()]
    larger = [decode_step(model, accelerator, size + 1, context_len, **options) for size in sizes.tolist()]
    rates = np.array([step.tokens_per_s for step in steps])
    return StepParts(
        sizes,
        np.array([step.weights_s for step in steps]) / sizes,
        np.array([step.kv_s for step in steps]) / sizes,
        np.array([step.compute_s for step in steps]) / sizes,
        1 / rates,
        rates,
        np.array([step.tokens_per_s for step in larger]) - rates,
    )


# --- what stops it --------------------------------------------------------------------------------------------------


def memory_ceiling(
    model: ModelConfig,
    accelerator: Accelerator,
    context_len: int,
    weight_bits: int = 16,
    kv_bits: float = 16,
    group_size: int | None = None,
) -> int:
    """Requests of `context_len` tokens whose cache fits beside the weights; 0 if none does.

    Nothing is set aside for activations or for the last, half-filled blocks. Raises ValueError for an accelerator
    whose memory is not known, and for what is out of range.
    """
    if accelerator.memory_bytes is None:
        raise ValueError(f"accelerator must have a known memory_bytes, got {accelerator.name} with None")
    left = accelerator.memory_bytes - model.weight_bytes(weight_bits, group_size)
    return requests_that_fit(model, max(0.0, left), context_len, kv_bits)


def compute_bound_batch(model: ModelConfig, accelerator: Accelerator, context_len: int, **options: Any) -> int | None:
    """The smallest batch whose decode step spends most of its time on arithmetic; None if none does.

    Weight reads are divided among the requests, cache reads are not: where reading a request's cache takes longer than
    its arithmetic, no batch is compute bound. Overhead is left out. `options` are those of `latency.decode_step`.
    """
    options = {**options, "overhead_s": 0.0}

    def compute_bound(batch_size: int) -> bool:
        return decode_step(model, accelerator, batch_size, context_len, **options).bound_by == "compute"

    enough = 1  # beyond the batch whose arithmetic takes as long as reading all weights nothing changes any more
    while (step := decode_step(model, accelerator, enough, context_len, **options)).linear_s == step.weights_s:
        enough *= 2
    if not compute_bound(enough):
        return None
    return 1 + bisect_left(range(1, enough), True, key=compute_bound)


@dataclass(frozen=True)
class BatchLimits:
    """The two ends of batching: requests that fit in memory, and the batch from which a step is compute bound."""

    memory: int
    compute: int | None
    """None: never, cache reads dominate"""

    @property
    def first(self) -> Literal["memory", "compute"]:
        """Which of the two a growing batch meets first."""
        return "memory" if self.compute is None or self.memory < self.compute else "compute"


def batch_limits(
    model: ModelConfig,
    accelerator: Accelerator,
    context_len: int,
    weight_bits: int = 16,
    kv_bits: float = 16,
    group_size: int | None = None,
    dtype: str = "bf16",
) -> BatchLimits:
    """Both limits of the batch for requests of `context_len` tokens. Raises ValueError as `memory_ceiling` does."""
    bits: dict[str, Any] = {"weight_bits": weight_bits, "kv_bits": kv_bits, "group_size": group_size}
    return BatchLimits(
        memory_ceiling(model, accelerator, context_len, **bits),
        compute_bound_batch(model, accelerator, context_len, dtype=dtype, **bits),
    )
