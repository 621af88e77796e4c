"""A load test of any server with an OpenAI-compatible interface: `load_test`, or `python -m lessonlib.lab.load_test`.

TTFT is the time from sending a request to its first token: connecting, queue and prefill. ITL is every gap between
two arrivals of one request, so that its percentiles are over gaps; TPOT is one request's mean over the tokens after
the first, so that its percentiles are over requests. End to end = TTFT + (output tokens - 1) x TPOT.
"""

import asyncio
import datetime
import math
import os
import platform
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from tqdm.auto import tqdm

import lessonlib
from lessonlib.checks import check_choice, check_count, check_lengths, check_number
from lessonlib.lab.load_test.client import (
    PATHS,
    Api,
    ApiName,
    Request,
    closed_loop,
    in_background,
    make_prompt,
    open_loop,
)
from lessonlib.lab.load_test.results import LoadResult, LoadTest, Served, level_text
from lessonlib.lab.machine import processor_name

__all__ = ["LoadResult", "LoadTest", "Served", "load_test"]

COMMAND = ("python", "-m", "lessonlib.lab.load_test")
CLIENTS = (1, 2, 4, 8)
PROMPT_LEN, OUTPUT_LEN, TIMEOUT_S = 64, 32, 60.0
KEY_ENV = "OPENAI_API_KEY"
FEWEST, PER_CLIENT, SPAN_S = 8, 4, 15  # requests of a level: at least, for each client, or for so long at a rate
FRESH_WORDS = 3  # of a prompt

Lengths = int | Sequence[int]


def load_test(
    url: str,
    clients: Sequence[int] = CLIENTS,
    *,
    rates_per_s: Sequence[float] | None = None,
    api: ApiName = "completions",
    model: str | None = None,
    prompt_len: Lengths = PROMPT_LEN,
    output_len: Lengths = OUTPUT_LEN,
    requests: int | None = None,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    api_key_env: str | None = KEY_ENV,
    show_progress: bool = True,
) -> LoadTest:
    """Load the server at `url` level by level, and note when every token arrives.

    At each level so many `clients` send their next request as soon as their last is answered; or, with `rates_per_s`
    instead, requests arrive by themselves, so many a second on average, at random times (Poisson). A level has
    `requests` requests; by default 4 for each client, or 15 seconds' worth, but at least 8.

    Prompts have about `prompt_len` tokens. Answers have `output_len` where the server knows `ignore_eos`, as llama.cpp
    and vLLM do; others may end earlier, which is no failure. Either length is a number, or (lowest, highest) between
    which each request's own is drawn. `seed` fixes lengths, arrivals and prompts, but for a prompt's first words: they
    are new every time, so that no server has it in its cache. `api` is "completions" or "chat", and `model`, if left
    out, the first that the server names.

    A request that is refused, breaks off, brings something else than tokens or is not done after `timeout_s` seconds
    has failed; it is counted with its reason, not raised. When nothing answers any more, the rest fails at once. So a
    level takes at most `timeout_s` for each request that one client makes, or after the last arrival.

    `api_key_env` is the name of the environment variable that holds the server's key. If there is a key, it is sent to
    `url`, and neither shown nor kept. None sends none.

    Interrupting it (Ctrl-C, or a notebook's stop button) returns what has been measured, marked as `interrupted`;
    before the first request is done it raises KeyboardInterrupt. Raises ConnectionError if at the beginning nothing
    answers at `url` as it should, and ValueError for what is out of range.
    """
    server = Api(url, check_choice("api", api, tuple(PATHS)), model, api_key_env)
    settings: dict[str, Any] = {
        "prompt_len": _check_range("prompt_len", prompt_len),
        "output_len": _check_range("output_len", output_len),
        "requests": None if requests is None else check_count("requests", requests),
        "seed": check_count("seed", seed, 0),
        "timeout_s": check_number("timeout_s", timeout_s, exclusive=True),
    }
    if rates_per_s is None:
        loads: list[tuple[int | None, float | None]] = [(n, None) for n in check_lengths("clients", clients).tolist()]
    else:
        loads = [(None, check_number("rates_per_s", rate, exclusive=True)) for rate in rates_per_s]
    if not loads:
        raise ValueError("rates_per_s must hold at least one number of requests per second, or be None")
    processor = f"{processor_name()}, {os.cpu_count()} cores, on which the clients ran"
    levels = [_plan(*load, number, settings) for number, load in enumerate(loads)]
    total = sum(len(level.requests) for level in levels)
    with tqdm(total=total, unit="request", miniters=0, disable=not show_progress, leave=False) as bar:

        def show() -> None:
            bar.set_description(next((level.name for level in levels if not level.wall_s), "done"), refresh=False)
            bar.set_postfix_str(f"{server.pieces:,} tokens so far", refresh=False)
            bar.update(sum(len(level.served) for level in levels) - bar.n)

        interrupted = False
        try:
            in_background(_serve(server, levels, timeout_s), show)
        except KeyboardInterrupt:
            interrupted = True
            if not any(level.served for level in levels):
                raise
    done = [LoadResult(x.clients, x.wall_s, tuple(x.served), x.rate_per_s) for x in levels if x.served and x.wall_s]
    numbers, rates = zip(*loads, strict=True)
    options: dict[str, Any] = {"clients": numbers} if rates_per_s is None else {"rates": rates}
    options |= {"api": api, "model": model and server.model_name, **settings}
    options |= {} if api_key_env == KEY_ENV else {"api_key_env": api_key_env or ""}
    provenance = {
        "what": "load test of a server with an OpenAI-compatible interface; all times in seconds",
        "server": server.host,
        "model": server.model_name,
        "api": api,
        **settings,
        "left_out": list(server.dropped),
        "command": _command({"url": server.url, **options}),
        "processor": processor,
        "versions": f"Python {platform.python_version()}, httpx {httpx.__version__}, lessonlib {lessonlib.__version__}",
        "date": datetime.date.today().isoformat(),
    }
    return LoadTest(tuple(done), provenance, interrupted)


@dataclass
class _Level:
    """One level of load: what is asked, and what has become of it so far."""

    clients: int | None
    rate_per_s: float | None
    requests: list[Request]
    arrival_s: np.ndarray
    served: list[Served] = field(default_factory=list)
    wall_s: float = 0.0
    """how long it took; 0 until it has ended"""

    @property
    def name(self) -> str:
        return level_text(self.clients, self.rate_per_s)


def _plan(clients: int | None, rate_per_s: float | None, number: int, settings: dict[str, Any]) -> _Level:
    """The requests of a level. Those of another begin with the same lengths and gaps, so that only the load differs."""
    count = settings["requests"] or max(FEWEST, PER_CLIENT * (clients or 0), math.ceil(SPAN_S * (rate_per_s or 0)))
    seed = settings["seed"]

    def draw(part: int, name: str) -> np.ndarray:
        lowest, highest = np.broadcast_to(settings[name], 2)
        return np.random.default_rng((seed, part)).integers(lowest, highest, count, endpoint=True)

    words, fresh = np.random.default_rng((seed, 3, number)), np.random.default_rng()
    asked = []
    for prompt_len, output_len in zip(draw(0, "prompt_len"), draw(1, "output_len"), strict=True):
        num_fresh = min(FRESH_WORDS, prompt_len)
        prompt = [make_prompt(fresh, num_fresh), make_prompt(words, prompt_len - num_fresh)]
        asked.append(Request(" ".join(prompt).strip(), int(output_len)))
    gaps = np.random.default_rng((seed, 2)).exponential(1 / (rate_per_s or 1), count)
    return _Level(clients, rate_per_s, asked, np.cumsum(gaps) - gaps[0])


async def _serve(server: Api, levels: Sequence[_Level], timeout_s: float) -> None:
    async with server.client() as client:
        await server.warm_up(client, timeout_s)
        for level in levels:
            await _serve_level(server, client, level, timeout_s)


async def _serve_level(server: Api, client: httpx.AsyncClient, level: _Level, timeout_s: float) -> None:
    start_s = time.perf_counter()

    async def ask(request: Request) -> None:
        if server.gone:
            level.served.append(server.not_sent(start_s))
        else:
            deadline = asyncio.get_running_loop().time() + timeout_s
            level.served.append(await server.ask(client, request, start_s, deadline))

    try:
        if level.clients is not None:
            await closed_loop(ask, level.requests, level.clients)
        else:
            await open_loop(ask, level.requests, level.arrival_s, hurry=lambda: bool(server.gone))
    finally:
        level.wall_s = time.perf_counter() - start_s


def _command(options: Mapping[str, Any]) -> str:
    """What does the same again."""
    words = [*COMMAND]
    for name, value in options.items():
        if value is not None:
            values = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
            words += [f"--{name.replace('_', '-')}", *(f"{v:g}" if isinstance(v, float) else str(v) for v in values)]
    return shlex.join(words)


def _check_range(name: str, value: object) -> int | list[int]:
    """A length, or the lowest and the highest."""
    if not isinstance(value, tuple | list):
        return check_count(name, value)
    lengths = [check_count(name, length) for length in value]
    if len(lengths) != 2 or lengths[0] > lengths[1]:
        raise ValueError(f"{name} must be a number of tokens, or the lowest and the highest, got {value!r}")
    return lengths
