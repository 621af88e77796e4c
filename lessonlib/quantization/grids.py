"""Other values than whole numbers for codes to stand for: NF4 and FP8.

Sources: Dettmers et al., arXiv:2305.14314 (NF4); Micikevicius et al., arXiv:2209.05433 (FP8).
"""

import math
from statistics import NormalDist

import numpy as np

from lessonlib.checks import check_count
from lessonlib.quantization.rounding import (
    SCALE_BITS,
    Granularity,
    QuantizedTensor,
    _numbers,
    _per_column,
    _ranges,
    _round_scale,
)


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
