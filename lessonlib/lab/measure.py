"""Time the real model, and hold the times against the prediction."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

from lessonlib.checks import check_count, check_values
from lessonlib.lab.llama import KVCache, Llama, stream


@dataclass(frozen=True)
class DecodeTime:
    """The median decode step of a batch, with the range of the middle half of the steps."""

    batch_size: int
    context_len: int
    """tokens in each request's cache, on average over the steps"""
    step_s: float
    low_s: float
    high_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole batch."""
        return self.batch_size / self.step_s


@dataclass(frozen=True)
class PrefillTime:
    """The median time of one prompt's prefill, with the fastest and the slowest run."""

    prompt_len: int
    seconds: float
    low_s: float
    high_s: float

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_len / self.seconds


@dataclass(frozen=True)
class Overhead:
    """The constant that predictions lack, and how far the measurements scatter around prediction + constant."""

    seconds: float
    scatter_s: float


def measure_decode(
    model: Llama, batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), context_len: int = 64, steps: int = 25
) -> list[DecodeTime]:
    """Time `steps` decode steps at each batch size, after a prompt of `context_len` tokens each.

    Raises ValueError for a batch, context or number of steps below 1.
    """
    for batch_size in batch_sizes:
        check_count("batch_size", batch_size)
    check_count("context_len", context_len)
    check_count("steps", steps)
    results = []
    with tqdm(total=len(batch_sizes) * steps, desc="decoding", unit="step", leave=False) as bar:
        for batch_size in batch_sizes:
            cache = KVCache(model.config, batch_size, context_len + steps + 1, model.dtype)
            tokens = model(_tokens(model, batch_size, context_len), cache).argmax(dim=-1)
            tokens = model(tokens, cache).argmax(dim=-1)  # warm up
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                tokens = model(tokens, cache).argmax(dim=-1)
                times.append(time.perf_counter() - start)
                bar.update()
            low, median, high = np.percentile(times, [25, 50, 75]).tolist()
            results.append(DecodeTime(batch_size, context_len + 1 + steps // 2, median, low, high))
    return results


def measure_prefill(
    model: Llama, prompt_lens: Sequence[int] = (1, 4, 16, 64, 128, 256, 512), repeats: int = 3
) -> list[PrefillTime]:
    """Time one prompt's prefill at each length. Raises ValueError for a length or a number of repeats below 1."""
    for prompt_len in prompt_lens:
        check_count("prompt_len", prompt_len)
    check_count("repeats", repeats)
    results = []
    with tqdm(total=sum(prompt_lens) * (repeats + 1), desc="prefilling", unit="token", leave=False) as bar:
        for prompt_len in prompt_lens:
            prompt = _tokens(model, 1, prompt_len)

            def prefill(prompt: torch.Tensor = prompt) -> None:
                model(prompt, KVCache(model.config, 1, prompt.shape[1], model.dtype))
                bar.update(prompt.shape[1])

            times = _times(prefill, repeats)
            results.append(PrefillTime(prompt_len, statistics.median(times), min(times), max(times)))
    return results


@dataclass(frozen=True)
class TokenTime:
    """The time of one new token behind `context_len` others, with the fastest and the slowest."""

    context_len: int
    """tokens before the new one, on average over those timed"""
    seconds: float
    low_s: float
    high_s: float


def measure_generation(
    model: Llama,
    context_lens: Sequence[int] = (64, 128, 256, 512, 1024),
    use_cache: bool = True,
    new_tokens: int = 3,
) -> list[TokenTime]:
    """Generate after prompts of these lengths (tokens), with or without a KV cache, and time each new token.

    The first token, which both ways comes from reading the prompt, is made but not timed. Raises ValueError for a
    length or a number of tokens below 1, or beyond the model's context.
    """
    for context_len in context_lens:
        check_count("context_len", context_len)
    check_count("new_tokens", new_tokens)
    if max(context_lens) + new_tokens > model.config.max_context:
        raise ValueError(
            f"context_lens and new_tokens must fit the model's {model.config.max_context} tokens, "
            f"got {max(context_lens)} and {new_tokens}"
        )
    results = []
    named = f"generating {'with' if use_cache else 'without'} a cache"
    with tqdm(total=sum(context_lens) * (new_tokens + 1), desc=named, unit="token of context", leave=False) as bar:
        for context_len in context_lens:
            tokens = stream(model, _tokens(model, 1, context_len).tolist(), use_cache)
            next(tokens)
            bar.update(context_len)
            times = []
            for _ in range(new_tokens):
                start = time.perf_counter()
                next(tokens)
                times.append(time.perf_counter() - start)
                bar.update(context_len)
            middle = context_len + (new_tokens + 1) // 2
            results.append(TokenTime(middle, statistics.median(times), min(times), max(times)))
    return results


def fit_overhead(measured_s: Sequence[float], predicted_s: Sequence[float]) -> Overhead:
    """The constant c for which predicted + c is nearest to the measured times: the mean difference.

    (Least squares with the slope held at 1.) Raises ValueError for lists that are empty, unequal or not finite.
    """
    measured, predicted = check_values("measured_s", measured_s), check_values("predicted_s", predicted_s)
    if measured.shape != predicted.shape or measured.ndim != 1 or not measured.size:
        raise ValueError(
            "measured_s and predicted_s must be lists of one length, at least 1, "
            f"got {measured.size} and {predicted.size}"
        )
    residuals = measured - predicted
    return Overhead(float(residuals.mean()), float(residuals.std()))


def _times(work: Callable[[], None], repeats: int) -> list[float]:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def _tokens(model: Llama, batch_size: int, length: int) -> torch.Tensor:
    """Token ids of no meaning: how long they take does not depend on what they say."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, model.config.vocab_size, (batch_size, length), generator=generator)
