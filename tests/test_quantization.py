"""Quantization against closed forms, brute force, PyTorch's FP8 and the `gguf` library."""

import dataclasses
import itertools
import math

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lessonlib.models import ModelConfig, effective_bits, get_model
from lessonlib.quantization import (
    BITS,
    BLOCK_FORMATS,
    E4M3_GRID,
    NF4_GRID,
    SMALLEST_SCALE,
    awq,
    bits_per_weight,
    channel_errors,
    decode_blocks,
    encode_blocks,
    gptq,
    keep_channels,
    mean_relative_error,
    output_error,
    pack_int4,
    quantize,
    quantize_to_grid,
    reference_matrix,
    rmse,
    round_to_codes,
    salient_channels,
    sqnr_db,
    unpack_int4,
)

pytestmark = pytest.mark.filterwarnings("error")  # no division by 0, no overflow
unhurried = settings(deadline=None)
NF4_PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip

matrices = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=3, max_side=9),
    elements=st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-4, 4, width=32),
)
granularities = st.tuples(st.just("tensor"), st.none()) | st.tuples(st.just("channel"), st.none())
schemes = granularities | st.tuples(st.just("group"), st.integers(1, 12))


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# The reference document


def test_one_value_by_hand():
    code = round_to_codes(0.734, 0.0078, bits=8)
    assert code == 94
    assert code * 0.0078 == pytest.approx(0.7332, abs=1e-12)


def test_the_reference_matrix():
    matrix = reference_matrix()
    first = (1103515245 * 42 + 12345) % 2**31
    assert matrix.shape == (16, 64)
    assert matrix[0, 0] == first / (2**31 - 1) - 0.5
    assert matrix[0, 1] == (1103515245 * first + 12345) % 2**31 / (2**31 - 1) - 0.5
    assert np.abs(matrix).max(axis=1) == pytest.approx(0.5 * 10.0 ** (np.arange(16) % 4), rel=0.1)


def test_the_reference_figures():
    matrix = reference_matrix()
    error = {
        (bits, granularity): 100 * mean_relative_error(matrix, quantize(matrix, bits, granularity).dequantize())
        for bits, granularity in [(8, "tensor"), (8, "channel"), (4, "channel")]
    }
    assert error[8, "tensor"] == pytest.approx(41.397, abs=5e-4)
    assert error[8, "channel"] == pytest.approx(1.1179, abs=5e-5)
    assert error[4, "channel"] == pytest.approx(16.142, abs=5e-4)
    assert error[8, "tensor"] / error[8, "channel"] == pytest.approx(37.03, abs=5e-3)


# Known right answers, row by row


def test_case_range_without_zero():
    x = np.arange(-22.0, -14)
    tensor = quantize(x, 8, symmetric=False)
    assert tensor.scale.item() == pytest.approx(22 / 255, rel=1e-6)
    assert tensor.zero_point.item() == 255
    assert np.abs(tensor.dequantize() - x).max() <= tensor.scale.item() / 2


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("granularity", "group_size"), [("tensor", None), ("channel", None), ("group", 4)])
@pytest.mark.parametrize("bits", BITS)
def test_case_all_zero_row_or_group(bits, granularity, group_size, symmetric):
    x = normals(3, 8)
    x[1] = 0
    x[2, :4] = 0
    back = quantize(x, bits, granularity, group_size, symmetric).dequantize()
    assert not back[x == 0].any()
    assert not quantize(np.zeros((2, 8)), bits, granularity, group_size, symmetric).dequantize().any()


def test_case_scale_underflow():
    x = np.full(32, 100 * 2.0**-25)
    assert np.float16(x.max() / 127) == 0
    assert quantize(x, 8).dequantize() == pytest.approx(x, rel=1e-6)  # an fp32 scale
    assert not decode_blocks(encode_blocks(x, "Q8_0"), "Q8_0").any()  # an fp16 scale
    assert decode_blocks(encode_blocks(2 * x, "Q8_0"), "Q8_0").any()


def test_case_ties():
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert round_to_codes(x, 1, bits=8).tolist() == [-2, -2, 0, 0, 2, 2]
    tensor = quantize([*x, 127], 8)
    assert tensor.scale.item() == 1
    assert tensor.codes.tolist() == [-2, -2, 0, 0, 2, 2, 127]


def test_case_rounding_not_truncation():
    x = normals(1_000_000)
    tensor = quantize(x, 8)
    scale = tensor.scale.item()
    assert rmse(x, tensor.dequantize()) / scale == pytest.approx(1 / math.sqrt(12), abs=5e-4)
    assert abs(np.mean(x - tensor.dequantize())) < 0.002 * scale
    assert rmse(x, np.trunc(x / scale) * scale) / scale == pytest.approx(0.574, abs=0.002)


def test_case_clip_before_cast():
    assert round_to_codes([1.0, -1.0], 1 / 256, bits=8, zero_point=-128).tolist() == [127, -128]
    assert round_to_codes([1.0, -9.0], 1 / 128, bits=8).tolist() == [127, -128]
    assert round_to_codes([300.0, -1.0], 1, bits=8, symmetric=False).tolist() == [255, 0]
    assert round_to_codes([9.0, -9.0], 1, bits=4).tolist() == [7, -8]


@pytest.mark.parametrize(("order", "word"), [("linear", 0x76543210), ("awq", 0x75316420)])
def test_case_nibble_order(order, word):
    packed = pack_int4(range(8), order)
    assert packed.dtype == np.uint32
    assert packed.tolist() == [word]
    assert unpack_int4(packed, order).tolist() == list(range(8))


@pytest.mark.parametrize(("columns", "group_size", "groups"), [(768, 512, 2), (4304, 32, 135), (192, 128, 2)])
def test_case_group_does_not_divide(columns, group_size, groups):
    x = normals(2, columns)
    with pytest.raises(ValueError, match=f"must divide the {columns} columns, got {group_size}"):
        quantize(x, 4, "group", group_size)
    tensor = quantize(x, 4, "group", group_size, pad=True)
    assert tensor.scale.shape == (2, groups)
    assert tensor.num_bits == 2 * groups * (group_size * 4 + 16)
    whole = columns - columns % group_size
    by_hand = [quantize(part, 4).dequantize() for part in (x[:, :group_size], x[:, whole:])]
    assert np.array_equal(tensor.dequantize()[:, :group_size], by_hand[0])
    assert np.array_equal(tensor.dequantize()[:, whole:], by_hand[1])


def test_case_axis():
    # a draw whose largest weight (3.5 times the spread) gives the per-tensor figure
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).numpy().astype(float)
    large = 58
    weight[large] *= 50
    others = np.arange(64) != large

    def error(approx):
        return rmse(weight[others], approx[others])

    assert error(quantize(weight, 8).dequantize()) == pytest.approx(0.007, abs=5e-4)
    assert error(quantize(weight.T, 8).dequantize().T) == pytest.approx(0.109, abs=5e-4)
    assert error(quantize(weight, 8, "tensor").dequantize()) == pytest.approx(0.392, abs=5e-4)


def test_case_fp16_order_of_operations():
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(1016) * np.float16(127))
    tensor = quantize(np.full((1, 1), 12.7, np.float16), 8)
    assert tensor.codes.item() == 127
    assert (np.float16(1016) * tensor.dequantize()).item() == pytest.approx(1016 * 12.7, rel=1e-3)


def test_case_bits_per_weight_f20():
    bits = {name: block.bits_per_weight for name, block in BLOCK_FORMATS.items()}
    assert bits == {"Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625}
    for name, block in BLOCK_FORMATS.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert sizes == (block.num_weights, block.num_bytes)
    weight = normals(4, 256)
    assert quantize(weight, 4, "group", 128, symmetric=False).effective_bits == 4.15625
    assert quantize(weight, 4, "group", 32, symmetric=False).effective_bits == 4.625
    for group_size in (128, 32):
        tensor = quantize(weight, 4, "group", group_size)
        assert tensor.effective_bits == effective_bits(4, group_size)
        assert tensor.num_bytes * 8 == tensor.effective_bits * weight.size


def test_case_tied_head():
    gemma = ModelConfig(
        name="Gemma 2B", num_layers=18, hidden_size=2048, num_heads=8, num_kv_heads=1, head_dim=256,
        intermediate_size=16384, vocab_size=256_000, max_context=8192, tied_embeddings=True,
    )  # fmt: skip
    scheme = {"weight_bits": 4, "group_size": 128, "scale_bits": 16, "zero_bits": 4}
    separate = dataclasses.replace(gemma, tied_embeddings=False)
    assert separate.weight_bytes(**scheme) - gemma.weight_bytes(**scheme) == 272_384_000
    row = quantize(normals(1, 2048), 4, "group", 128, symmetric=False)
    assert 256_000 * row.num_bytes == 272_384_000


def test_case_untied_copy():
    llama = get_model("llama-3.2-1b")
    body = llama.num_parameters - llama.head_params
    assert body / 1e6 == pytest.approx(973.1, abs=0.05)
    tied = llama.weight_bytes(4, 128, unquantized=("embedding",))
    untied = dataclasses.replace(llama, tied_embeddings=False)
    assert tied / 1e9 == pytest.approx(1.027, abs=5e-4)
    assert untied.weight_bytes(4, 128, unquantized=("embedding", "head")) / 1e9 == pytest.approx(1.552, abs=5e-4)


def test_f21_bits_of_a_file():
    assert bits_per_weight(42.52e9, get_model("llama-3.1-70b").num_parameters) == pytest.approx(4.82, abs=5e-3)


def test_f21_from_the_formats_in_the_file():
    # llama.cpp's Q4_K_M is a mixture: the head and, in half of the layers, MLP down and values take Q6_K; with eight
    # query heads to a KV head the other values take Q5_K; the rest is Q4_K (src/llama-quant.cpp)
    model = get_model("llama-3.1-70b")
    more = sum(i < 10 or i >= 70 or (i - 10) % 3 == 2 for i in range(model.num_layers))
    values = model.hidden_size * model.num_kv_heads * model.head_dim
    down = model.hidden_size * model.intermediate_size
    weights = {
        "Q6_K": model.head_params + more * (down + values),
        "Q5_K": (model.num_layers - more) * values,
    }
    weights["Q4_K"] = model.num_parameters - sum(weights.values())
    size = sum(count * BLOCK_FORMATS[name].bits_per_weight / 8 for name, count in weights.items())
    assert size / 1e9 == pytest.approx(42.52, rel=1e-3)


# Round to nearest


@unhurried
@given(matrices, st.sampled_from(BITS), schemes, st.booleans())
def test_quantizing_is_bounded_and_idempotent(x, bits, scheme, symmetric):
    granularity, group_size = scheme
    tensor = quantize(x, bits, granularity, group_size, symmetric, pad=True)
    back = tensor.dequantize()
    assert back.shape == tensor.codes.shape == x.shape
    assert tensor.scale.dtype == np.float32
    assert np.all(tensor.scale >= SMALLEST_SCALE)
    lowest = -(2 ** (bits - 1)) if symmetric else 0
    assert lowest <= tensor.codes.min()
    assert tensor.codes.max() < lowest + 2**bits
    assert np.all((tensor.zero_point >= 0) & (tensor.zero_point < 2**bits))
    scale = tensor.scale if group_size is None else np.repeat(tensor.scale, group_size, -1)[..., : x.shape[-1]]
    assert np.all(np.abs(back - x) <= scale * (0.5 + 1e-4))
    again = quantize(back, bits, granularity, group_size, symmetric, pad=True)
    assert np.array_equal(again.dequantize(), back)


def test_a_zero_point_between_two_codes():
    # -low / scale ends in one half: both ends must still get the end codes, or a second pass would shrink the range
    for ends in ([-1.0, 1.0], [-3, 3], [-0.1, 0.1], [-1e-30, 1e-30], [-(2.0**100), 2.0**100], [-100.5, 154.5]):
        tensor = quantize(ends, 8, symmetric=False)
        assert tensor.codes.tolist() == [0, 255]
        back = tensor.dequantize()
        assert np.array_equal(quantize(back, 8, symmetric=False).dequantize(), back)


@unhurried
@given(matrices, st.sampled_from(BITS), st.booleans())
def test_one_group_is_a_channel_and_smaller_groups_have_smaller_scales(x, bits, symmetric):
    columns = x.shape[-1]
    channel = quantize(x, bits, "channel", symmetric=symmetric)
    group = quantize(x, bits, "group", columns, symmetric)
    assert np.array_equal(channel.codes, group.codes)
    assert np.array_equal(channel.scale, group.scale)
    assert channel.num_bits == group.num_bits
    assert np.all(quantize(x, bits, "group", 1, symmetric).scale <= channel.scale)
    assert np.all(channel.scale <= quantize(x, bits, "tensor", symmetric=symmetric).scale)


def test_by_hand():
    tensor = quantize([[0.7, -0.26, 0.1], [7, 3.4, -7]], 4)
    assert tensor.scale.ravel() == pytest.approx([0.1, 1])
    assert tensor.codes.tolist() == [[7, -3, 1], [7, 3, -7]]
    assert tensor.codes.dtype == np.int8
    assert tensor.num_bits == 6 * 4 + 2 * 16
    whole = quantize([[0.7, -0.26, 0.1], [7, 3.4, -7]], 4, "tensor", symmetric=False)
    assert whole.scale == pytest.approx(14 / 15)
    assert whole.zero_point.item() == 8
    assert whole.codes.tolist() == [[9, 8, 8], [15, 12, 0]]
    assert whole.codes.dtype == np.uint8
    assert whole.num_bits == 6 * 4 + 16 + 4
    assert quantize([[1.0] * 3] * 3, 3, scale_bits=32).num_bytes == math.ceil((9 * 3 + 3 * 32) / 8)


def test_every_axis_but_the_last_is_rows():
    x = normals(2, 3, 8)
    tensor = quantize(x, 4, "group", 4)
    assert tensor.scale.shape == (2, 3, 2)
    assert np.array_equal(tensor.dequantize().reshape(6, 8), quantize(x.reshape(6, 8), 4, "group", 4).dequantize())
    assert quantize(x, 4, "tensor").scale.shape == (1, 1, 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.734, -5.0, 3.4e38, -3.4e38, 1.2e-38 * 127, 1])
def test_constant_and_single_values(value, symmetric, bits):
    assert quantize([value], bits, symmetric=symmetric).dequantize() == pytest.approx([value], rel=1e-6)
    assert quantize([[value] * 5] * 3, bits, symmetric=symmetric).dequantize() == pytest.approx(
        np.full((3, 5), value), rel=1e-6
    )


def test_huge_and_tiny_values():
    huge = np.array([3.4028234e38, -3.4028234e38, 1e38])
    assert quantize(huge, 8).dequantize() == pytest.approx(huge, rel=0.01)
    assert np.isfinite(quantize(huge, 8).dequantize().astype(np.float32)).all()
    assert np.isfinite(quantize(huge, 2, symmetric=False).dequantize()).all()
    for tiny in ([1e-45, -1e-45], [5e-324, 0], [1e-40, 5e-41]):  # a scale would be below fp32's normal numbers
        for symmetric in (True, False):
            back = quantize(tiny, 8, symmetric=symmetric).dequantize()
            assert np.abs(back - tiny).max() <= SMALLEST_SCALE / 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.int64])
def test_any_number_type(dtype):
    x = np.array([[100, -7, 31]], dtype)
    assert quantize(x, 8).dequantize() == pytest.approx(x.astype(float), abs=50 / 127)


@pytest.mark.parametrize(
    ("x", "options", "said"),
    [
        ([1, math.nan], {}, r"x must hold finite numbers up to 3.4e\+38 \(fp32\), got nan at \[1\]"),
        ([[1, 2], [-math.inf, 0]], {}, r"got -inf at \[1, 0\]"),
        ([1e39], {}, r"got 1e\+39"),
        ([], {}, "got 0 of type"),
        ([True], {}, "got 1 of type bool"),
        (["1"], {}, "x must hold finite numbers"),
        (3.0, {}, "x must have at least one axis"),
        ([1.0], {"bits": 1}, "bits must be one of 2, 3, 4, 5, 6, 7, 8, got 1"),
        ([1.0], {"bits": 9}, "bits"),
        ([1.0], {"bits": 4.5}, "bits"),
        ([1.0], {"bits": True}, "bits"),
        ([1.0], {"granularity": "row"}, "granularity must be one of tensor, channel, group, got 'row'"),
        ([1.0], {"granularity": "group"}, "group_size must be given"),
        ([1.0], {"granularity": "channel", "group_size": 1}, "group_size must be given"),
        ([1.0], {"granularity": "group", "group_size": 0}, "group_size must be a whole number of at least 1, got 0"),
        ([1.0], {"granularity": "group", "group_size": 2}, "group_size must divide the 1 columns, got 2; pad=True"),
        ([1.0], {"scale_bits": 0}, "scale_bits"),
    ],
)
def test_bad_input(x, options, said):
    with pytest.raises(ValueError, match=said):
        quantize(x, **{"bits": 8, **options})


def test_bad_scale_or_zero_point():
    for scale in (0, -1.0, 1e-39, math.nan):
        with pytest.raises(ValueError, match="scale must"):
            round_to_codes(1.0, scale, bits=8)
    with pytest.raises(ValueError, match=r"zero_point must hold whole numbers, got 0\.5"):
        round_to_codes(1.0, 1, bits=8, zero_point=0.5)


# Error measures


def test_error_measures_by_hand():
    x, y = np.array([1.0, -2.0, 4.0]), np.array([1.5, -2.0, 3.0])
    assert mean_relative_error(x, y) == pytest.approx((0.5 + 0 + 0.25) / 3, rel=1e-8)
    assert rmse(x, y) == pytest.approx(math.sqrt(1.25 / 3))
    assert sqnr_db(x, y) == pytest.approx(10 * math.log10(21 / 1.25))
    assert sqnr_db(x, x) == math.inf
    assert mean_relative_error([0.0, 1.0], [0.0, 1.0]) == 0
    weight, approx, activations = [[1.0, 2.0]], [[1.0, 1.0]], [[3.0, 4.0], [0.0, 5.0]]
    assert output_error(weight, approx, activations) == pytest.approx(math.hypot(4, 5) / math.hypot(11, 10))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_bit_is_worth_six_decibels(bits):
    x = np.random.default_rng(0).uniform(-1, 1, 200_000)
    steps = 2 ** (bits - 1) - 1
    expected = 10 * math.log10((1 / 3) / ((1 / steps) ** 2 / 12))
    assert sqnr_db(x, quantize(x, bits).dequantize()) == pytest.approx(expected, abs=0.1)


def test_error_measures_refuse():
    for measure in (mean_relative_error, rmse, sqnr_db):
        with pytest.raises(ValueError, match=r"y must have the shape of x, \(2,\), got \(3,\)"):
            measure([1.0, 2.0], [1.0, 2.0, 3.0])
        with pytest.raises(ValueError, match="y must hold finite numbers"):
            measure([1.0], [math.nan])
    with pytest.raises(ValueError, match="norm of x must be a finite number above 0"):
        sqnr_db([0.0], [1.0])
    with pytest.raises(ValueError, match="norm of the output"):
        output_error([[1.0, 1.0]], [[2.0, 1.0]], [[1.0, -1.0]])
    assert output_error([[1.0]], [[2.0]], [[0.0]]) == 0  # no activation, no error
    with pytest.raises(ValueError, match=r"activations must have the shape \(samples, 2\), got \(1, 3\)"):
        output_error([[1.0, 1.0]], [[2.0, 1.0]], [[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="weight must have two axes"):
        output_error([1.0], [2.0], [[1.0]])


# Storage


@unhurried
@given(
    hnp.arrays(np.int8, st.sampled_from([(8,), (1, 16), (3, 24), (2, 2, 8)]), elements=st.integers(-8, 7)),
    st.sampled_from(["linear", "awq"]),
)
def test_pack_and_unpack_is_the_identity(codes, order):
    words = pack_int4(codes, order)
    assert words.nbytes * 2 == codes.size
    assert np.array_equal(unpack_int4(words, order, signed=True), codes)
    unsigned = codes.astype(np.uint8) & 0xF
    assert np.array_equal(pack_int4(unsigned, order), words)
    assert np.array_equal(unpack_int4(words, order), unsigned)


def test_pack_refuses():
    for codes, said in [
        ([16] * 8, r"codes must be in \[0, 15\] or in \[-8, 7\], got 16 to 16"),
        ([-1] * 4 + [8] * 4, "got -1 to 8"),
        ([-9] * 8, "got -9"),
        ([1] * 7, "rows of 8 n"),
        ([1.0] * 8, "whole numbers"),
        ([], "codes"),
        (3, "codes"),
    ]:
        with pytest.raises(ValueError, match=said):
            pack_int4(codes)
    with pytest.raises(ValueError, match="order must be one of linear, awq, got 'marlin'"):
        pack_int4([1] * 8, "marlin")
    with pytest.raises(ValueError, match="order"):
        unpack_int4(np.zeros(1, np.uint32), "marlin")
    with pytest.raises(ValueError, match="words must be uint32"):
        unpack_int4([1])


def blocks_of_every_kind() -> np.ndarray:
    halves = np.arange(-31.5, 32)
    blocks = [normals(64, seed=1) * 10.0**power for power in range(-8, 6)]
    blocks += [np.zeros(64), -np.zeros(64), np.arange(-32.0, 32)]
    blocks += [np.where(np.arange(64) % 32 == 9, top, halves / 4 if top < 0 else halves) for top in (127, -8)]  # ties
    blocks += [np.eye(64)[5] * -3e5, np.full(64, 5e5), np.full(64, -7e-7), np.full(64, 1e-30)]
    return np.array(blocks, np.float32)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_blocks_are_those_of_gguf(name):
    x, kind = blocks_of_every_kind(), gguf.GGMLQuantizationType[name]
    data = encode_blocks(x, name)
    assert data.dtype == np.uint8
    assert np.array_equal(data, gguf.quants.quantize(x, kind))
    assert np.array_equal(decode_blocks(data, name), gguf.quants.dequantize(data, kind))
    assert data.size / x.size == BLOCK_FORMATS[name].bits_per_weight / 8
    rows = encode_blocks(x[:, None], name)
    assert np.array_equal(decode_blocks(rows, name), decode_blocks(data, name)[:, None])


@unhurried
@given(
    hnp.arrays(np.float32, (2, 64), elements=st.floats(-(2.0**18), 2.0**18, width=32) | st.floats(-2, 2, width=32)),
    st.sampled_from(["Q8_0", "Q4_0"]),
)
def test_any_blocks_are_those_of_gguf(x, name):
    x = np.where(np.abs(x) < 2.0**-100, np.float32(0), x)  # gguf divides by scales that are almost 0
    kind = gguf.GGMLQuantizationType[name]
    data = encode_blocks(x, name)
    assert np.array_equal(data, gguf.quants.quantize(x, kind))
    assert np.array_equal(decode_blocks(data, name), gguf.quants.dequantize(data, kind))


def test_blocks_refuse():
    with pytest.raises(ValueError, match="multiple of 32 columns"):
        encode_blocks(np.ones((2, 33)), "Q8_0")
    with pytest.raises(ValueError, match="fits fp16"):
        encode_blocks(np.full(32, 1e7), "Q8_0")
    with pytest.raises(ValueError, match="block_format must be one of Q8_0, Q4_0, got 'Q6_K'"):
        encode_blocks(np.ones(32), "Q6_K")
    with pytest.raises(ValueError, match="nan"):
        encode_blocks(np.full(32, np.nan), "Q4_0")
    with pytest.raises(ValueError, match="blocks of 34 uint8"):
        decode_blocks(np.zeros(18, np.uint8), "Q8_0")
    with pytest.raises(ValueError, match="finite scales, got nan"):
        decode_blocks(np.full(18, 255, np.uint8), "Q4_0")
    for tiny in (1e-45, -1e-39):  # 1 / scale would be infinite
        for name in ("Q8_0", "Q4_0"):
            assert not decode_blocks(encode_blocks(np.full(32, tiny), name), name).any()
    with pytest.raises(ValueError, match="num_weights"):
        bits_per_weight(1, 0)


# Value grids


def test_nf4_is_the_published_grid():
    assert np.abs(NF4_GRID - NF4_PUBLISHED).max() < 1e-6


def test_e4m3_is_the_grid_of_torch():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3_GRID, np.unique(every[np.isfinite(every)]))


def test_e4m3_rounds_as_torch_does():
    middles = (E4M3_GRID[1:] + E4M3_GRID[:-1]) / 2
    x = np.concatenate([[448], middles, E4M3_GRID, normals(2000), normals(2000) * 0.003]).astype(np.float32)
    tensor = quantize_to_grid(x, E4M3_GRID, "tensor")  # the largest value is 448, so the scale is 1
    assert tensor.scale.item() == 1
    assert np.array_equal(tensor.dequantize(), torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy())
    assert tensor.effective_bits == 8 + 16 / x.size


@unhurried
@given(matrices, st.sampled_from([NF4_GRID, E4M3_GRID, np.array([-6.0, -3, -1, 0, 1, 3, 6])]), schemes)
def test_the_nearest_of_a_grid(x, grid, scheme):
    granularity, group_size = scheme
    tensor = quantize_to_grid(x, grid, granularity, group_size, pad=True)
    back = tensor.dequantize()
    scale = tensor.scale if group_size is None else np.repeat(tensor.scale, group_size, -1)[..., : x.shape[-1]]
    scale = np.broadcast_to(scale.astype(float), x.shape)
    best = np.abs(x[..., None] - scale[..., None] * grid).min(axis=-1)
    assert np.abs(back - x) == pytest.approx(best, rel=1e-9, abs=0)
    assert np.array_equal(quantize_to_grid(back, grid, granularity, group_size, pad=True).dequantize(), back)


def test_nf4_beats_int4_on_normals():
    x = normals(64, 256)
    nf4 = quantize_to_grid(x, NF4_GRID, "group", 64, scale_bits=32)
    assert nf4.effective_bits == 4.5
    assert rmse(x, nf4.dequantize()) < rmse(x, quantize(x, 4, "group", 64).dequantize())
    assert not quantize_to_grid(np.zeros(64), NF4_GRID).dequantize().any()


@pytest.mark.parametrize("grid", [[0.0], [-1, 0, 2], [1, 0, -1], [-1, 1], [-1, 0, 0, 1], np.linspace(-1, 1, 257)])
def test_bad_grid(grid):
    with pytest.raises(ValueError, match="grid must hold 2 to 256 rising values"):
        quantize_to_grid([1.0], grid)


# GPTQ and AWQ


def layer(rows: int, columns: int, seed: int, samples: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Weights and activations as in a language model: few directions, a little noise, some channels far larger."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, columns)) * 0.05 * rng.lognormal(0, 0.5, (rows, 1))
    rank = max(2, columns // 4)
    activations = rng.standard_normal((samples, rank)) @ rng.standard_normal((rank, columns)) / math.sqrt(rank)
    activations += 0.2 * rng.standard_normal((samples, columns))
    activations[:, rng.choice(columns, max(1, columns // 50), replace=False)] *= 20
    return weight, activations


LAYERS = [layer(48, 96, seed) for seed in range(3)] + [layer(96, 192, 3), layer(24, 192, 4, samples=64)]


def round_to_nearest(weight, bits, group_size, symmetric=True):
    granularity = "channel" if group_size is None else "group"
    return quantize(weight, bits, granularity, group_size, symmetric)


def obs_reference(weight, activations, bits, group_size, symmetric, damping, order):
    """The same greedy updates by optimal brain surgery: each column leaves the inverse Hessian by elimination."""
    hessian = 2 * activations.T @ activations
    hessian += damping * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    columns = weight.shape[1]
    size = group_size or columns
    in_order = np.array_equal(order, range(columns))
    work, result = weight.copy(), np.empty_like(weight)
    inverse = np.linalg.inv(hessian)
    grids = {i: quantize(weight[:, i : i + size], bits, symmetric=symmetric) for i in range(0, columns, size)}
    for place, j in enumerate(order):
        if in_order and j % size == 0:
            grids[j] = quantize(work[:, j : j + size], bits, symmetric=symmetric)
        grid = grids[j - j % size]
        codes = round_to_codes(work[:, j], grid.scale[:, 0], bits, grid.zero_point[:, 0], symmetric)
        result[:, j] = (codes.astype(float) - grid.zero_point[:, 0]) * grid.scale[:, 0]
        left = order[place:]
        if len(left) <= 12:
            anew = np.linalg.inv(hessian[np.ix_(left, left)])
            assert inverse[np.ix_(left, left)] == pytest.approx(anew, rel=1e-6, abs=1e-9 * anew.max())
        work -= np.outer(work[:, j] - result[:, j], inverse[j] / inverse[j, j])
        inverse -= np.outer(inverse[:, j], inverse[j] / inverse[j, j])
    return result


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(6, 12, None), (6, 12, 4), (3, 150, None), (3, 150, 30), (2, 300, 150)]
)
def test_gptq_is_obs(rows, columns, group_size, symmetric, act_order):
    weight, activations = layer(rows, columns, seed=7)
    order = np.argsort(-np.sum(activations**2, axis=0), kind="stable") if act_order else range(columns)
    tensor = gptq(weight, activations, 3, group_size, symmetric, damping=0.02, act_order=act_order)
    expected = obs_reference(weight, activations, 3, group_size, symmetric, 0.02, order)
    assert tensor.dequantize() == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_gptq_beats_round_to_nearest():
    sums = np.zeros(2)
    settings_tried = itertools.product(LAYERS, [2, 3, 4], [None, 32], [True, False])
    for (weight, activations), bits, group_size, symmetric in settings_tried:
        nearest = round_to_nearest(weight, bits, group_size, symmetric)
        tensor = gptq(weight, activations, bits, group_size, symmetric)
        assert tensor.effective_bits == nearest.effective_bits
        assert tensor.codes.dtype == nearest.codes.dtype
        errors = [output_error(weight, t.dequantize(), activations) for t in (tensor, nearest)]
        assert errors[0] <= errors[1]
        sums += errors
    assert sums[0] < 0.7 * sums[1]


def test_gptq_beats_round_to_nearest_on_new_activations():
    weight, activations = layer(64, 128, seed=5, samples=2000)
    seen, unseen = activations[:1000], activations[1000:]
    tensor, nearest = gptq(weight, seen, 3, 64), round_to_nearest(weight, 3, 64)
    assert output_error(weight, tensor.dequantize(), unseen) < output_error(weight, nearest.dequantize(), unseen)


@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("activations", [np.eye(32), np.zeros((4, 32))])
def test_gptq_without_correlations_rounds_to_nearest(activations, group_size):
    weight = normals(5, 32)
    tensor = gptq(weight, activations, 4, group_size)
    assert np.array_equal(tensor.codes, round_to_nearest(weight, 4, group_size).codes)


def test_gptq_does_not_depend_on_the_unit_of_the_activations():
    weight, activations = LAYERS[0]
    codes = [gptq(weight, activations * unit, 3, 32).codes for unit in (1.0, 1e-200, 1e30)]
    assert np.array_equal(codes[0], codes[1])
    assert np.array_equal(codes[0], codes[2])


@pytest.mark.parametrize("group_size", [None, 32])
def test_weights_on_the_grid_lose_nothing(group_size):
    weight, activations = LAYERS[0]
    on_grid = round_to_nearest(weight, 4, group_size).dequantize()
    assert np.array_equal(gptq(on_grid, activations, 4, group_size).dequantize(), on_grid)
    found = awq(on_grid, activations, 4, group_size)
    assert found.alpha == found.errors.min() == 0


def test_gptq_with_a_padded_group():
    weight, activations = layer(8, 40, seed=1)
    with pytest.raises(ValueError, match="group_size must divide the 40 columns, got 32"):
        gptq(weight, activations, 4, 32)
    tensor = gptq(weight, activations, 4, 32, pad=True)
    assert tensor.scale.shape == (8, 2)
    assert tensor.num_bits == 16 * (32 * 4 + 16)
    nearest = quantize(weight, 4, "group", 32, pad=True)
    assert output_error(weight, tensor.dequantize(), activations) < output_error(
        weight, nearest.dequantize(), activations
    )


def test_act_order_helps_where_few_channels_carry_the_output():
    both = [
        sum(output_error(w, gptq(w, x, 3, None, act_order=flag).dequantize(), x) for w, x in LAYERS)
        for flag in (True, False)
    ]
    assert both[0] < both[1]


def test_gptq_refuses_what_does_not_fit():
    weight, activations = LAYERS[0]
    for damping in (0, -1, math.nan):
        with pytest.raises(ValueError, match="damping must be a finite number of at least 1e-06"):
            gptq(weight, activations, 4, 32, damping=damping)
    with pytest.raises(ValueError, match=r"activations must have the shape \(samples, 96\), got \(256, 5\)"):
        gptq(weight, activations[:, :5], 4, 32)
    with pytest.raises(ValueError, match="activations must hold finite numbers"):
        gptq(weight, activations * np.nan, 4, 32)
    with pytest.raises(ValueError, match="bits"):
        gptq(weight, activations, 16, 32)
    twins = np.array([[1.0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]])  # what column 1 loses goes to column 2
    with pytest.raises(ValueError, match="weight must leave room"):
        gptq([[3.4e38, 1.6e38, 3.4e38, 0]], twins, 2, 2)


def test_awq_is_never_worse_than_its_own_start():
    sums = np.zeros(2)
    for (weight, activations), bits, group_size in itertools.product(LAYERS, [2, 3, 4], [None, 32]):
        found, nearest = awq(weight, activations, bits, group_size), round_to_nearest(weight, bits, group_size)
        errors = [output_error(weight, t.dequantize(), activations) for t in (found, nearest)]
        assert found.alphas.shape == found.errors.shape == (20,)
        assert found.alphas[0] == 0
        assert found.errors[0] == pytest.approx(errors[1], rel=1e-9)
        assert found.errors.min() == pytest.approx(errors[0], rel=1e-9)
        assert found.errors[found.alphas == found.alpha] == found.errors.min()
        assert errors[0] <= errors[1]
        assert found.effective_bits == nearest.effective_bits
        assert found.num_bytes == nearest.num_bytes
        sums += errors
    assert sums[0] < 0.95 * sums[1]


def test_awq_by_hand():
    weight, activations = LAYERS[0]
    found = awq(weight, activations, 3, 32, symmetric=False)
    powers = np.abs(activations).mean(axis=0) ** found.alpha
    assert found.alpha > 0
    assert found.input_scale == pytest.approx(powers / math.sqrt(powers.max() * powers.min()))
    tensor = quantize(weight * found.input_scale, 3, "group", 32, symmetric=False)
    assert np.array_equal(found.quantized.codes, tensor.codes)
    assert np.array_equal(found.dequantize(), tensor.dequantize() / found.input_scale)
    # scaled weights times unscaled activations is the same layer
    scaled = (activations / found.input_scale) @ found.quantized.dequantize().T
    assert scaled == pytest.approx(activations @ found.dequantize().T)


def test_awq_with_channels_that_are_never_active():
    weight, activations = layer(8, 32, seed=2)
    activations[:, ::2] = 0
    for samples in (activations, activations * 0, activations * 1e-200):
        found = awq(weight, samples, 3, 16)
        assert np.isfinite(found.dequantize()).all()
        assert found.input_scale.max() / found.input_scale.min() <= 1e4 * (1 + 1e-9)
    only = awq(weight, activations, 3, 16, num_alphas=1)
    assert only.alpha == 0
    assert np.array_equal(only.dequantize(), quantize(weight, 3, "group", 16).dequantize())
    with pytest.raises(ValueError, match="num_alphas must be a whole number of at least 1, got 0"):
        awq(weight, activations, 3, 16, num_alphas=0)


# Salient channels


def test_one_percent_of_channels_matters_if_it_is_the_right_one():
    weight, activations = layer(64, 400, seed=6, samples=500)
    approx = quantize(weight, 3, "group", 100).dequantize()
    salient = salient_channels(activations, 0.01)
    assert salient.size == 4
    strength = np.abs(activations).mean(axis=0)
    assert strength[salient].min() >= np.delete(strength, salient).max()
    random = np.random.default_rng(0).choice(np.delete(np.arange(400), salient), 4, replace=False)
    errors = [output_error(weight, keep_channels(weight, approx, kept), activations) for kept in (salient, random, [])]
    assert errors[0] < 0.8 * errors[2]
    assert errors[1] > 0.95 * errors[2]


def test_kept_channels():
    weight, approx = normals(3, 5), normals(3, 5, seed=1)
    before = approx.copy()
    kept = keep_channels(weight, approx, [1, 4])
    assert np.array_equal(kept[:, [1, 4]], weight[:, [1, 4]])
    assert np.array_equal(kept[:, [0, 2, 3]], before[:, [0, 2, 3]])
    assert np.array_equal(approx, before)
    assert np.array_equal(keep_channels(weight, approx, range(5)), weight)
    for channels in ([5], [-1], [0.5], [True]):
        with pytest.raises(ValueError, match="channels must be whole numbers from 0 to 4"):
            keep_channels(weight, approx, channels)
    with pytest.raises(ValueError, match="approx must have the shape of weight"):
        keep_channels(weight, approx[:, :4], [1])


def test_salient_share():
    activations = np.array([[1.0, -9.0, 3.0, 0.0], [1.0, 9.0, 0.0, 0.0]])
    assert salient_channels(activations).tolist() == [1]
    assert salient_channels(activations, 0.5).tolist() == [1, 2]
    assert salient_channels(activations, 1).tolist() == [0, 1, 2, 3]
    for share in (0, 1.5, -0.1):
        with pytest.raises(ValueError, match="share must be"):
            salient_channels(activations, share)
    with pytest.raises(ValueError, match=r"activations must have the shape \(samples, in\), got \(4,\)"):
        salient_channels(activations[0])


def test_errors_of_each_channel_average_to_the_whole():
    weights = reference_matrix()
    approx = quantize(weights, 8, "tensor").dequantize()
    errors = channel_errors(weights, approx)
    assert errors.shape == (16,)
    assert errors.mean() == pytest.approx(mean_relative_error(weights, approx))
    assert errors[0] > 0.9 and errors[3] < 0.1  # row 3 is 1,000 times larger than row 0, and rules the scale
    with pytest.raises(ValueError, match="rows and columns"):
        channel_errors([1.0, 2.0], [1.0, 2.0])
