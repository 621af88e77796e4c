"""Coding tasks of lesson 3: a scale for each row, packing, sizes, output errors, and a range without zero."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lessonlib import quantization
from lessonlib.practice.tasks.task import Arrays, Task, rows


def _quantize_rows(weights: np.ndarray, bits: int) -> Arrays:
    quantized = quantization.quantize(weights, bits, "channel")
    return quantized.codes.astype(float), quantized.dequantize()


def _rows_slip(
    axis: int | None = -1, scale_of: Callable[[np.ndarray, int], np.ndarray] | None = None, rounding: Any = np.rint
) -> Callable[..., Arrays]:
    """Quantize with the absmax over another axis, another largest code, or another rounding."""

    def slip(weights: np.ndarray, bits: int) -> Arrays:
        absmax = np.abs(weights).max(axis=axis, keepdims=True)
        scale = scale_of(absmax, bits) if scale_of else absmax / (2 ** (bits - 1) - 1)
        scale = np.where(scale == 0, 1, scale)
        codes = np.clip(rounding(weights / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return codes, codes * scale

    return slip


def _weights(rows: int, columns: int, seed: int) -> np.ndarray:
    spread = 10.0 ** (np.arange(rows) % 3 - 1)
    return (np.random.default_rng(seed).normal(size=(rows, columns)) * spread[:, None]).round(3)


def _with_empty_row(weights: np.ndarray) -> np.ndarray:
    weights[1] = 0
    return weights


_QUANTIZE_ROWS = Task(
    "03/quantize-rows",
    "the codes, and the values they stand for, both in the shape of the weights",
    _quantize_rows,
    rows(
        "weights bits",
        (_weights(3, 6, 0), 8),
        (_weights(4, 5, 1), 4),
        (quantization.reference_matrix()[:4, :6].round(3), 3),
        (_with_empty_row(_weights(3, 4, 2)), 8),
    ),
    {
        "one scale for the whole matrix; each row gets its own": _rows_slip(axis=None),
        "one scale for each column; a row of weights makes one output, and gets one scale": _rows_slip(axis=0),
        "cut off instead of rounded to the nearest": _rows_slip(rounding=np.trunc),
        "rounded down instead of to the nearest": _rows_slip(rounding=np.floor),
        "divided by 2^(bits-1); the largest code is one less": _rows_slip(
            scale_of=lambda absmax, bits: absmax / 2 ** (bits - 1)
        ),
        "divided by 2^bits - 1; with signs, half of the codes are below 0": _rows_slip(
            scale_of=lambda absmax, bits: absmax / (2**bits - 1)
        ),
    },
    parts=("codes", "values"),
)


def _pack(codes: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-codes.size // 8) * 8, dtype=np.int64)
    padded[: codes.size] = codes
    return quantization.pack_int4(padded).astype("<u4").view(np.uint8)[: codes.size // 2].astype(float)


def _halves(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return codes[0::2].astype(int), codes[1::2].astype(int)


def _codes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 8, count).astype(np.int8)


_PACK = Task(
    "03/pack-int4",
    "bytes (uint8), each with two codes: the first in its low four bits, the second in its high four",
    _pack,
    tuple({"codes": codes} for codes in (np.array([1, 2, 3, 4], np.int8), _codes(8, 0), _codes(12, 1), _codes(2, 5))),
    {
        "the first code in the high four bits; it belongs in the low four": lambda codes: _pack(
            codes.reshape(-1, 2)[:, ::-1].ravel()
        ),
        "the sign of the first code runs into the second: keep only its low four bits (& 0xF)": lambda codes: (
            (_halves(codes)[0] | _halves(codes)[1] << 4) & 255
        ).astype(float),
        "8 added to each code; keep the low four bits as they are (two's complement)": lambda codes: (
            _halves(codes)[0] + 8 + 16 * (_halves(codes)[1] + 8)
        ).astype(float),
        "the first half paired with the second; neighbors share a byte": lambda codes: (
            codes[: codes.size // 2].astype(int) & 15 | (codes[codes.size // 2 :].astype(int) & 15) << 4
        ).astype(float),
    },
)


def _unpack(packed: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-packed.size // 4) * 4, dtype=np.uint8)
    padded[: packed.size] = packed
    words = padded.view("<u4").astype(np.uint32)
    return quantization.unpack_int4(words, signed=True)[: 2 * packed.size].astype(float)


_UNPACK = Task(
    "03/unpack-int4",
    "the signed codes, from -8 to 7, two for each byte",
    _unpack,
    tuple({"packed": _pack(codes).astype(np.uint8)} for codes in (_codes(4, 7), _codes(8, 8), _codes(14, 9))),
    {
        "unsigned: four bits above 7 stand for a code below 0 (take 16 off)": lambda packed: _unpack(packed) % 16,
        "the two codes of a byte the other way round": lambda packed: _unpack(packed).reshape(-1, 2)[:, ::-1].ravel(),
        "8 taken off every code; only those above 7 stand for one below 0": lambda packed: _unpack(packed) % 16 - 8,
        "all low halves, then all high ones; the two codes of a byte are neighbors": lambda packed: np.concatenate(
            [_unpack(packed)[0::2], _unpack(packed)[1::2]]
        ),
    },
)


def _size(rows: int, columns: int, bits: int, group_size: int, symmetric: bool) -> int:
    zeros = np.zeros((rows, columns))
    return quantization.quantize(zeros, bits, "group", group_size, symmetric, pad=True).num_bytes


def _size_slip(
    scale_bits: int = 16, zero_bits: float = 1.0, padded: bool = True, by_row: bool = True, lost: bool = False
) -> Callable[..., float]:
    def slip(rows: int, columns: int, bits: int, group_size: int, symmetric: bool) -> float:
        groups = rows * -(-columns // group_size) if by_row else -(-rows * columns // group_size)
        groups = rows * (columns // group_size) if lost else groups
        codes = groups * group_size if padded else rows * columns
        return -(-(codes * bits + groups * (scale_bits + (0 if symmetric else zero_bits * bits))) // 8)

    return slip


_SIZE = Task(
    "03/size",
    "the bytes of codes, scales and zero points, rounded up to a whole byte",
    _size,
    rows(
        "rows columns bits group_size symmetric",
        (64, 512, 4, 128, True),
        (48, 192, 4, 128, True),  # the last group of each row is filled up
        (64, 512, 4, 32, False),
        (7, 96, 3, 32, False),
        (10, 250, 8, 64, True),
    ),
    {
        "the codes alone: scales and zero points are bytes too": _size_slip(scale_bits=0, zero_bits=0),
        "the scales are missing: 16 bits for each group": _size_slip(scale_bits=0),
        "the zero points are missing: without symmetry each group has one, as wide as a code": _size_slip(zero_bits=0),
        "a scale was given 32 bits; it has 16": _size_slip(scale_bits=32),
        "a group that is not full is stored in full: count whole groups": _size_slip(padded=False),
        "groups were counted over the whole matrix; a group ends with its row": _size_slip(by_row=False),
        "the last group of a row, which is not full, was lost: round up": _size_slip(lost=True),
        "bits for bytes": lambda *g: 8 * _size(*g),
    },
    "byte",
)


def _output_input(rows: int, columns: int, samples: int, seed: int) -> dict[str, np.ndarray]:
    weight = _weights(rows, columns, seed)
    activations = np.random.default_rng(seed + 100).normal(size=(samples, columns)).round(2)
    activations[:, 0] *= 10  # one channel that speaks louder than the others, as real models have
    return {"weight": weight, "approx": _quantize_rows(weight, 4)[1].round(4), "activations": activations}


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


_OUTPUT_ERROR = Task(
    "03/output-error",
    "the error of the layer's output relative to that output, as a ratio of Frobenius norms",
    quantization.output_error,
    tuple(_output_input(*sizes) for sizes in ((3, 4, 5, 0), (4, 6, 3, 1), (2, 5, 6, 2))),
    {
        "the error of the weights; the next layer sees the outputs, activations @ weight.T": (
            lambda w, approx, x: _norm(w - approx) / _norm(w)
        ),
        "not relative: divide by the norm of the output": lambda w, approx, x: _norm(x @ (w - approx).T),
        "squared: take the root, or the ratio of norms": lambda *g: quantization.output_error(*g) ** 2,
        "divided by the norm of the weights; it is the output that counts": (
            lambda w, approx, x: _norm(x @ (w - approx).T) / _norm(w)
        ),
        "a mean of relative errors, in which outputs near 0 count most; divide norm by norm": (
            lambda w, approx, x: quantization.mean_relative_error(x @ w.T, x @ approx.T)
        ),
    },
)


def _quantize_uint8(x: np.ndarray) -> np.ndarray:
    return quantization.quantize(x, 8, "tensor", symmetric=False).dequantize()


def _range_without_zero(x: np.ndarray) -> np.ndarray:
    scale = (x.max() - x.min()) / 255
    zero_point = np.clip(np.rint(-x.min() / scale), 0, 255)
    return (np.clip(np.rint(x / scale) + zero_point, 0, 255) - zero_point) * scale


_ZERO_RANGE = Task(
    "03/zero-range",
    "the values that the codes from 0 to 255 stand for",
    _quantize_uint8,
    tuple(
        {"x": np.array(x)}
        for x in (
            (-1.27, 0.3, 2.91, -0.44, 1.05),
            (-22.0, -21, -20, -19, -18, -17, -16, -15),
            (3.1, 4.2, 5.3, 6.4, 7.5),
            (100.0, 101, 103, 107),
        )
    ),
    {
        "a range without 0: its zero point is clipped and takes all values with it; let the range include 0": (
            _range_without_zero
        ),
        "symmetric codes; here they run from 0 to 255, with a zero point": (
            lambda x: quantization.quantize(x, 8, "tensor").dequantize()
        ),
    },
)


TASKS = (_QUANTIZE_ROWS, _PACK, _UNPACK, _SIZE, _OUTPUT_ERROR, _ZERO_RANGE)
