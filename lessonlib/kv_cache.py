"""The key-value cache: what one token adds, and what a batch of requests holds.

For every layer the cache keeps one key and one value per KV head and token. MLA keeps one compressed vector
instead, which serves as both (so no factor 2). A sliding-window layer stops growing at its window.
"""

import numpy as np

from lessonlib.checks import check_choice, check_count, check_values
from lessonlib.models import ModelConfig

# Bits a cached number takes, with its share of the scale: 8.5 and 4.5 are llama.cpp's q8_0 and q4_0.
KV_BITS = (2, 3, 4, 4.5, 8, 8.5, 16, 32)


def bytes_per_token(model: ModelConfig, kv_bits: float = 16) -> float:
    """Bytes that one token adds to the cache, over all layers, while it is inside every window.

    Raises ValueError for a `kv_bits` that is not in KV_BITS.
    """
    check_choice("kv_bits", kv_bits, KV_BITS)
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

    Raises ValueError for a negative length, a batch below 1 or a `kv_bits` that is not in KV_BITS.
    """
    check_count("context_len", context_len, 0)
    check_count("batch_size", batch_size)
    per_token_layer = bytes_per_token(model, kv_bits) / model.num_layers
    return batch_size * per_token_layer * float(cached_token_layers(model, context_len))
