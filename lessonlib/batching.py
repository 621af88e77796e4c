"""Batching: what one more request in a step costs, who shares which step, and what stops it.

A step reads every weight once, however many requests share it. Static batching starts a batch and waits for its
longest request; continuous batching refills a lane as soon as it is free. Arrivals, prefill and a limited cache are
in `serving_simulator` and `traffic`, whose public names are also here.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any, Literal

import numpy as np

from lessonlib.accelerators import Accelerator
from lessonlib.checks import check_choice, check_count, check_lengths
from lessonlib.kv_cache import requests_that_fit
from lessonlib.latency import decode_step
from lessonlib.models import ModelConfig
from lessonlib.serving_load import LoadCurve, at_rate, capacity_per_s, load_curve
from lessonlib.serving_report import SLO, Gaps, Load, Report
from lessonlib.serving_simulator import POLICIES, Server
from lessonlib.traffic import Lognormal, Traffic, bursty_traffic, poisson_traffic, read_traffic

__all__ = [
    "POLICIES",
    "REFERENCE_LENS",
    "SLO",
    "BatchLimits",
    "Gaps",
    "Load",
    "LoadCurve",
    "Lognormal",
    "Report",
    "Server",
    "StepParts",
    "Timeline",
    "Traffic",
    "at_rate",
    "batch_limits",
    "bursty_traffic",
    "capacity_per_s",
    "compute_bound_batch",
    "fewest_steps",
    "load_curve",
    "memory_ceiling",
    "poisson_traffic",
    "read_lengths",
    "read_traffic",
    "simulate",
    "step_parts",
]

REFERENCE_LENS = (200, 12, 8, 150, 20, 6, 5, 90, 10, 7, 4, 120, 15, 9, 3, 60)
"""output lengths of sixteen requests: on four lanes static batching takes 470 steps, continuous batching 200"""


# --- lanes and steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Timeline:
    """Which request had which lane when. One step gives each running request one token."""

    lanes: int
    steps: int
    utilization: float
    """share of the lanes' steps that made a token, 0 to 1"""
    spans: np.ndarray
    """a row for each request in order of arrival, with fields request, lane, start and end: it has the lane in the
    steps start, start + 1, ..., end - 1"""

    @property
    def turns(self) -> np.ndarray:
        """How many requests had its lane before each request."""
        order = np.lexsort((self.spans["start"], self.spans["lane"]))
        lane = self.spans["lane"][order]
        turns = np.empty(len(lane), np.int64)
        turns[order] = np.arange(len(lane)) - np.searchsorted(lane, lane)
        return turns

    @property
    def idle(self) -> np.ndarray:
        """When which lane made no token, up to the last step: a row for each such time, with lane, start and end."""
        order = np.lexsort((self.spans["start"], self.spans["lane"]))
        lane, start, end = (self.spans[name][order] for name in ("lane", "start", "end"))
        lanes = np.arange(self.lanes)
        # a time can be idle from a request's end (or step 0) to the next request's start in the lane (or the last step)
        lane, begin = np.concatenate([lanes, lane]), np.concatenate([np.zeros(self.lanes, np.int64), end])
        order = np.lexsort((begin, lane))
        lane, begin = lane[order], begin[order]
        until = np.full(len(lane), self.steps)
        until[np.flatnonzero(np.diff(lane) == 0)] = start
        rows = np.empty(len(lane), dtype=[(name, np.int64) for name in ("lane", "start", "end")])
        rows["lane"], rows["start"], rows["end"] = lane, begin, until
        return rows[until > begin]


def simulate(
    output_lens: Sequence[int] | np.ndarray, lanes: int, policy: Literal["static", "continuous"] = "continuous"
) -> Timeline:
    """Requests of `output_lens` tokens, all there at the start, run in order on `lanes` lanes.

    Static: batches of `lanes` requests, each as long as its longest. Continuous: a free lane takes the next request at
    once (of several, the first lane does). The work grows with the number of requests, not with their tokens.
    Raises ValueError for no requests, lengths or lanes below 1, or an unknown policy.
    """
    lengths = check_lengths("output_lens", output_lens)
    check_count("lanes", lanes)
    check_choice("policy", policy, ("static", "continuous"))
    lane, start = (_static if policy == "static" else _continuous)(lengths, min(lanes, len(lengths)))
    spans = np.empty(len(lengths), dtype=[(name, np.int64) for name in ("request", "lane", "start", "end")])
    spans["request"], spans["lane"] = np.arange(len(lengths)), lane
    spans["start"], spans["end"] = start, start + lengths
    steps = int(spans["end"].max())
    return Timeline(lanes, steps, float(lengths.sum()) / lanes / steps, spans)


def fewest_steps(output_lens: Sequence[int] | np.ndarray, lanes: int) -> int:
    """No policy takes fewer steps: all tokens on all lanes, or the longest request. Raises ValueError as `simulate`."""
    lengths = check_lengths("output_lens", output_lens)
    return max(-(-int(lengths.sum()) // check_count("lanes", lanes)), int(lengths.max()))


def read_lengths(text: str, most_requests: int = 200, longest: int = 100_000) -> tuple[int, ...]:
    """The lengths in a list that someone typed, such as "200, 12 8": whole numbers, commas or spaces between them.

    Raises ValueError that names the first entry that is not from 1 to `longest`, or too few or too many of them.
    """
    entries = re.split(r"[\s,;]+", text.strip(" \t\r\n,;[]()"))
    if entries == [""]:
        raise ValueError("the list is empty: write output lengths in tokens, such as 200, 12, 8")
    if len(entries) > most_requests:
        raise ValueError(f"the list must hold at most {most_requests} requests, got {len(entries):,}")
    for position, entry in enumerate(entries, 1):
        if not re.fullmatch(r"[0-9]{1,9}", entry) or not 1 <= int(entry) <= longest:
            raise ValueError(
                f"the list must hold whole numbers from 1 to {longest:,}, but entry {position} is {entry[:40]!r}"
            )
    return tuple(map(int, entries))


def _static(lengths: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """The lane and the first step of each request."""
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), lanes))
    batch, lane = np.divmod(np.arange(len(lengths)), lanes)
    return lane, (np.cumsum(longest) - longest)[batch]


def _continuous(lengths: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """The lane and the first step of each request."""
    free = list(range(lanes))  # the heap's smallest: step x lanes + lane, the lane that is free first
    taken = [heapreplace(free, free[0] + length * lanes) for length in lengths.tolist()]  # each returns the smallest
    start, lane = np.divmod(np.array(taken), lanes)
    return lane, start


# --- what one more request costs ------------------------------------------------------------------------------------


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
