"""How codes are stored: eight 4-bit codes to a word, and llama.cpp's blocks.

Source of the block formats: ggml-org/llama.cpp, ggml-common.h.
"""

from dataclasses import dataclass

import numpy as np

from lessonlib.checks import check_choice, check_number
from lessonlib.quantization.rounding import _numbers

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
