"""What rounding lost: errors of weights and of the outputs they make."""

import math

import numpy as np

from lessonlib.checks import check_number
from lessonlib.quantization.rounding import _numbers


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
