"""Coding tasks of lesson 2: KV bytes, a cached attention step, windows, shared blocks, and MLA with a factor 2."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lessonlib import attention, kv_cache
from lessonlib.models import ModelConfig, get_model
from lessonlib.paging import BlockTable
from lessonlib.practice.tasks.task import Arrays, Task, rows


def _config(key: str) -> dict[str, Any]:
    """What a model's config.json says about its shape. Families leave out what follows from the rest."""
    model = get_model(key)
    config: dict[str, Any] = {
        "model_type": "qwen3" if key.startswith("qwen3") else "llama",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
    }
    if model.num_kv_heads == model.num_heads:
        del config["num_key_value_heads"]
    if model.num_heads * model.head_dim == model.hidden_size:
        del config["head_dim"]
    return config


def _kv_bytes(config: Mapping[str, Any]) -> float:
    return kv_cache.bytes_per_token(ModelConfig.from_hf_config(config))


def _kv_slip(factor: Callable[[ModelConfig], float]) -> Callable[..., float]:
    return lambda config: _kv_bytes(config) * factor(ModelConfig.from_hf_config(config))


_KV_BYTES = Task(
    "02/kv-bytes",
    "the bytes that one token adds to a 16-bit cache, over all layers",
    _kv_bytes,
    tuple({"config": _config(key)} for key in ("llama-1-7b", "llama-3.1-8b", "qwen3-4b", "smollm2-135m", "qwen3-32b")),
    {
        "query heads for KV heads: only the KV heads are kept (num_key_value_heads, where it is given)": _kv_slip(
            lambda m: m.num_heads / m.num_kv_heads
        ),
        "half: a token keeps a key and a value, two bytes for each number": _kv_slip(lambda m: 1 / 2),
        "the head size derived from the hidden size; where a config states head_dim, that is the one": _kv_slip(
            lambda m: m.hidden_size / m.num_heads / m.head_dim
        ),
        "the hidden size in the place of KV heads times head size": _kv_slip(
            lambda m: m.hidden_size / m.head_dim / m.num_kv_heads
        ),
        "eight times: bits for bytes": _kv_slip(lambda m: 8),
        "one layer; all of them keep a cache": _kv_slip(lambda m: 1 / m.num_layers),
        "twice: 16 bits are two bytes, and K and V are two": _kv_slip(lambda m: 2),
    },
    "byte",
)


def _grown(new: np.ndarray, cache: np.ndarray) -> np.ndarray:
    return np.vstack([cache, new])


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray) -> Arrays:
    keys, values = _grown(k, k_cache), _grown(v, v_cache)
    return attention.attention(q[None], keys, values)[0], keys, values


def _attend_slip(output: Callable[..., np.ndarray]) -> Callable[..., Arrays]:
    """A step with another output and the right caches."""

    def slip(q: np.ndarray, k: np.ndarray, v: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray) -> Arrays:
        keys, values = _grown(k, k_cache), _grown(v, v_cache)
        return output(q, keys, values), keys, values

    return slip


def _attend_inputs(cached_tokens: int, head_dim: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(cached_tokens)
    shapes = {"q": head_dim, "k": head_dim, "v": head_dim}
    vectors = {name: rng.normal(size=size).round(2) for name, size in shapes.items()}
    return vectors | {f"{name}_cache": rng.normal(size=(cached_tokens, head_dim)).round(2) for name in "kv"}


_CACHED_ATTENTION = Task(
    "02/cached-attention",
    "the output for the new token (D values), the grown keys and the grown values (S + 1 rows of D)",
    _attend,
    tuple(_attend_inputs(*sizes) for sizes in ((2, 4), (5, 4), (1, 3), (7, 8))),
    {
        "the new token does not attend to itself: grow the caches before you score": _attend_slip(
            lambda q, k, v: attention.attention(q[None], k[:-1], v[:-1])[0]
        ),
        "the scores are not divided by the square root of the head size": _attend_slip(
            lambda q, k, v: attention.attention(q[None] * np.sqrt(len(q)), k, v)[0]
        ),
        "the scores are divided by the head size, not by its square root": _attend_slip(
            lambda q, k, v: attention.attention(q[None] / np.sqrt(len(q)), k, v)[0]
        ),
        "the softmax is missing": _attend_slip(lambda q, k, v: k @ q / np.sqrt(len(q)) @ v),
        "keys mixed instead of values": _attend_slip(lambda q, k, v: attention.attention(q[None], k, k)[0]),
        "the caches came back as they were: the next step would not know this token": (
            lambda *g: (_attend(*g)[0], g[3], g[4])
        ),
    },
    parts=("output", "keys", "values"),
)


def _windowed(
    context_len: int, num_layers: int, windowed_layers: int, window: int, kv_heads: int, head_dim: int
) -> float:
    model = dataclasses.replace(
        get_model("llama-2-7b"),
        num_layers=num_layers,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=window,
        num_windowed_layers=windowed_layers,
    )
    return kv_cache.cache_bytes(model, context_len)


def _windowed_input(key: str, context_len: int) -> tuple[int, ...]:
    model = get_model(key)
    shape = (model.num_layers, model.num_windowed_layers, model.sliding_window, model.num_kv_heads, model.head_dim)
    return (context_len, *shape)


_WINDOWS = Task(
    "02/windows",
    "the bytes of one request's 16-bit cache",
    _windowed,
    rows(
        "context_len num_layers windowed_layers window kv_heads head_dim",
        _windowed_input("llama-3.1-8b", 8192),
        _windowed_input("gemma-3-27b", 32_768),
        _windowed_input("gemma-3-27b", 700),
        _windowed_input("gpt-oss-20b", 10_000),
        _windowed_input("mistral-7b-v0.1", 20_000),
    ),
    {
        "no window: a windowed layer stops growing at its window": (
            lambda tokens, layers, windowed, *g: _windowed(tokens, layers, 0, *g)
        ),
        "a window in every layer; the others keep all tokens": (
            lambda tokens, layers, windowed, window, *g: _windowed(tokens, layers, layers if window else 0, window, *g)
        ),
        "the two kinds of layer the wrong way round": (
            lambda tokens, layers, windowed, window, *g: _windowed(
                tokens, layers, layers - windowed if window else 0, window, *g
            )
        ),
        "a window that is not full yet: a layer holds at most the tokens there are": (
            lambda tokens, layers, windowed, window, kv_heads, head_dim: (
                4 * kv_heads * head_dim * ((layers - windowed) * tokens + windowed * window)
            )
        ),
        "half: a token keeps a key and a value, two bytes for each number": lambda *g: _windowed(*g) / 2,
        "twice: 16 bits are two bytes, and K and V are two": lambda *g: _windowed(*g) * 2,
    },
    "byte",
)


def _shared_blocks(prefix_len: int, own_lens: Sequence[int], block_size: int) -> int:
    pool = BlockTable(1 + prefix_len + sum(own_lens) + len(own_lens), block_size)
    pool.append("prefix", prefix_len)
    for user, own in enumerate(own_lens):
        pool.fork("prefix", str(user))
        pool.append(str(user), own)
    return sum(users > 0 for users in pool.users)


def _blocks_of(prefix_len: int, own_lens: Sequence[int], block_size: int, kept: int, shared: int) -> int:
    return kept + sum(kv_cache.blocks(prefix_len + own, block_size) - shared for own in own_lens)


_SHARED_BLOCKS = Task(
    "02/shared-blocks",
    "the blocks in use when all users share the blocks of the common beginning",
    _shared_blocks,
    rows(
        "prefix_len own_lens block_size",
        (1000, (200, 200, 200), 16),
        (1024, (200, 35, 16, 1), 16),
        (1000, (3, 5), 16),
        (77, (30, 300, 1000, 8), 32),
        (5, (100,), 1),
    ),
    {
        "nothing shared: that is a copy of the beginning for each user": (
            lambda prefix, own, size: sum(kv_cache.blocks(prefix + n, size) for n in own)
        ),
        "a user's own tokens go on in a copy of the last block, where there is room": (
            lambda prefix, own, size: sum(kv_cache.blocks(n, size) for n in (prefix, *own))
        ),
        "users in each other's blocks: only the common beginning is shared": (
            lambda prefix, own, size: kv_cache.blocks(prefix + sum(own), size)
        ),
        "the beginning's own last block, half full, is still there: each user writes in a copy of it": (
            lambda prefix, own, size: _blocks_of(prefix, own, size, prefix // size, prefix // size)
        ),
        "a half-full block that others use too cannot be written in: each user needs a copy": (
            lambda prefix, own, size: _blocks_of(prefix, own, size, -(-prefix // size), -(-prefix // size))
        ),
    },
    "",
)


def _mla(config: Mapping[str, int]) -> float:
    model = dataclasses.replace(
        get_model("deepseek-v3"),
        num_layers=config["num_hidden_layers"],
        num_dense_layers=1,
        kv_lora_rank=config["kv_lora_rank"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
    )
    return kv_cache.bytes_per_token(model)


def _mla_config(key: str, **changed: int) -> dict[str, int]:
    model = get_model(key)
    return {
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        **changed,
    }


def _latent(config: Mapping[str, int], values: float) -> float:
    return config["num_hidden_layers"] * values * 2


_MLA = Task(
    "02/mla",
    "the bytes that one token of a model with MLA adds to a 16-bit cache",
    _mla,
    (
        {"config": _mla_config("deepseek-v3")},
        {"config": _mla_config("deepseek-v2-lite")},
        {"config": _mla_config("deepseek-v3", num_hidden_layers=40, kv_lora_rank=256, qk_rope_head_dim=48)},
    ),
    {
        "a factor 2 and no rope part: one vector is key and value at once, and the rope part is kept beside it": (
            lambda config: _latent(config, 2 * config["kv_lora_rank"])
        ),
        "twice: the one vector is key and value at once": lambda config: 2 * _mla(config),
        "the rope part is missing: it is kept beside the compressed vector": (
            lambda config: _latent(config, config["kv_lora_rank"])
        ),
        "keys and values of all heads; they are computed from the compressed vector and not kept": (
            lambda config: _latent(config, 2 * config["num_attention_heads"] * config["v_head_dim"])
        ),
        "the compressed vector twice: it is key and value at once": (
            lambda config: _latent(config, 2 * config["kv_lora_rank"] + config["qk_rope_head_dim"])
        ),
        "half: 16 bits are two bytes": lambda config: _mla(config) / 2,
        "one layer; all of them keep a cache": lambda config: _mla(config) / config["num_hidden_layers"],
    },
    "byte",
)


TASKS = (_KV_BYTES, _CACHED_ATTENTION, _WINDOWS, _SHARED_BLOCKS, _MLA)
