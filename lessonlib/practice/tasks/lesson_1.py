"""Coding tasks of lesson 1: the critical batch, the step-time equation, users, experts, and a sparse peak."""

from collections.abc import Callable, Mapping
from typing import Any

from lessonlib import latency, roofline
from lessonlib.accelerators import Accelerator, get_accelerator
from lessonlib.models import effective_bits, get_model
from lessonlib.practice.tasks.task import Task, rows


def _machine(peak_flops_per_s: float, bandwidth: float) -> Accelerator:
    return Accelerator(key="", name="", memory_bandwidth=bandwidth, peak_flops={"bf16": peak_flops_per_s})


def _critical_batch(peak_flops_per_s: float, bandwidth: float, weight_bits: int) -> float:
    return roofline.critical_batch_size(_machine(peak_flops_per_s, bandwidth), weight_bits)


_CRITICAL_BATCH = Task(
    "01/critical-batch",
    "the batch at which decode's intensity reaches the ridge point",
    _critical_batch,
    rows(
        "peak_flops_per_s bandwidth weight_bits",
        (312e12, 2.039e12, 16),
        (989.4e12, 3.35e12, 8),
        (181.05e12, 0.864e12, 4),
        (1307.4e12, 5.3e12, 16),
        (65e12, 0.32e12, 32),
    ),
    {
        "the ridge itself, whatever the bits; fewer bytes for each weight need fewer requests": (
            lambda peak, bandwidth, bits: _critical_batch(peak, bandwidth, 16)
        ),
        "the wrong way round: with fewer bytes to read, fewer requests are enough": (
            lambda peak, bandwidth, bits: _critical_batch(peak, bandwidth, 16) * 16 / bits
        ),
        "twice: a multiply and an add are two FLOPs": lambda *g: 2 * _critical_batch(*g),
        "half: each weight serves two FLOPs a request, not four": lambda *g: _critical_batch(*g) / 2,
        "eight times: bits for bytes": lambda *g: 8 * _critical_batch(*g),
        "upside down": lambda *g: 1 / _critical_batch(*g),
    },
    "request",
)


def _step_time(of_step: Callable[[latency.StepTime], float]) -> Callable[..., float]:
    return lambda *amounts: of_step(latency.step_time(*amounts))


_STEP_TIME = Task(
    "01/step-time",
    "the time of one step, in seconds",
    _step_time(lambda step: step.total_s),
    rows(
        "linear_flops weight_bytes attention_flops kv_bytes peak_flops_per_s bandwidth overhead_s",
        (13.2e9, 13.2e9, 1.07e9, 1.07e9, 312e12, 2.039e12, 0.0),  # one request: all reading
        (13.2e12, 13.2e9, 0.5e12, 1.07e9, 312e12, 2.039e12, 0.0),  # a prompt: all arithmetic
        (6.6e12, 13.2e9, 0.27e12, 137e9, 312e12, 2.039e12, 5e-4),  # a large batch: arithmetic, then reading
        (2.1e9, 37e9, 9.1e12, 4.5e9, 989.4e12, 3.35e12, 2e-3),  # the other way round
        (0.27e9, 0.54e9, 0.02e9, 0.01e9, 0.15e12, 31e9, 0.03),  # a small model on a laptop: mostly overhead
    ),
    {
        "the overhead is missing": _step_time(lambda s: s.linear_s + s.attention_s),
        "reading alone; where arithmetic takes longer, it sets the pace": _step_time(
            lambda s: s.weights_s + s.kv_s + s.overhead_s
        ),
        "arithmetic alone; where reading takes longer, it sets the pace": _step_time(
            lambda s: s.compute_s + s.overhead_s
        ),
        "reading and arithmetic added up; they overlap, so take the longer of the two": _step_time(
            lambda s: s.weights_s + s.kv_s + s.compute_s + s.overhead_s
        ),
        "one maximum over the whole step; linear layers and attention follow each other, each with its own": _step_time(
            lambda s: max(s.weights_s + s.kv_s, s.compute_s) + s.overhead_s
        ),
        "the longer of linear layers and attention; they come one after the other, so add them": _step_time(
            lambda s: max(s.linear_s, s.attention_s) + s.overhead_s
        ),
        "the overhead comes on top": _step_time(lambda s: max(s.linear_s + s.attention_s, s.overhead_s)),
    },
    "s",
)


def _users(weight_bytes: float, kv_bytes_per_request: float, bandwidth: float, tokens_per_s: float) -> int:
    batch = 0
    while True:
        step = latency.step_time(0, weight_bytes, 0, (batch + 1) * kv_bytes_per_request, 1, bandwidth)
        if step.total_s > 1 / tokens_per_s:
            return batch
        batch += 1


_USERS = Task(
    "01/users",
    "how many users can share a step if each of them gets that many tokens per second",
    _users,
    rows(
        "weight_bytes kv_bytes_per_request bandwidth tokens_per_s",
        (16.06e9, 0.537e9, 3.35e12, 30.0),
        (16.06e9, 0.134e9, 3.35e12, 50.0),
        (13.2e9, 1.074e9, 2.039e12, 60.0),
        (141.1e9, 1.34e9, 4.8e12, 20.0),
        (141.1e9, 1.34e9, 4.8e12, 40.0),  # not even one
    ),
    {
        "one too many: the last user only fits in part, so round down": lambda *g: _users(*g) + 1,
        "the weights are read in every step too: their time comes off first": (
            lambda weights, kv, bandwidth, rate: _users(0, kv, bandwidth, rate)
        ),
        "below 0: if the weights alone take too long, nobody can be served, so return 0": (
            lambda weights, kv, bandwidth, rate: (bandwidth / rate - weights) // kv
        ),
        "there are no parts of a user: round down": (
            lambda weights, kv, bandwidth, rate: max(0, (bandwidth / rate - weights) / kv)
        ),
    },
    "request",
)


def _moe(total_parameters: int, active_parameters: int, weight_bits: int, bandwidth: float) -> tuple[float, float]:
    bytes_per_weight = effective_bits(weight_bits) / 8
    step = latency.step_time(0, active_parameters * bytes_per_weight, 0, 0, 1, bandwidth)
    return total_parameters * bytes_per_weight, step.tokens_per_s


def _moe_input(key: str, weight_bits: int, accelerator: str) -> tuple[int, int, int, float]:
    model = get_model(key)
    bandwidth = get_accelerator(accelerator).memory_bandwidth
    return model.num_parameters, model.num_active_parameters, weight_bits, bandwidth


_MOE = Task(
    "01/experts",
    "the bytes that have to fit in memory, and the most tokens per second for one user",
    _moe,
    rows(
        "total_parameters active_parameters weight_bits bandwidth",
        _moe_input("mixtral-8x7b", 16, "h200-sxm"),
        _moe_input("qwen3-30b-a3b", 8, "l40s"),
        _moe_input("gpt-oss-20b", 4, "rtx-4090"),
        _moe_input("llama-3.1-8b", 16, "a100-80gb-sxm"),
    ),
    {
        "all experts read for one token; a token reads only the active ones": (
            lambda total, active, bits, bandwidth: _moe(total, total, bits, bandwidth)
        ),
        "only the active parameters kept; the next token may need any expert, so all of them have to fit": (
            lambda total, active, bits, bandwidth: _moe(active, active, bits, bandwidth)
        ),
        "the wrong way round: memory holds all parameters, a token reads the active ones": (
            lambda total, active, bits, bandwidth: _moe(active, total, bits, bandwidth)
        ),
        "bits for bytes": lambda *g: (8 * _moe(*g)[0], _moe(*g)[1] / 8),
        "the two values the other way round: bytes first": lambda *g: _moe(*g)[::-1],
    },
    parts=("bytes", "tokens per second"),
)


def _sheet_ridge(datasheet: Mapping[str, Any]) -> float:
    dense = datasheet["bf16_tflops"] / (2 if "sparsity" in datasheet["footnote"] else 1)
    return roofline.ridge_point(_machine(dense * 1e12, datasheet["bandwidth_gb_s"] * 1e9))


def _sheet(key: str, footnote: str = "") -> dict[str, Any]:
    """An accelerator as its vendor prints it: with sparsity, the peak is twice the dense one."""
    accelerator = get_accelerator(key)
    return {
        "name": accelerator.name,
        "bf16_tflops": accelerator.peak() * (2 if footnote else 1) / 1e12,
        "footnote": footnote,
        "bandwidth_gb_s": accelerator.memory_bandwidth / 1e9,
    }


_SPARSE_PEAK = Task(
    "01/sparse-peak",
    "the ridge point that a language model sees, in FLOP/byte",
    _sheet_ridge,
    tuple(
        {"datasheet": _sheet(key, footnote)}
        for key, footnote in (
            ("a100-80gb-sxm", ""),
            ("h100-sxm", "with sparsity"),
            ("l4", "with sparsity"),
            ("mi300x", ""),
            ("h200-sxm", "with sparsity"),
        )
    ),
    {
        "the peak with sparsity: twice what a language model, whose weights are not sparse, can use": (
            lambda sheet: _sheet_ridge({**sheet, "footnote": ""})
        ),
        "every peak halved; only those printed with sparsity are twice too large": (
            lambda sheet: _sheet_ridge({**sheet, "footnote": "with sparsity"})
        ),
        "doubled instead of halved": lambda sheet: 2 * _sheet_ridge({**sheet, "footnote": ""}),
        "upside down: FLOP/s divided by bytes/s": lambda sheet: 1 / _sheet_ridge(sheet),
        "GiB for GB: a vendor's GB are 10^9 bytes": lambda sheet: _sheet_ridge(sheet) / 1.024**3,
    },
    "FLOP/byte",
)


TASKS = (_CRITICAL_BATCH, _STEP_TIME, _USERS, _MOE, _SPARSE_PEAK)
