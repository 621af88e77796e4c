"""This machine as an accelerator: how fast it reads memory, and how fast it multiplies matrices."""

import ctypes
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import torch
from tqdm.auto import tqdm

import lessonlib
from lessonlib.accelerators import Accelerator
from lessonlib.units import fmt

READ_BYTES = 512 * 2**20  # far beyond any cache
REPEATS = 15
PAUSE_S = 0.05  # between two runs, so that a moment in which the machine does something else spoils only a few
MATMUL_S = 0.2  # a matrix product is made about this long, whatever the machine
LARGEST_MATRIX = 4096


@dataclass(frozen=True)
class Measured:
    """The median of several measurements, with the lowest and the highest."""

    median: float
    low: float
    high: float

    def text(self, unit: str) -> str:
        """For people: 28.1 GB/s (26.3 to 30.2 GB/s)."""
        return f"{fmt(self.median, unit, 3)} ({fmt(self.low, unit, 3)} to {fmt(self.high, unit, 3)})"


@dataclass(frozen=True)
class Machine:
    """What was measured here, on what, and when."""

    read_bandwidth: Measured
    """B/s"""
    matmul_flops_per_s: dict[str, Measured]
    """FLOP/s, by dtype"""
    matrix_size: dict[str, int]
    """rows of the square matrices that were multiplied, by dtype"""
    memory_bytes: int
    provenance: dict[str, Any]

    @property
    def accelerator(self) -> Accelerator:
        """This machine in the form of the catalog's rows, under the key "this-machine"."""
        where = self.provenance
        return Accelerator(
            key="this-machine",
            name=f"This machine ({where['cpu']}, {where['threads']} threads)",
            memory_bandwidth=self.read_bandwidth.median,
            peak_flops={dtype: rate.median for dtype, rate in self.matmul_flops_per_s.items()},
            memory_bytes=float(self.memory_bytes),
            memory_type="main memory",
            source=f"measured here on {where['date']} with torch {where['torch']}, median of {REPEATS}",
        )


def measure_machine(refresh: bool = False) -> Machine:
    """This machine's measured rates: from an earlier measurement of it if there is one, else measured now (10 s)."""
    here = _provenance()
    kept = None if refresh else _load(here)
    if kept is None:
        kept = _measure(here)
        _save(kept)
    return kept


def _measure(here: dict[str, Any]) -> Machine:
    with tqdm(total=4, desc="measuring this machine (about 10 s)", leave=False) as bar:
        buffer = torch.ones(READ_BYTES // 4)
        read = _rate(READ_BYTES, buffer.sum)
        del buffer
        bar.update(2)
        matmul, size = {}, {}
        for dtype in ("fp32", "bf16"):
            matmul[dtype], size[dtype] = _matmul_rate(torch.float32 if dtype == "fp32" else torch.bfloat16)
            bar.update()
    return Machine(read, matmul, size, _memory_bytes(), here)


def _matmul_rate(dtype: torch.dtype) -> tuple[Measured, int]:
    """FLOP/s of a square product and its size, grown until it takes long enough to time (some CPUs crawl in bf16)."""
    size = 128
    while True:
        matrix = torch.ones(size, size, dtype=dtype)
        matrix @ matrix
        start = time.perf_counter()
        matrix @ matrix
        if time.perf_counter() - start > MATMUL_S / 8 or size >= LARGEST_MATRIX:
            return _rate(2 * size**3, partial(torch.matmul, matrix, matrix)), size
        size *= 2


def _rate(amount: float, work: Callable[[], Any]) -> Measured:
    """`amount` per second of `work`, over REPEATS runs, each right after one that wakes the cores up."""
    rates = []
    for _ in range(REPEATS):
        work()
        start = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - start))
        time.sleep(PAUSE_S)
    return Measured(statistics.median(rates), min(rates), max(rates))


def _path() -> Path:
    return Path(os.environ.get("LESSONLIB_DATA") or platformdirs.user_data_path("lessonlib")) / "machine.json"


def _save(machine: Machine) -> None:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"machine-{os.getpid()}.tmp")
    draft.write_text(json.dumps(dataclasses.asdict(machine), indent=1), encoding="utf-8")
    draft.replace(path)


def _load(here: dict[str, Any]) -> Machine | None:
    """An earlier measurement of this very machine; None if there is none, or it is damaged or of another one."""
    try:
        kept = json.loads(_path().read_text(encoding="utf-8"))
        machine = Machine(
            Measured(**kept["read_bandwidth"]),
            {dtype: Measured(**rate) for dtype, rate in kept["matmul_flops_per_s"].items()},
            kept["matrix_size"],
            kept["memory_bytes"],
            kept["provenance"],
        )
        machine.accelerator.peak("fp32")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    same = all(machine.provenance[name] == value for name, value in here.items() if name != "date")
    return machine if same else None


def _provenance() -> dict[str, Any]:
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lessonlib": lessonlib.__version__,
        "date": datetime.date.today().isoformat(),
        "how": "lessonlib.lab.measure_machine(refresh=True)",
    }


def processor_name() -> str:
    """The processor's name as its system gives it."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.machine()
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    """Bytes of main memory."""
    if sys.platform == "win32":
        kilobytes = ctypes.c_ulonglong()
        ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))
        return kilobytes.value * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
