"""Batching: what one more request in a step costs, who shares which step, and what stops it.

A step reads every weight once, however many requests share it. Static batching starts a batch and waits for its
longest request; continuous batching refills a lane as soon as it is free (`lanes`). `step` says what a token costs in
a batch, `traffic` when requests arrive, `server` what becomes of them, `report` what users saw, and `load_curve` how
much load a server stands.
"""

from lessonlib.batching.lanes import REFERENCE_LENS, Timeline, fewest_steps, read_lengths, simulate
from lessonlib.batching.load_curve import LoadCurve, at_rate, capacity_per_s, load_curve
from lessonlib.batching.report import Gaps, Load, Report
from lessonlib.batching.server import POLICIES, Server
from lessonlib.batching.step import (
    BatchLimits,
    StepParts,
    batch_limits,
    compute_bound_batch,
    memory_ceiling,
    step_parts,
)
from lessonlib.batching.traffic import Lognormal, Traffic, bursty_traffic, poisson_traffic, read_traffic
from lessonlib.latency import SLO

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
