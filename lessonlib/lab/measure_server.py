"""Time a running server as its clients see it: tokens per second, TTFT and TPOT, at one client and at several.

Any server with an OpenAI-compatible interface will do. Tokens are streamed, and each one's arrival is noted.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
from tqdm.auto import tqdm

from lessonlib.batching import REFERENCE_LENS
from lessonlib.batching.traffic import check_lengths
from lessonlib.checks import check_count, check_number
from lessonlib.lab.load_test.client import Api, Request, closed_loop, in_background, make_prompt
from lessonlib.lab.load_test.results import LoadResult, Served
from lessonlib.units import fmt


@dataclass(frozen=True, repr=False)
class BatchingResult:
    """The same requests served both ways."""

    static: LoadResult
    continuous: LoadResult

    @property
    def speedup(self) -> float:
        """How many times as long static batching took."""
        return self.static.wall_s / self.continuous.wall_s

    def __repr__(self) -> str:
        failures = self.static.failures + self.continuous.failures
        said = f"static {fmt(self.static.wall_s, 's', 3)}, continuous {fmt(self.continuous.wall_s, 's', 3)}"
        return f"{said}: {self.speedup:.2f} times as fast" + (f", {failures} requests failed" if failures else "")


def measure_clients(
    url: str,
    clients: Sequence[int] = (1, 2, 4, 8),
    prompt_len: int = 32,
    output_len: int = 48,
    requests_per_client: int = 2,
    timeout_s: float = 60,
) -> list[LoadResult]:
    """Serve 1, 2, 4, ... clients, each of which sends its next request as soon as it has all of its last one's tokens.

    Prompts have about `prompt_len` tokens, and the server is asked for exactly `output_len` (it must know
    `ignore_eos`, as llama.cpp and vLLM do). `timeout_s` is the longest that one number of clients may take: a request
    that is not done by then has failed, as has one that the server refuses or breaks off. Failed requests are counted,
    not raised. Raises ConnectionError if nothing answers at `url`, ValueError for what is out of range.
    """
    numbers = check_lengths("clients", clients).tolist()
    check_count("prompt_len", prompt_len)
    check_count("output_len", output_len)
    check_count("requests_per_client", requests_per_client)
    runs = [(number, [[output_len] * (number * requests_per_client)]) for number in numbers]
    return _measure(url, runs, prompt_len, timeout_s, "serving clients")


def measure_batching(
    url: str,
    output_lens: Sequence[int] = REFERENCE_LENS,
    slots: int = 4,
    prompt_len: int = 16,
    timeout_s: float = 90,
) -> BatchingResult:
    """Serve requests of `output_lens` tokens both ways, on a server with at least `slots` slots, and take the time.

    Static: batches of `slots` requests, the next sent when the last token of the whole batch is there. Continuous:
    the next request is sent as soon as a slot is free. Unlike the lanes of `batching.simulate`, the slots that static
    batching leaves empty cost the engine nothing, so that its steps get shorter as a batch thins out.
    Time-outs, failures and errors as in `measure_clients`.
    """
    check_count("slots", slots)
    check_count("prompt_len", prompt_len)
    lens = check_lengths("output_lens", output_lens).tolist()
    batches = [lens[start : start + slots] for start in range(0, len(lens), slots)]
    runs = [(slots, batches), (slots, [lens])]
    static, continuous = _measure(url, runs, prompt_len, timeout_s, "static, then continuous")
    return BatchingResult(static, continuous)


# --- how it is done -------------------------------------------------------------------------------------------------


def _measure(
    url: str, runs: Sequence[tuple[int, Sequence[Sequence[int]]]], prompt_len: int, timeout_s: float, named: str
) -> list[LoadResult]:
    """Each run: a number of clients, and batches of output lengths, each all served before the next begins."""
    check_number("timeout_s", timeout_s, exclusive=True)
    server = Api(url, exact=True)
    total = sum(length for _, batches in runs for batch in batches for length in batch)
    with tqdm(total=total, desc=named, unit="token", leave=False) as bar:

        async def serve() -> list[LoadResult]:
            async with server.client() as client:
                await server.warm_up(client, timeout_s)
                return [await _run(server, client, *run, prompt_len, timeout_s) for run in runs]

        return in_background(serve(), lambda: bar.update(server.pieces - bar.n))


async def _run(
    server: Api,
    client: httpx.AsyncClient,
    clients: int,
    batches: Sequence[Sequence[int]],
    prompt_len: int,
    timeout_s: float,
) -> LoadResult:
    rng = np.random.default_rng()
    start_s = time.perf_counter()
    deadline = asyncio.get_running_loop().time() + timeout_s
    served: list[Served] = []

    async def ask(request: Request) -> None:
        served.append(await server.ask(client, request, start_s, deadline))

    for batch in batches:
        await closed_loop(ask, (Request(make_prompt(rng, prompt_len), length) for length in batch), clients)
    return LoadResult(clients, time.perf_counter() - start_s, tuple(served))
