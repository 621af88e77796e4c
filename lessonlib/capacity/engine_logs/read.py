"""What an engine's start-up log says about memory, and how it compares with the prediction.

Read are vLLM (from "# GPU blocks" to the refusals of today), SGLang, TensorRT-LLM and llama.cpp. Lines that match no
known wording are counted, not guessed at. Engines print GiB, whether they call them GiB, GB, MiB or MB.
"""

import bisect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from lessonlib import kv_cache
from lessonlib.accelerators import Accelerator
from lessonlib.capacity.memory import MemoryPlan, plan
from lessonlib.models import ModelConfig
from lessonlib.units import fmt

MAX_CHARACTERS = 5_000_000  # a start-up log has some ten thousand
ENGINES = ("vLLM", "SGLang", "TensorRT-LLM", "llama.cpp")
VLLM_BLOCK_SIZE = 16  # vLLM's own choice on GPUs, which it does not print

_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "KB": 2**10, "MiB": 2**20, "MB": 2**20, "GiB": 2**30, "GB": 2**30}
_COUNT = r"([0-9][0-9,]{0,17})"
_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)"
_SIZE = rf"{_NUMBER}\s{{0,3}}([KMG]i?B|bytes)"  # groups: a number and its unit
_SIGNED_SIZE = _SIZE.replace("(", "(-?", 1)
_GAP = r"\s{1,40}"  # bounded, so that no text takes long


# Engine, what is read, its wording. A blank matches any white space; {n} is a count, {x} a number, {s} a size, and {d}
# a size that may be negative, as it is a difference.
_WORDINGS = [
    ("vLLM", "weights", r"Loading model weights took {s}"),
    ("vLLM", "weights", r"Model loading took {s}"),
    ("vLLM", "weights", r"model weights take {s}"),
    ("vLLM", "weights", r"weights memory: {s}"),
    ("vLLM", "activation", r"PyTorch activation peak memory(?: takes)? {s}"),
    ("vLLM", "activation", r"torch peak memory increase: {s}"),
    ("vLLM", "peak", r"peak_torch_memory={s}"),
    ("vLLM", "other", r"non_torch_memory(?:=| takes | ){d}"),
    ("vLLM", "other", r"non-torch forward increase memory: {d}"),
    ("vLLM", "total", r"total_gpu_memory(?:=| ){s}"),
    ("vLLM", "total", r"total_gpu_memory \({s}\)"),
    ("vLLM", "total", r"on device [a-z]{2,8}:[0-9]{1,3} \([0-9.]{1,9}/{s}\)"),
    ("vLLM", "utilization", r"gpu_memory_utilization(?:=| )([01]\.[0-9]{1,4})"),
    ("vLLM", "utilization", r"gpu_memory_utilization \(([01]\.[0-9]{1,4})\)"),
    ("vLLM", "utilization", r"desired GPU memory utilization \(([01]\.[0-9]{1,4}),"),
    ("vLLM", "kv", r"the rest of the memory reserved for KV Cache is {d}"),
    ("vLLM", "kv", r"kv_cache_size={d}"),
    ("vLLM", "kv", r"available_kv_cache_memory {d}"),
    ("vLLM", "kv", r"Available KV cache memory: {d}"),
    ("vLLM", "kv", r"available KV cache memory \({d}\)"),
    ("vLLM", "blocks", r"# (?!CPU)[A-Za-z]{2,8} blocks: {n}"),
    ("vLLM", "tokens", r"GPU KV cache size: {n} tokens"),
    ("vLLM", "tokens", r"maximum number of tokens that can be stored in KV cache \({n}\)"),
    ("vLLM", "max_len", r"Maximum concurrency for {n} tokens per request"),
    ("vLLM", "concurrency", r"tokens per request: {x}x"),
    ("vLLM", "max_len", r"max seq len \({n}\)"),
    ("vLLM", "needed", r"(?<![0-9.]){s} KV cache is needed"),
    ("vLLM", "estimated_len", r"estimated maximum model length is {n}"),
    ("vLLM", "refused", r"(No) available memory for the cache blocks"),
    ("vLLM", "refused", r"(less) than desired GPU memory utilization"),
    ("vLLM", "refused", r"is (larger) than the maximum number of tokens"),
    ("vLLM", "refused", r"(larger) than the available KV cache memory"),
    ("vLLM", "tensor_parallel", r"tensor_parallel_size={n}"),
    ("vLLM", "pipeline_parallel", r"pipeline_parallel_size={n}"),
    ("SGLang", "weights", r"Load weight end\.[^\n]{1,300}?mem usage={s}"),
    ("SGLang", "tokens", r"KV Cache is allocated\.[^\n]{1,60}?#tokens: {n}"),
    ("SGLang", "kv_part", r"#tokens: [0-9,]{1,18}, K size: {s}"),
    ("SGLang", "kv_part", r"K size: [0-9.]{1,12} GB, V size: {s}"),
    ("SGLang", "kv_part", r"#tokens: [0-9,]{1,18}, KV size: {s}"),
    ("SGLang", "tokens", r"(?<![a-z_])max_total_num_tokens={n}"),
    ("SGLang", "max_len", r"max_running_requests=[0-9]{1,9}, context_len={n}"),
    ("SGLang", "utilization", r"mem_fraction_static=([01]\.[0-9]{1,4})"),
    ("SGLang", "tensor_parallel", r"(?<![a-z_])tp_size={n}"),
    ("TensorRT-LLM", "weights", r"Loaded engine size: {s}"),
    ("TensorRT-LLM", "activation", r"Allocated {s} for execution context memory"),
    ("TensorRT-LLM", "other_part", r"Allocated {s} GPU memory for runtime buffers"),
    ("TensorRT-LLM", "other_part", r"Allocated {s} GPU memory for decoder"),
    ("TensorRT-LLM", "kv", r"Allocated {s} for max tokens in paged KV cache"),
    ("TensorRT-LLM", "kv", r"Allocate {s} for k/v cache"),
    ("TensorRT-LLM", "tokens", r"max tokens in paged KV cache \({n}\)"),
    ("TensorRT-LLM", "tokens", r"Using {n} tokens in paged KV cache"),
    ("TensorRT-LLM", "blocks", r"Number of blocks in KV cache primary pool: {n}"),
    ("TensorRT-LLM", "block_size", r"Number of tokens per block: {n}"),
    ("TensorRT-LLM", "total", r"calculating max tokens in paged kv cache: total: {s}"),
    ("TensorRT-LLM", "max_len", r"(?<![a-z_])max_seq_len={n}, max_num_requests"),
    ("llama.cpp", "weights_part", r"load_tensors: [A-Za-z0-9_]{1,40}(?: model)? buffer size = {s}"),
    ("llama.cpp", "n_ctx", r": n_ctx = {n}"),
    ("llama.cpp", "max_len", r": n_ctx_(?:per_)?seq = {n}"),
    ("llama.cpp", "kv_part", r"llama_kv_cache[a-z_]{0,20}: size = {s}"),
    ("llama.cpp", "cells", r"\(\s{0,20}{n} cells,"),
    ("llama.cpp", "streams", r"cells, [0-9]{1,5} layers, [0-9]{1,5}/{n} seqs"),
    ("llama.cpp", "kv_part", r"KV self size = {s}"),
    ("llama.cpp", "kv_part", r"kv self size = {s}"),
    ("llama.cpp", "activation_part", r": [A-Za-z0-9_]{1,40} compute buffer size = {s}"),
    ("llama.cpp", "other_part", r": [A-Za-z0-9_]{1,40} output buffer size = {s}"),
]


def _compiled(wording: str) -> re.Pattern[str]:
    for name, piece in ((" ", _GAP), ("{d}", _SIGNED_SIZE), ("{s}", _SIZE), ("{n}", _COUNT), ("{x}", _NUMBER)):
        wording = wording.replace(name, piece)
    return re.compile(wording, re.ASCII)


_PATTERNS = [(engine, what, _compiled(wording)) for engine, what, wording in _WORDINGS]


class Reading(NamedTuple):
    """One number found in a log: what it is, its value (bytes, or a count), and the line, counted from 1."""

    engine: str
    what: str
    value: float
    line: int


@dataclass(frozen=True)
class EngineLog:
    """What a log says. None: it does not say. Sizes are bytes of one accelerator, as every rank prints its own.

    Of several ranks the largest weights and the smallest cache count: the tightest rank decides.
    """

    engine: str
    """one of ENGINES, or "" if no line was recognized"""
    weights_bytes: float | None = None
    kv_bytes: float | None = None
    short_bytes: float = 0.0
    """what is missing before the first cached token: an engine prints it as a negative cache"""
    num_blocks: int | None = None
    block_size: int | None = None
    num_tokens: int | None = None
    max_len: int | None = None
    concurrency: float | None = None
    activation_bytes: float | None = None
    other_bytes: float | None = None
    utilization: float | None = None
    total_bytes: float | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    needed_bytes: float | None = None
    """of cache, for one request of the longest length, where the engine refused it"""
    estimated_len: int | None = None
    """the length that the engine says would fit"""
    refused: bool = False
    readings: tuple[Reading, ...] = ()
    recognized: tuple[str, ...] = ()
    """the lines that something was read from"""
    unrecognized: int = 0
    """lines with text that nothing was read from"""

    @property
    def fits(self) -> bool:
        """Whether the engine went on."""
        return not self.refused and self.short_bytes == 0

    @property
    def message(self) -> str:
        """What was read, what was not, and how many lines were not recognized."""
        if not self.engine:
            return (
                f"no line of {self.unrecognized:,} was recognized. Known are the start-up logs of "
                f"{', '.join(ENGINES)}: look for lines on weights, KV cache or GPU blocks."
            )
        found = [f"{name} {text}" for name, text in self._found()]
        absent = [name for name, value in self._fields() if value is None]
        said = f"{self.engine}, {len(self.recognized)} lines recognized, {self.unrecognized:,} not: {', '.join(found)}."
        if self.short_bytes:
            said += f" It does not fit, short by {_gib(self.short_bytes)}."
        elif self.refused:
            said += " The engine refused to start."
        return said + (f" Not found: {', '.join(absent)}." if absent else "")

    def _fields(self) -> list[tuple[str, float | None]]:
        return [
            ("weights", self.weights_bytes),
            ("KV cache", self.kv_bytes),
            ("activations", self.activation_bytes),
            ("other", self.other_bytes),
            ("memory", self.total_bytes),
            ("utilization", self.utilization),
            ("blocks", self.num_blocks),
            ("tokens", self.num_tokens),
            ("length", self.max_len),
            ("concurrency", self.concurrency),
        ]

    def _found(self) -> list[tuple[str, str]]:
        sizes = ("weights", "KV cache", "activations", "other", "memory")
        return [
            (name, _gib(value) if name in sizes else fmt(value, digits=7))
            for name, value in self._fields()
            if value is not None
        ]


def _gib(num_bytes: float) -> str:
    return fmt(num_bytes, "B", digits=4, binary=True)


# --- reading --------------------------------------------------------------------------------------------------------


def read_engine_log(text: str) -> EngineLog:
    """Read an engine's start-up log; what is not in it is None in the answer, whose `message` says so.

    Raises ValueError for what is not text, and for more than 5,000,000 characters. Nothing else is an error.
    """
    if not isinstance(text, str):
        raise ValueError(f"text must be the log as a str, got {type(text).__name__}")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"text must be at most {MAX_CHARACTERS:,} characters, got {len(text):,}: paste the start-up part only"
        )
    lines = text.split("\n")
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    readings: list[Reading] = []
    touched: dict[str, set[int]] = {engine: set() for engine in ENGINES}
    for engine, what, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            first, last = (bisect.bisect_right(starts, end) - 1 for end in (match.start(), match.end() - 1))
            touched[engine].update(range(first, last + 1))
            readings.append(Reading(engine, what, _value(match), last + 1))
    written = sum(bool(line.strip()) for line in lines)
    if not readings:
        return EngineLog("", unrecognized=written)
    engine = Counter(reading.engine for reading in readings).most_common(1)[0][0]
    readings = sorted((reading for reading in readings if reading.engine == engine), key=lambda reading: reading.line)
    recognized = tuple(_printable(lines[i]) for i in sorted(touched[engine]))
    unrecognized = written - sum(bool(line) for line in recognized)
    return EngineLog(engine, readings=tuple(readings), recognized=recognized, unrecognized=unrecognized,
                     **_FOUND[engine](readings))  # fmt: skip


def _printable(line: str) -> str:
    return line.strip()[:300].encode("utf-8", "replace").decode()


def _value(match: re.Match[str]) -> float:
    text = match[1].replace(",", "")
    if not re.fullmatch(r"-?[0-9.]+", text):
        return 1.0  # a wording without a number
    return float(text) * (_UNITS[match[2]] if match.re.groups > 1 else 1)


def _gather(readings: Sequence[Reading]) -> Callable[[str], list[float]]:
    """A look-up: all values of one kind, in the order of the log."""

    def values(what: str) -> list[float]:
        return [reading.value for reading in readings if reading.what == what]

    return values


def _whole(values: Sequence[float], choose: Callable[[Sequence[float]], float] = min) -> int | None:
    return int(choose(values)) if values else None


def _cache(values: Sequence[float]) -> dict[str, float | None]:
    """The smallest cache, never negative, and what is missing."""
    smallest = min(values, default=None)
    return {
        "kv_bytes": None if smallest is None else max(0.0, smallest),
        "short_bytes": 0.0 if smallest is None else max(0.0, -smallest),
    }


def _vllm(readings: list[Reading]) -> dict[str, Any]:
    values = _gather(readings)
    weights, peak = max(values("weights"), default=None), max(values("peak"), default=None)
    activation = max(values("activation"), default=None)
    if activation is None and peak is not None and weights is not None:
        activation = max(0.0, peak - weights)  # the peak of this generation includes the weights
    blocks, tokens, max_len = _whole(values("blocks")), _whole(values("tokens")), _whole(values("max_len"), max)
    if tokens is None and blocks is not None:
        tokens = blocks * VLLM_BLOCK_SIZE
    concurrency = min(values("concurrency"), default=None)
    if concurrency is None and tokens is not None and max_len:
        concurrency = tokens / max_len
    return {
        "weights_bytes": weights,
        **_cache(values("kv")),
        "num_blocks": blocks,
        "block_size": VLLM_BLOCK_SIZE if blocks is not None else None,
        "num_tokens": tokens,
        "max_len": max_len,
        "concurrency": concurrency,
        "activation_bytes": activation,
        "other_bytes": max((max(0.0, value) for value in values("other")), default=None),
        "utilization": values("utilization")[-1] if values("utilization") else None,
        "total_bytes": min(values("total"), default=None),
        "tensor_parallel": _whole(values("tensor_parallel"), max),
        "pipeline_parallel": _whole(values("pipeline_parallel"), max),
        "needed_bytes": max(values("needed"), default=None),
        "estimated_len": _whole(values("estimated_len")),
        "refused": bool(values("refused")),
    }


def _sglang(readings: list[Reading]) -> dict[str, Any]:
    values = _gather(readings)
    tokens, max_len = _whole(values("tokens"), max), _whole(values("max_len"), max)
    caches = Counter[int]()  # K and V, or both at once, on one line; a draft model's cache is the smaller one
    for reading in readings:
        if reading.what == "kv_part":
            caches[reading.line] += int(reading.value)
    return {
        "weights_bytes": max(values("weights"), default=None),
        "kv_bytes": float(max(caches.values())) if caches else None,
        "num_tokens": tokens,
        "max_len": max_len,
        "concurrency": tokens / max_len if tokens is not None and max_len else None,
        "utilization": values("utilization")[-1] if values("utilization") else None,
        "tensor_parallel": _whole(values("tensor_parallel"), max),
    }


def _tensorrt(readings: list[Reading]) -> dict[str, Any]:
    values = _gather(readings)
    last = {what: values(what)[-1] if values(what) else None for what in ("kv", "tokens", "blocks", "block_size")}
    tokens, max_len = last["tokens"], _whole(values("max_len"), max)  # a first, small cache serves to measure
    return {
        "weights_bytes": max(values("weights"), default=None),
        "kv_bytes": None if last["kv"] is None else max(0.0, last["kv"]),
        "num_blocks": None if last["blocks"] is None else int(last["blocks"]),
        "block_size": None if last["block_size"] is None else int(last["block_size"]),
        "num_tokens": None if tokens is None else int(tokens),
        "max_len": max_len,
        "concurrency": tokens / max_len if tokens is not None and max_len else None,
        "activation_bytes": max(values("activation"), default=None),
        "other_bytes": sum(values("other_part")) if values("other_part") else None,
        "total_bytes": min(values("total"), default=None),
    }


def _llama_cpp(readings: list[Reading]) -> dict[str, Any]:
    """Of several contexts (a trial without memory, a draft model) the one with the largest cache, and its weights."""
    contexts: list[list[Reading]] = [[]]
    seen: set[str] = set()
    for reading in readings:
        loads_again = reading.what == "weights_part" and seen - {"weights_part"}
        if loads_again or (reading.what == "n_ctx" and "n_ctx" in seen):
            contexts.append([])
            seen.clear()
        contexts[-1].append(reading)
        seen.add(reading.what)
    values = _gather(max(reversed(contexts), key=lambda context: sum(_gather(context)("kv_part"))))
    cells, streams = _whole(values("cells"), max), _whole(values("streams"), max) or 1
    context_len = _whole(values("n_ctx"), max)
    tokens = cells * streams if cells is not None else context_len  # each stream has its own cells
    max_len = _whole(values("max_len"), max) or context_len

    def total(what: str) -> float | None:
        return sum(values(what)) if values(what) else None

    return {
        "weights_bytes": total("weights_part"),
        "kv_bytes": total("kv_part"),
        "num_tokens": tokens,
        "max_len": max_len,
        "concurrency": tokens / max_len if tokens is not None and max_len else None,
        "activation_bytes": total("activation_part"),
        "other_bytes": total("other_part"),
    }


_FOUND: dict[str, Callable[[list[Reading]], dict[str, Any]]] = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "TensorRT-LLM": _tensorrt,
    "llama.cpp": _llama_cpp,
}


# --- comparing ------------------------------------------------------------------------------------------------------

AGREES = 0.01
LEFT_OPEN_BYTES = 0.02 * 2**30  # four sizes, each printed to 0.01 GiB


@dataclass(frozen=True)
class LogRow:
    """One line of a comparison: logged and predicted in `unit`, and why they differ where that is known."""

    what: str
    logged: float
    predicted: float | None
    unit: str
    """B (bytes of one accelerator), or what is counted"""
    explanation: str = ""

    @property
    def ratio(self) -> float | None:
        """Logged over predicted; None where there is no prediction, or it is 0."""
        return self.logged / self.predicted if self.predicted else None

    @property
    def agrees(self) -> bool:
        """Whether both are within 1 %."""
        return self.ratio is not None and abs(self.ratio - 1) <= AGREES

    def __str__(self) -> str:
        def shown(value: float | None) -> str:
            if value is None:
                return "-"
            return _gib(value) if self.unit == "B" else fmt(value, self.unit, digits=7)

        ratio = "" if self.ratio is None else f" (x {self.ratio:.3f})"
        because = f": {self.explanation}" if self.explanation else ""
        return f"{self.what}: logged {shown(self.logged)}, predicted {shown(self.predicted)}{ratio}{because}"


def compare_log(log: EngineLog, model: ModelConfig, **options: Any) -> tuple[LogRow, ...]:
    """Hold a log line by line against the memory plan of `model`.

    `options` are those of `memory_plan.plan`: bits, ranks, `unquantized`. What the log says itself (memory,
    utilization, ranks) need not be given. Raises ValueError for a log from which nothing was read, and as `plan` does.
    """
    if not log.engine:
        raise ValueError(f"log must have at least one recognized line, got none: {log.message}")
    said = {
        "memory_bytes": log.total_bytes,
        "memory_utilization": log.utilization if log.utilization and log.utilization <= 1 else None,
        "tensor_parallel": log.tensor_parallel,
        "pipeline_parallel": log.pipeline_parallel,
    }
    known = {**{name: value for name, value in said.items() if value}, **options}
    usable_is_known = "memory_bytes" in known
    found = plan(model, _LOGGED_DEVICE, **{"memory_bytes": 1.0, **known})  # the size does not matter where unknown
    rows = [
        _weights_row(log, found),
        _budget_row(log, found) if usable_is_known else None,
        _tokens_row(log, found),
        _blocks_row(log),
        _concurrency_row(log),
        _needed_row(log, found),
        _estimate_row(log, found),
    ]
    return tuple(row for row in rows if row)


_LOGGED_DEVICE = Accelerator(key="logged", name="the logged device", memory_bandwidth=1.0, peak_flops={})


def _because(ratio: float | None, reasons: Sequence[tuple[float, str]]) -> str:
    """The reason whose factor is the ratio, within 1 %; none where both agree anyway."""
    if ratio is None or abs(ratio - 1) <= AGREES:
        return ""
    return next((reason for factor, reason in reasons if abs(ratio / factor - 1) <= AGREES), "")


def _weights_row(log: EngineLog, found: MemoryPlan) -> LogRow | None:
    if not log.weights_bytes:
        return None
    heaviest = max(rank.weight_bytes for rank in found.ranks)
    reasons = [(1 / 1.073741824, "GB read as GiB"), (1.073741824, "GiB read as GB")]
    if found.weight_bits < 16 and not found.options["unquantized"]:
        kept = found.replan(unquantized=("embedding", "head"))
        size = max(rank.weight_bytes for rank in kept.ranks)
        reasons.insert(0, (size / heaviest, f"embedding and head stay at 16 bits: {_gib(size)}"))
    if found.num_accelerators > 1:
        reasons.append((found.weight_bytes / heaviest, "the weights of all accelerators, not of one"))
    for bits in (4, 8, 16):
        if bits != found.weight_bits:
            size = max(rank.weight_bytes for rank in found.replan(weight_bits=bits, group_size=None).ranks)
            reasons.append((size / heaviest, f"weights of {bits} bits"))
    return LogRow("weights", log.weights_bytes, heaviest, "B", _because(log.weights_bytes / heaviest, reasons))


def _budget_row(log: EngineLog, found: MemoryPlan) -> LogRow | None:
    if log.kv_bytes is None:
        return None
    weights = log.weights_bytes or max(rank.weight_bytes for rank in found.ranks)
    left = min(rank.usable_bytes for rank in found.ranks) - weights
    left -= (log.activation_bytes or 0) + (log.other_bytes or 0)
    if left < 0:
        why = f"does not fit, short by {_gib(-left)}"
        return LogRow("KV cache", log.kv_bytes, 0.0, "B", why)
    row = LogRow("KV cache", log.kv_bytes, left, "B")
    if row.agrees:
        return row
    why = ""
    if abs(log.kv_bytes - left) <= LEFT_OPEN_BYTES:
        why = "as near as the two decimals of the log allow"
    elif log.activation_bytes is None and log.kv_bytes < left:
        why = f"activations are not free: {_gib(left - log.kv_bytes)} go to them and to the engine itself"
    return LogRow("KV cache", log.kv_bytes, left, "B", why)


def _tokens_row(log: EngineLog, found: MemoryPlan) -> LogRow | None:
    if log.num_tokens is None or log.kv_bytes is None:
        return None
    per_token = max(rank.bytes_per_token for rank in found.ranks)
    row = LogRow("tokens", log.num_tokens, log.kv_bytes / per_token, "tokens")
    model, ranks = found.model, found.tensor_parallel
    held = _gib(log.num_tokens * per_token)
    reasons = [(found.kv_bits / bits, f"a KV cache of {bits:g} bits") for bits in (16, 8, 4) if bits != found.kv_bits]
    reasons.append((1 / ranks, f"the KV heads are not divided: every one of {ranks} accelerators keeps all of them"))
    reasons.append((model.num_kv_heads / model.num_heads, "query heads counted for KV heads"))
    why = _because(row.ratio, reasons)
    if not why and not row.agrees and found.num_accelerators > 1 and 0.5 < (row.ratio or 0) < 1:
        why = f"the tightest accelerator decides: its cache is {held}, this one has {_gib(log.kv_bytes)}"
    if not why and ranks > found.ranks[0].kv_shards:
        shards = found.ranks[0].kv_shards
        why = f"the cache is divided by {shards} only, and replicated beyond: {ranks} accelerators"
    return LogRow("tokens", row.logged, row.predicted, "tokens", why)


def _blocks_row(log: EngineLog) -> LogRow | None:
    if log.num_blocks is None or log.num_tokens is None or not log.block_size:
        return None
    return LogRow("blocks", log.num_blocks, log.num_tokens / log.block_size, "blocks")


def _concurrency_row(log: EngineLog) -> LogRow | None:
    if log.concurrency is None or log.num_tokens is None or not log.max_len:
        return None
    row = LogRow("concurrency", log.concurrency, log.num_tokens / log.max_len, "requests")
    if log.concurrency < 1:
        why = f"less than one request of {log.max_len:,} tokens fits: the engine refuses to start"
        return LogRow(row.what, row.logged, row.predicted, row.unit, why)
    return row


def _needed_row(log: EngineLog, found: MemoryPlan) -> LogRow | None:
    if log.needed_bytes is None or not log.max_len:
        return None
    tightest = max(found.ranks, key=lambda rank: rank.bytes_per_token)
    row = LogRow("cache of one request", log.needed_bytes, tightest.cache_bytes(log.max_len), "B")
    all_layers = sum(rank.cache_bytes(log.max_len) for rank in found.ranks if rank.shard == 0)
    reasons = [(all_layers / (row.predicted or 1), "the engine counts all layers, not those of one stage")]
    return LogRow(row.what, row.logged, row.predicted, "B", _because(row.ratio, reasons))


def _estimate_row(log: EngineLog, found: MemoryPlan) -> LogRow | None:
    if log.estimated_len is None or log.kv_bytes is None:
        return None
    per_token = max(rank.bytes_per_token for rank in found.ranks)
    row = LogRow("longest length", log.estimated_len, log.kv_bytes / per_token, "tokens")
    all_layers = kv_cache.bytes_per_token(found.model, found.kv_bits) / found.ranks[0].kv_shards
    reasons = [(per_token / all_layers, "the engine counts all layers, not those of one stage")]
    return LogRow(row.what, row.logged, row.predicted, "tokens", _because(row.ratio, reasons))
