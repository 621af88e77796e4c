"""The step-time equation and what follows from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessonlib import latency
from lessonlib.accelerators import get_accelerator
from lessonlib.models import get_model

A100 = get_accelerator("a100-80gb-sxm")
LLAMA_2 = get_model("llama-2-7b")
LLAMA_3 = get_model("llama-3.1-8b")
GPT_OSS = get_model("gpt-oss-20b")


def test_the_parts_of_a_step():
    step = latency.step_time(100, 30, 8, 20, peak_flops_per_s=10, memory_bandwidth=2, overhead_s=1, tokens=4)
    assert (step.linear_compute_s, step.weights_s, step.attention_compute_s, step.kv_s) == (10, 15, 0.8, 10)
    assert (step.linear_s, step.attention_s, step.total_s, step.compute_s) == (15, 10, 26, 10.8)
    assert step.tokens_per_s == pytest.approx(4 / 26)
    assert step.bound_by == "memory"
    assert latency.step_time(100, 3, 8, 2, 10, 2).bound_by == "compute"
    assert latency.step_time(1, 1, 1, 1, 10, 2, overhead_s=5).bound_by == "overhead"


def test_llama_2_7b_on_an_a100():
    step = latency.decode_step(LLAMA_2, A100, context_len=2048)
    assert step.weights_s == pytest.approx(13.214e9 / 2039e9, rel=1e-4)
    assert step.kv_s == pytest.approx(1.0737e9 / 2039e9, rel=1e-4)
    assert step.total_s == pytest.approx(7.01e-3, rel=1e-3)


def test_ttft_is_the_queue_and_prefill():
    first = latency.prefill(LLAMA_3, A100, 1000)
    assert latency.ttft(LLAMA_3, A100, 1000, queue_s=0.5) == 0.5 + first.total_s


@pytest.mark.parametrize("model", [LLAMA_3, GPT_OSS], ids=lambda model: model.name)
@pytest.mark.parametrize(("prompt_len", "output_len"), [(1, 2), (100, 60), (120, 40)])
def test_tpot_is_the_mean_step(model, prompt_len, output_len):
    steps = [
        latency.decode_step(model, A100, 8, prompt_len + i - 1, overhead_s=1e-4).total_s
        for i in range(2, output_len + 1)
    ]
    tpot = latency.tpot(model, A100, prompt_len, output_len, batch_size=8, overhead_s=1e-4)
    assert tpot == pytest.approx(sum(steps) / len(steps), rel=1e-9)


def test_tensor_parallelism_divides_up_to_the_kv_heads():
    one, four, sixteen = (latency.decode_step(LLAMA_3, A100, 4, 8192, num_accelerators=n) for n in (1, 4, 16))
    assert four.total_s == pytest.approx(one.total_s / 4)
    assert sixteen.weights_s == pytest.approx(one.weights_s / 16)
    assert sixteen.kv_s == pytest.approx(one.kv_s / 8)  # 8 KV heads: beyond that each is held twice


def test_mla_is_held_whole_on_every_accelerator():
    model = get_model("deepseek-v3")
    one, eight = (latency.decode_step(model, A100, 4, 8192, num_accelerators=n) for n in (1, 8))
    assert eight.kv_s == one.kv_s
    assert eight.weights_s == pytest.approx(one.weights_s / 8)


def test_a_layer_split_adds_no_speed_to_a_token():
    one = latency.decode_step(LLAMA_3, A100, 1, 1000)
    assert latency.decode_step(LLAMA_3, A100, 1, 1000, num_accelerators=4, split="layer") == one


@pytest.mark.parametrize(("model", "count", "said"), [(LLAMA_3, 3, "32 query heads.*use 1, 2, 4, 8, 16, 32"),
                                                      (get_model("phi-4"), 4, "10 KV heads"),
                                                      (LLAMA_3, 0, "num_accelerators")])  # fmt: skip
def test_heads_that_cannot_be_divided(model, count, said):
    with pytest.raises(ValueError, match=said):
        latency.decode_step(model, A100, num_accelerators=count)


@given(st.integers(1, 300), st.integers(0, 20_000), st.sampled_from([4, 8, 16]))
def test_a_step_never_gets_faster_with_more_to_do(batch_size, context_len, bits):
    step = latency.decode_step(LLAMA_3, A100, batch_size, context_len, weight_bits=bits)
    longer = latency.decode_step(LLAMA_3, A100, batch_size, context_len + 1, weight_bits=bits)
    larger = latency.decode_step(LLAMA_3, A100, batch_size + 1, context_len, weight_bits=bits)
    assert step.total_s < longer.total_s
    assert step.total_s <= larger.total_s
    assert larger.tokens_per_s > step.tokens_per_s * 0.999


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"context_len": -5}, "context_len"),
        ({"weight_bits": 5}, "weight_bits"),
        ({"overhead_s": -1}, "overhead_s"),
        ({"overhead_s": float("nan")}, "overhead_s"),
        ({"dtype": "fp8"}, "A100.*no published peak"),
        ({"split": "diagonal"}, "split must be one of tensor, layer"),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(ValueError, match=said):
        latency.decode_step(LLAMA_3, A100, **options)


def test_very_long_requests_take_no_memory_to_predict():
    assert latency.tpot(LLAMA_3, A100, 1, 10**9) > latency.tpot(LLAMA_3, A100, 1, 10**6)
    with pytest.raises(ValueError, match="at most the 32 layers"):
        latency.decode_step(LLAMA_3, A100, num_accelerators=1000, split="layer")


def test_bad_prefill_and_speed():
    with pytest.raises(ValueError, match="efficiency"):
        latency.prefill(LLAMA_3, A100, 10, efficiency=1.2)
    with pytest.raises(ValueError, match="prompt_len"):
        latency.prefill(LLAMA_3, A100, 0)
    with pytest.raises(ValueError, match="output_len"):
        latency.tpot(LLAMA_3, A100, 10, 1)
    with pytest.raises(ValueError, match="tokens_per_s"):
        latency.check_speed(float("inf"), 1e9, 1e9)
