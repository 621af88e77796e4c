"""The cache's size and arithmetic, against closed forms, brute force and what must always hold."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessonlib import kv_cache
from lessonlib.models import ModelConfig, get_model, list_models
from lessonlib.roofline import decode_operators, prefill_operators, total

LLAMA, LLAMA_3 = get_model("llama-2-7b"), get_model("llama-3.1-8b")
MODELS = st.sampled_from([get_model(key) for key in list_models()])
LENGTHS, BITS = st.integers(1, 300_000), st.sampled_from(kv_cache.KV_BITS)


def counted_one_by_one(model: ModelConfig, context_len: int, kv_bits: float) -> float:
    """Every layer, its window and its values, added up without a formula."""
    num_bytes = 0.0
    for layer in range(model.num_layers):
        tokens = min(context_len, model.sliding_window) if layer < model.num_windowed_layers else context_len
        values = model.kv_lora_rank + model.qk_rope_head_dim or 2 * model.num_kv_heads * model.head_dim
        num_bytes += tokens * values * kv_bits / 8
    return num_bytes


@given(MODELS, LENGTHS, BITS, st.integers(1, 512))
def test_what_always_holds(model, context_len, kv_bits, batch_size):
    size = kv_cache.cache_bytes(model, context_len, batch_size, kv_bits)
    one = kv_cache.cache_bytes(model, context_len, 1, kv_bits)
    assert size == pytest.approx(batch_size * one)  # linear in the batch
    assert one == pytest.approx(counted_one_by_one(model, context_len, kv_bits))  # additive over layers
    assert kv_cache.cache_bytes(model, context_len + 1, 1, kv_bits) >= one > 0  # never shrinks
    full = dataclasses.replace(model, num_windowed_layers=0, sliding_window=0)
    assert one <= kv_cache.cache_bytes(full, context_len, 1, kv_bits)  # a window only saves
    if context_len <= (model.sliding_window or context_len):
        assert one == context_len * kv_cache.bytes_per_token(model, kv_bits)


@given(MODELS)
def test_grouped_heads_save_in_proportion(model):
    variants = kv_cache.attention_variants(model)
    mha, gqa, mqa = (kv_cache.bytes_per_token(variants[name]) for name in ("MHA", "GQA", "MQA"))
    groups = variants["GQA"].num_kv_heads
    assert gqa == mha * groups / model.num_heads
    assert mqa == mha / model.num_heads
    assert {name: v.attention_kind for name, v in variants.items() if name in ("MHA", "MLA")} == {
        "MHA": "MHA", "MLA": "MLA",
    }  # fmt: skip
    windowed = variants["windowed"]
    assert kv_cache.cache_bytes(windowed, 10**6) == kv_cache.cache_bytes(windowed, 4096)
    for tokens in (100, 1000, 4096, 10_000, 100_000):  # a window only saves, also where the model has some already
        assert kv_cache.cache_bytes(windowed, tokens) <= kv_cache.cache_bytes(model, tokens)


def test_a_model_is_among_its_own_variants():
    per_token = kv_cache.bytes_per_token
    assert per_token(kv_cache.attention_variants(LLAMA)["MHA"]) == per_token(LLAMA)
    assert per_token(kv_cache.attention_variants(LLAMA_3)["GQA"]) == per_token(LLAMA_3)
    for key in ("deepseek-v2-lite", "deepseek-v3"):
        model = get_model(key)
        variants = kv_cache.attention_variants(model)
        assert per_token(variants["MLA"]) == per_token(model)
        # DeepSeek-V2 paper, section 2.1: MLA keeps as much as GQA with 2.25 groups
        assert per_token(model) / per_token(variants["MQA"]) == 2.25


def test_q4_1_and_others_count_too():
    assert kv_cache.bytes_per_token(LLAMA, 5) == 524_288 * 5 / 16


def test_growth_bends_at_the_window():
    mistral, gemma = get_model("mistral-7b-v0.1"), get_model("gemma-3-27b")
    lengths = np.array([1024, 2048, 4096, 8192, 16384])
    assert kv_cache.cache_growth(mistral, lengths).tolist() == [m * 131_072 for m in (1024, 2048, 4096, 4096, 4096)]
    steps = np.diff(kv_cache.cache_growth(gemma, lengths)) / np.diff(lengths)  # bytes a token beyond 1,024
    assert steps.tolist() == [kv_cache.bytes_per_token(gemma) * 10 / 62] * 4  # 10 of 62 layers still grow
    gpt_oss = get_model("gpt-oss-20b")
    assert kv_cache.cache_bytes(gpt_oss, 100_000) == 49_152 / 24 * (12 * 100_000 + 12 * 128)
    assert kv_cache.cache_bytes(gpt_oss, 0) == 0
    gemma_2 = get_model("gemma-2-9b")  # 21 of 42 layers look back 4,096 tokens
    assert kv_cache.cache_bytes(gemma_2, 8192) == 344_064 / 42 * (21 * 8192 + 21 * 4096)


@given(MODELS, st.floats(0, 1e12), BITS, st.integers(1, 64))
def test_memory_ends_where_one_token_more_would_not_fit(model, budget, kv_bits, batch_size):
    longest = kv_cache.longest_context(model, budget, batch_size, kv_bits)
    if longest is None:
        assert model.num_windowed_layers == model.num_layers
        assert kv_cache.cache_bytes(model, 10**9, batch_size, kv_bits) <= budget
        return
    slack = 1e-9 * budget + 1e-6
    assert kv_cache.cache_bytes(model, longest, batch_size, kv_bits) <= budget + slack
    assert kv_cache.cache_bytes(model, longest + 1, batch_size, kv_bits) > budget - slack


@given(MODELS, st.floats(0, 1e12), LENGTHS)
def test_as_many_requests_as_fit(model, budget, context_len):
    count = kv_cache.requests_that_fit(model, budget, context_len)
    assert count * kv_cache.cache_bytes(model, context_len) <= budget * (1 + 1e-12)
    assert (count + 1) * kv_cache.cache_bytes(model, context_len) > budget * (1 - 1e-12)


def test_the_reference_block():
    without, with_cache = (kv_cache.generation_flops(256, 128, 512, use_cache=used) for used in (False, True))
    assert f"{without:.3e} {with_cache:.3e}" == "4.317e+10 2.851e+08"
    assert round(without / with_cache, 1) == 151.4
    doubled = {
        used: kv_cache.step_flops(512, 512, used) / kv_cache.step_flops(256, 512, used) for used in (False, True)
    }
    assert round(doubled[False], 3) == 1.994
    assert doubled[True] == 1.25


@pytest.mark.parametrize("key", ["smollm2-135m", "llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "mixtral-8x7b"])
def test_generation_of_a_model_is_the_sum_of_its_steps(key):
    model = get_model(key)
    prompt, new = 120, 30  # gpt-oss's window of 128 tokens lies between

    def prefill(tokens: int) -> float:
        return total(prefill_operators(model, prompt_len=tokens)).flops

    def decode(context: int) -> float:
        return total(decode_operators(model, context_len=context)).flops

    cached = prefill(prompt) + sum(decode(prompt + i) for i in range(1, new))
    uncached = sum(prefill(prompt + i) for i in range(new))
    assert kv_cache.model_generation_flops(model, prompt, new) == pytest.approx(cached, rel=1e-9)
    assert kv_cache.model_generation_flops(model, prompt, new, use_cache=False) == pytest.approx(uncached, rel=1e-9)
    assert kv_cache.model_generation_flops(model, prompt, 1) == kv_cache.model_generation_flops(
        model, prompt, 1, use_cache=False
    )


def test_tensor_parallel_divides_heads_and_then_replicates_them():
    per_rank = [kv_cache.rank_bytes_per_token(LLAMA_3, n) for n in (1, 2, 4, 8, 16, 32)]
    assert per_rank == [131_072, 65_536, 32_768, 16_384, 16_384, 16_384]
    mla = get_model("deepseek-v3")
    assert {kv_cache.rank_bytes_per_token(mla, n) for n in (1, 2, 8, 16)} == {70_272}
    assert kv_cache.rank_bytes_per_token(LLAMA_3, 2, num_layers=8) == 65_536 / 4
    assert kv_cache.kv_shards(LLAMA_3, 4, split="layer") == 1


@pytest.mark.parametrize(
    ("model", "count", "said"),
    [
        (LLAMA_3, 3, "divide the 32 query heads of Llama 3.1 8B.*got 3: use 1, 2, 4, 8, 16, 32"),
        (get_model("phi-4"), 4, "10 KV heads or be a multiple of them, got 4: use 1, 2, 5, 10, 20, 40"),
        (get_model("deepseek-v3"), 3, "got 3: use 1, 2, 4, 8, 16, 32, 64, 128"),
        (LLAMA_3, 0, "num_accelerators must be a whole number of at least 1"),
    ],
)
def test_counts_that_cannot_divide_the_heads_are_explained(model, count, said):
    with pytest.raises(ValueError, match=said):
        kv_cache.rank_bytes_per_token(model, count)


@given(st.integers(0, 10**6), st.integers(1, 512))
def test_blocks_hold_all_tokens_and_not_one_block_too_many(tokens, block_size):
    count = kv_cache.blocks(tokens, block_size)
    assert count * block_size >= tokens > (count - 1) * block_size
    assert 0 <= kv_cache.paging_waste(tokens, block_size) == count * block_size - tokens <= block_size - 1
    assert kv_cache.blocks([tokens, tokens + 1], block_size)[0] == count


def test_waste_of_a_few_sequences():
    assert kv_cache.paging_waste([1, 16, 17, 100], 16).tolist() == [15, 0, 15, 12]
    assert kv_cache.paging_waste([1, 16, 17, 100], 1).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: kv_cache.cache_bytes(LLAMA, -1), "context_len"),
        (lambda: kv_cache.cache_bytes(LLAMA, 1, 0), "batch_size"),
        (lambda: kv_cache.cache_bytes(LLAMA, 1, 1, -5), "kv_bits must be a finite number above 0, got -5"),
        (lambda: kv_cache.cache_bytes(LLAMA, 1, 1, 33), "kv_bits must be above 0 and at most 32, got 33"),
        (lambda: kv_cache.cache_growth(LLAMA, [1, float("nan")]), "context_len"),
        (lambda: kv_cache.blocks([1.9]), "num_tokens must hold whole numbers"),
        (lambda: kv_cache.paging_waste(1.5), "lengths must hold whole numbers"),
        (lambda: kv_cache.concurrency(-1, 10), "num_tokens"),
        (lambda: kv_cache.concurrency(1, 0), "max_len"),
        (lambda: kv_cache.requests_that_fit(LLAMA, -1, 100), "budget_bytes"),
        (lambda: kv_cache.requests_that_fit(LLAMA, 1e9, 0), "context_len"),
        (lambda: kv_cache.longest_context(LLAMA, float("inf")), "budget_bytes"),
        (lambda: kv_cache.generation_flops(-1, 2, 512), "prompt_len"),
        (lambda: kv_cache.generation_flops(1, 0, 512), "output_len"),
        (lambda: kv_cache.step_flops(1, 0), "hidden_size"),
        (lambda: kv_cache.model_generation_flops(LLAMA, 0, 1), "prompt_len"),
        (lambda: kv_cache.blocks(-1), "num_tokens"),
        (lambda: kv_cache.blocks(1, 0), "block_size"),
        (lambda: kv_cache.paging_waste([1, -1]), "lengths"),
        (lambda: kv_cache.rank_bytes_per_token(LLAMA, 1, num_layers=33), "num_layers must be at most the 32"),
        (lambda: kv_cache.num_blocks(LLAMA, -1.0), "budget_bytes"),
        (lambda: kv_cache.kv_shards(LLAMA, 33, split="layer"), "at most the 32 layers"),
        (lambda: kv_cache.kv_shards(LLAMA, 2, split="rows"), "split"),
    ],
)
def test_what_is_out_of_range_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
