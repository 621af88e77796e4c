"""How long a step takes: the one equation behind every plot, question and prediction of the course.

linear layers = max(2 x tokens x parameters / peak, weight bytes / bandwidth)
attention     = max(attention FLOPs / peak, KV bytes / bandwidth)
step          = linear layers + attention + overhead

Weights count what a step streams: the input embedding is a look-up, the output head is read. Activations are left
out: in decode they are well below 1 % of the bytes (see `roofline.Operator.activation_bytes`).
Source: the two bounds of the roofline, applied to the two kinds of work a transformer step consists of.
"""

from dataclasses import dataclass
from typing import Any, Literal

from lessonlib.accelerators import Accelerator
from lessonlib.checks import check_count, check_number, check_share
from lessonlib.kv_cache import (
    attention_flops_per_token_layer,
    bytes_per_token,
    cache_bytes,
    cached_token_layers,
    kv_shards,
    prefill_attention_flops,
    summed_token_layers,
)
from lessonlib.models import ModelConfig
from lessonlib.units import fmt


@dataclass(frozen=True)
class StepTime:
    """The parts of one step, in seconds, and the `tokens` it produces (decode) or takes in (prefill)."""

    linear_compute_s: float
    weights_s: float
    attention_compute_s: float
    kv_s: float
    overhead_s: float = 0.0
    tokens: float = 1

    @property
    def compute_s(self) -> float:
        """Time of all arithmetic at the peak rate."""
        return self.linear_compute_s + self.attention_compute_s

    @property
    def linear_s(self) -> float:
        """The linear layers: arithmetic or weight reads, whichever takes longer."""
        return max(self.linear_compute_s, self.weights_s)

    @property
    def attention_s(self) -> float:
        """Attention: arithmetic or cache reads, whichever takes longer."""
        return max(self.attention_compute_s, self.kv_s)

    @property
    def total_s(self) -> float:
        """The step."""
        return self.linear_s + self.attention_s + self.overhead_s

    @property
    def bound_by(self) -> Literal["memory", "compute", "overhead"]:
        """What takes most of the step."""
        spent: dict[Literal["memory", "compute", "overhead"], float]
        spent = {"memory": 0.0, "compute": 0.0, "overhead": self.overhead_s}
        spent["memory" if self.weights_s > self.linear_compute_s else "compute"] += self.linear_s
        spent["memory" if self.kv_s > self.attention_compute_s else "compute"] += self.attention_s
        return max(spent, key=spent.__getitem__)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole batch."""
        return self.tokens / self.total_s


def step_time(
    linear_flops: float,
    weight_bytes: float,
    attention_flops: float,
    kv_bytes: float,
    peak_flops_per_s: float,
    memory_bandwidth: float,
    overhead_s: float = 0.0,
    tokens: float = 1,
) -> StepTime:
    """The step-time equation on plain numbers: FLOPs, bytes, FLOP/s, B/s and seconds.

    Raises ValueError for a negative amount, or a rate that is not above 0.
    """
    check_number("peak_flops_per_s", peak_flops_per_s, exclusive=True)
    check_number("memory_bandwidth", memory_bandwidth, exclusive=True)
    return StepTime(
        check_number("linear_flops", linear_flops) / peak_flops_per_s,
        check_number("weight_bytes", weight_bytes) / memory_bandwidth,
        check_number("attention_flops", attention_flops) / peak_flops_per_s,
        check_number("kv_bytes", kv_bytes) / memory_bandwidth,
        check_number("overhead_s", overhead_s),
        check_number("tokens", tokens, exclusive=True),
    )


def decode_step(
    model: ModelConfig,
    accelerator: Accelerator,
    batch_size: int = 1,
    context_len: int = 0,
    weight_bits: int = 16,
    kv_bits: float = 16,
    num_accelerators: int = 1,
    overhead_s: float = 0.0,
    dtype: str = "bf16",
    group_size: int | None = None,
    split: Literal["tensor", "layer"] = "tensor",
) -> StepTime:
    """One decode step: `batch_size` requests get one token each, with `context_len` tokens in each one's cache.

    `dtype` is the arithmetic's (weights of fewer bits are widened on the way). With `split` "tensor" every
    accelerator holds a slice of each layer and all work at once; with "layer" each holds whole layers and a token
    visits them in turn, so that memory adds up and speed does not. Raises ValueError for what is out of range.
    """
    check_count("batch_size", batch_size)
    kv_bytes = cache_bytes(model, context_len, batch_size, kv_bits)
    token_layers = float(cached_token_layers(model, context_len))
    shards = kv_shards(model, num_accelerators, split)
    workers = num_accelerators if split == "tensor" else 1
    return step_time(
        2 * batch_size * model.matmul_params / workers,
        model.streamed_weight_bytes(weight_bits, group_size, num_tokens=batch_size) / workers,
        batch_size * attention_flops_per_token_layer(model) * token_layers / workers,
        kv_bytes / shards,
        accelerator.peak(dtype),
        accelerator.memory_bandwidth,
        overhead_s,
        batch_size,
    )


def prefill(
    model: ModelConfig,
    accelerator: Accelerator,
    prompt_len: int,
    batch_size: int = 1,
    efficiency: float = 1.0,
    weight_bits: int = 16,
    kv_bits: float = 16,
    num_accelerators: int = 1,
    overhead_s: float = 0.0,
    dtype: str = "bf16",
    group_size: int | None = None,
    all_logits: bool = False,
) -> StepTime:
    """Prefill of `batch_size` prompts of `prompt_len` tokens in one step, at `efficiency` (0 to 1) of the peak.

    The output head runs for each prompt's last position, or for all if `all_logits`. Raises ValueError for what is
    out of range.
    """
    tokens = check_count("batch_size", batch_size) * check_count("prompt_len", prompt_len)
    check_share("efficiency", efficiency)
    head = model.head_params
    logits = tokens if all_logits else batch_size
    shards = kv_shards(model, num_accelerators)
    return step_time(
        2 * (tokens * (model.matmul_params - head) + logits * head) / num_accelerators,
        model.streamed_weight_bytes(weight_bits, group_size, num_tokens=tokens) / num_accelerators,
        batch_size * prefill_attention_flops(model, prompt_len) / num_accelerators,
        tokens * bytes_per_token(model, kv_bits) / shards,
        accelerator.peak(dtype) * efficiency,
        accelerator.memory_bandwidth,
        overhead_s,
        tokens,
    )


def ttft(
    model: ModelConfig, accelerator: Accelerator, prompt_len: int, queue_s: float = 0.0, **prefill_options: Any
) -> float:
    """Time to first token, in seconds: the wait in the queue, then prefill, whose last position is the first token.

    Further arguments are those of `prefill`.
    """
    return check_number("queue_s", queue_s) + prefill(model, accelerator, prompt_len, **prefill_options).total_s


def tpot(
    model: ModelConfig, accelerator: Accelerator, prompt_len: int, output_len: int, batch_size: int = 1, **options: Any
) -> float:
    """Time per output token, in seconds: the mean decode step over all tokens after the first.

    The step that makes token i attends to prompt_len + i - 1 tokens. Further arguments are those of `decode_step`.
    Raises ValueError for fewer than two tokens.
    """
    last = check_count("prompt_len", prompt_len) + check_count("output_len", output_len, 2) - 1
    empty = decode_step(model, accelerator, batch_size, 0, **options)
    one_token = decode_step(model, accelerator, batch_size, 1, **options)
    # Attention is proportional to the tokens cached over all layers; the rest of a step does not depend on them.
    token_layers = summed_token_layers(model, last) - summed_token_layers(model, prompt_len)
    mean_tokens = token_layers / (output_len - 1) / model.num_layers
    return empty.total_s + one_token.attention_s * mean_tokens


@dataclass(frozen=True)
class SLO:
    """A service level objective: the longest TTFT and TPOT (seconds) a user should see.

    Raises ValueError for times that are not above 0.
    """

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        check_number("ttft_s", self.ttft_s, exclusive=True)
        check_number("tpot_s", self.tpot_s, exclusive=True)


@dataclass(frozen=True)
class SpeedCheck:
    """A measured decode speed held against the most the memory can deliver."""

    bound_tokens_per_s: float
    share: float
    possible: bool
    message: str


def check_speed(
    tokens_per_s: float, bytes_per_token: float, memory_bandwidth: float, num_accelerators: int = 1
) -> SpeedCheck:
    """Hold a measured batch-1 decode speed (tokens/s) against bandwidth (B/s, of each accelerator) / bytes per token.

    No machine decodes faster than it reads: a share above 1 means a wrong figure, which the message says how to find.
    Raises ValueError for amounts that are not above 0.
    """
    check_number("tokens_per_s", tokens_per_s, exclusive=True)
    check_number("bytes_per_token", bytes_per_token, exclusive=True)
    check_number("memory_bandwidth", memory_bandwidth, exclusive=True)
    bound = check_count("num_accelerators", num_accelerators) * memory_bandwidth / bytes_per_token
    share = tokens_per_s / bound
    said = f"{fmt(tokens_per_s)} tokens/s is {share:.0%} of the most the memory can deliver, {fmt(bound)} tokens/s"
    if share <= 1:
        return SpeedCheck(bound, share, True, f"{said}.")
    return SpeedCheck(
        bound,
        share,
        False,
        f"{said}: not possible at batch 1. Look for a smaller file than stated, GiB read as GB, several "
        "requests or prompt tokens counted, or speculative decoding.",
    )
