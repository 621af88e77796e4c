"""Time a running server as its clients see it: tokens per second, TTFT and TPOT, at one client and at several.

Any server with an OpenAI-compatible interface will do. Tokens are streamed, and each one's arrival is noted.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
import numpy as np
from tqdm.auto import tqdm

from lessonlib.batching import REFERENCE_LENS
from lessonlib.checks import check_count, check_number
from lessonlib.traffic import check_lengths
from lessonlib.units import fmt

T = TypeVar("T")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLL_S = 0.1
# One token each in most tokenizers. Nothing depends on what a prompt says, but no prompt is sent twice: a server may
# keep the cache of an earlier one.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend"
)


class Request(NamedTuple):
    """What a client asks for: a prompt of about `prompt_len` tokens (words), and exactly `output_len` tokens."""

    prompt_len: int
    output_len: int


@dataclass(frozen=True)
class Served:
    """What became of one request. Times are in seconds since its run began."""

    sent_s: float
    token_s: tuple[float, ...]
    """when each piece of text arrived: a token, or a few that came at once"""
    end_s: float
    prompt_tokens: int
    output_tokens: int
    error: str = ""
    """why the request failed; empty if it did not"""

    @property
    def ttft_s(self) -> float:
        """Time from sending the request to its first token. Of requests that did not fail only."""
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first. Of requests of two tokens and more that did not fail only."""
        return (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, repr=False)
class LoadResult:
    """All requests of one run, and how long the run took."""

    clients: int
    """requests under way at a time, at most"""
    wall_s: float
    served: tuple[Served, ...]

    @property
    def completed(self) -> list[Served]:
        """The requests that did not fail."""
        return [one for one in self.served if not one.error]

    @property
    def failures(self) -> int:
        """How many requests failed."""
        return len(self.served) - len(self.completed)

    @property
    def errors(self) -> Counter[str]:
        """Why requests failed, and how many for each reason."""
        return Counter(one.error for one in self.served if one.error)

    @property
    def output_tokens(self) -> int:
        """Tokens of the requests that did not fail."""
        return sum(one.output_tokens for one in self.completed)

    @property
    def tokens_per_s(self) -> float:
        """`output_tokens` per second of the run."""
        return self.output_tokens / self.wall_s

    @property
    def ttft_s(self) -> np.ndarray:
        """Time to first token of each request that did not fail."""
        return np.array([one.ttft_s for one in self.completed])

    @property
    def tpot_s(self) -> np.ndarray:
        """Time per output token of each request of two tokens or more that did not fail."""
        return np.array([one.tpot_s for one in self.completed if one.output_tokens > 1])

    def __repr__(self) -> str:
        said = [f"{self.clients} client{'s' if self.clients > 1 else ''}: {fmt(self.tokens_per_s, 'tokens/s', 3)}"]
        if self.completed:
            said.append(f"median TTFT {fmt(float(np.median(self.ttft_s)), 's', 3)}")
        if self.tpot_s.size:
            said.append(f"median TPOT {fmt(float(np.median(self.tpot_s)), 's', 3)}")
        if self.failures:
            said.append(f"{self.failures} of {len(self.served)} requests failed ({'; '.join(self.errors)})")
        return ", ".join(said)


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
    request = Request(check_count("prompt_len", prompt_len), check_count("output_len", output_len))
    check_count("requests_per_client", requests_per_client)
    runs = [[[request] * (number * requests_per_client)] for number in numbers]
    return _measure(url, list(zip(numbers, runs, strict=True)), timeout_s, "serving clients")


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
    requests = [Request(prompt_len, length) for length in check_lengths("output_lens", output_lens).tolist()]
    batches = [requests[start : start + slots] for start in range(0, len(requests), slots)]
    static, continuous = _measure(url, [(slots, batches), (slots, [requests])], timeout_s, "static, then continuous")
    return BatchingResult(static, continuous)


# --- how it is done -------------------------------------------------------------------------------------------------


def _measure(
    url: str, runs: Sequence[tuple[int, Sequence[Sequence[Request]]]], timeout_s: float, named: str
) -> list[LoadResult]:
    """Each run: a number of clients, and batches of requests of which one is all served before the next begins."""
    check_number("timeout_s", timeout_s, exclusive=True)
    api = _Api(url)
    everything = [request for _, batches in runs for batch in batches for request in batch]
    with tqdm(total=sum(r.output_len for r in everything), desc=named, unit="token", leave=False) as bar:

        async def serve() -> list[LoadResult]:
            async with api.client() as client:
                await api.warm_up(client, timeout_s)
                return [await _run(api, client, clients, batches, timeout_s) for clients, batches in runs]

        return _in_background(serve(), lambda: bar.update(api.pieces - bar.n))


async def _run(
    api: "_Api", client: httpx.AsyncClient, clients: int, batches: Sequence[Sequence[Request]], timeout_s: float
) -> LoadResult:
    start_s = time.perf_counter()
    deadline = asyncio.get_running_loop().time() + timeout_s
    served: list[Served] = []

    async def keep_asking(waiting: Iterator[Request]) -> None:
        for request in waiting:  # of all clients' requests, the next
            served.append(await api.ask(client, request, start_s, deadline))

    for batch in batches:
        waiting = iter(batch)
        await asyncio.gather(*(keep_asking(waiting) for _ in range(clients)))
    return LoadResult(clients, time.perf_counter() - start_s, tuple(served))


class _Api:
    """One server's completions, streamed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url) if isinstance(url, str) else None
        if not parts or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be a server's address such as http://127.0.0.1:8080, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.local = parts.hostname in LOOPBACK
        self.model = ""
        self.pieces = 0  # of text that have arrived
        self.rng = np.random.default_rng()

    def client(self) -> httpx.AsyncClient:
        """A client that opens as many connections as it is asked for; a proxy is not for this machine's own server.

        Each request has a connection of its own: one that is kept open may be closed by the server just when the next
        request is sent on it.
        """
        return httpx.AsyncClient(
            timeout=None, limits=httpx.Limits(max_keepalive_connections=0), trust_env=not self.local
        )

    async def warm_up(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        """Learn the model's name and get one token. Raises ConnectionError if that does not work."""
        try:
            answer = await client.get(f"{self.url}/v1/models", timeout=timeout_s)
            self.model = answer.raise_for_status().json()["data"][0]["id"]
            problem = ""
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            problem = _said(error)
        if not problem:
            deadline = asyncio.get_running_loop().time() + timeout_s
            problem = (await self.ask(client, Request(4, 1), 0, deadline)).error
        if problem:
            raise ConnectionError(
                f"no OpenAI-compatible server answers at {self.url} ({problem}): start one, for example "
                "lessonlib.lab.LlamaCppServer(), and pass its url while it is running"
            )
        self.pieces = 0

    async def ask(self, client: httpx.AsyncClient, request: Request, start_s: float, deadline: float) -> Served:
        """Send one request and note when its tokens arrive; a failure is part of the answer."""
        body = {
            "model": self.model,
            "prompt": " ".join(self.rng.choice(WORDS.split(), request.prompt_len)),
            "max_tokens": request.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = time.perf_counter() - start_s
        token_s: list[float] = []
        usage: dict[str, int] = {}
        error = ""
        try:
            async with (
                asyncio.timeout_at(deadline),
                client.stream("POST", f"{self.url}/v1/completions", json=body) as response,
            ):
                if response.is_error:
                    raise _FailedError(f"HTTP {response.status_code}: {(await response.aread())[:200]!r}")
                async for chunk in _chunks(response):
                    if any(choice.get("text") for choice in chunk.get("choices", [])):
                        token_s.append(time.perf_counter() - start_s)
                        self.pieces += 1
                    usage = chunk.get("usage") or usage
            if not token_s or usage.get("completion_tokens", len(token_s)) < request.output_len:
                raise _FailedError(f"it ended before {request.output_len} tokens were made")
        except (httpx.HTTPError, TimeoutError, _FailedError) as failure:
            error = _said(failure)
        return Served(
            sent_s,
            tuple(token_s),
            time.perf_counter() - start_s,
            usage.get("prompt_tokens", request.prompt_len),
            usage.get("completion_tokens", len(token_s)),
            error,
        )


class _FailedError(Exception):
    """A server's answer is not what it should be."""


async def _chunks(response: httpx.Response) -> Any:
    """The parts of a streamed answer (server-sent events), as they come."""
    async for line in response.aiter_lines():
        kind, _, data = line.partition(":")
        if kind == "error" or '"error"' in data[:20]:
            raise _FailedError(data.strip()[:200])
        if kind == "data" and data.strip() != "[DONE]":
            try:
                yield json.loads(data)
            except ValueError:
                raise _FailedError(f"not JSON: {data.strip()[:200]}") from None


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return "not done in time"
    return str(error) if isinstance(error, _FailedError) else f"{type(error).__name__}: {error}".rstrip(": ")


def _in_background(work: Coroutine[Any, Any, T], show: Callable[[], Any]) -> T:
    """Run `work` in a thread of its own, since in a notebook an event loop runs already, and `show` its progress here.

    An interruption here ends it there.
    """
    stopped = threading.Event()

    async def until_stopped() -> T:
        task = asyncio.ensure_future(work)
        while not stopped.is_set():
            await asyncio.wait({task}, timeout=POLL_S)
            if task.done():
                return task.result()
        raise asyncio.CancelledError  # asyncio.run cancels the task

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, until_stopped())
        try:
            while not wait([future], POLL_S).done:
                show()
            show()
            return future.result()
        finally:
            stopped.set()
