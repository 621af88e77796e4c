"""Speculative decoding: the published closed form, simulated drafts, and the step-time equation by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessonlib import latency, speculative
from lessonlib.accelerators import get_accelerator
from lessonlib.models import get_model, list_models

H100 = get_accelerator("h100-sxm")
LARGE, SMALL = get_model("llama-3.1-8b"), get_model("llama-3.2-1b")


@pytest.mark.parametrize(("acceptance", "draft_tokens", "expected"), [(0.8, 4, 3.3616), (0.7, 4, 2.7731)])
def test_f23_expected_tokens(acceptance, draft_tokens, expected):
    assert speculative.expected_tokens(acceptance, draft_tokens) == pytest.approx(expected, abs=1e-12)


def test_expected_tokens_at_the_ends():
    assert speculative.expected_tokens(1.0, 4) == 5.0  # the closed form would divide by 0
    assert speculative.expected_tokens(0.0, 4) == 1.0
    assert speculative.expected_tokens(0.5, 0) == 1.0
    assert speculative.expected_tokens(1 - 1e-12, 7) == pytest.approx(8)


@given(st.floats(0, 0.999), st.integers(0, 30))
def test_the_sum_is_the_closed_form(acceptance, draft_tokens):
    closed = (1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance)
    assert speculative.expected_tokens(acceptance, draft_tokens) == pytest.approx(closed, rel=1e-9)
    assert 1 <= closed <= draft_tokens + 1


def test_expected_tokens_by_drawing():
    rng = random.Random(0)

    def one_check() -> int:
        kept = 0
        while kept < 4 and rng.random() < 0.8:
            kept += 1
        return kept + 1

    mean = sum(one_check() for _ in range(20_000)) / 20_000
    assert speculative.expected_tokens(0.8, 4) == pytest.approx(mean, rel=0.01)


@settings(deadline=None)
@given(st.sampled_from(list_models()), st.integers(1, 300), st.integers(0, 20_000))
def test_a_check_of_nothing_is_a_decode_step(key, batch_size, context_len):
    model = get_model(key)
    plain = latency.decode_step(model, H100, batch_size, context_len, overhead_s=1e-4)
    check = speculative.verify_step(model, H100, 0, batch_size, context_len, overhead_s=1e-4)
    for part in ("linear_compute_s", "weights_s", "attention_compute_s", "kv_s", "total_s", "tokens"):
        assert getattr(check, part) == pytest.approx(getattr(plain, part))
    more = speculative.verify_step(model, H100, 3, batch_size, context_len, overhead_s=1e-4)
    assert more.kv_s == pytest.approx(plain.kv_s)  # the cache is read once for all four tokens
    assert more.linear_compute_s == pytest.approx(4 * plain.linear_compute_s)
    assert plain.total_s * (1 - 1e-9) <= more.total_s <= 4 * plain.total_s * (1 + 1e-9)


def test_memory_bound_by_hand():
    # Batch 1, no context: every step is the weights. A draft of 1.236e9 parameters against 8.03e9 minus the embedding.
    ratio = SMALL.streamed_weight_bytes() / LARGE.streamed_weight_bytes()
    found = speculative.speculate(LARGE, SMALL, H100, 0.8, 4)
    assert found.speedup == pytest.approx(3.3616 / (4 * ratio + 1))
    assert found.speedup > 1.9 and found.pays
    assert found.tpot_s == pytest.approx(found.plain_step_s / found.speedup)
    assert found.round_s == found.draft_s + found.verify_s


def test_compute_bound_by_hand():
    # A large batch: the check costs 5 tokens' arithmetic and yields 3.3616.
    ratio = SMALL.matmul_params / LARGE.matmul_params
    found = speculative.speculate(LARGE, SMALL, H100, 0.8, 4, batch_size=4096)
    assert found.speedup == pytest.approx(3.3616 / (4 * ratio + 5))
    assert found.speedup < 0.7 and not found.pays


@pytest.mark.parametrize(
    ("acceptance", "draft_tokens", "context_len"), [(0.8, 4, 0), (0.8, 4, 300), (0.6, 2, 0), (0.9, 1, 64), (0.3, 4, 0)]
)
def test_where_it_stops_paying_by_trying(acceptance, draft_tokens, context_len):
    def pays(size: int) -> bool:
        return speculative.speculate(LARGE, SMALL, H100, acceptance, draft_tokens, size, context_len).pays

    last = max((size for size in range(1, 1025) if pays(size)), default=0)
    found = speculative.stops_paying(LARGE, SMALL, H100, acceptance, draft_tokens, context_len)
    assert found == last + 1
    assert last < 1024


def test_a_poor_draft_never_pays_and_a_long_context_always_does():
    assert speculative.stops_paying(LARGE, SMALL, H100, 0.1, 4) == 1
    assert speculative.stops_paying(LARGE, LARGE, H100, 1.0, 4) == 1  # the draft is as slow as the model
    # The draft has 1/4 of the cache: at 32,768 tokens reads dominate at every batch.
    assert speculative.stops_paying(LARGE, SMALL, H100, 0.8, 4, context_len=32_768) is None
    assert speculative.speculate(LARGE, SMALL, H100, 0.8, 4, 65_536, 32_768).pays


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.1, 4), "acceptance must be at least 0 and at most 1, got 1.1"),
        ((-0.1, 4), "acceptance must be a finite number of at least 0, got -0.1"),
        ((0.5, -1), "draft_tokens must be a whole number of at least 0, got -1"),
        ((0.5, 1.5), "draft_tokens must be a whole number of at least 0, got 1.5"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        speculative.expected_tokens(*arguments)
    with pytest.raises(ValueError, match="max_batch_size must be a whole number"):
        speculative.stops_paying(LARGE, SMALL, H100, 0.5, 1, max_batch_size=0)
