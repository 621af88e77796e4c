"""What fits, how many requests, what a million tokens costs, and what an engine's start-up log says about it.

`memory` says what fits, `service` how long requests of one shape take and what they cost, `money` what follows from
rates that were measured, `deployment` how to start it, and `engine_logs` reads what engines print.
"""

from lessonlib.capacity.engine_logs import EngineLog, LogRow, compare_log, read_engine_log
from lessonlib.capacity.memory import (
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
from lessonlib.capacity.money import (
    BreakEven,
    Energy,
    break_even,
    cost_from_rate,
    cost_per_correct_answer,
    energy_per_token,
)
from lessonlib.capacity.service import (
    Amount,
    BatchChoice,
    OperatingPoint,
    Service,
    ServingCost,
    TokenTime,
    batch_under_slo,
    cost_per_million_tokens,
)
from lessonlib.latency import SLO

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
    "OperatingPoint",
    "Rank",
    "Remedy",
    "Service",
    "ServingCost",
    "TokenTime",
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
