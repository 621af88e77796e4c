"""Intensity, ridge and operators, against closed forms and counts done by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessonlib import kv_cache, roofline
from lessonlib.accelerators import Accelerator, get_accelerator
from lessonlib.models import get_model, list_models

TEXTBOOK = Accelerator(key="t", name="Textbook", memory_bandwidth=2.0e12, peak_flops={"bf16": 312e12})
A100 = get_accelerator("a100-80gb-sxm")
LLAMA = get_model("llama-2-7b")


def test_one_token_through_seven_billion_parameters():
    intensity = roofline.arithmetic_intensity(flops=2 * 7e9, num_bytes=2 * 7e9)
    assert intensity == 1
    assert roofline.ridge_point(TEXTBOOK) == 156
    assert roofline.bound_by(intensity, TEXTBOOK) == "memory"
    assert float(roofline.attainable_flops_per_s(intensity, TEXTBOOK)) / (2 * 7e9) == pytest.approx(142.857, abs=1e-3)


def test_the_roof():
    intensities = np.array([[0.5, 156.0], [157.0, 1e6]])
    rates = roofline.attainable_flops_per_s(intensities, TEXTBOOK)
    assert rates.shape == (2, 2)
    assert rates.ravel().tolist() == [1e12, 312e12, 312e12, 312e12]
    assert roofline.bound_by(156, TEXTBOOK) == "compute"


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_roof_never_falls_and_never_exceeds_the_peak(a, b):
    low, high = sorted((a, b))
    rates = roofline.attainable_flops_per_s([low, high], A100)
    assert rates[0] <= rates[1] <= A100.peak("bf16")


@pytest.mark.parametrize("key", list_models())
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_decode_operators_add_up_to_the_step(key, batch_size):
    model = get_model(key)
    whole = roofline.total(roofline.decode_operators(model, batch_size, context_len=100, weight_bits=8))
    assert whole.weight_bytes == pytest.approx(model.streamed_weight_bytes(8, num_tokens=batch_size), rel=1e-12)
    assert whole.kv_bytes == kv_cache.cache_bytes(model, 100, batch_size)
    linear = roofline.total(roofline.decode_operators(model, batch_size, context_len=0))
    assert linear.flops == pytest.approx(2 * batch_size * model.matmul_params, rel=1e-12)


def test_attention_by_hand():
    # Llama 2 7B, one cached token: 32 layers x 32 heads x 128 x (multiply, add) x (scores, values)
    attention = {op.name: op for op in roofline.decode_operators(LLAMA, context_len=1)}["attention"]
    assert attention.flops == 32 * 32 * 128 * 2 * 2
    assert attention.kv_bytes == 524_288
    # Falcon's 71 query heads share one KV head: 71 times the arithmetic for each byte read
    mha, mqa = ({op.name: op for op in roofline.decode_operators(get_model(k), context_len=1)}["attention"]
                for k in ("llama-2-7b", "falcon-7b"))  # fmt: skip
    assert (mqa.flops / mqa.kv_bytes) / (mha.flops / mha.kv_bytes) == pytest.approx(71)


def test_prefill_attention_is_the_sum_over_positions():
    decode = sum(
        {op.name: op for op in roofline.decode_operators(LLAMA, context_len=t)}["attention"].flops for t in range(1, 33)
    )
    assert kv_cache.prefill_attention_flops(LLAMA, 32) == decode


def test_prefill_attention_with_a_window():
    model = get_model("gpt-oss-20b")  # half of its 24 layers look back 128 tokens
    per_pair = 4 * 64 * 64
    full, windowed = sum(range(1, 301)), sum(min(t, 128) for t in range(1, 301))
    assert kv_cache.prefill_attention_flops(model, 300) == per_pair * 12 * (full + windowed)


def test_decode_hardly_moves_prefill_and_training_cross_the_ridge():
    ridge = roofline.ridge_point(A100)
    intensity = {
        "decode": roofline.total(roofline.decode_operators(LLAMA, 1, 2048)).intensity,
        "prefill": roofline.total(roofline.prefill_operators(LLAMA, 1, 2048)).intensity,
        "training": roofline.total(roofline.training_operators(LLAMA, 4, 2048)).intensity,
    }
    assert intensity["decode"] < 1 < ridge < intensity["prefill"]
    assert ridge < intensity["training"]


def test_training_is_six_flops_a_parameter_and_token():
    short = roofline.total(roofline.training_operators(LLAMA, 1, 1))
    assert short.flops == pytest.approx(6 * LLAMA.matmul_params, rel=1e-4)
    assert short.weight_bytes == 3 * LLAMA.streamed_weight_bytes(16)


def test_the_head_runs_once_a_prompt():
    last, every = (
        roofline.total(roofline.prefill_operators(LLAMA, 2, 10, all_logits=flag)).flops for flag in (False, True)
    )
    assert every - last == 2 * 18 * LLAMA.head_params


@given(st.integers(1, 300), st.integers(0, 4000))
def test_a_larger_batch_never_lowers_the_intensity_of_the_weights(batch_size, context_len):
    def mlp(size):
        return {op.name: op for op in roofline.decode_operators(LLAMA, size, context_len)}["MLP"].intensity

    assert mlp(batch_size) < mlp(batch_size + 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": -3}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"context_len": -1}, "context_len must be a whole number of at least 0, got -1"),
        ({"weight_bits": 5}, "weight_bits must be one of"),
        ({"kv_bits": 0}, "kv_bits must be a finite number above 0"),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(ValueError, match=said):
        roofline.decode_operators(LLAMA, **options)


def test_bad_numbers():
    with pytest.raises(ValueError, match="num_bytes"):
        roofline.arithmetic_intensity(1, 0)
    with pytest.raises(ValueError, match="intensity"):
        roofline.attainable_flops_per_s([1, float("nan")], A100)
    with pytest.raises(ValueError, match="intensity"):
        roofline.bound_by(-1, A100)
