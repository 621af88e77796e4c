"""The asynchronous client of any server with an OpenAI-compatible interface: it streams, and notes each arrival.

Whatever a server does - refuse, hang, die half-way, send rubbish - becomes the error of one request. Nothing that it
sends is evaluated, and of its words only a short piece is kept, without the key.
"""

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
import numpy as np

from lessonlib.checks import LARGEST_WHOLE
from lessonlib.lab.load_test.results import Served


class _FailedError(Exception):
    """A server's answer is not what it should be: the reason and, after a colon, what else there is to say."""


T = TypeVar("T")
ApiName = Literal["completions", "chat"]
PATHS: dict[ApiName, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLL_S = 0.1
LOGGERS = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy")
WARM_UP_LEN = 8  # tokens
SILENCES = 3  # requests in a row that get no answer at all before a server counts as gone
MOST_SHOWN = 200  # characters of what a server says
MOST_BYTES, MOST_BYTES_PER_TOKEN = 2**20, 2**12  # of an answer
OPTIONAL = ("ignore_eos", "stream_options")  # what some servers know and others refuse
REFUSALS = ("HTTP 401", "HTTP 403")
FAILURES = (httpx.HTTPError, httpx.StreamError, OSError, _FailedError)
# One token each in most tokenizers. Nothing depends on what a prompt says, but no prompt is sent twice: a server may
# keep the cache of an earlier one.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend"
)


DONE: dict[str, Any] = {"choices": [{"finish_reason": "[DONE]"}]}  # a stream's last line, in the form of the others


class Request(NamedTuple):
    """What a client asks for: an answer of `output_len` tokens to a prompt."""

    prompt: str
    output_len: int


def make_prompt(rng: np.random.Generator, num_words: int) -> str:
    """A prompt of so many words, which are about as many tokens."""
    return " ".join(rng.choice(WORDS.split(), num_words))


@dataclass
class _Answer:
    """What has come of one answer so far."""

    token_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    finished: bool = False

    def add(self, event: dict[str, Any], now_s: float) -> bool:
        """Take note of an event of the stream; whether it carries text."""
        choices = event.get("choices")
        choices = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
        self.finished |= any(choice.get("finish_reason") for choice in choices)
        for name, kept in (("usage", self.usage), ("timings", self.timings)):
            if isinstance(event.get(name), dict):
                kept.update(event[name])
        if has_text := any(map(_has_text, choices)):
            self.token_s.append(now_s)
        return has_text

    @property
    def engine_s(self) -> tuple[float | None, float | None]:
        """What llama.cpp says it took: from starting on the prompt to the first token, and each further token.

        (Its own time per token divides by all tokens, although the first is there when that clock starts.)
        """
        prompt_ms, rest_ms = _positive(self.timings.get("prompt_ms")), _positive(self.timings.get("predicted_ms"))
        tokens = _positive(self.timings.get("predicted_n"), int) or 0
        return prompt_ms and prompt_ms / 1000, rest_ms / 1000 / (tokens - 1) if rest_ms and tokens > 1 else None


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice carries text, be it of reasoning."""
    delta = choice.get("delta")
    pieces = [choice.get("text")]
    if isinstance(delta, dict):
        pieces += [delta.get(name) for name in ("content", "reasoning_content", "reasoning")]
    return any(isinstance(piece, str) and piece for piece in pieces)


def _positive(value: Any, kind: Any = int | float) -> Any:
    """A number that a server sent; None for anything that is none, or cannot be."""
    return value if isinstance(value, kind) and not isinstance(value, bool) and 0 < value <= LARGEST_WHOLE else None


class Api:
    """One server's completions or chat, streamed.

    With `exact` the server must make just as many tokens as it is asked for (it must know `ignore_eos`, as llama.cpp
    and vLLM do): fewer are a failure. `key_env` names the environment variable that holds the server's key, if any.
    Raises ValueError for what is no server's address, no name of a variable, or no key.
    """

    def __init__(
        self,
        url: str,
        name: ApiName = "completions",
        model: str | None = None,
        key_env: str | None = None,
        exact: bool = False,
    ) -> None:
        self.url = base_url(url)
        self.name, self.exact = name, exact
        self.model = model or ""
        self._key_env, self._key = key_env, read_key(key_env)
        self.dropped: tuple[str, ...] = ()
        """of OPTIONAL, what the server does not take"""
        self.pieces = 0
        """of text that have arrived"""
        self._silences: list[str] = []

    @property
    def host(self) -> str:
        """The server's name or number, and its port."""
        return urlsplit(self.url).netloc

    @property
    def model_name(self) -> str:
        """The model's name, fit to be shown; of a file or folder (so llama.cpp and vLLM name theirs) its last part."""
        return self.show(re.sub(r"^(?:[/~.\\]|[A-Za-z]:).*[/\\](?=.)", "", self.model))

    @property
    def gone(self) -> str:
        """Why the server counts as gone; empty if it does not. A request that it answers brings it back."""
        return self._silences[-1] if len(self._silences) >= SILENCES else ""

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client that opens as many connections as it is asked for; a proxy is not for this machine's own server.

        Each request has a connection of its own: one that is kept open may be closed by the server just when the next
        request is sent on it.
        """
        loggers = [logging.getLogger(name) for name in LOGGERS if self._key]  # which repeat what a server says
        for logger in loggers:
            logger.addFilter(self._is_harmless)
        try:
            async with httpx.AsyncClient(
                timeout=None,
                limits=httpx.Limits(max_keepalive_connections=0),
                trust_env=urlsplit(self.url).hostname not in LOOPBACK,
                headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
            ) as client:
                yield client
        finally:
            for logger in loggers:
                logger.removeFilter(self._is_harmless)

    def _is_harmless(self, record: logging.LogRecord) -> bool:
        return self._key not in record.getMessage()

    async def warm_up(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        """Learn the model's name, and what the server takes. Raises ConnectionError if that does not work."""
        problem = "" if self.model else await self._learn_model(client, timeout_s)
        forms = ((),) if self.exact else ((), *((name,) for name in OPTIONAL), OPTIONAL)
        request = Request(make_prompt(np.random.default_rng(), 4), 1 if self.exact else WARM_UP_LEN)
        for dropped in forms if not problem else ():
            self.dropped = dropped
            deadline = asyncio.get_running_loop().time() + timeout_s
            problem = (await self.ask(client, request, 0, deadline)).error
            if not problem.startswith(("HTTP 400", "HTTP 422")):
                break
        if problem.startswith(REFUSALS):
            raise ConnectionError(f"{self.url} does not let this in: {problem}")
        if problem:
            raise ConnectionError(
                f"no OpenAI-compatible server answers at {self.url} ({problem}): start one, for example "
                "lessonlib.lab.LlamaCppServer(), and pass its url while it is running"
            )
        self.pieces = 0

    async def _learn_model(self, client: httpx.AsyncClient, timeout_s: float) -> str:
        """Take the first model that the server names. The answer is what went wrong, if something did."""
        try:
            async with asyncio.timeout(timeout_s), client.stream("GET", f"{self.url}/v1/models") as response:
                self.model = json.loads(await self._whole(response))["data"][0]["id"]
            if not isinstance(self.model, str) or not self.model:
                raise _FailedError("the model's name in /v1/models must be text")
        except (LookupError, TypeError, ValueError, RecursionError):
            return "there is no list of models at /v1/models"
        except FAILURES as failure:
            return self._said(failure)
        return ""

    async def ask(self, client: httpx.AsyncClient, request: Request, start_s: float, deadline: float) -> Served:
        """Send one request and note when its tokens arrive; a failure is part of the answer."""
        sent_s = time.perf_counter() - start_s
        answer, error = _Answer(), ""
        url, most = self.url + PATHS[self.name], MOST_BYTES + MOST_BYTES_PER_TOKEN * request.output_len
        try:
            async with asyncio.timeout_at(deadline), client.stream("POST", url, json=self._body(request)) as response:
                if not response.is_success:
                    await self._whole(response)  # which raises
                async for event in _events(response, most):
                    if answer.add(event, time.perf_counter() - start_s):
                        self.pieces += 1
                        self._silences.clear()
            self._silences.clear()
        except FAILURES as failure:
            error = self._said(failure)
            if isinstance(failure, httpx.ConnectError | TimeoutError) and not answer.token_s:
                self._silences.append(error)
            else:
                self._silences.clear()
        counted = _positive(answer.usage.get("completion_tokens"), int)
        tokens = counted or len(answer.token_s)
        whole = tokens >= request.output_len or (answer.finished and answer.token_s and not self.exact)
        if not error and not (whole and answer.token_s):
            error = self._too_short(request, answer)
        engine_prompt_s, engine_tpot_s = answer.engine_s
        return Served(
            sent_s=sent_s,
            token_s=tuple(answer.token_s),
            end_s=time.perf_counter() - start_s,
            prompt_tokens=_positive(answer.usage.get("prompt_tokens"), int) or len(request.prompt.split()),
            output_tokens=tokens,
            error=error,
            counted_by="usage" if counted else "pieces",
            engine_prompt_s=engine_prompt_s,
            engine_tpot_s=engine_tpot_s,
        )

    def not_sent(self, start_s: float) -> Served:
        """What becomes of a request to a server that is gone: it fails as the last did that was sent."""
        now_s = time.perf_counter() - start_s
        return Served(now_s, (), now_s, 0, 0, self.gone)

    def _body(self, request: Request) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.name == "chat":
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        return {name: value for name, value in body.items() if name not in self.dropped}

    async def _whole(self, response: httpx.Response) -> bytes:
        """An answer that is not streamed. Raises _FailedError if it says that something is wrong."""
        body = b""
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MOST_BYTES:
                break
        if not response.is_success:
            status, said = f"HTTP {response.status_code}", body.decode("utf-8", "replace")
            if status in REFUSALS and self._key_env:
                advice = "it does not take the key in" if self._key else "it wants a key, set"
                said = f"{advice} the environment variable {self._key_env}. It says: {said}"
            raise _FailedError(f"{status}: {said}")
        return body

    def _too_short(self, request: Request, answer: _Answer) -> str:
        if self.exact:
            return f"it ended before {request.output_len} tokens were made"
        return "cut off: the stream ended too early" if answer.token_s else "no tokens: nothing was streamed"

    def _said(self, error: BaseException) -> str:
        """A failure in words: the reason and, after a colon, what else there is to say."""
        if isinstance(error, TimeoutError | httpx.TimeoutException):
            return "not done in time"
        if isinstance(error, _FailedError):
            return self.show(str(error))
        root = error
        while root.__cause__ or root.__context__:
            root = root.__cause__ or root.__context__ or root
        return self.show(f"{type(error).__name__}: {root}").rstrip(": ")

    def show(self, text: str) -> str:
        """Text that a server had a hand in, fit to be shown: one short line, without the key."""
        if self._key:
            text = text.replace("\\/", "/").replace(self._key, "[key]")  # JSON may hold either form of a slash
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MOST_SHOWN]


async def _events(response: httpx.Response, most_bytes: int) -> AsyncIterator[dict[str, Any]]:
    """The parts of a streamed answer (server-sent events), as they come."""
    async for line in _lines(response, most_bytes):
        kind, _, data = line.partition(":")
        data = data.strip()
        if line.lstrip().startswith(("<", "{")):
            raise _FailedError(f"not a stream: {line}")
        if kind == "error":
            raise _FailedError(f"error event: {data}")
        if kind == "data" and data == "[DONE]":
            yield DONE
            return  # some servers leave the connection open
        if kind == "data":
            yield _event(data)


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise _FailedError(f"not JSON: {data}") from None
    if not isinstance(event, dict):
        raise _FailedError(f"no event: {data}")
    if event.get("error") or event.get("object") == "error":
        raise _FailedError(f"error event: {data}")
    return event


async def _lines(response: httpx.Response, most_bytes: int) -> AsyncIterator[str]:
    """The lines of an answer, split at line feeds only: text may hold the other signs that end a line in Unicode."""
    rest, seen = b"", 0
    async for part in response.aiter_bytes():
        seen += len(part)
        if seen > most_bytes:
            raise _FailedError(f"too long: more than {most_bytes:,} bytes")
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", "replace")


# --- requests side by side, beside a notebook's own event loop ------------------------------------------------------


async def closed_loop(
    ask: Callable[[Request], Coroutine[Any, Any, None]], requests: Iterable[Request], clients: int
) -> None:
    """So many clients, each of which asks the next of all requests as soon as its last one is done."""
    waiting = iter(requests)

    async def keep_asking() -> None:
        for request in waiting:
            await ask(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(keep_asking())


async def open_loop(
    ask: Callable[[Request], Coroutine[Any, Any, None]],
    requests: Iterable[Request],
    arrival_s: Iterable[float],
    hurry: Callable[[], bool],
) -> None:
    """Each request is asked at its time, counted from now, whatever has become of those before; in a hurry, at once."""
    begin_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request, at_s in zip(requests, arrival_s, strict=True):
            while (left_s := begin_s + at_s - time.perf_counter()) > 0 and not hurry():
                await asyncio.sleep(min(left_s, POLL_S))
            group.create_task(ask(request))


def in_background(work: Coroutine[Any, Any, T], show: Callable[[], Any]) -> T:
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


# --- what is typed --------------------------------------------------------------------------------------------------


def base_url(url: str) -> str:
    """The address without a trailing slash or /v1."""
    said = "url must be a server's address such as http://127.0.0.1:8080"
    if isinstance(url, str) and re.search("[@?#]", url):
        raise ValueError(
            f"{said}, without @, ? and #: a key belongs in an environment variable, whose name is given as api_key_env"
        )
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and httpx.URL(url)
    except (ValueError, TypeError, AttributeError, httpx.InvalidURL):
        good = None
    if not good:
        raise ValueError(f"{said}, got {url!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def read_key(name: str | None) -> str:
    """The key in the environment variable of that name; empty if there is none. No message shows it."""
    if name is None:
        return ""
    if not isinstance(name, str) or not re.fullmatch("[A-Z_][A-Z0-9_]*", name):
        raise ValueError(
            "api_key_env must be the name of an environment variable in capitals, such as OPENAI_API_KEY, or None; "
            "what was given is not shown here, since it may be the key itself"
        )
    key = os.environ.get(name, "").strip()
    if not re.fullmatch("[!-~]*", key):
        raise ValueError(f"the environment variable {name} must hold a key: letters, digits and signs without spaces")
    return key
