"""Rounding to nearest: values as whole numbers times a scale.

value = (code - zero_point) x scale        symmetric: zero_point = 0

Any array works: its last axis holds the columns, and everything before it is rows. Sizes count scales and zero
points: stored in 16 bits and in `bits` bits. Computed values keep their scale in fp32, because a small fp16 scale
would round to 0. Source: Jacob et al., arXiv:1712.05877 (scale and zero point).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lessonlib.checks import check_choice, check_count

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
