"""Plain attention, attention step by step, and attention in tiles: one result. torch is the referee."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from lessonlib import attention


def heads(new: int, tokens: int, scale: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return scale * rng.normal(size=(new, 16)), scale * rng.normal(size=(tokens, 16)), rng.normal(size=(tokens, 8))


def test_plain_attention_is_torch_s():
    q, k, v = heads(40, 40)
    expected = scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), is_causal=True).numpy()
    assert np.abs(attention.attention(q, k, v) - expected).max() < 1e-12


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 70), st.sampled_from([0.1, 1.0, 30.0]))
def test_tiles_equal_plain_attention(new, before, tile, scale):
    q, k, v = heads(new, new + before, scale)
    assert np.abs(attention.flash_attention(q, k, v, tile) - attention.attention(q, k, v)).max() < 1e-6


@pytest.mark.parametrize("order", [1, -1])
def test_scores_that_would_overflow(order):
    q, k, v = heads(30, 30, scale=1000.0)
    k = k[np.argsort(order * (k @ q[-1]))]  # the largest score first, or last
    tiled = attention.flash_attention(q, k, v, tile=7)
    assert np.isfinite(tiled).all()
    assert np.abs(tiled - attention.attention(q, k, v)).max() < 1e-6


def test_a_step_with_a_cache_is_the_last_row():
    q, k, v = heads(20, 20)
    whole = attention.attention(q, k, v)
    steps = [attention.attention(q[t : t + 1], k[: t + 1], v[: t + 1])[0] for t in range(20)]
    assert np.abs(np.array(steps) - whole).max() < 1e-12


def test_traffic_grows_with_the_square_or_hardly():
    plain, flash = (
        [traffic(n, 32, 128) for n in (1024, 2048, 4096)]
        for traffic in (attention.plain_traffic_bytes, attention.flash_traffic_bytes)
    )
    assert plain[0] == 2 * 32 * (4 * 1024 * 128 + 4 * 1024**2)
    assert plain[2] / plain[1] == pytest.approx(4, rel=0.05)
    assert all(a > b for a, b in zip(plain, flash, strict=True))
    assert attention.flash_traffic_bytes(4096, 32, 128, 4096) == 2 * attention.flash_traffic_bytes(2048, 32, 128, 2048)
    assert attention.flash_traffic_bytes(128, 1, 64, tile=128) == 2 * 4 * 128 * 64  # one pass: everything once


@pytest.mark.parametrize(
    ("q", "k", "v"), [((2, 4), (1, 4), (1, 4)), ((0, 4), (1, 4), (1, 4)), ((1, 3), (2, 4), (2, 4)), ((4,), (4,), (4,))]
)
def test_shapes_that_do_not_fit(q, k, v):
    for function in (attention.attention, attention.flash_attention):
        with pytest.raises(ValueError, match=r"q, k and v must be \(L, D\)"):
            function(np.zeros(q), np.zeros(k), np.zeros(v))
    with pytest.raises(ValueError, match="tile"):
        attention.flash_attention(*heads(2, 2), tile=0)
    with pytest.raises(ValueError, match="context_len"):
        attention.plain_traffic_bytes(-1, 1, 1)
