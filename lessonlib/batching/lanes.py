"""Batching: what one more request in a step costs, who shares which step, and what stops it.

A step reads every weight once, however many requests share it. Static batching starts a batch and waits for its
longest request; continuous batching refills a lane as soon as it is free. Arrivals, prefill and a limited cache are
in `serving_simulator` and `traffic`, whose public names are also here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Literal

import numpy as np

from lessonlib.checks import check_choice, check_count, check_lengths

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
