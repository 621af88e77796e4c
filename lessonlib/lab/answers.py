"""Ask a running server the course's own questions, and count the right answers: the loss side of a deployment."""

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from tqdm.auto import tqdm

from lessonlib.checks import check_count, check_number
from lessonlib.lab.load_test import KEY_ENV
from lessonlib.lab.load_test.client import LOOPBACK, base_url, read_key
from lessonlib.lab.quality import ClozeItem, load_cloze
from lessonlib.units import fmt


@dataclass(frozen=True, repr=False)
class Answers:
    """What a server answered: for each item whether it was right, and what it took."""

    right: tuple[bool, ...]
    output_tokens: int
    wall_s: float
    errors: Counter[str]
    """why requests failed, and how many for each reason; a failed request is a wrong answer"""

    @property
    def accuracy(self) -> float:
        """The share of items answered right."""
        return sum(self.right) / len(self.right)

    @property
    def accuracy_error(self) -> float:
        """The standard error of `accuracy`, had the items been drawn at random."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / len(self.right))

    @property
    def answers_per_s(self) -> float:
        """Answers per second, right or wrong."""
        return len(self.right) / self.wall_s

    def usd_per_correct(self, usd_per_hour: float) -> float:
        """USD per right answer on a machine of that price, while there is work. Raises ValueError if none was right."""
        if not any(self.right):
            raise ValueError(
                f"at least one answer must be right for a price per right answer, got 0 of {len(self.right)}"
            )
        return check_number("usd_per_hour", usd_per_hour, exclusive=True) / 3600 * self.wall_s / sum(self.right)

    def __repr__(self) -> str:
        said = f"{sum(self.right)} of {len(self.right)} right in {fmt(self.wall_s, 's', 3)}"
        failures = sum(self.errors.values())
        return said + (f", {failures} requests failed ({'; '.join(self.errors)})" if failures else "")


def measure_answers(
    url: str,
    items: Sequence[ClozeItem] | None = None,
    clients: int = 4,
    max_tokens: int = 6,
    timeout_s: float = 60,
    model: str | None = None,
    api_key_env: str | None = KEY_ENV,
) -> Answers:
    """Let a server with OpenAI's completions interface go on from each item's prompt; count where it goes on right.

    Unlike `task_accuracy`, which compares four given endings, this takes what the model says by itself (temperature 0):
    harder, and what a user would see. `items` are those of data/cloze.csv if left out; `clients` ask at a time, and
    each answer may take `timeout_s` seconds. `model` is the server's first if left out; `api_key_env` names the
    environment variable with the server's key, which is not kept. Failed requests are counted, not raised. Raises
    ConnectionError if none succeeds, ValueError for what is out of range.
    """
    chosen = load_cloze() if items is None else list(items)
    check_count("number of items", len(chosen))
    check_count("max_tokens", max_tokens)
    check_number("timeout_s", timeout_s, exclusive=True)
    address, key = base_url(url), read_key(api_key_env)
    right, tokens, errors = [False] * len(chosen), 0, Counter[str]()
    with (
        httpx.Client(
            base_url=address,
            timeout=timeout_s,
            trust_env=urlsplit(address).hostname not in LOOPBACK,  # no proxy between this machine and itself
            headers={"Authorization": f"Bearer {key}"} if key else None,
        ) as client,
        ThreadPoolExecutor(check_count("clients", clients)) as pool,
        tqdm(total=len(chosen), desc="asking", unit="question", leave=False) as bar,
    ):
        body = {"model": model or _first_model(client), "max_tokens": max_tokens, "temperature": 0}
        start = time.perf_counter()
        asked = {pool.submit(_ask, client, {**body, "prompt": item.prompt}): i for i, item in enumerate(chosen)}
        try:
            for done in as_completed(asked):
                text, used, error = done.result()
                right[asked[done]] = is_right(text, chosen[asked[done]].right)
                tokens += used
                errors.update([error] if error else [])
                bar.update()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after an interruption nothing more is asked
        wall_s = time.perf_counter() - start
    if errors.total() == len(chosen):
        raise ConnectionError(
            f"no question was answered at {address} ({errors.most_common(1)[0][0]}): start a server, for example "
            "lessonlib.lab.LlamaCppServer(), and pass its url while it is running"
        )
    return Answers(tuple(right), tokens, wall_s, errors)


@dataclass(frozen=True)
class Difference:
    """The same items answered by two deployments."""

    lost: int
    """items that only the first answered right"""
    won: int
    """items that only the second answered right"""

    @property
    def chance(self) -> float:
        """How likely a split at least as uneven is if both are equally good (the sign test, two-sided)."""
        differing = self.lost + self.won
        uneven = sum(math.comb(differing, k) for k in range(min(self.lost, self.won) + 1))
        return min(1.0, 2 * uneven / 2**differing)


def compare_answers(first: Answers, second: Answers) -> Difference:
    """Where two deployments differ, item by item. Raises ValueError if they were not asked equally many items."""
    if len(first.right) != len(second.right):
        raise ValueError(f"both must answer the same items, got {len(first.right)} and {len(second.right)}")
    pairs = list(zip(first.right, second.right, strict=True))
    return Difference(pairs.count((True, False)), pairs.count((False, True)))


def is_right(text: str, ending: str) -> bool:
    """Whether a text begins with that ending, as whole words and whatever the case."""
    return re.match(rf"\W*{re.escape(ending)}\b", text, re.IGNORECASE) is not None


def _first_model(client: httpx.Client) -> str:
    """The first model that a server names; "" if it names none, which some do not mind."""
    try:
        return str(client.get("/v1/models").json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return ""


def _ask(client: httpx.Client, body: dict[str, Any]) -> tuple[str, int, str]:
    """The text that a prompt is continued by, its tokens, and why there is none."""
    try:
        response = client.post("/v1/completions", json=body)
        if not response.is_success:
            return "", 0, f"HTTP {response.status_code}"
        answer = response.json()
        return str(answer["choices"][0]["text"]), int(answer["usage"]["completion_tokens"]), ""
    except httpx.TimeoutException:
        return "", 0, "not done in time"
    except httpx.HTTPError as error:
        return "", 0, type(error).__name__
    except (ValueError, LookupError, TypeError):
        return "", 0, "not an answer as OpenAI's interface has it"
