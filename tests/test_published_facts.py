"""Figures that others published, from our functions. Ids and sources are those of tests/data/*.csv."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from lessonlib import kv_cache, latency, paging, roofline
from lessonlib.accelerators import Accelerator, get_accelerator
from lessonlib.models import ModelConfig, get_model

DATA = Path(__file__).parent / "data"
A6000 = Accelerator(key="a6000", name="RTX A6000", memory_bandwidth=768e9, peak_flops={"bf16": 154.8e12})
A100 = get_accelerator("a100-80gb-sxm")
# The scaling book uses 8.1e11 B/s for TPU v5e in its inference chapters and 8.2e11 B/s in its roofline chapter.
V5E = Accelerator(key="v5e", name="TPU v5e", memory_bandwidth=8.1e11, peak_flops={"bf16": 1.97e14})


@pytest.mark.parametrize(
    ("fact", "key", "expected"),
    [
        ("F1", "llama-2-7b", 524_288),
        ("F2", "llama-3.1-8b", 131_072),
        ("F3", "llama-3.1-70b", 327_680),
        ("F4", "llama-3.1-405b", 516_096),
        ("F5", "opt-13b", 819_200),  # the PagedAttention paper, section 3: 800 KB
        ("F6", "qwen3-4b", 147_456),
        ("F7", "deepseek-v3", 70_272),
    ],
)
def test_kv_bytes_per_token(fact, key, expected):
    assert kv_cache.bytes_per_token(get_model(key)) == expected
    assert kv_cache.cache_bytes(get_model(key), context_len=1) == expected


@pytest.mark.parametrize(
    ("fact", "key", "kv_bits", "mebibytes"),
    [
        ("F8", "llama-3.1-8b", 16, 256),  # llama.cpp's start-up logs; Llama 3 has the shape of Llama 3.1
        ("F8", "llama-3.1-70b", 16, 640),
        ("F8", "mixtral-8x7b", 16, 256),
        ("F9", "llama-3.2-1b", 16, 64),  # tetherto/qvac PR 1159: f16, q8_0, q4_0
        ("F9", "llama-3.2-1b", 8.5, 34),
        ("F9", "llama-3.2-1b", 4.5, 18),
    ],
)
def test_llama_cpp_caches_of_2048_tokens(fact, key, kv_bits, mebibytes):
    assert kv_cache.cache_bytes(get_model(key), 2048, kv_bits=kv_bits) == mebibytes * 2**20


def test_f17_shares_of_memory_in_use():
    # The paper's figure 2: Orca 20.4, 26.8 and 38.2 %, paged 96.3 %. It ran traces; ours is drawn, so: order and shape.
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(4.5, 1.0, 500), 4, 1000).astype(int)
    outputs = np.clip(rng.lognormal(5.3, 0.8, 500), 4, 1000).astype(int)
    shares = [paging.share_in_use(prompts, outputs, policy) for policy in paging.RESERVATIONS]
    assert shares == sorted(shares)
    assert shares[0] < 0.3 and shares[-1] > 0.95
    assert kv_cache.paging_waste(prompts + outputs, 16).max() <= 15


def engine_log(row_id: str) -> dict[str, str]:
    with (DATA / "engine_logs.csv").open(encoding="utf-8", newline="") as file:
        return next(row for row in csv.DictReader(file) if row["id"] == row_id)


# What each engine logged about its cache: blocks of 16 tokens (or tokens), from a budget printed to 3 or 4 digits.
LOGGED_BLOCKS = [
    # row, model, KV bits, tensor parallel, GiB logged, its last digit, blocks
    ("L1", "llama-3.1-8b", 16, 1, 3.81, 0.01, 1952),
    ("L2", "llama-3.1-8b", 16, 1, 2.89, 0.01, 1478),
    ("L4", "llama-3.1-8b", 16, 2, 4.55, 0.01, 4660),
    ("L5", "qwen3-30b-a3b", 8, 1, 10.55, 0.01, 230_528 / 16),
    ("L10", "llama-3.1-8b", 16, 1, 5.055, 0.001, 2588),
    ("L11", "qwen3-4b", 16, 1, 12116 / 1024, 1 / 1024, 5385),
]


@pytest.mark.parametrize(("row", "key", "kv_bits", "ranks", "gib", "digit", "logged"), LOGGED_BLOCKS)
def test_blocks_that_engines_logged(row, key, kv_bits, ranks, gib, digit, logged):
    assert float(engine_log(row)["kv_gib"].split()[0]) == pytest.approx(gib, abs=digit)
    fewest, most = (
        kv_cache.num_blocks(get_model(key), (gib + side * digit / 2) * 2**30, 16, kv_bits, ranks) for side in (-1, 1)
    )
    assert fewest <= logged <= most
    assert most - fewest < 0.005 * logged  # the logs pin it down


def test_l1_the_budget_that_the_log_adds_up_to():
    row = engine_log("L1")
    budget = float(row["total_gib"]) * float(row["utilization"]) - 17.06 - float(row["other_gib"])
    assert kv_cache.num_blocks(get_model("llama-3.1-8b"), budget * 2**30) == pytest.approx(1952, abs=3)
    assert kv_cache.blocks(20_000) * 1.56 == pytest.approx(1952, rel=0.005)  # "1.56x at 20,000 tokens"


@pytest.mark.parametrize(("tokens", "max_len", "logged"), [(1478 * 16, 29_000, 0.82), (4660 * 16, 40_000, 1.86),
                                                            (230_528, 100_000, 2.31), (127_626 * 16, 2048, 997.08)],
                         ids=["L2", "L4", "L5", "L12"])  # fmt: skip
def test_concurrency_is_tokens_over_length(tokens, max_len, logged):
    assert kv_cache.concurrency(tokens, max_len) == pytest.approx(logged, abs=0.006)


def test_l4_one_token_on_one_of_two_ranks():
    assert kv_cache.rank_bytes_per_token(get_model("llama-3.1-8b"), num_accelerators=2) == 64 * 2**10


def test_l6_the_stage_with_more_layers_decides():
    model = get_model("qwen3-30b-a3b")  # Qwen3-Coder-30B-A3B has its shape
    tokens = 262_144
    whole, first, second = (
        kv_cache.rank_bytes_per_token(model, num_layers=layers) * tokens / 2**30 for layers in (48, 16, 32)
    )
    assert (whole, first, second) == (24.0, 8.0, 16.0)
    assert kv_cache.longest_context(model, 3.18 * 2**30) == pytest.approx(34_736, rel=0.002)  # the engine's estimate


def test_l10_activations_are_not_free():
    model = get_model("llama-3.1-8b")
    without = kv_cache.num_blocks(model, 0.9 * 24 * 2**30 - model.weight_bytes()) * 16
    assert without == pytest.approx(54_400, rel=0.01)
    assert without > 1.3 * 41_408


def test_l11_bytes_of_a_block():
    assert 16 * kv_cache.bytes_per_token(get_model("qwen3-4b")) == 2.25 * 2**20


def test_l13_one_request_and_a_figure_28_times_too_high():
    model = get_model("qwen2.5-7b")
    assert kv_cache.bytes_per_token(model) == 57_344
    assert f"{kv_cache.cache_bytes(model, 3072) / 2**30:.2f}" == "0.16"
    query_heads_for_kv_heads = model.num_heads / model.num_kv_heads
    assert 57_344 * query_heads_for_kv_heads * 4 == 1_605_632  # 7x: query heads; 4x: bits used as bytes


@pytest.mark.parametrize(("bits", "batch"), [(16, 240), (8, 120), (4, 60)])
def test_f10_critical_batch_of_tpu_v5e(bits, batch):
    v5e = dataclasses.replace(V5E, memory_bandwidth=8.2e11)
    assert roofline.critical_batch_size(v5e, weight_bits=bits) == pytest.approx(batch, rel=0.01)


def test_f11_ridge_of_h100():
    assert roofline.critical_batch_size(get_accelerator("h100-sxm")) == pytest.approx(295, rel=0.01)


@pytest.mark.parametrize(("batch_size", "milliseconds"), [(4, 2.57), (256, 21.05)])
def test_f12_decode_step_from_plain_numbers(batch_size, milliseconds):
    step = latency.step_time(
        linear_flops=2 * batch_size * 30e9,
        weight_bytes=30e9,
        attention_flops=0,
        kv_bytes=batch_size * 8192 * 100e3,
        peak_flops_per_s=16 * 1.97e14,
        memory_bandwidth=16 * 8.1e11,
    )
    assert step.total_s * 1e3 == pytest.approx(milliseconds, rel=0.01)


@pytest.mark.parametrize(
    ("fact", "accelerator", "batch_size", "milliseconds", "tolerance"),
    [
        ("F13", A6000, 1, 18.60, 0.01),
        ("F13", A100, 1, 7.01, 0.01),
        ("F14", A6000, 16, 40.10, 0.02),  # LLM-Viewer counts activations too; weights and cache alone: 39.57
        ("F14", A100, 16, 15.10, 0.02),
    ],
)
def test_decode_step_of_llama_2_7b(fact, accelerator, batch_size, milliseconds, tolerance):
    step = latency.decode_step(get_model("llama-2-7b"), accelerator, batch_size, context_len=2048)
    assert step.total_s * 1e3 == pytest.approx(milliseconds, rel=tolerance)


def test_f14_activations_are_a_small_part():
    operators = roofline.total(roofline.decode_operators(get_model("llama-2-7b"), batch_size=16, context_len=2048))
    assert 0 < operators.activation_bytes < 0.01 * operators.num_bytes


def test_f15_llama_3_70b_on_eight_v5e():
    options = {"batch_size": 32, "context_len": 8192, "weight_bits": 8, "kv_bits": 8}
    model = get_model("llama-3.1-70b")
    moved = roofline.total(roofline.decode_operators(model, **options))
    assert moved.weight_bytes + moved.kv_bytes == pytest.approx(112e9, rel=0.01)
    step = latency.decode_step(model, V5E, num_accelerators=8, **options)
    assert step.total_s * 1e3 == pytest.approx(17.3, rel=0.01)


def test_f16_prefill_of_llama_3_70b_on_sixteen_v5e():
    # The book counts the head at every position and leaves attention out: its 0.91 s is our linear part.
    step = latency.prefill(get_model("llama-3.1-70b"), V5E, 8192, efficiency=0.4, num_accelerators=16, all_logits=True)
    assert step.linear_s == pytest.approx(0.91, rel=0.02)


@pytest.mark.parametrize(
    ("key", "megahertz", "fma_per_cycle", "units"), [("h100-sxm", 1830, 512, 528), ("a100-80gb-sxm", 1410, 256, 432)]
)
def test_f22_peak_from_clock(key, megahertz, fma_per_cycle, units):
    peak = roofline.peak_from_clock(megahertz * 1e6, fma_per_cycle, units)
    assert peak == pytest.approx(get_accelerator(key).peak("bf16"), rel=0.001)


def decode_speeds() -> list[dict[str, str]]:
    with (DATA / "decode_speeds.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def accelerators_that_stream(row: dict[str, str]) -> int:
    """How many devices read at once: with a layer split one after the other, with tensor parallelism all."""
    return 8 if "TP8" in row["dtype"] else 1


@pytest.mark.parametrize("row", decode_speeds(), ids=lambda row: f"{row['model']}-{row['device']}-{row['dtype']}")
def test_measured_decode_speeds(row):
    check = latency.check_speed(
        float(row["measured_tokens_s"]),
        float(row["bytes_gb_per_token"]) * 1e9,
        float(row["bandwidth_gb_s"]) * 1e9,
        accelerators_that_stream(row),
    )
    assert check.bound_tokens_per_s == pytest.approx(float(row["bound_tokens_s"]), rel=0.01)
    assert check.possible == (row["possible"] == "yes")
    assert ("not possible" in check.message) == (row["possible"] == "no")


@pytest.mark.parametrize(
    ("key", "options", "gigabytes"),
    [
        ("llama-2-7b", {}, 13.21),
        ("llama-2-7b", {"weight_bits": 8}, 6.61),
        ("llama-2-7b", {"weight_bits": 4, "group_size": 32, "zero_bits": 16}, 4.13),
        ("llama-2-70b", {"weight_bits": 8}, 68.7),
        ("mixtral-8x7b", {"weight_bits": 8}, 12.75),
        ("llama-3.1-8b", {}, 15.01),
        ("llama-3.1-70b", {}, 139.0),
    ],
)
def test_bytes_per_token_of_the_measured_models(key, options, gigabytes):
    assert get_model(key).streamed_weight_bytes(**options) / 1e9 == pytest.approx(gigabytes, rel=0.002)


def test_a_bound_from_all_parameters_of_a_mixture_would_be_violated():
    mixtral: ModelConfig = get_model("mixtral-8x7b")
    everything = latency.check_speed(56.04, mixtral.weight_bytes(8), 2039e9)
    assert not everything.possible
    assert latency.check_speed(56.04, mixtral.streamed_weight_bytes(8), 2039e9).possible
