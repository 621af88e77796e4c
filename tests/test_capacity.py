"""Memory plans and costs, against engines' own figures, closed forms and what must always hold."""

import copy
import csv
import dataclasses
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessonlib import capacity, kv_cache, latency
from lessonlib.accelerators import get_accelerator, list_accelerators
from lessonlib.batching import memory_ceiling
from lessonlib.capacity import SLO, plan
from lessonlib.models import ModelConfig, get_model, list_models

GIB = 2**30
ENGINE_LOGS = Path(__file__).parent / "data" / "engine_logs.csv"
H100, A100, RTX_4090 = (get_accelerator(key) for key in ("h100-sxm", "a100-80gb-sxm", "rtx-4090"))
LLAMA_3 = get_model("llama-3.1-8b")
QWEN_14B = ModelConfig(
    name="DeepSeek-R1-Distill-Qwen-14B", num_layers=48, hidden_size=5120, num_heads=40, num_kv_heads=8, head_dim=128,
    intermediate_size=13824, vocab_size=152064, max_context=131072, qkv_bias=True,
)  # fmt: skip


def engine_log(row_id: str) -> dict[str, str]:
    with ENGINE_LOGS.open(encoding="utf-8", newline="") as file:
        return next(row for row in csv.DictReader(file) if row["id"] == row_id)


def sizes(row_id: str) -> tuple[float, float, float, float, float]:
    """Memory, weights, activations, other (GiB) and utilization of a row."""
    row = engine_log(row_id)
    names = ("total_gib", "weights_gib", "activation_gib", "other_gib", "utilization")
    total, weights, activation, other, share = (float(row[name].split()[0]) for name in names)
    return total, weights, activation, other, share


# --- budgets that engines printed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row_id", ["L1", "L2", "L3", "L4", "L9", "L14"])
def test_what_is_left_is_what_the_log_says(row_id):
    total, weights, activation, other, share = sizes(row_id)
    left = capacity.kv_budget_bytes(total * GIB, weights * GIB, activation * GIB, other * GIB, share)
    assert left / GIB == pytest.approx(float(engine_log(row_id)["kv_gib"]), abs=0.011)  # each term has two decimals


def test_l8_does_not_fit_and_says_by_how_much():
    total, weights, activation, other, share = sizes("L8")
    with pytest.raises(capacity.DoesNotFitError, match=r"does not fit, short by 1\.05 GiB") as error:
        capacity.kv_budget_bytes(total * GIB, weights * GIB, activation * GIB, other * GIB, share)
    assert error.value.short_bytes == pytest.approx(1.05 * GIB, rel=1e-6)
    assert isinstance(error.value, ValueError)

    model = get_model("qwen2.5-7b")
    found = plan(
        model, RTX_4090, weight_bits=4, group_size=128, unquantized=("embedding", "head"), memory_bytes=total * GIB,
        activation_bytes=activation * GIB, other_bytes=other * GIB, memory_utilization=share,
    )  # fmt: skip
    assert found.weight_bytes / GIB == pytest.approx(weights, rel=0.01)
    assert not found.fits
    assert found.short_bytes / GIB == pytest.approx(1.05, abs=0.05)  # our weights are within 1 % of the file's
    assert (found.num_blocks, found.num_tokens, found.requests_at(1), found.tightest.kv_budget_bytes) == (0, 0, 0, 0)
    assert "does not fit, short by 1." in found.message
    assert {name for remedy in found.remedies() for name in remedy.changes} == {"tensor_parallel", "memory_utilization"}


def test_l3_the_tightest_rank_decides():
    total, weights, activation, other, share = sizes("L3")
    common = {"tensor_parallel": 2, "memory_bytes": total * GIB, "memory_utilization": share}
    even = plan(QWEN_14B, RTX_4090, activation_bytes=activation * GIB, other_bytes=other * GIB, **common)
    assert even.weight_bytes / 2 / GIB == pytest.approx(weights, rel=0.015)
    assert even.tightest.bytes_per_token == 98_304

    # What one rank printed, and what all of them can hold: the other rank has 7.465 GiB.
    fits, printed = 81_536, 8.69
    assert fits * 98_304 / GIB == pytest.approx(7.465, abs=0.001)
    measured = (weights * GIB - even.ranks[0].weight_bytes) + activation * GIB  # the weights that were measured
    tight = plan(
        QWEN_14B, RTX_4090, activation_bytes=measured, context_len=131_072,
        other_bytes=(other * GIB, (other + printed - 7.465) * GIB), **common,
    )  # fmt: skip
    assert [rank.kv_budget_bytes / GIB for rank in tight.ranks] == pytest.approx([8.69, 7.465], abs=0.006)
    assert tight.tightest.shard == 1
    assert tight.num_tokens == pytest.approx(fits, abs=0.006 * GIB / 98_304)
    assert not tight.fits and tight.longest_context() == tight.num_tokens
    # Two memories with the weights of one: the reporter's wrong 31.8 GiB.
    doubled = capacity.kv_budget_bytes(2 * total * GIB, weights * GIB, activation * GIB, other * GIB, share)
    assert doubled / GIB == pytest.approx(31.8, abs=0.05)


def test_l4_l9_l14_blocks_from_the_printed_sizes():
    for row_id, key, accelerator, ranks, blocks in (
        ("L4", "llama-3.1-8b", "v100-32gb", 2, 4660),
        ("L9", "llama-3.1-8b", "a100-40gb-sxm", 1, 5691),
        ("L14", "qwen2.5-72b", "a100-40gb-sxm", 4, 537 // 16),
    ):
        total, weights, activation, other, share = sizes(row_id)
        bare = plan(get_model(key), get_accelerator(accelerator), tensor_parallel=ranks, memory_bytes=total * GIB)
        more = weights * GIB - bare.ranks[0].weight_bytes  # what the engine holds beyond the parameters
        assert 0 <= more < 0.025 * weights * GIB  # L14's has a vision tower
        found = bare.replan(memory_utilization=share, activation_bytes=activation * GIB, other_bytes=other * GIB + more)
        within = 0.02 * GIB / (16 * found.tightest.bytes_per_token)  # four sizes, each to two decimals
        assert found.num_blocks == pytest.approx(blocks, abs=within)


def test_l9_concurrency_and_l12():
    row = engine_log("L9")
    tokens = 5691 * 16
    assert f"{tokens:,}" in row["logged"]
    assert tokens / 8192 == pytest.approx(11.12, abs=0.006)
    # 11.12 GiB to two decimals holds 5,691 blocks or up to five more
    fewest, most = (kv_cache.num_blocks(LLAMA_3, gib * GIB) for gib in (11.115, 11.125))
    assert fewest <= 5691 <= most <= fewest + 6


def test_l6_layers_of_two_stages():
    model, tokens = get_model("qwen3-30b-a3b"), 262_144
    found = plan(model, get_accelerator("rtx-5090"), pipeline_parallel=2, stage_layers=(16, 32), weight_bits=8,
                 context_len=tokens, memory_bytes=(15.9 * GIB, 31.4 * GIB))  # fmt: skip
    assert [rank.cache_bytes(tokens) / GIB for rank in found.ranks] == [8.0, 16.0]
    assert kv_cache.cache_bytes(model, tokens) / GIB == 24.0  # what the engine asked of each of them
    assert sum(rank.weight_bytes for rank in found.ranks) == pytest.approx(model.weight_bytes(8))
    assert {part.part for part in found.ranks[0].weights} ^ {part.part for part in found.ranks[1].weights} == {
        "embedding", "head",
    }  # fmt: skip


def test_l7_embedding_and_head_stay_at_16_bits():
    model = get_model("llama-3.1-70b")
    kept = plan(model, H100, weight_bits=8, unquantized=("embedding", "head"))
    assert kept.weight_bytes / GIB == pytest.approx(67.67, abs=0.005)
    assert plan(model, H100, weight_bits=8).weight_bytes / GIB == pytest.approx(65.71, abs=0.005)
    assert kept.weight_bytes / GIB == pytest.approx(float(engine_log("L7")["weights_gib"]), rel=0.001)
    bits = {part.part: part.bits for part in kept.ranks[0].weights}
    assert bits == {"embedding": 16, "attention": 8, "mlp": 8, "norms": 8, "head": 16}
    budget = float(engine_log("L7")["kv_gib"]) * GIB
    assert kv_cache.num_blocks(model, budget) == pytest.approx(1381, abs=1)
    concurrency = 1381 * 16 / 2048
    assert concurrency == pytest.approx(10.79, abs=0.005)


def test_l10_without_activations_a_third_too_many_tokens():
    optimistic = plan(LLAMA_3, RTX_4090, memory_bytes=24 * GIB)
    assert optimistic.num_tokens == pytest.approx(54_400, rel=0.01)
    activations = optimistic.tightest.kv_budget_bytes - 5.055 * GIB
    assert optimistic.replan(activation_bytes=activations).num_tokens == pytest.approx(41_408, abs=16)


# --- the weights of each part and rank ------------------------------------------------------------------------------

MODELS = st.sampled_from([get_model(key) for key in list_models()])
BITS = st.sampled_from([4, 8, 16])


@given(MODELS, BITS, st.sampled_from([None, 128]), st.sampled_from([(), ("embedding",), ("head", "norms"), "head"]))
def test_one_accelerator_holds_all_weights(model, bits, group, kept):
    found = plan(model, H100, weight_bits=bits, group_size=group, unquantized=kept)
    assert found.weight_bytes == pytest.approx(model.weight_bytes(bits, group, unquantized=kept))


@given(MODELS, st.integers(1, 6))
def test_pipeline_stages_hold_all_weights_once(model, stages):
    found = plan(model, H100, pipeline_parallel=stages)
    copied = 2 * model.head_params if model.tied_embeddings and stages > 1 else 0  # the last stage needs the table too
    assert found.weight_bytes == pytest.approx(model.weight_bytes() + copied, rel=1e-12)
    windowed = sum(rank.layers.num_windowed_layers for rank in found.ranks)
    assert windowed == model.num_windowed_layers
    length = 2 * (model.sliding_window or 1000)
    cached = sum(rank.cache_bytes(length) for rank in found.ranks)
    assert cached == pytest.approx(kv_cache.cache_bytes(model, length))


def test_bits_of_single_parts():
    # The course's file: matrices Q4_1 (5 bits with scale and minimum), embedding Q8_0; llama.cpp printed 92.10 MiB.
    model = get_model("smollm2-135m")
    found = plan(model, H100, weight_bits=4, group_size=32, zero_bits=16, part_bits={"embedding": 8.5, "norms": 32})
    assert found.weight_bytes / 2**20 == pytest.approx(92.10, rel=0.001)
    with pytest.raises(ValueError, match="part_bits must be one of embedding, "):
        plan(model, H100, part_bits={"table": 8})


def test_kv_heads_beyond_the_ranks_are_replicated():
    model = get_model("llama-3.1-70b")
    eight, sixteen = (plan(model, H100, tensor_parallel=ranks) for ranks in (8, 16))
    assert sixteen.tightest.bytes_per_token == eight.tightest.bytes_per_token  # 8 KV heads
    makes_kv = 2 * 2 * model.num_layers * model.hidden_size * 8 * 128
    norms = 2 * model.parameter_counts()["norms"]
    assert eight.weight_bytes == pytest.approx(model.weight_bytes() + 7 * norms)
    assert sixteen.weight_bytes == pytest.approx(model.weight_bytes() + 15 * norms + makes_kv)
    mla = get_model("deepseek-v3")
    one, four = (plan(mla, H100, tensor_parallel=ranks) for ranks in (1, 4))
    assert four.tightest.bytes_per_token == one.tightest.bytes_per_token == 70_272


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(48, 2, (24, 24)), (61, 4, (15, 15, 16, 15)), (7, 4, (2, 2, 2, 1)), (3, 3, (1, 1, 1))],
)
def test_layers_of_each_stage(layers, stages, expected):
    assert capacity.split_layers(layers, stages) == expected


# --- what must always hold ------------------------------------------------------------------------------------------


@st.composite
def plans(draw):
    model = draw(MODELS)
    memory = draw(st.floats(1e9, 4e12))
    return plan(
        model,
        H100,
        memory_bytes=memory,
        context_len=draw(st.none() | st.integers(1, 200_000)),
        batch_size=draw(st.integers(1, 64)),
        tensor_parallel=draw(st.sampled_from([n for n in (1, 2, 4, 8) if model.num_heads % n == 0])) if
        model.num_kv_heads % 8 == 0 else 1,
        pipeline_parallel=draw(st.integers(1, 4)),
        weight_bits=draw(BITS),
        kv_bits=draw(BITS),
        block_size=draw(st.sampled_from([1, 16, 64])),
        memory_utilization=draw(st.floats(0.1, 1.0)),
        activation_bytes=draw(st.floats(0, 1e10)),
        other_bytes=draw(st.floats(0, 1e10)),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(1, 100_000))
def test_plans_add_up(found, context_len):
    for rank in found.ranks:
        assert rank.kv_budget_bytes >= 0 and rank.short_bytes >= 0 and rank.weight_bytes > 0
        assert rank.kv_budget_bytes == 0 or rank.short_bytes == 0
        if not rank.short_bytes:
            total = rank.weight_bytes + rank.activation_bytes + rank.other_bytes + rank.kv_budget_bytes
            assert total <= rank.usable_bytes * (1 + 1e-12)
        requests = found.requests_at(context_len)
        assert requests * rank.cache_bytes(context_len) <= rank.kv_budget_bytes * (1 + 1e-12)
        assert found.num_tokens * rank.bytes_per_token <= rank.kv_budget_bytes * (1 + 1e-12)
    assert requests <= found.concurrency(context_len) * (1 + 1e-12)
    assert found.fits == (found.short_bytes == 0)
    assert found.num_tokens == found.num_blocks * found.block_size >= 0
    assert sum(rank.layers.num_layers for rank in found.ranks) == found.model.num_layers * found.tensor_parallel
    if found.context_len:
        assert found.fits == (found.requests_at(found.context_len) >= found.batch_size)
    longest = found.longest_context()
    assert longest == 0 or found.requests_at(longest) >= 1
    if 0 < longest < found.model.max_context:
        assert found.requests_at(longest + found.block_size) == 0


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(1, 100_000))
def test_fewer_bits_and_more_ranks_never_hold_less(found, context_len):
    requests = found.requests_at(context_len)
    for change in ({"weight_bits": 4}, {"kv_bits": 4}, {"activation_bytes": 0}, {"memory_utilization": 1.0}):
        assert found.replan(**change).requests_at(context_len) >= requests
    twice = 2 * found.tensor_parallel
    if found.model.num_heads % twice == 0 and found.model.num_kv_heads % twice == 0:
        assert found.replan(tensor_parallel=twice).requests_at(context_len) >= requests
    assert found.requests_at(2 * context_len) <= requests


@settings(max_examples=60, deadline=None)
@given(plans())
def test_every_remedy_works(found):
    remedies = found.remedies()
    assert not (found.fits and remedies)
    for remedy in remedies:
        assert found.replan(**remedy.changes).fits, remedy
        assert remedy.text in found.message


def test_remedies_are_the_smallest_changes():
    found = plan(get_model("llama-3.1-70b"), H100, context_len=8192)
    assert [dict(remedy.changes) for remedy in found.remedies()] == [
        {"weight_bits": 4, "group_size": 128}, {"tensor_parallel": 2},
    ]  # fmt: skip
    long = plan(LLAMA_3, RTX_4090, context_len=131_072)
    [weights, kv_bits, two, context] = long.remedies()
    assert weights.changes == {"weight_bits": 4, "group_size": 128}  # 8 bits leave 12.7 GiB of the 16 wanted
    assert kv_bits.changes == {"kv_bits": 4}  # 8 bits: 8 GiB of cache; 4.9 GiB are left
    assert two.changes == {"tensor_parallel": 2}
    assert context.changes == {"context_len": long.longest_context()}
    assert long.replan(context_len=long.longest_context() + 16).fits is False
    assert "short by" in long.message and long.tightest.short_bytes == 0  # the weights alone would fit
    slightly = plan(LLAMA_3, RTX_4090, memory_bytes=24 * GIB, activation_bytes=7 * GIB)
    assert [dict(remedy.changes) for remedy in slightly.remedies()][-1] == {"memory_utilization": 0.92}
    per_rank = plan(LLAMA_3, RTX_4090, memory_bytes=[8 * GIB])
    assert "tensor_parallel" not in {name for remedy in per_rank.remedies() for name in remedy.changes}


def test_with_nothing_set_aside_it_is_the_memory_ceiling():
    for length in (256, 2048, 8192):
        assert capacity.max_batch_size(LLAMA_3, A100, length, memory_utilization=1.0) == memory_ceiling(
            LLAMA_3, A100, length
        )
    gemma = get_model("gemma-3-27b")  # windows: a long request takes less than all its tokens in all layers
    found = plan(gemma, H100, memory_utilization=1.0)
    assert found.requests_at(65_536) == memory_ceiling(gemma, H100, 65_536) > found.num_tokens / 65_536


def test_plans_are_values():
    found = plan(LLAMA_3, H100, memory_bytes=[80e9])
    assert found == plan(LLAMA_3, H100, memory_bytes=[80e9])
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.block_size = 8
    assert hash(found.ranks[0].layers) == hash(LLAMA_3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_utilization": 1.1}, "memory_utilization must be above 0 and at most 1, got 1.1"),
        ({"memory_utilization": 0}, "memory_utilization must be a finite number above 0, got 0"),
        ({"memory_bytes": -1}, "memory_bytes must be a finite number above 0, got -1"),
        ({"memory_bytes": (1e9, 1e9)}, "memory_bytes must be one number or one for each of 1 accelerators, got 2"),
        ({"activation_bytes": float("nan")}, "activation_bytes must be a finite number of at least 0, got nan"),
        ({"tensor_parallel": 3}, "tensor_parallel must divide the 32 query heads"),
        ({"pipeline_parallel": 33}, "pipeline_parallel must be at most the 32 layers, got 33"),
        ({"pipeline_parallel": 2, "stage_layers": (16, 17)}, "stage_layers must be 2 numbers that add up to the 32"),
        ({"kv_bits": 33}, "kv_bits must be above 0 and at most 32, got 33"),
        ({"kv_bits": 0}, "kv_bits must be a finite number above 0, got 0"),
        ({"context_len": 0}, "context_len must be a whole number of at least 1, got 0"),
        ({"unquantized": ("router",)}, "unquantized must be one of embedding, head, norms"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_arguments_say_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        plan(LLAMA_3, H100, **options)


@given(MODELS, st.floats(0.1, 32))
def test_a_cached_number_may_take_any_width(model, kv_bits):
    found = plan(model, H100, memory_bytes=4e12, kv_bits=kv_bits)
    assert found.tightest.bytes_per_token == pytest.approx(kv_cache.bytes_per_token(model, kv_bits))
    assert found.num_tokens <= plan(model, H100, memory_bytes=4e12, kv_bits=kv_bits / 2).num_tokens


def test_an_accelerator_without_known_memory():
    laptop = get_accelerator("cpu-laptop-ddr5-5600")
    with pytest.raises(ValueError, match="memory_bytes must be given for Laptop CPU"):
        plan(LLAMA_3, laptop)
    assert plan(LLAMA_3, laptop, memory_bytes=32e9).fits


# --- cost -----------------------------------------------------------------------------------------------------------


def test_cost_of_a_rate():
    # 3.60 USD/h is 0.001 USD/s: at 1,000 tokens/s a token costs 1e-6 USD
    cost = capacity.cost_from_rate(3.6, 1000)
    assert str(cost) == "1 USD/million tokens"
    assert capacity.cost_from_rate(3.6, 1000, utilization=0.25) == pytest.approx(4)
    assert cost * 2 == 2.0 and f"{cost:.2f}" == "1.00"
    for same in (copy.deepcopy(cost), pickle.loads(pickle.dumps(cost))):
        assert (same, same.unit) == (cost, cost.unit)


def test_a_request_costs_its_share_of_the_time():
    found = plan(LLAMA_3, H100)
    cost = capacity.cost_per_million_tokens(found, 1000, 201, 32, usd_per_hour=3.6)
    prefill = latency.prefill(LLAMA_3, H100, 1000).total_s
    step = latency.tpot(LLAMA_3, H100, 1000, 201, 32)
    assert cost.input == pytest.approx(prefill * 0.001 / 1000 * 1e6)
    assert cost.output == pytest.approx(200 * step / 32 * 0.001 / 201 * 1e6)
    assert cost.request == pytest.approx((1000 * cost.input + 201 * cost.output) / 1e6)
    assert cost.ttft_s == pytest.approx(step + prefill)
    # in the time of one request's 200 steps each of the other 31 leaves, and another is prefilled in its place
    assert cost.tpot_s == pytest.approx(step + 31 * prefill / 200)
    assert cost.requests_per_s * (prefill + 200 * cost.tpot_s) == pytest.approx(32)  # Little's law
    assert cost.tokens_per_s == pytest.approx(201 * cost.requests_per_s)
    half = capacity.cost_per_million_tokens(found, 1000, 201, 32, usd_per_hour=3.6, utilization=0.5)
    assert half.request == pytest.approx(2 * cost.request)
    assert [amount.unit for amount in (cost.input, cost.output, cost.request)] == [
        "USD/million input tokens", "USD/million output tokens", "USD/request",
    ]  # fmt: skip
    assert str(cost.output).endswith(" USD/million output tokens")
    assert capacity.cost_per_million_tokens(found, 1000, 201, 32).usd_per_hour == H100.usd_per_hour


def test_pipeline_stages_work_at_the_same_time():
    one = capacity.cost_per_million_tokens(plan(LLAMA_3, H100), 512, 65, 16)
    two = capacity.cost_per_million_tokens(plan(LLAMA_3, H100, pipeline_parallel=2), 512, 65, 32)
    assert two.usd_per_hour == 2 * one.usd_per_hour
    assert two.requests_per_s == pytest.approx(2 * one.requests_per_s)  # two batches in flight
    assert two.request == pytest.approx(one.request)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([key for key in list_accelerators() if get_accelerator(key).usd_per_hour and "v100" not in key]),
    st.integers(1, 4000), st.integers(2, 1000), st.integers(1, 200),
)  # fmt: skip
def test_costs_are_positive_and_larger_batches_are_cheaper(key, prompt_len, output_len, batch_size):
    found = plan(get_model("llama-3.2-1b"), get_accelerator(key), memory_bytes=2e12)
    small, large = (
        capacity.cost_per_million_tokens(found, prompt_len, output_len, size) for size in (batch_size, 2 * batch_size)
    )
    assert 0 < large.output <= small.output * (1 + 1e-9)
    assert large.input == small.input > 0
    assert large.tpot_s >= small.tpot_s > 0


@pytest.mark.parametrize("slo", [SLO(0.2, 0.02), SLO(0.06, 0.05), SLO(1.0, 0.2), SLO(1e-4, 1.0), SLO(1.0, 1e-4)])
def test_the_largest_batch_under_an_slo(slo):
    found = plan(LLAMA_3, H100)
    choice = capacity.batch_under_slo(found, 1500, 300, slo)
    most = found.requests_at(1800)

    def meets(size: int) -> bool:
        cost = capacity.cost_per_million_tokens(found, 1500, 300, size)
        return cost.ttft_s <= slo.ttft_s and cost.tpot_s <= slo.tpot_s

    by_trying = max((size for size in range(1, most + 1) if meets(size)), default=0)
    assert choice.batch_size == by_trying
    assert choice.limited_by == ("memory" if by_trying == most else "TTFT" if slo.ttft_s < 0.1 else "TPOT")
    assert str(by_trying) in choice.message


def test_no_batch_where_nothing_fits():
    found = plan(get_model("llama-3.1-70b"), RTX_4090)
    choice = capacity.batch_under_slo(found, 100, 100, SLO(10, 10))
    assert (choice.batch_size, choice.limited_by) == (0, "memory")
    assert "short by" in choice.message
    with pytest.raises(ValueError, match="batch_size must be at most 0, the requests of 200 tokens that fit, got 1"):
        capacity.cost_per_million_tokens(found, 100, 100, 1)


def test_break_even():
    # 3.60 USD/h against 2 USD per million tokens: 500 tokens/s, half of what it can do
    found = capacity.break_even(3.6, 1000, 2.0)
    assert (found.tokens_per_s, found.utilization, found.possible) == (pytest.approx(500), pytest.approx(0.5), True)
    assert str(found.tokens_per_s) == "500 tokens/s" and "50.0%" in found.message
    at_break_even = capacity.cost_from_rate(3.6, 1000, found.utilization)
    assert at_break_even == pytest.approx(2.0)
    never = capacity.break_even(3.6, 1000, 0.5)
    assert not never.possible and "never pays" in never.message


def test_energy():
    # 700 W at 1,000 tokens/s: 0.7 J; a million tokens take 700 kJ
    found = capacity.energy_per_token(H100, 1000)
    assert str(found.per_token) == "0.7 J/token" and str(found.per_million_tokens) == "0.1944 kWh/million tokens"
    assert capacity.energy_per_token(H100, 1000, num_accelerators=4).per_token == pytest.approx(2.8)
    with pytest.raises(ValueError, match="accelerator must have a known tdp_w, got TPU v5e with None"):
        capacity.energy_per_token(get_accelerator("tpu-v5e"), 1000)


def test_cost_per_correct_answer():
    # 0.50 USD per million, 400 tokens: 0.0002 USD an answer, 0.00025 if four of five are right
    cost = capacity.cost_per_correct_answer(0.5, 400, 0.8)
    assert str(cost) == "0.00025 USD/correct answer"
    # B's tokens are cheaper, A's correct answers are
    assert capacity.cost_per_correct_answer(0.6, 400, 0.9) < capacity.cost_per_correct_answer(0.5, 400, 0.7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: capacity.cost_from_rate(0, 1), "usd_per_hour must be a finite number above 0, got 0"),
        (lambda: capacity.cost_from_rate(1, 1, 2), "utilization must be above 0 and at most 1, got 2"),
        (lambda: capacity.cost_per_correct_answer(1, 1, 1.5), "accuracy must be above 0 and at most 1, got 1.5"),
        (lambda: capacity.cost_per_correct_answer(1, 1, 0), "accuracy must be a finite number above 0, got 0"),
        (lambda: capacity.break_even(1, 1, 0), "usd_per_million_tokens must be a finite number above 0"),
        (lambda: capacity.cost_per_million_tokens(plan(LLAMA_3, H100), 10, 1, 1), "output_len must be a whole number"),
        (
            lambda: capacity.cost_per_million_tokens(plan(LLAMA_3, get_accelerator("l40")), 10, 10, 1),
            "usd_per_hour must be given for L40, got None",
        ),
        (lambda: capacity.kv_budget_bytes(-1, 0), "memory_bytes must be a finite number above 0, got -1"),
    ],
)
def test_costs_refuse_what_is_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_file_of_lesson_5_is_a_fifth_larger_than_its_matrices_bits_say():
    model = get_model("smollm2-135m")
    in_file = {"weight_bits": 4, "group_size": 32, "zero_bits": 16, "part_bits": {"embedding": 8.5}}
    whole = plan(model, get_accelerator("h100-sxm"), **in_file).weight_bytes
    assert model.streamed_weight_bytes(4, 32) / whole == pytest.approx(0.8, abs=0.03)
