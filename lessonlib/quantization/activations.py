"""Methods that look at activations: GPTQ and AWQ. A weight is W[out, in], and a layer computes activations @ W.T.

Sources: Frantar et al., arXiv:2210.17323 (GPTQ); Lin et al., arXiv:2306.00978 (AWQ).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lessonlib.checks import check_count, check_number
from lessonlib.quantization.errors import _layer, _pair
from lessonlib.quantization.rounding import Granularity, QuantizedTensor, _encode, _fit, _numbers, quantize


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
