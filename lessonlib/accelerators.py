"""Accelerators: memory, bandwidth and peak rates, each row of data/accelerators.csv with its source.

Peaks are dense. A vendor figure printed "with sparsity" is twice what a language model can use, and is halved here.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from lessonlib.catalog import look_up, read_table
from lessonlib.checks import check_choice, check_number

DTYPES = ("fp32", "bf16", "fp8", "int8", "fp4")
_PEAK_COLUMNS = dict(
    zip(
        DTYPES,
        ("fp32_tflops", "bf16_dense_tflops", "fp8_dense_tflops", "int8_dense_tops", "fp4_dense_tflops"),
        strict=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device: a GPU, a TPU, or a CPU with its memory. What is not known is None, or missing from `peak_flops`.

    Raises ValueError for a bandwidth, peak or size that is not above 0, and for an unknown kind of arithmetic.
    """

    key: str
    name: str
    memory_bandwidth: float
    """B/s"""
    peak_flops: Mapping[str, float] = field(hash=False)
    """dense FLOP/s by kind of arithmetic: fp32, bf16, fp8, int8, fp4"""
    memory_bytes: float | None = None
    """as the vendor prints it, GB read as 10^9 bytes (devices report up to 7 % more, and keep some for themselves)"""
    memory_type: str = ""
    vendor: str = ""
    year: int | None = None
    tdp_w: float | None = None
    usd_per_hour: float | None = None
    """a typical price in the cloud on the day the source gives; prices go stale"""
    source: str = ""

    def __post_init__(self) -> None:
        check_number("memory_bandwidth", self.memory_bandwidth, exclusive=True)
        if not isinstance(self.peak_flops, Mapping):
            raise ValueError(f"peak_flops must be a table such as {{'bf16': 312e12}}, got {self.peak_flops!r}")
        for dtype, peak in self.peak_flops.items():
            check_choice("dtype", dtype, DTYPES)
            check_number(f"peak_flops[{dtype!r}]", peak, exclusive=True)
        for name in ("memory_bytes", "tdp_w", "usd_per_hour"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), exclusive=True)
        object.__setattr__(self, "peak_flops", dict(self.peak_flops))

    def peak(self, dtype: str = "bf16") -> float:
        """Dense peak in FLOP/s. Raises ValueError where none is published for `dtype`."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops) or "none"
            raise ValueError(f"{self.name} has no published peak for dtype {dtype!r}; it has: {known}")
        return self.peak_flops[dtype]


def _number(text: str, scale: float = 1.0) -> float | None:
    return float(text) * scale if text else None


@cache
def _catalog() -> dict[str, Accelerator]:
    return {row["key"]: _from_row(row) for row in read_table("accelerators.csv")}


def _from_row(row: dict[str, str]) -> Accelerator:
    # 989.4 x 1e12 is rounded to a whole number of FLOP/s, so that 989.4e12 equals it
    peaks = {dtype: round(float(row[column]) * 1e12, 0) for dtype, column in _PEAK_COLUMNS.items() if row[column]}
    return Accelerator(
        key=row["key"],
        name=row["name"],
        memory_bandwidth=math.floor(float(row["bandwidth_gb_s"]) * 1e9 + 0.5),
        peak_flops=peaks,
        memory_bytes=_number(row["memory_gb"], 1e9),
        memory_type=row["memory_type"],
        vendor=row["vendor"],
        year=int(row["year"]),
        tdp_w=_number(row["tdp_w"]),
        usd_per_hour=_number(row["typical_cloud_usd_per_hour"]),
        source=row["source"],
    )


def get_accelerator(key: str) -> Accelerator:
    """The accelerator of the catalog with this key, such as "h100-sxm". Raises ValueError, naming near keys."""
    return dataclasses.replace(_catalog()[look_up("accelerator", key, list_accelerators())])


def list_accelerators() -> list[str]:
    """All keys of the catalog."""
    return list(_catalog())
