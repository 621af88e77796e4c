"""The roofline: how much arithmetic a step does per byte it moves, and which of the two the hardware runs out of.

arithmetic intensity = FLOPs / bytes moved          (FLOP/byte)
ridge point          = peak FLOP/s / bandwidth      (FLOP/byte)
attainable rate      = min(peak, intensity x bandwidth)

Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009. A multiply and an add are two FLOPs.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lessonlib.accelerators import Accelerator
from lessonlib.checks import check_count, check_number, check_values
from lessonlib.kv_cache import (
    attention_flops_per_token_layer,
    bytes_per_token,
    cache_bytes,
    cached_token_layers,
    prefill_attention_flops,
)
from lessonlib.models import ModelConfig, effective_bits

ACTIVATION_BYTES = 2  # activations are kept in 16 bits


def arithmetic_intensity(flops: float, num_bytes: float) -> float:
    """FLOPs done per byte moved (FLOP/byte). Raises ValueError for negative FLOPs or no bytes."""
    return check_number("flops", flops) / check_number("num_bytes", num_bytes, exclusive=True)


def ridge_point(accelerator: Accelerator, dtype: str = "bf16") -> float:
    """The intensity (FLOP/byte) from which on arithmetic, not memory, sets the pace."""
    return accelerator.peak(dtype) / accelerator.memory_bandwidth


def attainable_flops_per_s(intensity: object, accelerator: Accelerator, dtype: str = "bf16") -> np.ndarray:
    """The most FLOP/s at an intensity (FLOP/byte; a number or an array), of the same shape."""
    intensities = check_values("intensity", intensity)
    return np.minimum(intensities * accelerator.memory_bandwidth, accelerator.peak(dtype))


def bound_by(intensity: float, accelerator: Accelerator, dtype: str = "bf16") -> Literal["memory", "compute"]:
    """What the hardware runs out of first at this intensity (FLOP/byte)."""
    return "memory" if check_number("intensity", intensity) < ridge_point(accelerator, dtype) else "compute"


def critical_batch_size(accelerator: Accelerator, weight_bits: int = 16, dtype: str = "bf16") -> float:
    """The batch at which a dense model's decode reaches the ridge, the KV cache left out.

    One weight of `weight_bits` serves 2 FLOPs per request: intensity = 2 B / (bits / 8).
    """
    return ridge_point(accelerator, dtype) * effective_bits(weight_bits) / 16


def peak_from_clock(clock_hz: float, fma_per_cycle: float, num_units: int) -> float:
    """Peak FLOP/s of `num_units` units that each finish `fma_per_cycle` multiply-adds a cycle (2 FLOPs each)."""
    check_number("clock_hz", clock_hz, exclusive=True)
    check_number("fma_per_cycle", fma_per_cycle, exclusive=True)
    return clock_hz * fma_per_cycle * 2 * check_count("num_units", num_units)


@dataclass(frozen=True)
class Operator:
    """One kind of work of a step, summed over the layers: its FLOPs and the bytes it moves."""

    name: str
    flops: float
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def num_bytes(self) -> float:
        """All bytes moved."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved (FLOP/byte)."""
        return arithmetic_intensity(self.flops, self.num_bytes)


def total(operators: list[Operator], name: str = "total") -> Operator:
    """The whole step as one operator."""
    return Operator(
        name,
        sum(op.flops for op in operators),
        sum(op.weight_bytes for op in operators),
        sum(op.kv_bytes for op in operators),
        sum(op.activation_bytes for op in operators),
    )


def decode_operators(
    model: ModelConfig,
    batch_size: int = 1,
    context_len: int = 0,
    weight_bits: int = 16,
    kv_bits: float = 16,
    group_size: int | None = None,
) -> list[Operator]:
    """One decode step: each of `batch_size` requests adds a token and attends to `context_len` cached tokens.

    Raises ValueError for a batch below 1, a negative context or bit widths that are not allowed.
    """
    check_count("batch_size", batch_size)
    kv_bytes = cache_bytes(model, context_len, batch_size, kv_bits)
    attention = batch_size * attention_flops_per_token_layer(model) * float(cached_token_layers(model, context_len))
    return _operators(model, batch_size, batch_size, attention, kv_bytes, effective_bits(weight_bits, group_size))


def prefill_operators(
    model: ModelConfig,
    batch_size: int = 1,
    prompt_len: int = 1,
    weight_bits: int = 16,
    kv_bits: float = 16,
    group_size: int | None = None,
    all_logits: bool = False,
) -> list[Operator]:
    """Prefill of `batch_size` prompts of `prompt_len` tokens: the cache is written once, no token waits for another.

    The output head runs for the last position of each prompt, or for every position if `all_logits`.
    Attention keeps its scores on chip (FlashAttention). Raises ValueError as `decode_operators` does.
    """
    tokens = check_count("batch_size", batch_size) * check_count("prompt_len", prompt_len)
    return _operators(
        model,
        tokens,
        tokens if all_logits else batch_size,
        batch_size * prefill_attention_flops(model, prompt_len),
        tokens * bytes_per_token(model, kv_bits),
        effective_bits(weight_bits, group_size),
    )


def training_operators(model: ModelConfig, batch_size: int = 1, seq_len: int = 2048) -> list[Operator]:
    """One training step in 16 bits: forward, and a backward that does twice the forward's arithmetic.

    Weights are read in both directions and their gradient is written: three passes over their bytes.
    Left out: the optimizer (some 26 bytes a parameter, once a step) and recomputed activations.
    """
    forward = prefill_operators(model, batch_size, seq_len, all_logits=True)
    return [
        Operator(op.name, 3 * op.flops, 3 * op.weight_bytes, 0.0, 3 * (op.activation_bytes + op.kv_bytes))
        for op in forward
    ]


def _operators(
    model: ModelConfig, tokens: int, logits: int, attention_flops: float, kv_bytes: float, weight_bits: float
) -> list[Operator]:
    """The operators of a step over `tokens` tokens, `logits` of which go through the output head."""
    parts = model.parameter_counts()
    weight_bytes = weight_bits / 8
    outside_mlp = parts["attention"] + parts["router"] + parts["norms"] + model.head_params
    mlp_read = model.streamed_params(tokens) - outside_mlp
    mlp_used = model.matmul_params - outside_mlp
    layers, hidden = model.num_layers, model.hidden_size
    query_width = model.num_heads * (model.v_head_dim or model.head_dim)
    projected = 2 * hidden + 2 * query_width + model.kv_values_per_token_per_layer
    per_token = ACTIVATION_BYTES * tokens

    def linear(name: str, used: float, read: float, count: int, activations: float) -> Operator:
        return Operator(name, 2 * count * used, read * weight_bytes, 0.0, activations * per_token * count / tokens)

    operators = [
        linear("attention projections", parts["attention"], parts["attention"], tokens, layers * projected),
        Operator("attention", attention_flops, 0.0, kv_bytes, per_token * layers * 2 * query_width),
        linear("experts" if model.num_experts else "MLP", mlp_used, mlp_read, tokens, _mlp_activations(model)),
        linear("router", parts["router"], parts["router"], tokens, layers * (hidden + model.num_experts)),
        linear("norms", parts["norms"], parts["norms"], tokens, 4 * layers * hidden),
        linear("output head", model.head_params, model.head_params, logits, hidden + model.vocab_size),
    ]
    return [op for op in operators if op.flops]


def _mlp_activations(model: ModelConfig) -> float:
    """Numbers read and written per token around the MLPs: input, the wide middle (twice if gated) both ways, output."""
    middle = 3 if model.gated_mlp else 2
    dense = model.num_dense_layers if model.num_experts else model.num_layers
    dense_width = (
        (model.dense_intermediate_size or model.intermediate_size) if model.num_experts else (model.intermediate_size)
    )
    sparse_width = model.experts_per_token * model.intermediate_size + model.shared_intermediate_size
    wide = dense * dense_width + (model.num_layers - dense) * sparse_width
    return middle * wide + 2 * model.hidden_size * model.num_layers
