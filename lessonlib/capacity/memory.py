"""What fits: weights, KV cache and the rest on every accelerator, and what to change where it does not fit.

usable memory = utilization x memory = weights + activations + other + KV cache

Every accelerator (rank) holds its share of each layer (tensor parallel) of its own layers (pipeline parallel). All
ranks keep the same requests, so the one with the fewest tokens decides. Activations and the engine's own memory have
no closed form: they are inputs, and engines print them at start-up (`engine_logs` reads them).
Source: vLLM's start-up accounting, held against the logs in tests/data/engine_logs.csv.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lessonlib import kv_cache
from lessonlib.accelerators import Accelerator
from lessonlib.checks import check_choice, check_count, check_number, check_share
from lessonlib.models import PARTS, ModelConfig, effective_bits
from lessonlib.units import fmt

WIDEST_UTILIZATION = 0.98  # more leaves nothing for the driver and for fragmentation


class DoesNotFitError(ValueError):
    """The weights and what goes with them are larger than the memory. `short_bytes` says by how much."""

    def __init__(self, message: str, short_bytes: float) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


def kv_budget_bytes(
    memory_bytes: float,
    weight_bytes: float,
    activation_bytes: float = 0.0,
    other_bytes: float = 0.0,
    memory_utilization: float = 0.9,
) -> float:
    """Bytes left for the cache on one accelerator: utilization x memory - weights - activations - other.

    Raises DoesNotFitError (a ValueError) where nothing is left, and ValueError for a negative size or a utilization
    outside (0, 1].
    """
    usable = check_number("memory_bytes", memory_bytes, exclusive=True)
    usable *= check_share("memory_utilization", memory_utilization)
    sizes = {"weight_bytes": weight_bytes, "activation_bytes": activation_bytes, "other_bytes": other_bytes}
    taken = sum(check_number(name, size) for name, size in sizes.items())
    if taken > usable:
        short = taken - usable
        raise DoesNotFitError(
            f"does not fit, short by {_gib(short)}: {_gib(taken)} are needed before the first cached token, "
            f"{_gib(usable)} may be used",
            short,
        )
    return usable - taken


def _gib(num_bytes: float) -> str:
    return fmt(num_bytes, "B", digits=4, binary=True)


# --- one accelerator ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightPart:
    """One part of the weights on one accelerator: its name, the effective bits of a weight, its bytes."""

    part: str
    bits: float
    num_bytes: float


@dataclass(frozen=True)
class Rank:
    """One accelerator's memory, in bytes. A budget is never negative: where it would be, `short_bytes` is above 0."""

    stage: int
    """which group of layers, from 0"""
    shard: int
    """which share of each layer, from 0"""
    layers: ModelConfig
    """the stage's layers, as a model"""
    weights: tuple[WeightPart, ...]
    memory_bytes: float
    usable_bytes: float
    activation_bytes: float
    other_bytes: float
    kv_bits: float
    kv_shards: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights here."""
        return sum(part.num_bytes for part in self.weights)

    @property
    def taken_bytes(self) -> float:
        """Bytes taken before the first token is cached."""
        return self.weight_bytes + self.activation_bytes + self.other_bytes

    @property
    def kv_budget_bytes(self) -> float:
        """Bytes left for the cache, 0 where nothing is left."""
        return max(0.0, self.usable_bytes - self.taken_bytes)

    @property
    def short_bytes(self) -> float:
        """Bytes missing before the first token is cached, 0 where nothing is missing."""
        return max(0.0, self.taken_bytes - self.usable_bytes)

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token adds to the cache here, while it is inside every window."""
        return kv_cache.bytes_per_token(self.layers, self.kv_bits) / self.kv_shards

    def cache_bytes(self, context_len: int) -> float:
        """Bytes that a request of `context_len` tokens keeps here, windows respected."""
        return kv_cache.cache_bytes(self.layers, context_len, 1, self.kv_bits) / self.kv_shards


# --- all of them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """Something that makes it fit: the changed arguments of `plan`, and the same in words."""

    changes: Mapping[str, Any] = field(hash=False)
    text: str


@dataclass(frozen=True)
class MemoryPlan:
    """What `plan` found. `fits` speaks of `batch_size` requests of `context_len` tokens, or of the weights alone."""

    model: ModelConfig
    accelerator: Accelerator
    context_len: int | None
    batch_size: int
    tensor_parallel: int
    pipeline_parallel: int
    weight_bits: int
    group_size: int | None
    kv_bits: float
    block_size: int
    memory_utilization: float
    ranks: tuple[Rank, ...]
    options: Mapping[str, Any] = field(repr=False, hash=False)
    """the arguments of `plan`, as given"""

    @property
    def num_accelerators(self) -> int:
        """Accelerators in all."""
        return len(self.ranks)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights over all accelerators, replicas counted."""
        return sum(rank.weight_bytes for rank in self.ranks)

    def _request_bytes(self, rank: Rank, context_len: int) -> float:
        return rank.cache_bytes(kv_cache.blocks(context_len, self.block_size) * self.block_size)

    def _short(self, rank: Rank) -> float:
        requests = self.batch_size * self._request_bytes(rank, self.context_len) if self.context_len else 0.0
        return max(0.0, rank.taken_bytes + requests - rank.usable_bytes)

    @property
    def short_bytes(self) -> float:
        """Bytes that are missing on the accelerator that misses most; 0 where everything fits."""
        return max(self._short(rank) for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether nothing is missing."""
        return self.short_bytes == 0

    @property
    def tightest(self) -> Rank:
        """The accelerator that decides: the one whose cache holds the fewest tokens (or that misses most)."""
        return min(self.ranks, key=lambda rank: (-rank.short_bytes, rank.kv_budget_bytes / rank.bytes_per_token))

    @property
    def num_blocks(self) -> int:
        """Blocks of `block_size` tokens that every accelerator can hold, each over all layers (windows ignored)."""
        return min(int(rank.kv_budget_bytes // (self.block_size * rank.bytes_per_token)) for rank in self.ranks)

    @property
    def num_tokens(self) -> int:
        """Tokens in those blocks."""
        return self.num_blocks * self.block_size

    def requests_at(self, context_len: int) -> int:
        """Whole requests of `context_len` tokens that fit at once, in whole blocks; 0 if none does.

        Raises ValueError for a length below 1.
        """
        check_count("context_len", context_len)
        return min(int(rank.kv_budget_bytes // self._request_bytes(rank, context_len)) for rank in self.ranks)

    def concurrency(self, context_len: int) -> float:
        """The same as a number with decimals, as vLLM prints it: the cache over what one request takes.

        Raises ValueError for a length below 1.
        """
        check_count("context_len", context_len)
        return min(rank.kv_budget_bytes / rank.cache_bytes(context_len) for rank in self.ranks)

    def longest_context(self, batch_size: int = 1) -> int:
        """Tokens that each of `batch_size` requests can have, in whole blocks, at most the model's own limit."""
        found = self.model.max_context
        for rank in self.ranks:
            budget = rank.kv_budget_bytes * rank.kv_shards
            longest = kv_cache.longest_context(rank.layers, budget, batch_size, self.kv_bits)
            if longest is not None and longest < found:
                found = longest // self.block_size * self.block_size
        return found

    def replan(self, **changes: Any) -> "MemoryPlan":
        """The same plan with some arguments of `plan` changed."""
        return plan(**{**self.options, **changes})

    def remedies(self) -> tuple[Remedy, ...]:
        """What would make it fit, each by itself and each tried out; empty where it fits already.

        Activations and other memory are taken to stay as they are on each accelerator.
        """
        if self.fits:
            return ()
        return tuple(filter(None, [*map(self._try_bits, ("weight_bits", "kv_bits")), self._try_accelerators(),
                                   self._try_context(), self._try_utilization()]))  # fmt: skip

    def _try_bits(self, name: str) -> Remedy | None:
        for bits in (8, 4):
            if bits < getattr(self, name):
                changes: dict[str, Any] = {name: bits}
                if name == "weight_bits" and bits < 8 and self.group_size is None:
                    changes["group_size"] = 128
                if self.replan(**changes).fits:
                    what = "weights" if name == "weight_bits" else "a KV cache"
                    return Remedy(changes, f"{what} of {bits} bits")
        return None

    def _try_accelerators(self) -> Remedy | None:
        if any(isinstance(self.options[name], tuple) for name in PER_RANK):
            return None  # nobody said what further accelerators have
        for ranks in range(self.tensor_parallel + 1, self.model.num_heads + 1):
            try:
                if self.replan(tensor_parallel=ranks).fits:
                    return Remedy({"tensor_parallel": ranks}, f"{ranks * self.pipeline_parallel} accelerators")
            except ValueError:  # heads that cannot be divided
                continue
        return None

    def _try_context(self) -> Remedy | None:
        longest = min(self.longest_context(self.batch_size), (self.context_len or 1) - 1)
        if longest < 1:
            return None
        return Remedy({"context_len": longest}, f"a context of {longest:,} tokens")

    def _try_utilization(self) -> Remedy | None:
        needed = max((rank.usable_bytes + self._short(rank)) / rank.memory_bytes for rank in self.ranks)
        share = math.ceil(needed * 100) / 100
        if share > WIDEST_UTILIZATION:
            return None
        return Remedy({"memory_utilization": share}, f"a memory utilization of {share:.2f}")

    @property
    def message(self) -> str:
        """The answer in words."""
        rank = self.tightest
        parts = f"weights {_gib(rank.weight_bytes)}, activations {_gib(rank.activation_bytes)}, other "
        parts += f"{_gib(rank.other_bytes)} of {_gib(rank.usable_bytes)} usable"
        where = f"{self.model.name} on {self.num_accelerators} x {self.accelerator.name}"
        if self.fits:
            left = f"{_gib(rank.kv_budget_bytes)} for the KV cache, {self.num_tokens:,} tokens"
            return f"{where}: fits, {left} ({parts}, on the tightest accelerator)."
        ways = ", or ".join(remedy.text for remedy in self.remedies()) or "nothing that is tried here"
        return f"{where}: does not fit, short by {_gib(self.short_bytes)} ({parts}). It would fit with {ways}."


PER_RANK = ("memory_bytes", "activation_bytes", "other_bytes")


def plan(
    model: ModelConfig,
    accelerator: Accelerator,
    *,
    context_len: int | None = None,
    batch_size: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    stage_layers: Sequence[int] | None = None,
    weight_bits: int = 16,
    group_size: int | None = None,
    scale_bits: int = 16,
    zero_bits: int = 0,
    unquantized: Collection[str] = (),
    part_bits: Mapping[str, float] | None = None,
    kv_bits: float = 16,
    block_size: int = 16,
    memory_utilization: float = 0.9,
    memory_bytes: float | Sequence[float] | None = None,
    activation_bytes: float | Sequence[float] = 0.0,
    other_bytes: float | Sequence[float] = 0.0,
) -> MemoryPlan:
    """The memory of tensor_parallel x pipeline_parallel accelerators that serve `model`.

    Args:
        context_len, batch_size: what must fit, tokens and requests; with None the weights alone
        stage_layers: layers of each pipeline stage; None divides them evenly, extra ones to the middle
        unquantized: parts (of models.PARTS) that stay at 16 bits
        part_bits: effective bits of single parts, such as {"embedding": 8.5} (a tied head is the embedding)
        memory_bytes: what the device reports; None takes the vendor's figure
        memory_bytes, activation_bytes, other_bytes: bytes, one number or one for each accelerator (stage by stage)

    Raises ValueError for what is out of range, for heads or layers that cannot be divided, and for an accelerator
    whose memory is not known. What does not fit is an answer, not an error.
    """
    options = dict(locals())
    for name in PER_RANK:  # a list may be changed later
        options[name] = tuple(options[name]) if isinstance(options[name], Sequence) else options[name]
    for name, value in (("batch_size", batch_size), ("block_size", block_size), ("tensor_parallel", tensor_parallel)):
        check_count(name, value)
    if context_len is not None:
        check_count("context_len", context_len)
    kv_cache.bytes_per_token(model, kv_bits)  # refuses what is no width
    shards = _kv_shards(model, tensor_parallel)
    stages = split_layers(model.num_layers, pipeline_parallel) if stage_layers is None else tuple(stage_layers)
    _check_stages(model, stages, pipeline_parallel)
    memory = accelerator.memory_bytes if memory_bytes is None else memory_bytes
    if memory is None:
        raise ValueError(f"memory_bytes must be given for {accelerator.name}, whose memory is not known, got None")
    num_ranks = tensor_parallel * pipeline_parallel
    memories = _for_each_rank("memory_bytes", memory, num_ranks, exclusive=True)
    activations = _for_each_rank("activation_bytes", activation_bytes, num_ranks)
    others = _for_each_rank("other_bytes", other_bytes, num_ranks)
    share = check_share("memory_utilization", memory_utilization)
    bits = effective_bits(weight_bits, group_size, scale_bits, zero_bits)
    bits_of = dict.fromkeys(model.parameter_counts(), bits)
    for part in (unquantized,) if isinstance(unquantized, str) else unquantized:
        bits_of[check_choice("unquantized", part, PARTS)] = max(16.0, bits)
    for part, given in (part_bits or {}).items():
        bits_of[check_choice("part_bits", part, bits_of)] = check_number(f"part_bits[{part!r}]", given, exclusive=True)
    if model.tied_embeddings:  # one table
        bits_of["embedding"] = bits_of["head"] = max(bits_of["embedding"], bits_of["head"])
    ranks = []
    for stage in range(pipeline_parallel):
        layers, weights = _stage(model, stages, stage, tensor_parallel, bits_of)
        for shard in range(tensor_parallel):
            i = stage * tensor_parallel + shard
            ranks.append(Rank(stage, shard, layers, weights, memories[i], share * memories[i], activations[i],
                              others[i], kv_bits, shards))  # fmt: skip
    return MemoryPlan(model, accelerator, context_len, batch_size, tensor_parallel, pipeline_parallel, weight_bits,
                      group_size, kv_bits, block_size, share, tuple(ranks), options)  # fmt: skip


def max_batch_size(model: ModelConfig, accelerator: Accelerator, context_len: int, **options: Any) -> int:
    """Requests of `context_len` tokens that fit at once on the accelerators of `plan`; 0 if none does.

    `options` are those of `plan`. Raises ValueError as `plan` does.
    """
    return plan(model, accelerator, **options).requests_at(context_len)


def split_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: even, and extra layers to the stages before the last, which has the head.

    Raises ValueError for more stages than layers.
    """
    each, extra = divmod(check_count("num_layers", num_layers), check_count("pipeline_parallel", stages))
    if not each:
        raise ValueError(f"pipeline_parallel must be at most the {num_layers} layers, got {stages}")
    first = stages - 1 - extra
    return tuple(each + (first <= stage < first + extra) for stage in range(stages))


def _kv_shards(model: ModelConfig, tensor_parallel: int) -> int:
    try:
        return kv_cache.kv_shards(model, tensor_parallel)
    except ValueError as error:
        raise ValueError(str(error).replace("num_accelerators", "tensor_parallel")) from None


def _check_stages(model: ModelConfig, stages: tuple[int, ...], pipeline_parallel: int) -> None:
    for layers in stages:
        check_count("stage_layers", layers)
    if len(stages) != pipeline_parallel or sum(stages) != model.num_layers:
        raise ValueError(
            f"stage_layers must be {pipeline_parallel} numbers that add up to the {model.num_layers} layers of "
            f"{model.name}, got {stages}"
        )


def _for_each_rank(
    name: str, value: float | Sequence[float], num_ranks: int, exclusive: bool = False
) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * num_ranks
    if len(values) != num_ranks:
        raise ValueError(f"{name} must be one number or one for each of {num_ranks} accelerators, got {len(values)}")
    return tuple(check_number(name, number, exclusive=exclusive) for number in values)


def _stage(
    model: ModelConfig, stages: tuple[int, ...], stage: int, tensor_parallel: int, bits_of: Mapping[str, float]
) -> tuple[ModelConfig, tuple[WeightPart, ...]]:
    """The layers of one stage as a model, and the weights of one of its ranks."""
    start, size = sum(stages[:stage]), stages[stage]
    windowed = [model.num_windowed_layers * layer // model.num_layers for layer in (start, start + size)]
    layers = dataclasses.replace(
        model,
        num_layers=size,
        num_dense_layers=min(size, max(0, model.num_dense_layers - start)),
        num_windowed_layers=windowed[1] - windowed[0],  # spread evenly, as models interleave them
    )
    counts = layers.parameter_counts()
    first, last = stage == 0, stage == len(stages) - 1
    final_norm = counts["norms"] // (size * model.norms_per_layer + 1)
    counts["norms"] -= 0 if last else final_norm
    counts["head"] = model.head_params if last and not (model.tied_embeddings and first) else 0
    if not first:
        counts["embedding"] = counts["positions"] = 0
    held = {part: _rank_params(layers, part, params, tensor_parallel) for part, params in counts.items() if params}
    return layers, tuple(WeightPart(part, bits_of[part], params * bits_of[part] / 8) for part, params in held.items())


def _rank_params(layers: ModelConfig, part: str, params: int, tensor_parallel: int) -> float:
    """Parameters of one part on one rank. Norms, routers and positions are replicated, and of attention what makes
    keys and values where there are more ranks than KV heads (MLA: the projections to the compressed vectors)."""
    if part in ("norms", "router", "positions"):
        return params
    if part != "attention":
        return params / tensor_parallel
    width = layers.hidden_size
    if layers.kv_lora_rank:
        latent = layers.kv_lora_rank + layers.qk_rope_head_dim
        makes_kv = width * latent + layers.kv_lora_rank + layers.q_lora_rank * (width + 1)
    else:
        makes_kv = 2 * layers.num_kv_heads * layers.head_dim * (width + layers.qkv_bias)
    makes_kv *= layers.num_layers
    return (params - makes_kv) / tensor_parallel + makes_kv / kv_cache.kv_shards(layers, tensor_parallel)
