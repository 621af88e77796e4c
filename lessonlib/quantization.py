"""Quantization: weights as whole numbers times a scale, what that loses, and two methods that lose less.

value = (code - zero_point) x scale        symmetric: zero_point = 0

A weight is W[out, in] and a layer computes activations @ W.T. Any array works: its last axis holds the columns, and
everything before it is rows. Sizes count scales and zero points: stored in 16 bits and in `bits` bits. Computed
values keep their scale in fp32, because a small fp16 scale would round to 0.

Sources: Jacob et al., arXiv:1712.05877 (scale and zero point); Frantar et al., arXiv:2210.17323 (GPTQ); Lin et al.,
arXiv:2306.00978 (AWQ); Dettmers et al., arXiv:2305.14314 (NF4); Micikevicius et al., arXiv:2209.05433 (FP8);
ggml-org/llama.cpp, ggml-common.h (block formats).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from lessonlib.checks import check_choice, check_count, check_number

Granularity = Literal["tensor", "channel", "group"]
GRANULARITIES = ("tensor", "channel", "group")
BITS = (2, 3, 4, 5, 6, 7, 8)
SCALE_BITS = 16  # what a file spends on one scale
FP32_MAX = float(np.finfo(np.float32).max)
SMALLEST_SCALE = np.finfo(np.float32).tiny  # 1.2e-38, the smallest normal fp32 number


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes with the scales and zero points that turn them back into values."""

    codes: np.ndarray
    """shape of the tensor; int8 if symmetric, else uint8; with a `grid`: places in it"""
    scale: np.ndarray
    """fp32; shape of the codes, but the last axis has one entry per group (per channel: 1; per tensor: all axes 1)"""
    zero_point: np.ndarray
    """whole numbers in the shape of `scale`; all 0 if symmetric"""
    bits: int
    granularity: Granularity = "channel"
    group_size: int | None = None
    """columns that share a scale; None where there are no groups"""
    symmetric: bool = True
    scale_bits: int = SCALE_BITS
    """what a stored scale takes; the values here use fp32"""
    grid: np.ndarray | None = None
    """the values that codes stand for before scaling, where they are not the whole numbers"""

    def dequantize(self) -> np.ndarray:
        """The values, in the shape of `codes`: float64, in which a code times an fp32 scale is exact."""
        parts = self.scale, self.zero_point
        scale, zero_point = (_per_column(part, self.group_size, self.codes.shape) for part in parts)
        steps = self.codes.astype(float) - zero_point if self.grid is None else self.grid[self.codes]
        return steps * scale

    @property
    def num_bits(self) -> int:
        """Bits of all codes, scales and zero points; a padded last group counts in full."""
        stored_codes = self.scale.size * self.group_size if self.group_size else self.codes.size
        zero_bits = 0 if self.symmetric else self.bits
        return stored_codes * self.bits + self.scale.size * (self.scale_bits + zero_bits)

    @property
    def num_bytes(self) -> int:
        """Bytes of all codes, scales and zero points, rounded up to a whole byte."""
        return -(-self.num_bits // 8)

    @property
    def effective_bits(self) -> float:
        """Bits per weight with its share of scale and zero point."""
        return self.num_bits / self.codes.size


def quantize(
    x: object,
    bits: int,
    granularity: Granularity = "channel",
    group_size: int | None = None,
    symmetric: bool = True,
    pad: bool = False,
    scale_bits: int = SCALE_BITS,
) -> QuantizedTensor:
    """`x` (any shape, columns last) rounded to the nearest code, half to even.

    One scale for the whole tensor, for each row ("channel"), or for each `group_size` columns of a row ("group").
    Symmetric: scale = absmax / (2^(bits-1) - 1), codes in [-2^(bits-1), 2^(bits-1) - 1].
    Asymmetric: the range always includes 0; scale = range / (2^bits - 1), codes in [0, 2^bits - 1].
    A scale is rounded towards 0 to fp32, so that the ends of the range get the end codes and quantizing twice
    changes nothing; it is at least SMALLEST_SCALE, so all zeros stay exactly 0.

    Raises ValueError for `bits` that are not in BITS, for no values, NaN, infinity or a value beyond fp32, and for a
    group that does not divide the columns, unless `pad` allows a last group that is filled up with zeros.
    """
    values = _numbers("x", x)
    bits = int(check_choice("bits", bits, BITS))
    low, high = _ranges(values, granularity, group_size, pad)
    scale, zero_point = _fit(low, high, bits, symmetric)
    spread_scale, spread_zero = (_per_column(part, group_size, values.shape) for part in (scale, zero_point))
    codes = _encode(values, spread_scale, spread_zero, bits, symmetric)
    width = check_count("scale_bits", scale_bits)
    return QuantizedTensor(codes, scale, zero_point, bits, granularity, group_size, symmetric, width)


def round_to_codes(x: object, scale: object, bits: int, zero_point: object = 0, symmetric: bool = True) -> np.ndarray:
    """Codes of `x` (any shape) at a given scale and zero point: rounded half to even, then clipped, then cast.

    Returns int8 if symmetric, else uint8. A value outside the range gets the nearest end code.
    Raises ValueError for `bits` that are not in BITS, a scale below SMALLEST_SCALE or a broken zero point.
    """
    steps, zeros = _numbers("scale", scale), _numbers("zero_point", zero_point)
    if steps.min() < SMALLEST_SCALE:
        raise ValueError(f"scale must be at least {SMALLEST_SCALE:.2g}, got {steps.min():g}")
    if np.any(zeros % 1):
        raise ValueError(f"zero_point must hold whole numbers, got {zero_point!r}")
    return _encode(_numbers("x", x), steps, zeros, int(check_choice("bits", bits, BITS)), symmetric)


def _numbers(name: str, value: object) -> np.ndarray:
    array = np.asarray(value)
    allowed = f"{name} must hold finite numbers up to {FP32_MAX:.1e} (fp32)"
    if array.dtype.kind not in "iuf" or not array.size:
        raise ValueError(f"{allowed}, got {array.size} of type {array.dtype}")
    array = array.astype(float)
    fits = np.abs(array) <= FP32_MAX  # false for NaN
    if not fits.all():
        raise ValueError(f"{allowed}, got {array[~fits][0]} at {[int(i) for i in np.argwhere(~fits)[0]]}")
    return array


def _ranges(
    values: np.ndarray, granularity: Granularity, group_size: int | None, pad: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest value that share a scale, 0 always included."""
    check_choice("granularity", granularity, GRANULARITIES)
    if (granularity == "group") != (group_size is not None):
        raise ValueError(f'group_size must be given for granularity "group" only, got {group_size} for "{granularity}"')
    if values.ndim == 0:
        raise ValueError("x must have at least one axis, got a single number: put it in a list")
    if group_size is not None:
        columns = values.shape[-1]
        starts = np.arange(0, columns, check_count("group_size", group_size))
        if columns % group_size and not pad:
            remedy = f"pad=True fills up the last of {len(starts)} groups with zeros"
            raise ValueError(f"group_size must divide the {columns} columns, got {group_size}; {remedy}")
        low, high = (f.reduceat(values, starts, axis=-1) for f in (np.minimum, np.maximum))
        return np.minimum(low, 0), np.maximum(high, 0)
    axis = None if granularity == "tensor" else -1
    return values.min(axis, keepdims=True, initial=0), values.max(axis, keepdims=True, initial=0)


def _fit(low: np.ndarray, high: np.ndarray, bits: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale (fp32) and zero point that cover `low` (at most 0) to `high` (at least 0)."""
    if symmetric:
        return _round_scale(np.maximum(high, -low) / (2 ** (bits - 1) - 1)), np.zeros(low.shape, np.int32)
    scale = _round_scale((high - low) / (2**bits - 1))
    return scale, np.floor(0.5 - low / scale).astype(np.int32)


def _round_scale(exact: np.ndarray) -> np.ndarray:
    if exact.max() > FP32_MAX:  # only where GPTQ's updates make huge weights larger
        raise ValueError(f"weight must leave room for a scale below {FP32_MAX:.1e} (fp32), got {exact.max():.1e}")
    scale = exact.astype(np.float32)
    scale = np.where(scale > exact, np.nextafter(scale, np.float32(0)), scale)
    return np.maximum(scale, SMALLEST_SCALE)


def _encode(values: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, bits: int, symmetric: bool) -> np.ndarray:
    lowest = -(2 ** (bits - 1)) if symmetric else 0
    codes = np.rint(values / scale + zero_point)
    return np.clip(codes, lowest, lowest + 2**bits - 1).astype(np.int8 if symmetric else np.uint8)


def _per_column(part: np.ndarray, group_size: int | None, shape: tuple[int, ...]) -> np.ndarray:
    """One entry per scale -> something that broadcasts against values of `shape`."""
    return part if group_size is None else np.repeat(part, group_size, axis=-1)[..., : shape[-1]]


# Other value grids


def _nf4_grid() -> np.ndarray:
    """8 quantiles of the normal distribution above 0, 7 below, and 0, scaled to end at -1 and 1."""
    tail = 1 - (1 / 32 + 1 / 30) / 2
    above, below = ([NormalDist().inv_cdf(p) for p in np.linspace(0.5, tail, n)[1:]] for n in (9, 8))
    return np.array([-q for q in reversed(below)] + [0.0, *above]) / above[-1]


def _e4m3_grid() -> np.ndarray:
    """Sign, 4 exponent bits, 3 mantissa bits: no infinity, and the largest pattern is NaN, so the most is 448."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
    return np.unique([sign * value for value in subnormal + normal for sign in (-1, 1)])


NF4_GRID = _nf4_grid()
E4M3_GRID = _e4m3_grid()


def quantize_to_grid(
    x: object,
    grid: object,
    granularity: Granularity = "channel",
    group_size: int | None = None,
    pad: bool = False,
    scale_bits: int = SCALE_BITS,
) -> QuantizedTensor:
    """`x` rounded to the nearest value of scale x `grid`, a tie to the even place; scale = absmax / largest value.

    `grid` holds 2 to 256 rising values from -m to m with 0 among them: NF4_GRID (with groups of 64), E4M3_GRID.
    Other arguments and errors are those of `quantize`; ValueError for another grid.
    """
    points = _numbers("grid", grid)
    rising = points.ndim == 1 and 2 <= points.size <= 256 and bool(np.all(np.diff(points) > 0))
    if not (rising and points[0] == -points[-1] and 0 in points):
        raise ValueError(f"grid must hold 2 to 256 rising values from -m to m, 0 among them, got {grid!r}")
    values = _numbers("x", x)
    low, high = _ranges(values, granularity, group_size, pad)
    scale = _round_scale(np.maximum(high, -low) / points[-1])
    middles = (points[1:] + points[:-1]) / 2
    scaled = values / _per_column(scale, group_size, values.shape)
    below, above = (np.searchsorted(middles, scaled, side) for side in ("left", "right"))  # they differ at a tie
    codes = np.where(below % 2, above, below).astype(np.uint8)
    bits, width = math.ceil(math.log2(points.size)), check_count("scale_bits", scale_bits)
    zero_point = np.zeros(scale.shape, np.int32)
    return QuantizedTensor(codes, scale, zero_point, bits, granularity, group_size, True, width, points)


# What was lost


def mean_relative_error(x: object, y: object) -> float:
    """Mean of |x - y| / (|x| + 1e-9): the error relative to each weight, as a fraction. Shapes must agree."""
    exact, approx = _pair(x, y)
    return float(np.mean(np.abs(exact - approx) / (np.abs(exact) + 1e-9)))


def channel_errors(x: object, y: object) -> np.ndarray:
    """`mean_relative_error` of each row (channel) of two (rows, columns) matrices: fractions, shape (rows,)."""
    original, approx = _pair(x, y)
    if original.ndim != 2:
        raise ValueError(f"x must have rows and columns, got shape {original.shape}")
    return np.mean(np.abs(original - approx) / (np.abs(original) + 1e-9), axis=1)


def rmse(x: object, y: object) -> float:
    """Root of the mean squared difference, in the unit of `x`. Shapes must agree."""
    exact, approx = _pair(x, y)
    return float(np.sqrt(np.mean((exact - approx) ** 2)))


def sqnr_db(x: object, y: object) -> float:
    """Signal to quantization noise, 10 log10(sum x^2 / sum (x - y)^2), in dB; infinite where nothing was lost.

    Raises ValueError where `x` is all 0 and `y` is not (there is no signal), or where the shapes differ.
    """
    exact, approx = _pair(x, y)
    if np.array_equal(exact, approx):
        return math.inf
    signal = check_number("the norm of x", float(np.linalg.norm(exact)), exclusive=True)
    noise = check_number("the norm of x - y", float(np.linalg.norm(exact - approx)), exclusive=True)
    return 20 * math.log10(signal / noise)


def output_error(weight: object, approx: object, activations: object) -> float:
    """|X (W - W')^T| / |X W^T| (Frobenius norms): the error of a layer's output relative to that output.

    `weight` and `approx` are (out, in), `activations` (samples, in). Raises ValueError where these do not fit, or where
    the output is all 0 and its error is not.
    """
    exact, changed = _pair(weight, approx, "weight", "approx")
    exact, samples = _layer(exact, activations)
    error = float(np.linalg.norm(samples @ (exact - changed).T))
    if not error:
        return 0.0
    return error / check_number("the norm of the output", float(np.linalg.norm(samples @ exact.T)), exclusive=True)


def _pair(x: object, y: object, x_name: str = "x", y_name: str = "y") -> tuple[np.ndarray, np.ndarray]:
    first, second = _numbers(x_name, x), _numbers(y_name, y)
    if first.shape != second.shape:
        raise ValueError(f"{y_name} must have the shape of {x_name}, {first.shape}, got {second.shape}")
    return first, second


def _layer(weight: object, activations: object) -> tuple[np.ndarray, np.ndarray]:
    matrix, samples = _numbers("weight", weight), _numbers("activations", activations)
    if matrix.ndim != 2:
        raise ValueError(f"weight must have two axes, out and in, got the shape {matrix.shape}")
    if samples.ndim != 2 or samples.shape[1] != matrix.shape[1]:
        raise ValueError(f"activations must have the shape (samples, {matrix.shape[1]}), got {samples.shape}")
    return matrix, samples


def reference_matrix() -> np.ndarray:
    """The course's 16 x 64 example: pseudo-random weights in [-0.5, 0.5], row r multiplied by 10^(r mod 4)."""
    state, values = 42, []
    for _ in range(16 * 64):
        state = (1103515245 * state + 12345) % 2**31
        values.append(state / (2**31 - 1) - 0.5)
    return np.array(values).reshape(16, 64) * 10.0 ** (np.arange(16) % 4)[:, None]


# How codes are stored

NIBBLE_ORDERS = {"linear": (0, 1, 2, 3, 4, 5, 6, 7), "awq": (0, 2, 4, 6, 1, 3, 5, 7)}
"""which of eight codes goes to the lowest four bits of a word, the next four, ..."""


def pack_int4(codes: object, order: str = "linear") -> np.ndarray:
    """Eight 4-bit codes to a uint32 word, along the last axis. Codes are in [0, 15] or, signed, in [-8, 7].

    Raises ValueError for other codes, a last axis that eight does not divide, or an order not in NIBBLE_ORDERS.
    """
    places = NIBBLE_ORDERS[check_choice("order", order, NIBBLE_ORDERS)]
    array = np.asarray(codes)
    if array.dtype.kind not in "iu" or array.ndim == 0 or array.shape[-1] % 8 or not array.size:
        raise ValueError(f"codes must be whole numbers in rows of 8 n, got {array.dtype} of shape {array.shape}")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < -8 or highest > (7 if lowest < 0 else 15):
        raise ValueError(f"codes must be in [0, 15] or in [-8, 7], got {lowest} to {highest}")
    nibbles = (array.astype(np.int64) & 0xF).astype(np.uint32).reshape(*array.shape[:-1], -1, 8)
    return np.bitwise_or.reduce(nibbles[..., places] << np.arange(0, 32, 4, dtype=np.uint32), axis=-1)


def unpack_int4(words: object, order: str = "linear", signed: bool = False) -> np.ndarray:
    """The codes in uint32 words, eight for each along the last axis: uint8 in [0, 15] or, `signed`, int8 in [-8, 7].

    Raises ValueError for words that are not uint32 or an order not in NIBBLE_ORDERS.
    """
    places = NIBBLE_ORDERS[check_choice("order", order, NIBBLE_ORDERS)]
    array = np.asarray(words)
    if array.dtype != np.uint32 or array.ndim == 0:
        raise ValueError(f"words must be uint32 with at least one axis, got {array.dtype} of shape {array.shape}")
    nibbles = (array[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(0xF)
    codes = nibbles[..., np.argsort(places)].astype(np.uint8).reshape(*array.shape[:-1], -1)
    return ((codes ^ 8).astype(np.int8) - np.int8(8)) if signed else codes


def bits_per_weight(num_bytes: float, num_weights: float) -> float:
    """Bits that each weight takes in a file or block of `num_bytes`. Raises ValueError unless both are above 0."""
    return 8 * check_number("num_bytes", num_bytes, exclusive=True) / check_number("num_weights", num_weights, 1)


@dataclass(frozen=True)
class BlockFormat:
    """A llama.cpp format: `num_bytes` bytes for each block of `num_weights` weights."""

    num_weights: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits that each weight takes with its share of scales and minima."""
        return bits_per_weight(self.num_bytes, self.num_weights)


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18),
    "Q4_1": BlockFormat(32, 20),
    "Q8_0": BlockFormat(32, 34),
    "Q4_K": BlockFormat(256, 144),
    "Q5_K": BlockFormat(256, 176),
    "Q6_K": BlockFormat(256, 210),
}
WRITABLE_FORMATS = ("Q8_0", "Q4_0")


def encode_blocks(x: object, block_format: str) -> np.ndarray:
    """`x` (columns last, a multiple of 32) as the bytes (uint8) that llama.cpp stores for Q8_0 or Q4_0.

    Each block has one fp16 scale: absmax / 127 (Q8_0), or the value farthest from 0 over -8 (Q4_0). An fp16 scale
    below 2^-25 rounds to 0, and the block with it: Q8_0 loses blocks with absmax below 127 x 2^-25 = 3.8e-6.
    Raises ValueError for another format, other columns, or a block whose scale exceeds fp16.
    """
    check_choice("block_format", block_format, WRITABLE_FORMATS)
    values = _numbers("x", x).astype(np.float32)
    size = BLOCK_FORMATS[block_format].num_weights
    if values.ndim == 0 or values.shape[-1] % size:
        raise ValueError(f"x must have a multiple of {size} columns for {block_format}, got the shape {values.shape}")
    blocks = values.reshape(-1, size)
    farthest = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
    scale = np.abs(farthest) / np.float32(127) if block_format == "Q8_0" else farthest / np.float32(-8)
    with np.errstate(divide="ignore", over="ignore"):
        stored, inverse = scale.astype(np.float16), np.float32(1) / scale
    if np.isinf(stored).any():
        raise ValueError(f"x must have blocks whose scale fits fp16 (65504), got a scale of {np.abs(scale).max():g}")
    scaled = blocks * np.where(np.isfinite(inverse), inverse, np.float32(0))
    if block_format == "Q8_0":
        whole = np.floor(np.abs(scaled))
        codes = np.copysign(whole + (np.abs(scaled) - whole >= 0.5), scaled).astype(np.int8)  # half away from 0
    else:
        codes = np.minimum(np.floor(scaled + np.float32(8.5)), 15).astype(np.uint8)
        codes = codes[:, :16] | codes[:, 16:] << 4
    return np.hstack([stored.view(np.uint8), codes.view(np.uint8)]).reshape(*values.shape[:-1], -1)


def decode_blocks(data: object, block_format: str) -> np.ndarray:
    """The fp32 values in the bytes of Q8_0 or Q4_0, blocks along the last axis.

    Raises ValueError for another format, bytes that are not whole blocks, or a scale that is not finite.
    """
    check_choice("block_format", block_format, WRITABLE_FORMATS)
    array, width = np.asarray(data), BLOCK_FORMATS[block_format].num_bytes
    if array.dtype != np.uint8 or array.ndim == 0 or array.shape[-1] % width:
        raise ValueError(f"data must be blocks of {width} uint8, got {array.dtype} of shape {array.shape}")
    blocks = np.ascontiguousarray(array).reshape(-1, width)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if not np.isfinite(scale).all():
        raise ValueError(f"data must hold finite scales, got {scale[~np.isfinite(scale)][0]}")
    codes = blocks[:, 2:].view(np.int8)
    if block_format == "Q4_0":
        codes = np.hstack([codes & 0xF, codes >> 4 & 0xF]) - np.int8(8)
    return (codes * scale).reshape(*array.shape[:-1], -1)


# Methods that look at activations


def gptq(
    weight: object,
    activations: object,
    bits: int,
    group_size: int | None = 128,
    symmetric: bool = True,
    damping: float = 0.01,
    act_order: bool = False,
    pad: bool = False,
) -> QuantizedTensor:
    """`weight` (out, in) rounded column after column, each error made up for by the columns still to come.

    With H = 2 X^T X of the activations X (samples, in), plus `damping` times its mean diagonal, and the upper Cholesky
    factor U of H^-1: e_j = (w_j - q_j) / U_jj, then w_k -= e_j U_jk for k > j. The scale of X drops out. Columns
    beyond a block of about 128 get their updates together. A group's scale is fixed when its first column is
    reached; without groups (`group_size=None`: one scale per row) at the start. `act_order` takes the columns with
    the largest H_jj first; groups stay where they are in the row, and their scales are fixed at the start.

    Raises ValueError as `quantize`, for shapes that do not fit, and for a damping below 1e-6 (H would be singular).
    Source: Frantar et al. 2022, algorithm 1.
    """
    matrix, samples = _layer(weight, activations)
    result = _round_to_nearest(matrix, bits, group_size, symmetric, pad)
    columns = matrix.shape[1]
    order = np.argsort(-np.sum(samples**2, axis=0), kind="stable") if act_order else np.arange(columns)
    upper = _inverse_factor(samples[:, order], check_number("damping", damping, 1e-6))
    size = group_size or columns
    block_size = max(1, 128 // size) * size if group_size else 128  # whole groups
    work = matrix.T[order]  # (in, out), so that a column of the weight is contiguous
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        errors = np.empty((stop - start, len(matrix)))
        for j in range(start, stop):
            group = order[j] // size
            scale, zero_point = result.scale[:, group], result.zero_point[:, group]  # views
            if j % size == 0 and not act_order:
                rest = work[j : j + size]
                scale[:], zero_point[:] = _fit(rest.min(0, initial=0), rest.max(0, initial=0), result.bits, symmetric)
            codes = _encode(work[j], scale, zero_point, result.bits, symmetric)
            result.codes[:, order[j]] = codes
            error = (work[j] - (codes.astype(float) - zero_point) * scale) / upper[j, j]
            work[j + 1 : stop] -= np.outer(upper[j, j + 1 : stop], error)
            errors[j - start] = error
        work[stop:] -= upper[start:stop, stop:].T @ errors
    return result


def _round_to_nearest(
    matrix: np.ndarray, bits: int, group_size: int | None, symmetric: bool, pad: bool
) -> QuantizedTensor:
    granularity: Granularity = "channel" if group_size is None else "group"
    return quantize(matrix, bits, granularity, group_size, symmetric, pad)


def _inverse_factor(samples: np.ndarray, damping: float) -> np.ndarray:
    """Upper triangular U with U^T U = H^-1."""
    scaled = samples / (np.abs(samples).max() or 1.0)
    hessian = 2 * scaled.T @ scaled
    mean = hessian.diagonal().mean()
    hessian[np.diag_indices_from(hessian)] += damping * mean if mean else 1.0  # no activations: nothing to weigh
    return np.linalg.cholesky(np.linalg.inv(hessian)).T


@dataclass(frozen=True, eq=False)
class AwqResult:
    """What AWQ found: the weight scaled per input channel and quantized, and the scales."""

    quantized: QuantizedTensor
    """the codes and scales of weight x input_scale"""
    input_scale: np.ndarray
    """(in,); a model divides its activations by it, at no cost: it goes into the layer before"""
    alpha: float
    alphas: np.ndarray
    errors: np.ndarray
    """`output_error` at each of `alphas` (absolute if the output is all 0); alpha = 0 is round to nearest"""

    def dequantize(self) -> np.ndarray:
        """The weight (out, in) to use with activations as they were."""
        return self.quantized.dequantize() / self.input_scale

    @property
    def effective_bits(self) -> float:
        """Bits per weight; the input scales take none (see `input_scale`)."""
        return self.quantized.effective_bits

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self.quantized.num_bytes


def awq(
    weight: object,
    activations: object,
    bits: int,
    group_size: int | None = 128,
    symmetric: bool = True,
    num_alphas: int = 20,
    pad: bool = False,
) -> AwqResult:
    """`weight` (out, in) rounded to nearest after input channels with large activations were scaled up.

    s = mean|x|^alpha per channel of the activations (samples, in), divided by sqrt(max s x min s); W' = Q(W s) / s,
    with the alpha of `num_alphas` from 0 to 1 that has the least output error. alpha = 0 is round to nearest, so the
    search is never worse. A channel whose mean is below 1e-4 of the largest counts as that much. The paper's search
    for a clipping range is left out.

    Raises ValueError as `quantize` and for shapes that do not fit. Source: Lin et al. 2023, section 3.2.
    """
    matrix, samples = _layer(weight, activations)
    strength = np.abs(samples).mean(axis=0)
    strength = np.maximum(strength / strength.max(), 1e-4) if strength.any() else np.ones_like(strength)
    if len(samples) > samples.shape[1]:
        samples = np.linalg.qr(samples)[1]  # the same norms from fewer rows

    def scaled(alpha: float) -> tuple[np.ndarray, QuantizedTensor]:
        powers = strength**alpha
        input_scale = powers / math.sqrt(powers.max() * powers.min())
        return input_scale, _round_to_nearest(matrix * input_scale, bits, group_size, symmetric, pad)

    alphas = np.linspace(0, 1, check_count("num_alphas", num_alphas))
    output = np.linalg.norm(samples @ matrix.T) or 1.0
    lost = (matrix - tensor.dequantize() / scale for scale, tensor in map(scaled, alphas))
    errors = np.array([np.linalg.norm(samples @ part.T) for part in lost]) / output
    alpha = float(alphas[errors.argmin()])
    input_scale, quantized = scaled(alpha)
    return AwqResult(quantized, input_scale, alpha, alphas, errors)


def salient_channels(activations: object, share: float = 0.01) -> np.ndarray:
    """The input channels with the largest mean |activation| (samples, in): a `share` of them, at least one, rising.

    Raises ValueError for a share that is not above 0 and at most 1.
    """
    samples = _numbers("activations", activations)
    if samples.ndim != 2:
        raise ValueError(f"activations must have the shape (samples, in), got {samples.shape}")
    if check_number("share", share, exclusive=True) > 1:
        raise ValueError(f"share must be at most 1, got {share}")
    strength = np.abs(samples).mean(axis=0)
    return np.sort(np.argsort(-strength, kind="stable")[: max(1, round(share * strength.size))])


def keep_channels(weight: object, approx: object, channels: Sequence[int] | np.ndarray) -> np.ndarray:
    """`approx` (out, in) with the input channels (columns) in `channels` as they are in `weight`.

    Raises ValueError where the shapes differ or a channel is not a column.
    """
    exact, result = _pair(weight, approx, "weight", "approx")
    chosen, last = np.asarray(channels), exact.shape[-1] - 1
    if chosen.size and (chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() > last):
        raise ValueError(f"channels must be whole numbers from 0 to {last}, got {channels!r}")
    chosen = chosen.astype(int)  # an empty list is made of floats
    result[..., chosen] = exact[..., chosen]
    return result
