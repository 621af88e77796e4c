"""Quantization: weights as whole numbers times a scale, what that loses, and two methods that lose less.

`rounding` turns values into codes, `grids` gives codes other values to stand for, `errors` says what was lost,
`storage` how codes are stored, `activations` holds the methods that look at activations, and `ladder` reads what all
of that does to a real model.
"""

from lessonlib.quantization.activations import AwqResult, awq, gptq, keep_channels, salient_channels
from lessonlib.quantization.errors import (
    channel_errors,
    mean_relative_error,
    output_error,
    reference_matrix,
    rmse,
    sqnr_db,
)
from lessonlib.quantization.grids import E4M3_GRID, NF4_GRID, quantize_to_grid
from lessonlib.quantization.ladder import Ladder, LadderRow, parse_ladder, read_ladder, write_ladder_text
from lessonlib.quantization.rounding import (
    BITS,
    GRANULARITIES,
    SCALE_BITS,
    SMALLEST_SCALE,
    Granularity,
    QuantizedTensor,
    quantize,
    round_to_codes,
)
from lessonlib.quantization.storage import (
    BLOCK_FORMATS,
    NIBBLE_ORDERS,
    BlockFormat,
    bits_per_weight,
    decode_blocks,
    encode_blocks,
    pack_int4,
    unpack_int4,
)

__all__ = [
    "BITS",
    "BLOCK_FORMATS",
    "E4M3_GRID",
    "GRANULARITIES",
    "NF4_GRID",
    "NIBBLE_ORDERS",
    "SCALE_BITS",
    "SMALLEST_SCALE",
    "AwqResult",
    "BlockFormat",
    "Granularity",
    "Ladder",
    "LadderRow",
    "QuantizedTensor",
    "awq",
    "bits_per_weight",
    "channel_errors",
    "decode_blocks",
    "encode_blocks",
    "gptq",
    "keep_channels",
    "mean_relative_error",
    "output_error",
    "pack_int4",
    "parse_ladder",
    "quantize",
    "quantize_to_grid",
    "read_ladder",
    "reference_matrix",
    "rmse",
    "round_to_codes",
    "salient_channels",
    "sqnr_db",
    "unpack_int4",
    "write_ladder_text",
]
