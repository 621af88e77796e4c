"""A language-model server under load: who waits, who shares a step, and how long each step takes.

Time passes in steps. In a step every decoding request gets one token, and pieces of prompts may be prefilled; the
last piece of a prompt yields its first token. A step takes what the step-time equation of `latency` says. Admission
is first come, first served, to a limited number of lanes and to a paged KV cache of limited size. The scheme is that
of Orca (Yu et al., OSDI 2022: continuous batching), vLLM (Kwon et al., SOSP 2023: paging, preemption by recompute)
and Sarathi-Serve (Agrawal et al., OSDI 2024: chunked prefill).

Left out: the network, tokenizing, prefixes shared between requests, and what an engine does between steps beyond
`overhead_s`.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np

from lessonlib.accelerators import Accelerator
from lessonlib.batching.report import Report
from lessonlib.batching.traffic import Traffic
from lessonlib.checks import check_choice, check_count, check_number
from lessonlib.kv_cache import (
    attention_flops_per_token_layer,
    bytes_per_token,
    cached_token_layers,
    kv_shards,
    num_blocks,
    prefill_attention_flops,
)
from lessonlib.latency import StepTime, step_time
from lessonlib.models import ModelConfig
from lessonlib.units import fmt

POLICIES = ("static", "dynamic", "continuous")
Policy = Literal["static", "dynamic", "continuous"]


@dataclass(frozen=True)
class Server:
    """One model on one accelerator (or `num_accelerators`, tensor parallel), serving requests in steps.

    `policy` says when a waiting request may take a free lane, of which there are `max_batch_size`:
    "static": when all lanes are free, and a full batch waits or no more requests will come.
    "dynamic": when all lanes are free, and a full batch waits or the first has waited `max_wait_s`.
    "continuous": at every step.
    Tokens are delivered as they are made; under the first two a lane whose request is done idles until all are done.

    `token_budget` is the most tokens of a step (chunked prefill): decoding requests take one each, prompts share the
    rest in order of arrival. None: whole prompts, in steps of their own, and decode waits for them (prefill first).

    `kv_budget_bytes` is the cache's size on each accelerator, in blocks of `block_size` tokens that span all layers
    (None: no limit). A request is admitted when its prompt fits. When decode runs out of blocks, the request that came
    last loses its lane and its cache and goes to the front of the queue; later its prompt and the tokens it has are
    prefilled again.

    Raises ValueError for what is out of range.
    """

    model: ModelConfig
    accelerator: Accelerator
    policy: Policy = "continuous"
    max_batch_size: int = 64
    token_budget: int | None = None
    kv_budget_bytes: float | None = None
    block_size: int = 16
    max_wait_s: float = 0.05
    weight_bits: int = 16
    kv_bits: float = 16
    num_accelerators: int = 1
    overhead_s: float = 0.0
    dtype: str = "bf16"
    group_size: int | None = None

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, POLICIES)
        check_count("max_batch_size", self.max_batch_size)
        check_count("block_size", self.block_size)
        check_number("max_wait_s", self.max_wait_s)
        if self.token_budget is not None:
            check_count("token_budget", self.token_budget)
        if self.kv_budget_bytes is not None:
            check_number("kv_budget_bytes", self.kv_budget_bytes, exclusive=True)
        check_number("overhead_s", self.overhead_s)
        self.costs.step(1, 1)  # refuses what the equation refuses

    @cached_property
    def costs(self) -> "StepCosts":
        """How long this server's steps take."""
        return StepCosts(self)

    @property
    def num_blocks(self) -> float:
        """Blocks of the KV cache; infinite without a budget."""
        if self.kv_budget_bytes is None:
            return math.inf
        return num_blocks(self.model, self.kv_budget_bytes, self.block_size, self.kv_bits, self.num_accelerators)

    def run(self, requests: Traffic) -> Report:
        """Serve all requests. Raises ValueError for one whose cache can never fit."""
        if not isinstance(requests, Traffic):
            raise ValueError(f"requests must be a Traffic (see poisson_traffic), got {type(requests).__name__}")
        most = requests.prompt_lens + requests.output_lens - 1  # the last token is not cached
        largest = int(np.argmax(most))
        needed = -(-int(most[largest]) // self.block_size)
        if needed > self.num_blocks:
            raise ValueError(
                f"request {largest} can never be served: its {requests.prompt_lens[largest]:,} prompt and "
                f"{requests.output_lens[largest]:,} output tokens need {needed:,} blocks of {self.block_size} tokens "
                f"in the KV cache, and kv_budget_bytes of {fmt(self.kv_budget_bytes or 0, 'B')} is "
                f"{self.num_blocks:,} blocks"
            )
        return _Run(self, requests).report()


# --- what a step costs ----------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a request's prompt (or of prompt and tokens so far, after a preemption)."""

    request: int
    start: int
    end: int
    last: bool
    """whether the prompt ends here, so that the output head runs"""


class StepCosts:
    """The step-time equation for steps that mix decode and prefill, in seconds for each token, weight read and so on.

    What does not change from step to step is worked out and checked once, so that a step costs microseconds.
    """

    def __init__(self, server: Server) -> None:
        model, workers = server.model, server.num_accelerators
        kv_bytes = bytes_per_token(model, server.kv_bits) / kv_shards(model, workers)

        def alone(linear: float = 0, weights: float = 0, attention: float = 0, kv: float = 0) -> StepTime:
            """These FLOPs and bytes, shared by the accelerators where they are shared."""
            flops_and_bytes = linear / workers, weights / workers, attention / workers, kv
            return step_time(
                *flops_and_bytes, server.accelerator.peak(server.dtype), server.accelerator.memory_bandwidth
            )

        @cache
        def weights_s(tokens: int) -> float:
            streamed = model.streamed_weight_bytes(server.weight_bits, server.group_size, num_tokens=tokens)
            return alone(weights=streamed).weights_s

        @cache
        def prompt_s(tokens: int) -> float:
            return alone(attention=prefill_attention_flops(model, tokens)).attention_compute_s if tokens else 0.0

        @cache
        def token_layers(context_len: int) -> float:
            return float(cached_token_layers(model, context_len))

        @cache
        def decode_base_s(batch_size: int) -> float:
            return self.step(batch_size, 0).total_s

        one = alone(attention=attention_flops_per_token_layer(model), kv=kv_bytes / model.num_layers)
        self._attend_s, self._read_s = one.attention_compute_s, one.kv_s  # one cached token of one layer
        self._write_s = alone(kv=kv_bytes).kv_s  # one token of a prompt
        self._body_s = alone(linear=2 * (model.matmul_params - model.head_params)).linear_compute_s
        self._head_s = alone(linear=2 * model.head_params).linear_compute_s
        self._overhead_s = server.overhead_s
        self._weights_s = weights_s if model.num_experts else lambda tokens: weights_s(1)
        self._prompt_s = prompt_s  # the attention of a prompt of this length
        self.token_layers = token_layers
        """tokens that a request of this length has in the cache, summed over the layers"""
        self.decode_base_s = decode_base_s
        """a decode step of this batch but for its attention"""
        self.decode_slope_s = one.attention_s
        """what each cached token of each layer adds to it"""

    def step(self, batch_size: int, token_layers: float, chunks: Sequence[Chunk] = ()) -> StepTime:
        """A step in which `batch_size` requests decode, with `token_layers` in their caches, and chunks are prefilled.

        A chunk writes its tokens to the cache, and reads those before it.
        """
        tokens = logits = batch_size
        attention_s, kv_s = self._attend_s * token_layers, self._read_s * token_layers
        for _, start, end, last in chunks:
            tokens += end - start
            logits += last
            attention_s += self._prompt_s(end) - self._prompt_s(start)
            kv_s += self._write_s * (end - start) + self._read_s * self.token_layers(start)
        linear_compute_s = self._body_s * tokens + self._head_s * logits
        return StepTime(linear_compute_s, self._weights_s(tokens), attention_s, kv_s, self._overhead_s, tokens)


# --- requests that decode -------------------------------------------------------------------------------------------


class _Decoding:
    """The requests that are decoding. Each gets a token in every decode step, so that one count of steps describes all:

    a request's context is `steps` plus an offset that stays, the step at which it ends is known when it joins, and
    what a step reads from the cache grows by the same amount from step to step.
    """

    def __init__(self, server: Server) -> None:
        self._token_layers = server.costs.token_layers
        self._windowed_layers = server.model.num_windowed_layers
        self._window = server.model.sliding_window if self._windowed_layers else 0
        self._block_size = server.block_size
        self.steps = 0
        self.offsets: dict[int, int] = {}  # request -> context - steps
        self.token_layers = 0.0  # in the cache, of all requests
        self.growth = 0.0  # of token_layers in each step
        self._ending: defaultdict[int, list[int]] = defaultdict(list)  # step -> requests that end with it
        self._window_full: Counter[int] = Counter()  # step -> requests whose windows stop growing with it
        self._phases = [0] * self._block_size  # requests by the step (modulo block_size) in which they take a block

    def __len__(self) -> int:
        return len(self.offsets)

    def join(self, request: int, context: int, last_context: int) -> None:
        """A request with `context` tokens in the cache decodes until it has `last_context`."""
        self.offsets[request] = context - self.steps
        self._ending[self.steps + last_context - context].append(request)
        self._count(context, 1)

    def leave(self, request: int, last_context: int) -> int:
        """Take a request out before its end. Returns its context in tokens."""
        offset = self.offsets.pop(request)
        ending = self._ending[last_context - offset]
        ending.remove(request)
        if not ending:
            del self._ending[last_context - offset]
        self._count(offset + self.steps, -1)
        return offset + self.steps

    def advance(self, steps: int) -> list[int]:
        """Every request gets `steps` tokens, at most `steps_to_change`. Returns the requests that end."""
        self.steps += steps
        self.token_layers += steps * self.growth
        self.growth -= self._windowed_layers * self._window_full.pop(self.steps, 0)
        ended = self._ending.pop(self.steps, [])
        for request in ended:
            self._count(self.offsets.pop(request) + self.steps, -1)
        return ended

    def _count(self, context: int, sign: int) -> None:
        """Add (1) or take off (-1) what a request with this context holds and will take."""
        held = self._token_layers(context)
        self.token_layers += sign * held
        self.growth += sign * (self._token_layers(context + 1) - held)
        self._phases[(self.steps - context) % self._block_size] += sign
        if context < self._window:
            full = self.steps + self._window - context
            self._window_full[full] += sign
            if not self._window_full[full]:
                del self._window_full[full]

    def blocks_for(self, steps: int) -> int:
        """Blocks that the next `steps` steps take: a request takes one when its context is a multiple of the size."""
        turns, rest = divmod(steps, self._block_size)
        first = self.steps % self._block_size
        return turns * len(self) + sum((self._phases * 2)[first : first + rest])

    def steps_to_change(self) -> int:
        """Steps until a request ends or its windows are full."""
        return min([*self._ending, *self._window_full]) - self.steps


# --- the run --------------------------------------------------------------------------------------------------------


class _Run:
    """The server's state while it serves `traffic`. A request is known by its place in the order of arrival."""

    def __init__(self, server: Server, traffic: Traffic) -> None:
        self.server, self.traffic, self.costs = server, traffic, server.costs
        self.arrivals: list[float] = traffic.arrival_s.tolist()
        self.last_contexts: list[int] = (traffic.prompt_lens + traffic.output_lens - 1).tolist()
        self.to_prefill: list[int] = traffic.prompt_lens.tolist()  # more after a preemption
        self.now = 0.0
        self.arrived = 0
        self.free_blocks = server.num_blocks
        # A request is in one of these three; all are in order of arrival, and no one overtakes another.
        self.queue: deque[int] = deque()
        self.prefilled: dict[int, int] = {}  # request -> tokens of its prompt that are done
        self.decoding = _Decoding(server)
        # When a request got its latest token: all that decode at last_decode_s, except for those named here.
        self.last_decode_s = 0.0
        self.joined_s: dict[int, float] = {}  # came from prefill since
        self.preempted_s: dict[int, float] = {}  # wait for another prefill
        # for the report
        self.first_token_s = np.full(len(traffic), np.nan)
        self.finish_s = np.full(len(traffic), np.nan)
        self.admissions_s: list[float] = []
        self.preemptions_s: list[float] = []
        self.gap_runs: list[tuple[float, float, int, int]] = []
        self.busy_s = 0.0
        self.num_steps = 0

    def report(self) -> Report:
        """Run until every request is done."""
        while self.running or self.queue or self.arrived < len(self.arrivals):
            if not self.running:
                self.now = max(self.now, self.next_batch_s())
            while self.arrived < len(self.arrivals) and self.arrivals[self.arrived] <= self.now:
                self.queue.append(self.arrived)
                self.arrived += 1
            self.reserve_blocks()
            self.admit()
            if chunks := self.plan_prefill():
                self.mixed_step(chunks)
            else:
                self.decode_steps()
        return Report(
            self.traffic,
            self.first_token_s,
            self.finish_s,
            np.array(self.admissions_s),
            np.array(self.preemptions_s),
            np.array(self.gap_runs).reshape(-1, 4),
            self.busy_s,
            self.num_steps,
        )

    @property
    def running(self) -> int:
        """Lanes taken."""
        return len(self.prefilled) + len(self.decoding)

    # --- who runs

    def next_batch_s(self) -> float:
        """When the next batch can start, all lanes being free."""
        first = self.queue[0] if self.queue else self.arrived
        if self.server.policy == "continuous":
            return self.arrivals[first]
        last = self.arrived + self.server.max_batch_size - len(self.queue) - 1  # that fills the batch
        if self.server.policy == "static":
            return self.arrivals[min(last, len(self.arrivals) - 1)]
        full_s = self.arrivals[last] if last < len(self.arrivals) else math.inf
        return min(full_s, self.arrivals[first] + self.server.max_wait_s)

    def lane_is_free(self) -> bool:
        """Whether a request may join now."""
        if self.server.policy == "continuous":
            return self.running < self.server.max_batch_size
        return not self.running

    def admit(self) -> None:
        """Give free lanes to the requests at the head of the queue, as far as their prompts' blocks are free."""
        if not self.lane_is_free():
            return
        reserved = self.decoding.blocks_for(1)
        while self.queue and self.running < self.server.max_batch_size:
            blocks = self.blocks(self.to_prefill[self.queue[0]])
            if blocks > self.free_blocks - reserved:
                break
            self.free_blocks -= blocks
            self.prefilled[self.queue.popleft()] = 0
            self.admissions_s.append(self.now)

    def reserve_blocks(self) -> None:
        """Preempt the request that came last until the next decode step's blocks are free."""
        while self.decoding.blocks_for(1) > self.free_blocks:
            if self.prefilled:
                request, _ = self.prefilled.popitem()
                self.free_blocks += self.blocks(self.to_prefill[request])
            else:
                request = max(self.decoding.offsets)
                context = self.decoding.leave(request, self.last_contexts[request])
                self.free_blocks += self.blocks(context)
                self.to_prefill[request] = context + 1  # all its tokens so far
                self.preempted_s[request] = self.joined_s.pop(request, self.last_decode_s)
            self.queue.appendleft(request)
            self.preemptions_s.append(self.now)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.server.block_size)

    def plan_prefill(self) -> list[Chunk]:
        """The pieces of prompts that the next step has room for, first come, first served."""
        budget = self.server.token_budget
        room = math.inf if budget is None else budget - len(self.decoding)
        chunks = []
        for request, start in self.prefilled.items():
            if not room:
                break
            end = int(min(self.to_prefill[request], start + room))
            chunks.append(Chunk(request, start, end, end == self.to_prefill[request]))
            room -= end - start
        return chunks

    # --- what a step does

    def mixed_step(self, chunks: list[Chunk]) -> None:
        """One step of prefill, and of decode too if prefill is chunked."""
        if self.server.token_budget is not None and self.decoding:
            token_layers = self.decoding.token_layers + self.decoding.growth
            self.free_blocks -= self.decoding.blocks_for(1)
            self.decode(1, self.costs.step(len(self.decoding), token_layers, chunks).total_s, 0.0)
        else:
            self.pass_time(1, self.costs.step(0, 0, chunks).total_s)
        for request, _, end, last in chunks:
            self.prefilled[request] = end
            if last:
                del self.prefilled[request]
                self.end_prefill(request, end)

    def end_prefill(self, request: int, context: int) -> None:
        """The last position of a prompt has yielded a token: the first, or after a preemption the next."""
        if request in self.preempted_s:
            self.gap_runs.append((self.now - self.preempted_s.pop(request), 0.0, 1, 1))
        else:
            self.first_token_s[request] = self.now
        if context == self.last_contexts[request]:
            self.finish(request)
        else:
            self.joined_s[request] = self.now
            self.decoding.join(request, context, self.last_contexts[request])

    def decode_steps(self) -> None:
        """As many steps of decode alone as pass until something else can happen."""
        slope = self.costs.decode_slope_s
        growth_s = slope * self.decoding.growth
        first_s = self.costs.decode_base_s(len(self.decoding)) + slope * self.decoding.token_layers + growth_s
        steps = self.decoding.steps_to_change()
        if self.decoding.blocks_for(steps) > self.free_blocks:
            steps = bisect_right(range(steps), self.free_blocks, key=self.decoding.blocks_for) - 1
        if self.arrived < len(self.arrivals) and not self.queue and self.lane_is_free():
            arrival_s = self.arrivals[self.arrived]
            steps = bisect_left(range(steps), arrival_s, key=lambda n: self.now + _sum_s(n, first_s, growth_s))
        self.free_blocks -= self.decoding.blocks_for(steps)
        self.decode(steps, first_s, growth_s)

    def decode(self, steps: int, first_s: float, growth_s: float) -> None:
        """Each decoding request gets a token in each of `steps` steps: one of `first_s`, each next longer by growth."""
        first_end_s = self.now + first_s
        for joined_s in self.joined_s.values():
            self.gap_runs.append((first_end_s - joined_s, 0.0, 1, 1))
        if others := len(self.decoding) - len(self.joined_s):
            self.gap_runs.append((first_end_s - self.last_decode_s, 0.0, 1, others))
        if steps > 1:
            self.gap_runs.append((first_s + growth_s, growth_s, steps - 1, len(self.decoding)))
        self.joined_s.clear()
        self.pass_time(steps, _sum_s(steps, first_s, growth_s))
        self.last_decode_s = self.now
        for request in self.decoding.advance(steps):
            self.finish(request)

    def finish(self, request: int) -> None:
        """The request has its last token: its lane and its blocks are free."""
        self.finish_s[request] = self.now
        self.free_blocks += self.blocks(self.last_contexts[request])

    def pass_time(self, steps: int, seconds: float) -> None:
        """The clock moves on by `steps` steps."""
        self.now += seconds
        self.busy_s += seconds
        self.num_steps += steps


def _sum_s(steps: int, first_s: float, growth_s: float) -> float:
    """Seconds of `steps` steps: one of `first_s`, each next longer by growth."""
    return steps * first_s + growth_s * (steps * (steps - 1) // 2)
