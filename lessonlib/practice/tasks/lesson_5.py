"""Coding tasks of lesson 5: what fits, a start-up log, cost, the cheapest right answer, drafts, and pooled GPUs."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lessonlib import capacity, speculative
from lessonlib.practice.tasks.task import Task, rows


def _left(
    memory_bytes: float,
    utilization: float,
    weight_bytes: float,
    activation_bytes: float = 0.0,
    other_bytes: float = 0.0,
) -> float:
    """Bytes left for the cache; below 0 where bytes are missing."""
    try:
        return capacity.kv_budget_bytes(memory_bytes, weight_bytes, activation_bytes, other_bytes, utilization)
    except capacity.DoesNotFitError as error:
        return -error.short_bytes


def _requests(
    memory_bytes: float,
    utilization: float,
    weight_bytes: float,
    activation_bytes: float,
    other_bytes: float,
    kv_bytes_per_token: float,
    context_len: int,
) -> tuple[int, float]:
    left = _left(memory_bytes, utilization, weight_bytes, activation_bytes, other_bytes)
    return int(max(0.0, left) // (kv_bytes_per_token * context_len)), max(0.0, -left)


def _requests_slip(of_left: Callable[[float, float], tuple[float, float]]) -> Callable[..., tuple[float, float]]:
    """Another answer from the bytes that are left (below 0 where bytes are missing) and those of one request."""
    return lambda *g: of_left(_left(*g[:5]), g[5] * g[6])


_FIT = Task(
    "05/fit",
    "how many requests fit at once, and the bytes that are missing before the first token can be cached (0 if none)",
    _requests,
    rows(
        "memory_bytes utilization weight_bytes activation_bytes other_bytes kv_bytes_per_token context_len",
        (25.3e9, 0.9, 16.06e9, 1.7e9, 0.3e9, 131_072, 6000),
        (85.1e9, 0.92, 16.06e9, 2.3e9, 0.4e9, 131_072, 2000),
        (8.59e9, 0.7, 5.59e9, 1.53e9, 0.04e9, 57_344, 4000),  # the weights and the rest are too much
        (48.3e9, 0.95, 38.17e9, 2.6e9, 0.5e9, 327_680, 32_000),  # they fit, but no request does
        (150.1e9, 0.9, 70.6e9, 3.9e9, 0.8e9, 327_680, 10_000),
    ),
    {
        "all of the memory; the utilization says which share of it may be used": lambda memory, share, *g: _requests(
            memory, 1.0, *g
        ),
        "the utilization taken of what is left; it is a share of the whole memory": (
            lambda memory, share, weights, activations, other, *g: _requests(
                memory - weights - activations - other, share, 0, 0, 0, *g
            )
        ),
        "weights alone; activations and the rest take memory too": (
            lambda memory, share, weights, activations, other, *g: _requests(memory, share, weights, 0, 0, *g)
        ),
        "a number below 0: where bytes are missing, 0 requests fit": _requests_slip(
            lambda left, request: (left // request, max(0.0, -left))
        ),
        "there are no parts of a request: round down": _requests_slip(
            lambda left, request: (max(0.0, left) / request, max(0.0, -left))
        ),
        "missing bytes below 0: where some are left, 0 are missing": _requests_slip(
            lambda left, request: (max(0.0, left) // request, -left)
        ),
        "what is left instead of what is missing": _requests_slip(
            lambda left, request: (max(0.0, left) // request, max(0.0, left))
        ),
        "a request's cache counted as missing; what is asked for ends before the first cached token": _requests_slip(
            lambda left, request: (max(0.0, left) // request, max(0.0, request - left))
        ),
    },
    parts=("requests", "missing bytes"),
)


def _read(log: str) -> tuple[int, int]:
    said = capacity.read_engine_log(log)
    if said.num_tokens is None or said.max_len is None:
        raise ValueError(f"log must say tokens and a length, got {said.message}")
    return said.num_tokens, said.max_len


def _read_slip(
    choose: Callable[[Sequence[int]], int] = min, block_size: int = 16, device: str = "GPU", digits: str = "[0-9,]+"
) -> Callable[[str], tuple[int, int]]:
    """Choose another of several sizes, forget the block size, read the other device, or stop at a comma."""

    def slip(log: str) -> tuple[int, int]:
        def read(wording: str) -> list[int]:
            return [int(number.replace(",", "")) for number in re.findall(f"{wording} ({digits})", log)]

        sizes = [block_size * blocks for blocks in read(f"# {device} blocks:")] + read("KV cache size:")
        return choose(sizes), read("concurrency for")[0]

    return slip


_READ = Task(
    "05/log",
    "the tokens that the cache holds, and the most tokens of one request",
    _read,
    (
        {
            "log": "INFO 11-21 08:01:12 model_runner.py:1077] Loading model weights took 14.9888 GB\n"
            "INFO 11-21 08:01:14 gpu_executor.py:113] # GPU blocks: 1952, # CPU blocks: 2048\n"
            "INFO 11-21 08:01:14 gpu_executor.py:117] Maximum concurrency for 20000 tokens per request: 1.56x\n"
        },
        {
            "log": "INFO 09-21 09:10:59 [gpu_worker.py:298] Available KV cache memory: 10.55 GiB\n"
            "INFO 09-21 09:10:59 [kv_cache_utils.py:864] GPU KV cache size: 230,528 tokens\n"
            "INFO 09-21 09:10:59 [kv_cache_utils.py:868] Maximum concurrency for 100,000 tokens per request: 2.31x\n"
        },
        {
            "log": "".join(
                f"INFO 05-06 17:20:4{i} [kv_cache_utils.py:634] GPU KV cache size: {tokens:,} tokens\n"
                f"INFO 05-06 17:20:4{i} [kv_cache_utils.py:637] Maximum concurrency for 16,000 tokens per request: "
                f"{tokens / 16_000:.2f}x\n"
                for i, tokens in enumerate((51_904, 48_160, 52_480))
            )
        },
        {
            "log": "INFO 02-26 09:54:05 worker.py:267] the rest of the memory reserved for KV Cache is -1.05GiB.\n"
            "INFO 02-26 09:54:05 executor_base.py:111] # GPU blocks: 0, # CPU blocks: 4681\n"
            "INFO 02-26 09:54:05 executor_base.py:116] Maximum concurrency for 3000 tokens per request: 0.00x\n"
        },
    ),
    {
        "blocks counted as tokens; a block holds 16 of them": _read_slip(block_size=1),
        "the CPU's blocks; the cache that serves is the GPU's": _read_slip(device="CPU"),
        "the first of several GPUs; all keep the same requests, so the smallest cache decides": _read_slip(
            lambda sizes: sizes[0]
        ),
        "the largest of several caches; all GPUs keep the same requests, so the smallest decides": _read_slip(max),
        "the caches of several GPUs added up; each keeps its share of the same tokens": _read_slip(sum),
        "a number cut off at its comma": _read_slip(digits="[0-9]+"),
        "the two values the other way round: tokens of the cache first": lambda log: _read(log)[::-1],
    },
    parts=("tokens", "tokens of one request"),
)


def _cost(usd_per_hour: float, num_accelerators: int, tokens_per_s: float, utilization: float) -> float:
    return float(capacity.cost_from_rate(usd_per_hour * num_accelerators, tokens_per_s, utilization))


_COST = Task(
    "05/cost",
    "USD per million tokens",
    _cost,
    rows(
        "usd_per_hour num_accelerators tokens_per_s utilization",
        (1.89, 1, 2350.0, 0.6),
        (2.97, 4, 9120.0, 0.35),
        (0.43, 1, 71.0, 1.0),
        (3.79, 8, 17_300.0, 0.52),
        (0.17, 2, 38.5, 0.08),
    ),
    {
        "idle time left out: it is paid for, and makes no tokens": lambda price, count, rate, share: _cost(
            price, count, rate, 1.0
        ),
        "multiplied by the utilization; idle time makes a token dearer, not cheaper": (
            lambda price, count, rate, share: _cost(price, count, rate, 1.0) * share
        ),
        "one accelerator's price; all of them are paid for": lambda price, count, rate, share: _cost(
            price, 1, rate, share
        ),
        "the rate taken times the accelerators; it is that of all together": lambda price, count, rate, share: _cost(
            price, 1, rate * count, share
        ),
        "3,600 times too much: the price is per hour, the rate per second": lambda *g: 3600 * _cost(*g),
        "one token; a million are asked for": lambda *g: _cost(*g) / 1e6,
        "a thousand tokens; a million are asked for": lambda *g: _cost(*g) / 1e3,
        "upside down: tokens for a dollar, not dollars for tokens": lambda *g: 1e6 / _cost(*g),
    },
    "USD",
)

_Deployments = Sequence[Mapping[str, float]]


def _per_correct(deployment: Mapping[str, float]) -> float:
    usd, tokens = deployment["usd_per_million_tokens"], deployment["tokens_per_answer"]
    return float(capacity.cost_per_correct_answer(usd, tokens, deployment["accuracy"]))


def _per_answer(deployment: Mapping[str, float]) -> float:
    return _per_correct(deployment) * deployment["accuracy"]


def _cheapest(
    key: Callable[[Mapping[str, float]], float], cost: Callable[[Mapping[str, float]], float] = _per_correct
) -> Callable[[_Deployments, float], tuple[int, float]]:
    """Of those that are accurate enough the one with the smallest `key`, and its cost."""

    def choose(deployments: _Deployments, min_accuracy: float) -> tuple[int, float]:
        enough = [i for i, deployment in enumerate(deployments) if deployment["accuracy"] >= min_accuracy]
        best = min(enough, key=lambda i: key(deployments[i]))
        return best, cost(deployments[best])

    return choose


_adopt = _cheapest(_per_correct)


def _deployments(*measured: tuple[float, float, float]) -> tuple[dict[str, float], ...]:
    return rows("usd_per_million_tokens tokens_per_answer accuracy", *measured)


_ADOPT = Task(
    "05/adopt",
    "the place (from 0) of the deployment to adopt, and its USD per correct answer",
    _adopt,
    rows(
        "deployments min_accuracy",
        (_deployments((0.62, 410, 0.83), (0.31, 395, 0.47)), 0.4),
        (_deployments((0.62, 410, 0.83), (0.55, 395, 0.62)), 0.5),
        (_deployments((0.27, 380, 0.58), (0.44, 352, 0.77), (0.71, 344, 0.86)), 0.75),  # the cheapest is not enough
        (_deployments((0.52, 880, 0.79), (0.93, 260, 0.81), (0.38, 905, 0.64)), 0.6),  # the dearest token wins
    ),
    {
        "the required accuracy left out: cheap answers that nobody can use": lambda deployments, least: _adopt(
            deployments, 0.0
        ),
        "the cheapest token; what counts is what a correct answer costs": _cheapest(
            lambda d: d["usd_per_million_tokens"]
        ),
        "chosen by the cost of an answer; wrong answers are paid for as well": _cheapest(_per_answer),
        "the cost of an answer, right or wrong; wrong ones are paid for as well": _cheapest(_per_answer, _per_answer),
        "chosen well, but the cost is that of any answer; divide by the share that is right": _cheapest(
            _per_correct, _per_answer
        ),
        "multiplied by the accuracy; fewer right answers make each of them dearer": _cheapest(
            lambda d: _per_answer(d) * d["accuracy"], lambda d: _per_answer(d) * d["accuracy"]
        ),
        "the most accurate; among those that are accurate enough, cost decides": _cheapest(lambda d: -d["accuracy"]),
        "the dearest": _cheapest(lambda d: -_per_correct(d)),
        "the price per million tokens taken as that of one": lambda *g: (_adopt(*g)[0], 1e6 * _adopt(*g)[1]),
        "counted from 1; in Python the first has place 0": lambda *g: (_adopt(*g)[0] + 1, _adopt(*g)[1]),
        "the two values the other way round: the place first": lambda *g: _adopt(*g)[::-1],
    },
    parts=("place", "USD per correct answer"),
)


def _speculate(acceptance: float, draft_tokens: int, draft_share: float, check_share: float) -> tuple[float, float]:
    tokens = speculative.expected_tokens(acceptance, draft_tokens)
    found = speculative.Speculation(tokens, draft_tokens * draft_share, check_share, plain_step_s=1.0)
    return found.expected_tokens, found.speedup


def _times_slip(round_s: Callable[[int, float, float], float]) -> Callable[..., tuple[float, float]]:
    """The right tokens over another time of the round (from drafts, a draft's share and the check's)."""

    def slip(acceptance: float, *g: Any) -> tuple[float, float]:
        tokens = speculative.expected_tokens(acceptance, g[0])
        return tokens, tokens / round_s(*g)

    return slip


def _tokens_slip(tokens: Callable[[float, int], float]) -> Callable[..., tuple[float, float]]:
    return lambda a, g, draft, check: (tokens(a, g), tokens(a, g) / (g * draft + check))


_SPECULATE = Task(
    "05/speculative",
    "the tokens that a round yields on average, and how many times as fast that is as plain decoding",
    _speculate,
    rows(
        "acceptance draft_tokens draft_share check_share",
        (0.8, 4, 0.05, 1.0),
        (0.65, 3, 0.12, 1.15),
        (0.72, 6, 0.06, 3.9),  # a busy machine: the check takes long, and it does not pay
        (0.0, 2, 0.08, 1.0),  # no draft is ever kept
        (1.0, 5, 0.04, 1.07),  # every draft is
    ),
    {
        "the check's own token is missing: it makes one even where no draft is kept": _tokens_slip(
            lambda a, g: speculative.expected_tokens(a, g) - 1
        ),
        "each draft by itself; after the first that is refused, all later ones are lost": _tokens_slip(
            lambda a, g: 1 + a * g
        ),
        "all drafts kept; each is kept with the chance that is given": _tokens_slip(lambda a, g: g + 1),
        "one draft too few": _tokens_slip(lambda a, g: speculative.expected_tokens(a, g - 1)),
        "one draft too many": _tokens_slip(lambda a, g: speculative.expected_tokens(a, g + 1)),
        "one draft step a round; each drafted token takes one": _times_slip(lambda g, draft, check: draft + check),
        "the time of the drafts is missing": _times_slip(lambda g, draft, check: check),
        "the time of the check is missing": _times_slip(lambda g, draft, check: g * draft),
        "a check as long as a plain step; check_share says how long it takes": _times_slip(
            lambda g, draft, check: g * draft + 1
        ),
        "upside down: above 1 should mean faster": lambda *g: (_speculate(*g)[0], 1 / _speculate(*g)[1]),
    },
    parts=("tokens", "times faster"),
)


def _on_tightest(usable_bytes: float, taken_bytes: Sequence[float], kv_bytes_per_token: float) -> int:
    left = min(_left(usable_bytes, 1.0, taken) for taken in taken_bytes)
    return int(max(0.0, left) * len(taken_bytes) // kv_bytes_per_token)


def _pooled_slip(left: Callable[[float, Sequence[float]], float]) -> Callable[..., int]:
    """Take the bytes left on all GPUs together to be something else, never below 0."""
    return lambda usable, taken, per_token: int(max(0.0, left(usable, taken)) // per_token)


_POOLED = Task(
    "05/pooled",
    "the tokens that the cache holds, as a whole number; 0 if nothing is left for it",
    _on_tightest,
    rows(
        "usable_bytes taken_bytes kv_bytes_per_token",
        (21.6e9, (8.7e9, 9.4e9), 131_072),
        (72.1e9, (37.9e9, 37.2e9, 37.2e9, 37.3e9), 327_680),
        (14.4e9, (16.2e9, 15.9e9), 131_072),  # does not fit
        (43.3e9, (17.7e9,), 147_456),
    ),
    {
        "what one GPU holds taken off the memory of all; each of them holds that much": _pooled_slip(
            lambda usable, taken: len(taken) * usable - taken[0]
        ),
        "all GPUs added up; they keep the same requests, so the one with the least left decides": _pooled_slip(
            lambda usable, taken: sum(usable - size for size in taken)
        ),
        "the first GPU; the one with the least left decides": _pooled_slip(
            lambda usable, taken: len(taken) * (usable - taken[0])
        ),
        "one GPU's bytes and a whole token; each GPU keeps its share of every token": _pooled_slip(
            lambda usable, taken: usable - max(taken)
        ),
        "the share of a token taken twice": _pooled_slip(lambda usable, taken: len(taken) ** 2 * (usable - max(taken))),
        "a number below 0: where nothing is left, 0 tokens fit": lambda usable, taken, per_token: int(
            len(taken) * (usable - max(taken)) // per_token
        ),
    },
    "token",
)


TASKS = (_FIT, _READ, _COST, _ADOPT, _SPECULATE, _POOLED)
