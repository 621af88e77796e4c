"""The key-value cache: what one token adds, what a batch of requests holds, and what it costs to do without.

For every layer the cache keeps one key and one value per KV head and token. MLA keeps one compressed vector
instead, which serves as both (so no factor 2). A sliding-window layer stops growing at its window.
"""

import dataclasses
from typing import Any

import numpy as np

from lessonlib.checks import check_choice, check_count, check_number, check_values
from lessonlib.models import ModelConfig

# Common widths of a cached number with its share of a scale: 8.5 and 4.5 bits are llama.cpp's q8_0 and q4_0.
KV_BITS = (2, 3, 4, 4.5, 8, 8.5, 16, 32)


# --- what is stored -------------------------------------------------------------------------------------------------


def bytes_per_token(model: ModelConfig, kv_bits: float = 16) -> float:
    """Bytes that one token adds to the cache, over all layers, while it is inside every window.

    `kv_bits` is what a number takes with its share of a scale. Raises ValueError unless it is above 0 and at most 32.
    """
    if check_number("kv_bits", kv_bits, exclusive=True) > 32:
        raise ValueError(f"kv_bits must be above 0 and at most 32, got {kv_bits!r}")
    return model.num_layers * model.kv_values_per_token_per_layer * kv_bits / 8


def cached_token_layers(model: ModelConfig, context_len: object) -> np.ndarray:
    """Tokens held, summed over the layers, when each request is `context_len` tokens long (a number or an array).

    A windowed layer holds at most `sliding_window` tokens. Raises ValueError for a negative length.
    """
    tokens = check_values("context_len", context_len)
    windowed = model.num_windowed_layers
    in_window = np.minimum(tokens, model.sliding_window) if windowed and model.sliding_window else tokens
    return (model.num_layers - windowed) * tokens + windowed * in_window


def summed_token_layers(model: ModelConfig, context_len: int) -> float:
    """`cached_token_layers` summed over the contexts 1, 2, ..., `context_len`: what token after token attends to."""
    tokens = check_count("context_len", context_len, 0)
    window = min(tokens, model.sliding_window or tokens)
    growing, capped = window * (window + 1) / 2, (tokens - window) * window
    windowed = model.num_windowed_layers
    return (model.num_layers - windowed) * tokens * (tokens + 1) / 2 + windowed * (growing + capped)


def cache_bytes(model: ModelConfig, context_len: int, batch_size: int = 1, kv_bits: float = 16) -> float:
    """Bytes of the cache of `batch_size` requests of `context_len` tokens each, windows respected.

    Raises ValueError for a negative length, a batch below 1, or a `kv_bits` that is not above 0 and at most 32.
    """
    return float(cache_growth(model, check_count("context_len", context_len, 0), batch_size, kv_bits))


def cache_growth(model: ModelConfig, context_lens: object, batch_size: int = 1, kv_bits: float = 16) -> np.ndarray:
    """`cache_bytes` (bytes) at every length of an array (tokens), of the same shape. Raises ValueError as it does."""
    check_count("batch_size", batch_size)
    per_token_layer = bytes_per_token(model, kv_bits) / model.num_layers
    return batch_size * per_token_layer * cached_token_layers(model, context_lens)


# --- the same model with another kind of attention -------------------------------------------------------------------

GQA_HEADS = 8  # what most published models with grouped queries keep
MLA_RANK, MLA_ROPE = 512, 64  # DeepSeek-V2 and V3
WINDOW = 4096  # Mistral 7B v0.1; a model that has shorter windows keeps them


def attention_variants(model: ModelConfig) -> dict[str, ModelConfig]:
    """The same model with one thing changed: "MHA", "GQA", "MQA", "MLA", or "windowed", a window in every layer.

    GQA keeps 8 KV heads (or the next number below that divides the heads), MLA DeepSeek's 512 + 64 values a token.
    """
    # MLA's heads are wider for the score than for the value: the value's width is what MHA would keep of both.
    head_dim = model.v_head_dim or model.head_dim
    heads = model.num_heads
    window = min(WINDOW, model.sliding_window or WINDOW)
    gqa = next(n for n in range(min(GQA_HEADS, heads), 0, -1) if heads % n == 0)

    def with_kv_heads(kv_heads: int, latent_rank: int = 0) -> ModelConfig:
        return dataclasses.replace(
            model,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            q_lora_rank=0,
            kv_lora_rank=latent_rank,
            qk_rope_head_dim=MLA_ROPE if latent_rank else 0,
            qk_nope_head_dim=head_dim if latent_rank else 0,
            v_head_dim=head_dim if latent_rank else 0,
        )

    return {
        "MHA": with_kv_heads(heads),
        "GQA": with_kv_heads(gqa),
        "MQA": with_kv_heads(1),
        "MLA": with_kv_heads(heads, MLA_RANK),
        "windowed": dataclasses.replace(model, sliding_window=window, num_windowed_layers=model.num_layers),
    }


# --- several accelerators -------------------------------------------------------------------------------------------


def kv_shards(model: ModelConfig, num_accelerators: int, split: str = "tensor") -> int:
    """Over how many accelerators a token's cache is divided: as many as there are KV heads, MLA's not at all.

    With `split` "layer" each accelerator holds whole layers, one after the other: no layer's cache is divided.
    Raises ValueError where the heads cannot be divided: the query heads must be a multiple of `num_accelerators`, and
    of KV heads and accelerators one must be a multiple of the other.
    """
    check_choice("split", split, ("tensor", "layer"))
    check_count("num_accelerators", num_accelerators)
    if split == "layer" and num_accelerators > model.num_layers:
        raise ValueError(
            f"num_accelerators must be at most the {model.num_layers} layers of {model.name}, got {num_accelerators}"
        )
    if num_accelerators == 1 or split == "layer":
        return 1
    heads, kv_heads = model.num_heads, model.num_kv_heads
    allowed = [
        n for n in range(1, heads + 1) if not heads % n and (model.kv_lora_rank or not min(n % kv_heads, kv_heads % n))
    ]
    if num_accelerators not in allowed:
        said = "" if model.kv_lora_rank else f", and divide the {kv_heads} KV heads or be a multiple of them"
        raise ValueError(
            f"num_accelerators must divide the {heads} query heads of {model.name}{said}, got {num_accelerators}: "
            f"use {', '.join(map(str, allowed))}"
        )
    return 1 if model.kv_lora_rank else min(num_accelerators, kv_heads)


def rank_bytes_per_token(
    model: ModelConfig, num_accelerators: int = 1, num_layers: int | None = None, kv_bits: float = 16
) -> float:
    """Bytes that one token adds on one of `num_accelerators` that hold `num_layers` layers (None: all).

    Beyond the KV heads the heads are replicated, and MLA's vector is replicated on every rank. Raises ValueError for
    what `kv_shards` refuses and for layers that the model does not have.
    """
    layers = model.num_layers if num_layers is None else check_count("num_layers", num_layers)
    if layers > model.num_layers:
        raise ValueError(f"num_layers must be at most the {model.num_layers} of {model.name}, got {layers}")
    return bytes_per_token(model, kv_bits) * layers / model.num_layers / kv_shards(model, num_accelerators)


# --- where memory ends ----------------------------------------------------------------------------------------------


def requests_that_fit(model: ModelConfig, budget_bytes: float, context_len: int, kv_bits: float = 16) -> int:
    """How many requests of `context_len` tokens each have their cache in `budget_bytes`.

    Raises ValueError for a negative budget or a length below 1.
    """
    check_number("budget_bytes", budget_bytes)
    return int(budget_bytes // cache_bytes(model, check_count("context_len", context_len), 1, kv_bits))


def longest_context(model: ModelConfig, budget_bytes: float, batch_size: int = 1, kv_bits: float = 16) -> int | None:
    """Tokens that each of `batch_size` requests can keep in `budget_bytes`; None if the windows stop it from filling.

    Raises ValueError for a negative budget or a batch below 1.
    """
    per_layer = bytes_per_token(model, kv_bits) / model.num_layers * check_count("batch_size", batch_size)
    token_layers = check_number("budget_bytes", budget_bytes) / per_layer
    growing = model.num_layers - model.num_windowed_layers
    window = model.sliding_window if model.num_windowed_layers else 0
    if not window or token_layers < window * model.num_layers:
        return int(token_layers // model.num_layers)
    return int((token_layers - model.num_windowed_layers * window) // growing) if growing else None


# --- arithmetic with and without a cache ----------------------------------------------------------------------------


def step_flops(context_len: int, hidden_size: int, use_cache: bool = True) -> float:
    """FLOPs of one new token in one attention block of width d, with `context_len` = t tokens before it.

    Its own query, key and value are projected: 3 x 2 d^2. It attends to the t tokens: 4 t d. Without a cache their
    keys and values are projected again: 4 t d^2. (The output projection and the MLP are the same either way.)
    """
    tokens, width = check_count("context_len", context_len, 0), check_count("hidden_size", hidden_size)
    again = 0 if use_cache else 4 * tokens * width**2
    return float(6 * width**2 + 4 * tokens * width + again)


def generation_flops(prompt_len: int, output_len: int, hidden_size: int, use_cache: bool = True) -> float:
    """FLOPs of `output_len` new tokens in one attention block after a prompt: the sum of `step_flops`.

    The contexts are prompt_len, ..., prompt_len + output_len - 1. Raises ValueError for a length below 0 or a width
    or an output below 1.
    """
    first = check_count("prompt_len", prompt_len, 0)
    contexts = range(first, first + check_count("output_len", output_len))
    return sum(step_flops(context, hidden_size, use_cache) for context in contexts)


def attention_flops_per_token_layer(model: ModelConfig, absorbed: bool = True) -> float:
    """FLOPs with which one new token attends to one cached token in one layer: a score and a weighted sum per head.

    MLA in decode works on the compressed vectors themselves (`absorbed`), in prefill on the expanded heads.
    """
    if not model.kv_lora_rank:
        return 4 * model.num_heads * model.head_dim
    if absorbed:
        return 2 * model.num_heads * (2 * model.kv_lora_rank + model.qk_rope_head_dim)
    return 2 * model.num_heads * (model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim)


def prefill_attention_flops(model: ModelConfig, prompt_len: int) -> float:
    """Attention FLOPs of one prompt: token t attends to t tokens, or to its window, in every layer."""
    pairs = summed_token_layers(model, check_count("prompt_len", prompt_len))
    return attention_flops_per_token_layer(model, absorbed=False) * pairs


def model_generation_flops(model: ModelConfig, prompt_len: int, output_len: int, use_cache: bool = True) -> float:
    """FLOPs of a whole model that generates `output_len` tokens after a prompt.

    The first token comes from the prompt's prefill. With a cache each later one is a decode step; without, it is a
    prefill of everything so far. The head runs for the last position only. Raises ValueError for lengths below 1.
    """
    prompt, new = check_count("prompt_len", prompt_len), check_count("output_len", output_len)
    head = 2 * model.head_params
    body = 2 * model.matmul_params - head

    def prefill(tokens: int) -> float:
        return tokens * body + head + prefill_attention_flops(model, tokens)

    if not use_cache:
        return sum(prefill(prompt + i) for i in range(new))
    attended = summed_token_layers(model, prompt + new - 1) - summed_token_layers(model, prompt)
    return prefill(prompt) + (new - 1) * (body + head) + attention_flops_per_token_layer(model) * attended


# --- paging ---------------------------------------------------------------------------------------------------------


def blocks(num_tokens: Any, block_size: int = 16) -> Any:
    """Blocks of `block_size` tokens that hold `num_tokens` (a count, or an array of counts, of the same shape).

    Raises ValueError for numbers of tokens that are negative or not whole, and for a block below 1.
    """
    size = check_count("block_size", block_size)
    if np.ndim(num_tokens):
        return -(-_counts("num_tokens", num_tokens) // size)
    return -(-check_count("num_tokens", num_tokens, 0) // size)


def paging_waste(lengths: object, block_size: int = 16) -> np.ndarray:
    """Token slots that each sequence of `lengths` tokens leaves empty in its last block: at most block_size - 1."""
    return -_counts("lengths", lengths) % check_count("block_size", block_size)


def _counts(name: str, values: object) -> np.ndarray:
    numbers = check_values(name, values)
    if np.any(numbers % 1):
        raise ValueError(f"{name} must hold whole numbers, got {values!r}")
    return numbers.astype(int)


def num_blocks(
    model: ModelConfig, budget_bytes: float, block_size: int = 16, kv_bits: float = 16, num_accelerators: int = 1
) -> int:
    """Blocks that one accelerator's budget (bytes) holds; every one spans all layers.

    Raises ValueError for a negative budget or what `rank_bytes_per_token` refuses.
    """
    per_token = rank_bytes_per_token(model, num_accelerators, kv_bits=kv_bits)
    return int(check_number("budget_bytes", budget_bytes) // (check_count("block_size", block_size) * per_token))


def concurrency(num_tokens: int, max_len: int) -> float:
    """How many requests of `max_len` tokens a cache of `num_tokens` tokens holds: below 1, not even one.

    Engines print it at start-up ("maximum concurrency"). Raises ValueError for counts that are not whole or too small.
    """
    return check_count("num_tokens", num_tokens, 0) / check_count("max_len", max_len)
