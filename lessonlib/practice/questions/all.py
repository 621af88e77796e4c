"""The eight practice questions: numbers, prompt, answers, wrong answers, hints and working, all computed.

`QUESTIONS["q3"]` carries the course's own numbers, `QUESTIONS["q3"].variant(7)` the same question with others. A
part is named by its question and a letter, "q3.b"; the question's name alone, "q3", means its last part, to which
the others lead. Nothing is typed in that the library can compute.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np

from lessonlib import batching, capacity, kv_cache, latency, quantization, roofline
from lessonlib.accelerators import Accelerator
from lessonlib.checks import check_choice, check_count
from lessonlib.models import ModelConfig, effective_bits, get_model
from lessonlib.practice.predictions import show_value
from lessonlib.units import fmt

Answer = float | str | tuple[int, ...]
Slip = tuple[Answer, str]
LARGEST_TOLERANCE = 0.02
CLOSE_CALL = 0.05  # a "which of the two" whose sides are nearer than this is not asked
_EXACT = 1e-9  # floating-point noise, for answers that are whole numbers


@dataclass(frozen=True)
class Mistake:
    """A plausible wrong answer, in the unit of its part, and what it means."""

    value: Answer
    meaning: str


@dataclass(frozen=True)
class Part:
    """One thing asked: a number in `unit` (a pint unit), one of the words of `choices`, or a row of whole numbers."""

    id: str
    ask: str
    answer: Answer
    unit: str = ""
    tolerance: float = LARGEST_TOLERANCE
    """relative; 0 for a whole number, which must be exact"""
    unit_optional: bool = False
    """whether `ask` fixes the unit, so that a bare number will do"""
    per: str = ""
    """what may follow the unit: "524,288 bytes per token" """
    choices: Mapping[str, str] = field(default_factory=dict)
    """word -> the choice it stands for"""
    close_call: bool = False
    """whether the two sides of a choice are too near each other to be asked about"""
    mistakes: tuple[Mistake, ...] = ()

    @property
    def shown(self) -> str:
        """The answer as the course prints it, with its unit."""
        return show_answer(self.answer, self.unit, exact=self.tolerance == 0)

    @property
    def form(self) -> str:
        """What to type, in a few words."""
        if isinstance(self.answer, str):
            return f"one word: {' or '.join(dict.fromkeys(self.choices.values()))}"
        if isinstance(self.answer, tuple):
            return f"{len(self.answer)} whole numbers with spaces between"
        if self.tolerance == 0:
            return "a whole number"
        examples = {"byte": "3 GB or 3 GiB", "percent": "12.3 %", "USD": "1.23 USD"}
        return f"a number, such as {examples[self.unit]}" if self.unit in examples else "a number"

    @property
    def is_clear(self) -> bool:
        """Whether the right answer and each wrong one can be told apart."""
        values = [self.answer, *(mistake.value for mistake in self.mistakes)]
        if self.unit == "percent":  # a bare 0.5 may mean 50 %
            values += [100 * value for value in values if isinstance(value, (int, float)) and value <= 1]
        return not self.close_call and all(_differ(a, b, self.tolerance) for a, b in combinations(values, 2))


@dataclass(frozen=True)
class Question:
    """A question with its numbers (`parameters`), its parts, a ladder of hints and the working, step by step."""

    id: str
    title: str
    parameters: Mapping[str, Any]
    """quantities carry their unit in their name"""
    prompt: str
    parts: tuple[Part, ...]
    hints: tuple[str, ...]
    working: tuple[str, ...]
    seed: int | None = None
    """None: the course's own numbers"""

    def variant(self, seed: int | None) -> "Question":
        """The same question with the numbers drawn for `seed` (None: the course's own). Raises ValueError below 0."""
        return get_question(self.id, seed)

    def __repr__(self) -> str:
        numbers = "the course's numbers" if self.seed is None else f"variant {self.seed}"
        return f"Question {self.id}: {self.title} ({len(self.parts)} answers, {numbers})"


def show_answer(value: Answer, unit: str = "", exact: bool = False) -> str:
    """An answer as the course prints it: 2.147 GB (2 GiB), 470 steps, memory, 1 0 -1."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if unit == "byte" and abs(value) >= 1024:
        size = f"{value:,.0f} bytes" if exact else fmt(value, "B")
        return f"{size} ({fmt(value, 'B', binary=True)})"
    return fmt(value, "steps") if unit == "step" else show_value(value, unit)


def _differ(a: Answer, b: Answer, tolerance: float) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) > max(tolerance, _EXACT) * max(abs(a), abs(b))
    return a != b


# --- how a part is written ------------------------------------------------------------------------------------------


def _number(ask: str, answer: float, unit: str, wrong: Iterable[Slip], per: str = "") -> Part:
    """A number within 2 %. A size needs its unit, for GB and GiB differ; elsewhere `ask` fixes the unit."""
    return Part("", ask, float(answer), unit, unit_optional=unit != "byte", per=per, mistakes=_merge(wrong))


def _whole(ask: str, answer: float, unit: str, wrong: Iterable[Slip], per: str = "") -> Part:
    """A whole number, which must be exact."""
    part = _number(ask, round(answer), unit, wrong, per)
    return dataclasses.replace(part, tolerance=0, unit_optional=True)


def _codes(ask: str, answer: Iterable[int], wrong: Iterable[Slip]) -> Part:
    return Part("", ask, tuple(answer), mistakes=_merge(wrong))


def _word(ask: str, answer: str, choices: Mapping[str, str], meaning: str, sides: tuple[float, float]) -> Part:
    """A choice between two words, settled by comparing two `sides`; `meaning` says why the other word is wrong."""
    wrong = [Mistake(choice, meaning) for choice in dict.fromkeys(choices.values()) if choice != answer]
    close_call = not _differ(*sides, CLOSE_CALL)
    return Part("", ask, answer, choices=choices, close_call=close_call, mistakes=tuple(wrong))


def _merge(wrong: Iterable[Slip]) -> tuple[Mistake, ...]:
    """Two slips that lead to the same value are one wrong answer with two possible meanings."""
    merged: dict[str, Mistake] = {}
    for value, meaning in wrong:
        key = f"{value:.9g}" if isinstance(value, (int, float)) else str(value)
        first = merged.get(key)
        merged[key] = Mistake(first.value, f"{first.meaning} Or: {meaning}") if first else Mistake(value, meaning)
    return tuple(merged.values())


_BOUND = {"memory": "memory", "bandwidth": "memory", "compute": "compute", "arithmetic": "compute"}
_YES_NO = {"yes": "yes", "y": "yes", "fits": "yes", "no": "no", "n": "no"}
_A_OR_B = {"a": "A", "b": "B"}


# --- 1: one token through a 7B model --------------------------------------------------------------------------------


def _accelerator(p: Mapping[str, Any]) -> Accelerator:
    peak, bandwidth = p["peak_flops_per_s"], p["bandwidth_bytes_per_s"]
    return Accelerator(key="", name="", memory_bandwidth=bandwidth, peak_flops={"bf16": peak})


def _draw_accelerator(rng: random.Random, ridges: tuple[int, ...]) -> dict[str, float]:
    """Rates whose ridge is a whole number of FLOP/byte."""
    bandwidth_tb = rng.choice((0.8, 1.0, 1.2, 1.6, 2.4, 3.2, 4.0, 4.8))
    peak_tflops = round(rng.choice(ridges) * bandwidth_tb, 6)
    return {"peak_flops_per_s": round(peak_tflops * 1e12), "bandwidth_bytes_per_s": round(bandwidth_tb * 1e12)}


def _draw_1(rng: random.Random) -> dict[str, Any]:
    return {
        "parameters": rng.choice((1.5e9, 3e9, 8e9, 13e9, 32e9, 70e9)),
        "bytes_per_weight": rng.choice((2, 4)),
        "batch_size": rng.choice((1, 1, 8, 32, 512, 1024)),
        **_draw_accelerator(rng, (75, 100, 120, 150, 180, 200, 300, 400)),
    }


def _build_1(p: Mapping[str, Any]) -> dict[str, Any]:
    params, size, batch, accelerator = p["parameters"], p["bytes_per_weight"], p["batch_size"], _accelerator(p)
    peak, bandwidth = accelerator.peak(), accelerator.memory_bandwidth
    flops, weight_bytes = 2 * params * batch, params * size
    intensity, ridge = roofline.arithmetic_intensity(flops, weight_bytes), roofline.ridge_point(accelerator)
    bound = roofline.bound_by(intensity, accelerator)
    step = latency.step_time(flops, weight_bytes, 0, 0, peak, bandwidth, tokens=batch)
    rate = step.tokens_per_s
    if bound == "memory":
        wrong_rates = [
            (batch / step.compute_s, "That is the limit of the arithmetic alone; reading the weights takes longer."),
            (rate * size, f"One byte was read for each weight; each has {size}."),
            (rate / 8, f"Bits were taken for bytes: a weight of {8 * size} bits has {size} bytes."),
        ]
    else:
        wrong_rates = [
            (batch / step.weights_s, "That is the limit of the memory alone; the arithmetic takes longer."),
            (rate * 2, "Twice: a multiply and an add are two FLOPs, or the peak is the one with sparsity."),
        ]
    wrong_intensities = [
        (intensity / 2, "Half: a multiply and an add are two FLOPs, not one (MACs for FLOPs)."),
        (intensity * size, f"The bytes are missing: each weight is {size} bytes, not one."),
        (intensity / 8, f"Bits were taken for bytes: a weight of {8 * size} bits has {size} bytes."),
    ]
    wrong_ridges = [
        (ridge * 2, "Twice: the peak with sparsity, which a language model cannot use."),
        (ridge / 2, "Half: MACs for FLOPs, or 4-byte weights (the ridge belongs to the machine alone)."),
        (1 / ridge, "Upside down: it is FLOP/s divided by bytes/s."),
    ]
    if batch > 1:
        wrong_intensities.append((intensity / batch, f"That is a batch of one: each byte serves {batch} requests."))
        wrong_rates.append((rate / batch, f"That is one request's share; the step makes {batch} tokens."))
    side = "below" if bound == "memory" else "above"
    where = " over the whole batch" if batch > 1 else ""
    flops_text, bytes_text = fmt(flops, "FLOP"), fmt(weight_bytes, "B")
    return {
        "prompt": f"A dense model with {params / 1e9:g} billion parameters and {size}-byte weights decodes "
        f"{f'a batch of {batch:,} requests' if batch > 1 else 'one request'}. The accelerator does "
        f"{fmt(peak, 'FLOP/s')} and reads {fmt(bandwidth, 'B/s')}. Leave the KV cache out.",
        "parts": [
            _number("The arithmetic intensity of a step, in FLOP/byte", intensity, "FLOP/byte", wrong_intensities),
            _number("The ridge point of the accelerator, in FLOP/byte", ridge, "FLOP/byte", wrong_ridges),
            _word(
                "What bounds the step: memory or compute?",
                bound,
                _BOUND,
                f"Compare the two: an intensity {side} the ridge.",
                (intensity, ridge),
            ),
            _number(f"The most tokens per second{where}, in tokens/s", rate, "token/s", wrong_rates),
        ],
        "hints": (
            "Every weight is read once a step, and used in one multiply and one add for each request.",
            "Intensity = FLOPs / bytes of the step. Ridge = FLOP/s / bytes/s of the machine.",
            "A step takes the longer of its reading time and its arithmetic time.",
        ),
        "working": (
            f"FLOPs of a step: 2 × {params / 1e9:g} billion × {batch} = {flops_text} (a multiply and an add each).",
            f"Bytes of a step: {params / 1e9:g} billion × {size} = {bytes_text} (every weight is read once).",
            f"Intensity: {flops_text} / {bytes_text} = {fmt(intensity, 'FLOP/B')}.",
            f"Ridge: {fmt(peak, 'FLOP/s')} / {fmt(bandwidth, 'B/s')} = {fmt(ridge, 'FLOP/B')}.",
            f"{fmt(intensity)} is {side} {fmt(ridge)}: {bound} bound.",
            f"Reading takes {bytes_text} / {fmt(bandwidth, 'B/s')} = {fmt(step.weights_s, 's')}, the arithmetic "
            f"{flops_text} / {fmt(peak, 'FLOP/s')} = {fmt(step.compute_s, 's')}; the step takes the longer of the two.",
            f"Tokens: {batch} / {fmt(step.total_s, 's')} = {fmt(rate, 'tokens/s')}.",
        ),
    }


# --- 2: the critical batch, and what ends first ---------------------------------------------------------------------


def _draw_2(rng: random.Random) -> dict[str, Any]:
    return {
        **_draw_accelerator(rng, (80, 100, 120, 140, 160, 200, 240, 300)),
        "model": rng.choice(("llama-2-7b", "llama-3.1-8b", "qwen3-8b", "qwen2.5-7b", "llama-3.2-3b", "llama-2-13b")),
        "context_tokens": rng.choice((1024, 2048, 4096, 8192)),
        "memory_bytes": rng.choice((40e9, 48e9, 80e9, 141e9, 192e9)),
    }


def _build_2(p: Mapping[str, Any]) -> dict[str, Any]:
    accelerator, model, context, memory = _accelerator(p), get_model(p["model"]), p["context_tokens"], p["memory_bytes"]
    ridge = roofline.ridge_point(accelerator)
    critical = {bits: roofline.critical_batch_size(accelerator, bits) for bits in (16, 8, 4)}
    billions, weight_bytes = f"{model.num_parameters / 1e9:.4g} billion", model.weight_bytes(16)
    left = memory - weight_bytes
    one_request = kv_cache.cache_bytes(model, context)
    fit = kv_cache.requests_that_fit(model, left, context)
    first = "memory" if fit < critical[16] else "compute"
    wrong_fits: list[Slip] = [
        (fit + 1, "Rounded up: the last one fits only in part."),
        (memory // one_request, "The weights were not taken off the memory first."),
        ((memory * 1.024**3 - weight_bytes) // one_request, "GiB for GB: the memory is given in units of 10^9 bytes."),
        (left // (one_request / 2), "K or V was forgotten: a token keeps both."),
    ]
    if model.num_kv_heads < model.num_heads:
        all_heads = kv_cache.cache_bytes(kv_cache.attention_variants(model)["MHA"], context)
        wrong_fits.append((left // all_heads, "Query heads were counted: only the KV heads are kept."))

    def wrong_batches(bits: int) -> list[Slip]:
        batch = critical[bits]
        wrong: list[Slip] = []
        if bits < 16:
            wrong.append((critical[16], f"That is for 16 bits; {bits}-bit weights are fewer bytes."))
            wrong.append(
                (ridge * 16 / bits, "The wrong way round: with fewer bytes to read, fewer requests are enough.")
            )
        wrong.append((2 * batch, "Twice: a weight serves two FLOPs, a multiply and an add (or: the sparse peak)."))
        wrong.append((batch / 2, "Half: check the bytes of a weight, and count a multiply and an add as two FLOPs."))
        return wrong

    return {
        "prompt": f"An accelerator does {fmt(p['peak_flops_per_s'], 'FLOP/s')} in 16 bits and reads "
        f"{fmt(p['bandwidth_bytes_per_s'], 'B/s')}; weights of fewer bits are widened first. Which batch brings "
        f"decode to the ridge, the KV cache left out? Then put {model.name} with 16-bit weights and cache on "
        f"{fmt(memory, 'B')} (GB = 10^9 bytes): {billions} parameters, {_shape(model)}; each request holds "
        f"{context:,} tokens.",
        "parts": [
            *(
                _whole(
                    f"The batch that reaches the ridge with {bits}-bit weights", batch, "request", wrong_batches(bits)
                )
                for bits, batch in critical.items()
            ),
            _whole("How many whole requests fit beside the weights?", fit, "request", wrong_fits),
            _word(
                "Which limit comes first as the batch grows, memory or compute (the ridge at 16 bits)?",
                first,
                _BOUND,
                "Compare how many requests fit with the batch that reaches the ridge: the smaller number comes first.",
                (fit, critical[16]),
            ),
        ],
        "hints": (
            "A batch of B does 2 × B FLOPs with each weight that it reads.",
            "Set 2 × B / (bytes per weight) equal to the ridge and solve for B.",
            "Requests that fit = (memory - weights) / (tokens × KV bytes per token), rounded down.",
        ),
        "working": (
            f"Ridge: {fmt(p['peak_flops_per_s'], 'FLOP/s')} / {fmt(p['bandwidth_bytes_per_s'], 'B/s')} = "
            f"{fmt(ridge, 'FLOP/B')}.",
            "A batch of B has an intensity of 2 × B / (bytes per weight), so B = ridge × bytes per weight / 2.",
            *(
                f"{bits}-bit weights: {fmt(ridge)} × {bits / 8:g} / 2 = {fmt(batch)} requests."
                for bits, batch in critical.items()
            ),
            f"Weights: {billions} × 2 = {fmt(weight_bytes, 'B')}, which leaves {fmt(left, 'B')}.",
            f"A request: {context:,} tokens × {kv_cache.bytes_per_token(model):,.0f} bytes = {fmt(one_request, 'B')}.",
            f"{fmt(left, 'B')} / {fmt(one_request, 'B')} = {left / one_request:,.2f}: {fit:,} whole requests.",
            f"{fit:,} is {'below' if first == 'memory' else 'above'} {fmt(critical[16])}: {first} comes first.",
        ),
    }


def _shape(model: ModelConfig) -> str:
    if model.kv_lora_rank:
        return (
            f"{model.num_layers} layers of MLA, which keep one vector of {model.kv_lora_rank} + "
            f"{model.qk_rope_head_dim} (rope) values for each token"
        )
    kind = (
        f"{model.num_layers} layers, {model.num_heads} query heads, {model.num_kv_heads} KV heads of {model.head_dim}"
    )
    return f"{kind} ({model.attention_kind})"


# --- 3: the KV cache of two models ----------------------------------------------------------------------------------


def kv_mistakes(model: ModelConfig, kv_bits: float = 16, num_tokens: int = 1) -> tuple[Mistake, ...]:
    """The usual wrong answers for the KV cache of `num_tokens` tokens of any model, in bytes, with their meanings."""
    return _merge(_kv_slips(model, kv_bits, num_tokens))


def _kv_slips(model: ModelConfig, kv_bits: float, num_tokens: int = 1) -> list[Slip]:
    right = kv_cache.bytes_per_token(model, kv_bits) * num_tokens
    heads, kv_heads, rank, rope = model.num_heads, model.num_kv_heads, model.kv_lora_rank, model.qk_rope_head_dim
    wrong: list[Slip] = []
    if rank:
        wrong += [
            (
                2 * right * rank / (rank + rope),
                "A factor 2 and no rope part: MLA's one vector is key and value at once.",
            ),
            (2 * right, "Twice: MLA keeps one vector that is key and value at once."),
            (right * rank / (rank + rope), "The rope part is missing: it is kept beside the compressed vector."),
        ]
    else:
        wrong.append((right / 2, "Half: K or V was forgotten; a token keeps a key and a value."))
        if heads > kv_heads:
            times = heads // kv_heads
            wrong.append((times * right, f"{times} times: query heads for KV heads; only the KV heads are kept."))
        if heads * model.head_dim != model.hidden_size:
            derived = right * model.hidden_size / (heads * model.head_dim)
            wrong.append((derived, "The head size was derived from the hidden size; this model states its own."))
        wrong.append((2 * right, f"Twice: {kv_bits:g} bits are {kv_bits / 8:g} bytes; or K and V were counted twice."))
    wrong.append((8 * right, "Eight times: bits for bytes."))
    wrong.append((right / model.num_layers, f"That is one layer; the model has {model.num_layers}."))
    return wrong


_MHA_MODELS = ("llama-2-7b", "llama-2-13b", "opt-13b", "pythia-1.4b", "smollm2-1.7b")
_OTHER_MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b", "qwen2.5-7b", "qwen2.5-0.5b", "qwen3-8b",
    "qwen3-32b", "qwen3-0.6b", "smollm2-135m", "tinyllama-1.1b", "phi-4", "deepseek-v3",
)  # fmt: skip


def _draw_3(rng: random.Random) -> dict[str, Any]:
    return {
        "first": rng.choice(_MHA_MODELS),
        "second": rng.choice(_OTHER_MODELS),
        "tokens": rng.choice((1000, 2048, 8000, 8192, 16_384, 32_768)),
        "kv_bits": rng.choice((8, 16, 16)),
    }


def _build_3(p: Mapping[str, Any]) -> dict[str, Any]:
    models, tokens, kv_bits = [get_model(p["first"]), get_model(p["second"])], p["tokens"], p["kv_bits"]
    per_token = [kv_cache.bytes_per_token(model, kv_bits) for model in models]
    caches = [kv_cache.cache_bytes(model, tokens, kv_bits=kv_bits) for model in models]
    return {
        "prompt": f"Keys and values are kept in {kv_bits} bits. {models[0].name}: {_shape(models[0])}, hidden size "
        f"{models[0].hidden_size:,}. {models[1].name}: {_shape(models[1])}, hidden size {models[1].hidden_size:,}.",
        "parts": [
            *(
                _whole(
                    f"How many bytes of KV cache does one token of {model.name} take?",
                    size,
                    "byte",
                    _kv_slips(model, kv_bits),
                    per="token",
                )
                for model, size in zip(models, per_token, strict=True)
            ),
            *(
                _number(
                    f"How much do {tokens:,} tokens of {model.name} take? Give the unit, such as GB or GiB",
                    cache,
                    "byte",
                    [*_kv_slips(model, kv_bits, tokens), (cache / tokens, f"That is one token; there are {tokens:,}.")],
                )
                for model, cache in zip(models, caches, strict=True)
            ),
        ],
        "hints": (
            "Each layer keeps something for each token. What, how many numbers, and how many bytes each?",
            "With heads: 2 (K and V) × layers × KV heads × head size × bytes per number.",
            "Query heads share KV heads and leave nothing in the cache. MLA keeps one vector, so no factor 2.",
        ),
        "working": (
            *(
                f"{model.name}: {_kv_product(model)} × {kv_bits / 8:g} = {size:,.0f} bytes per token "
                f"({fmt(size, 'B', binary=True)})."
                for model, size in zip(models, per_token, strict=True)
            ),
            *(
                f"{tokens:,} tokens of {model.name}: {tokens:,} × {size:,.0f} = {show_answer(cache, 'byte')}."
                for model, size, cache in zip(models, per_token, caches, strict=True)
            ),
            f"{models[0].name} takes {fmt(caches[0] / caches[1], '', 3)} times as much as {models[1].name}.",
        ),
    }


def _kv_product(model: ModelConfig) -> str:
    if model.kv_lora_rank:
        return f"{model.num_layers} layers × ({model.kv_lora_rank} + {model.qk_rope_head_dim})"
    return f"2 × {model.num_layers} layers × {model.num_kv_heads} KV heads × {model.head_dim}"


# --- 4: FLOPs with and without a cache ------------------------------------------------------------------------------


def _draw_4(rng: random.Random) -> dict[str, Any]:
    return {
        "prompt_tokens": rng.choice((64, 128, 256, 384, 512, 768, 1024)),
        "output_tokens": rng.choice((64, 100, 128, 200, 256, 400, 512)),
        "hidden_size": rng.choice((128, 256, 384, 512, 768, 1024)),
    }


def _build_4(p: Mapping[str, Any]) -> dict[str, Any]:
    prompt, output, hidden = p["prompt_tokens"], p["output_tokens"], p["hidden_size"]
    last = prompt + output - 1
    cached, uncached = (kv_cache.generation_flops(prompt, output, hidden, use_cache) for use_cache in (True, False))

    def fixed(context: int, use_cache: bool) -> float:
        return output * kv_cache.step_flops(context, hidden, use_cache)

    half = "Half: a multiply and an add are two FLOPs (MACs for FLOPs)."
    at_start = f"Every step was taken at {prompt:,} tokens; the context grows with each new one."
    at_end = f"Every step was taken at {last:,} tokens; only the last one has so many."
    ratio = uncached / cached
    wrong_cached = [
        (cached / 2, half),
        (fixed(0, True), "The attention to the cached tokens is missing: 4td in each step."),
        (fixed(prompt, True), at_start),
        (fixed(last, True), at_end),
        (uncached, "That is without a cache."),
    ]
    wrong_uncached = [
        (uncached / 2, f"{half} Or: only K or only V was projected again."),
        (fixed(prompt, False), at_start),
        (fixed(last, False), at_end),
        (uncached + (uncached - cached) / 2, "Old queries were projected again too; nobody asks for those."),
        (cached, "That is with a cache."),
    ]
    wrong_ratios = [
        (1 / ratio, "Upside down: without divided by with."),
        (fixed(prompt, False) / fixed(prompt, True), at_start),
        (fixed(last, False) / fixed(last, True), at_end),
    ]
    return {
        "prompt": f"One attention block of width d = {hidden:,} has {prompt:,} tokens before it and generates "
        f"{output:,} more. A step at context t projects the new token's query, key and value (3 × 2d²) and attends to "
        f"the t tokens (4td). Without a cache it also projects their keys and values again (4td²). Sum over "
        f"t = {prompt:,} to {last:,}.",
        "parts": [
            _number("FLOPs with a cache", cached, "FLOP", wrong_cached),
            _number("FLOPs without a cache", uncached, "FLOP", wrong_uncached),
            _number("How many times as many FLOPs without a cache as with one?", ratio, "", wrong_ratios),
        ],
        "hints": (
            "Write down the FLOPs of one step at context t, with a cache and without.",
            f"Then add them up: t takes the {output:,} values from {prompt:,} to {last:,}.",
            "The sum of t is (number of steps) × (first + last) / 2.",
        ),
        "working": (
            f"Sum of t from {prompt:,} to {last:,}: {output:,} × ({prompt:,} + {last:,}) / 2 = "
            f"{output * (prompt + last) // 2:,}.",
            f"Projections of the new tokens: {output:,} × 6d² = {fmt(fixed(0, True), 'FLOP')}.",
            f"Attention: 4d × sum of t = {fmt(cached - fixed(0, True), 'FLOP')}.",
            f"With a cache: the two together, {cached:,.0f} FLOPs = {fmt(cached, 'FLOP')}.",
            f"Projected again without a cache: 4d² × sum of t = {fmt(uncached - cached, 'FLOP')}.",
            f"Without a cache: {uncached:,.0f} FLOPs = {fmt(uncached, 'FLOP')}.",
            f"Ratio: {fmt(uncached, 'FLOP')} / {fmt(cached, 'FLOP')} = {fmt(ratio)}.",
        ),
    }


# --- 5: bytes of the weights, and whether they fit ------------------------------------------------------------------


def _draw_5(rng: random.Random) -> dict[str, Any]:
    return {
        "parameters": rng.choice((3e9, 8e9, 13e9, 14e9, 32e9)),
        "group_size": rng.choice((32, 64, 128)),
        "memory_bytes": rng.choice((4e9, 6e9, 8e9, 12e9, 16e9, 24e9)),
        "context_tokens": rng.choice((2048, 4096, 8192, 16_384, 32_768)),
        "gqa": "llama-3.1-8b",
        "mha": "llama-2-7b",
    }


def _build_5(p: Mapping[str, Any]) -> dict[str, Any]:
    params, group, memory, context = p["parameters"], p["group_size"], p["memory_bytes"], p["context_tokens"]
    billions = f"{params / 1e9:g} billion"
    sizes = {bits: params * effective_bits(bits) / 8 for bits in (32, 16, 8, 4)}
    names = {32: "FP32", 16: "FP16", 8: "INT8", 4: "INT4"}
    grouped_bits = effective_bits(4, group)
    grouped = params * grouped_bits / 8
    models = [get_model(p["gqa"]), get_model(p["mha"])]
    totals = [grouped + kv_cache.cache_bytes(model, context) for model in models]
    answers = ["yes" if total <= memory else "no" for total in totals]
    wrong_grouped = [
        (sizes[4], f"The scales are missing: 16 bits for every {group} weights."),
        (params * (4 + 16) / 8, f"A scale for every weight; one serves {group}."),
        (params * effective_bits(4, group, 128) / 8, "The scale was taken as 16 bytes; it has 16 bits."),
        (grouped * 8, "Bits for bytes: a byte has 8 bits."),
    ]

    def wrong_sizes(bits: int) -> list[Slip]:
        near = [other for other in (2 * bits, bits // 2) if other in sizes]
        wrong = [(sizes[other], f"That is {names[other]}; {names[bits]} takes {bits} bits a weight.") for other in near]
        return [*wrong, (8 * sizes[bits], "Bits for bytes: a byte has 8 bits.")]

    return {
        "prompt": f"A model has {billions} parameters. In INT4, each group of {group} weights shares one 16-bit scale. "
        f"The memory is {fmt(memory, 'B')}; say GB (10^9 bytes) or GiB (2^30). The cache is 16-bit, of one request.",
        "parts": [
            *(
                _number(f"The size in {names[bits]}, without scales", sizes[bits], "byte", wrong_sizes(bits))
                for bits in sizes
            ),
            _number(f"The size in INT4 with the scales of groups of {group}", grouped, "byte", wrong_grouped),
            *(
                _word(
                    f"Does that fit in {fmt(memory, 'B')} beside the cache of {context:,} tokens, yes or no? "
                    f"Its layers are like those of {model.name}: {_shape(model)}",
                    answer,
                    _YES_NO,
                    f"Add them up: weights with scales {fmt(grouped, 'B')}, cache {fmt(total - grouped, 'B')}.",
                    (total, memory),
                )
                for model, total, answer in zip(models, totals, answers, strict=True)
            ),
        ],
        "hints": (
            "Bytes = parameters × bits / 8.",
            f"A scale of 16 bits for {group} weights adds 16 / {group} bits to each.",
            "The cache: 2 × layers × KV heads × head size × 2 bytes for each token (question 3).",
        ),
        "working": (
            *(f"{names[bits]}: {billions} × {bits} / 8 = {show_answer(size, 'byte')}." for bits, size in sizes.items()),
            f"With scales a weight takes 4 + 16 / {group} = {grouped_bits:g} bits: {show_answer(grouped, 'byte')}.",
            *(
                f"With the cache of {model.name}'s shape: {fmt(grouped, 'B')} + {fmt(total - grouped, 'B')} = "
                f"{fmt(total, 'B')}, of {fmt(memory, 'B')}: {answer}."
                for model, total, answer in zip(models, totals, answers, strict=True)
            ),
        ),
    }


# --- 6: eight weights and a large neighbor --------------------------------------------------------------------------


def _draw_6(rng: random.Random) -> dict[str, Any]:
    scale, factor = rng.choice((0.004, 0.005, 0.01, 0.02)), rng.choice((50, 100, 200))
    codes = [rng.choice((-127, 127))]
    while len(codes) < 8:
        code = rng.choice((-1, 1)) * rng.randint(4, 126)
        if abs(abs(code / factor) % 1 - 0.5) > 0.03:  # no code per tensor hangs on a tie
            codes.append(code)
    row = [codes[0] * scale] + [(code + rng.choice((-0.4, -0.3, -0.2, 0.2, 0.3, 0.4))) * scale for code in codes[1:]]
    rng.shuffle(row)
    return {"row": tuple(round(weight, 6) for weight in row), "factor": factor, "bits": 8}


_WHERE = ("both rows", "each row")


def _build_6(p: Mapping[str, Any]) -> dict[str, Any]:
    row, factor, bits = np.array(p["row"]), p["factor"], p["bits"]
    matrix, largest_code = np.stack([row, factor * row]), 2 ** (bits - 1) - 1
    tensor, channel = (quantization.quantize(matrix, bits, granularity) for granularity in ("tensor", "channel"))
    scales = [float(quantized.scale[0, 0]) for quantized in (tensor, channel)]
    codes = [tuple(int(code) for code in quantized.codes[0]) for quantized in (tensor, channel)]
    errors = [100 * quantization.mean_relative_error(row, q.dequantize()[0]) for q in (tensor, channel)]
    both_rows = 100 * quantization.mean_relative_error(matrix, tensor.dequantize())
    truncated = [np.trunc(row / scale + np.sign(row) * _EXACT).astype(int) for scale in scales]
    parts = [
        _codes(
            f"The {len(row)} codes of row 1 with one scale for {where}",
            code,
            [
                (tuple(cut.tolist()), "Cut off instead of rounded to the nearest."),
                (other, f"Those are the codes with one scale for {elsewhere}."),
                (tuple(-c for c in code), "The signs are the wrong way round."),
                (tuple(abs(c) for c in code), "The signs are missing."),
            ],
        )
        for code, other, cut, where, elsewhere in zip(
            codes, reversed(codes), truncated, _WHERE, reversed(_WHERE), strict=True
        )
    ]
    for index, where in enumerate(_WHERE):
        back = [code * scales[index] for code in codes[index]]
        relative = np.abs(row - back) / np.abs(row)
        wrong: list[Slip] = [
            (errors[1 - index], f"That is with one scale for {_WHERE[1 - index]}."),
            (100 * float(relative.max()), "That is the largest error; the mean is asked for."),
            (
                100 * float(np.abs(row - back).sum() / np.abs(row).sum()),
                "Errors were added up first: divide each by its own weight, then average.",
            ),
            (
                100 * quantization.mean_relative_error(row, truncated[index] * scales[index]),
                "The codes were cut off instead of rounded to the nearest.",
            ),
        ]
        if index == 0:
            wrong.append((both_rows, "That is the mean over both rows; row 1 alone is asked for."))
        ask = f"The mean relative error of row 1 with one scale for {where}, in percent"
        parts.append(_number(ask, errors[index], "percent", wrong))
    weights = ", ".join(f"{weight:g}" for weight in row)
    return {
        "prompt": f"Row 1 of a matrix is {weights}. Row 2 is {factor} times row 1. Quantize to {bits} bits, symmetric: "
        f"scale = largest |weight| / {largest_code}, code = weight / scale, rounded to the nearest. The relative error "
        "of a weight w that comes back as w' is |w - w'| / |w|.",
        "parts": parts,
        "hints": (
            "Find the largest |weight| that shares the scale, and divide it by the largest code.",
            f"With one scale for both rows, row 2 sets it: it is {factor} times as large as row 1 needs.",
            "Go back with w' = code × scale. A weight whose code is 0 has lost all: its relative error is 100 %.",
        ),
        "working": (
            *(
                line
                for where, weights_shared, scale, code, error in zip(
                    _WHERE, (matrix, row), scales, codes, errors, strict=True
                )
                for line in (
                    f"One scale for {where}: {fmt(np.abs(weights_shared).max())} / {largest_code} = {fmt(scale)}.",
                    f"Codes of row 1: {show_answer(code)}.",
                    f"Back again: {', '.join(fmt(c * scale) for c in code)}.",
                    f"Mean relative error of row 1: {fmt(error, '%')}.",
                )
            ),
            f"A scale of its own makes row 1's error {fmt(errors[0] / errors[1], '', 3)} times smaller.",
        ),
    }


# --- 7: static and continuous batching ------------------------------------------------------------------------------


def _draw_7(rng: random.Random) -> dict[str, Any]:
    lengths = [rng.choice((rng.randint(2, 25), rng.randint(2, 25), rng.randint(40, 220))) for _ in range(16)]
    return {"output_tokens": tuple(lengths), "lanes": rng.choice((2, 3, 4, 5))}


def _build_7(p: Mapping[str, Any]) -> dict[str, Any]:
    lengths, lanes = p["output_tokens"], p["lanes"]
    static, continuous = timelines = [
        batching.simulate(lengths, lanes, "static"),
        batching.simulate(lengths, lanes, "continuous"),
    ]
    tokens, perfect = sum(lengths), -(-sum(lengths) // lanes)
    batches = [lengths[i : i + lanes] for i in range(0, len(lengths), lanes)]
    shares = [100 * timeline.utilization for timeline in (static, continuous)]
    per_batch = 100 * float(np.mean([sum(batch) / (lanes * max(batch)) for batch in batches]))
    parts = []
    policies = ("static", "continuous")
    for name, other_name, timeline, other, share, other_share in zip(
        policies, policies[::-1], timelines, timelines[::-1], shares, shares[::-1], strict=True
    ):
        wrong_steps: list[Slip] = [
            (other.steps, f"That is {other_name} batching."),
            (tokens, "That is one request after the other, in a single lane."),
            (perfect, f"All tokens divided by {lanes} lanes: that needs every lane busy to the very end."),
        ]
        wrong_shares: list[Slip] = [
            (other_share, f"That is {other_name} batching."),
            (100 - share, "That is the idle share."),
            (share * lanes, f"The lanes are missing: {lanes} lanes × steps could have made tokens."),
        ]
        if name == "static":
            wrong_steps.append((max(lengths), "That is the longest request alone; each batch has its own."))
            wrong_shares.append((per_batch, "An average over the batches: a long batch counts for more steps."))
        parts += [
            _whole(f"Steps with {name} batching", timeline.steps, "step", wrong_steps),
            _number(f"Share of lane-steps used with {name} batching, in percent", share, "percent", wrong_shares),
        ]
    longest = [max(batch) for batch in batches]
    return {
        "prompt": f"{len(lengths)} requests wait for {lanes} lanes; a step gives each running request one token. They "
        f"generate {', '.join(map(str, lengths))} tokens, in that order. Static: {lanes} at a time, and the next "
        f"{lanes} start when all have ended. Continuous: a lane that ends takes the next request at once.",
        "parts": parts,
        "hints": (
            "A static batch takes as many steps as its longest request.",
            "Continuous: keep a count for each lane; the next request goes to the lane that is free first.",
            "Used share = all tokens / (lanes × steps).",
        ),
        "working": (
            f"All tokens: {tokens:,}.",
            f"Static: the longest of each batch, {' + '.join(map(str, longest))} = {static.steps:,} steps.",
            f"Static: {tokens:,} / ({lanes} × {static.steps:,}) = {fmt(shares[0], '%')} used.",
            f"Continuous: the last lane ends after {continuous.steps:,} steps (the longest request alone takes "
            f"{max(lengths):,}, a perfect packing {perfect:,}).",
            f"Continuous: {tokens:,} / ({lanes} × {continuous.steps:,}) = {fmt(shares[1], '%')} used.",
            f"{fmt(static.steps / continuous.steps, '', 3)} times fewer steps for the same tokens.",
        ),
    }


# --- 8: two deployments ---------------------------------------------------------------------------------------------


def _draw_8(rng: random.Random) -> dict[str, Any]:
    def deployment(name: str, best: int) -> dict[str, Any]:
        return {
            f"{name}_tokens_per_s": rng.randrange(400, 3000, 50),
            f"{name}_usd_per_hour": round(rng.uniform(0.8, 4.0), 2),
            f"{name}_accuracy": rng.randint(best - 25, best) / 100,
        }

    return {"tokens_per_answer": rng.choice((200, 400, 500, 800)), **deployment("a", 90), **deployment("b", 80)}


def _build_8(p: Mapping[str, Any]) -> dict[str, Any]:
    answer_tokens, names = p["tokens_per_answer"], ("A", "B")
    rates, prices, accuracies = (
        [p[f"{name}_{what}"] for name in "ab"] for what in ("tokens_per_s", "usd_per_hour", "accuracy")
    )
    costs = [float(capacity.cost_from_rate(price, rate)) for price, rate in zip(prices, rates, strict=True)]
    per_1000 = [cost * answer_tokens * 1000 / 1e6 for cost in costs]  # answers, right or wrong
    per_correct = [cost / accuracy for cost, accuracy in zip(per_1000, accuracies, strict=True)]
    best = min(range(2), key=per_correct.__getitem__)
    cheaper_tokens = min(range(2), key=costs.__getitem__)
    why = "Compare the cost of correct answers; the smaller one wins."
    if cheaper_tokens != best:
        why = f"{names[cheaper_tokens]}'s tokens are cheaper, but more of its answers are wrong. {why}"

    def wrong_costs(i: int) -> list[Slip]:
        return [
            (costs[1 - i], f"That is {names[1 - i]}."),
            (costs[i] * 3600, "The price is per hour, the speed per second: an hour has 3,600."),
            (costs[i] * 60, "An hour has 3,600 seconds, not 60."),
            (1 / costs[i], "Upside down: those are million tokens for a dollar."),
            (costs[i] / 1e6, "That is one token; a million is asked for."),
        ]

    def wrong_per_correct(i: int) -> list[Slip]:
        return [
            (per_correct[1 - i], f"That is {names[1 - i]}."),
            (per_1000[i], "The accuracy is missing: wrong answers are paid for too."),
            (per_1000[i] * accuracies[i], "Divide by the accuracy: fewer right answers, so each one costs more."),
            (per_1000[i] / (1 - accuracies[i]), "Divided by the share that is wrong, not right."),
            (per_correct[i] / 100, "The accuracy is a share: for 80 % divide by 0.8, not by 80."),
            (per_correct[i] / 1000, "That is one correct answer; 1,000 are asked for."),
        ]

    return {
        "prompt": "Two measured deployments, both always busy. "
        + " ".join(
            f"{name}: {rate:,} tokens/s, {price:.2f} USD per hour, {accuracy:.0%} of the answers to your task right."
            for name, rate, price, accuracy in zip(names, rates, prices, accuracies, strict=True)
        )
        + f" An answer takes {answer_tokens} tokens.",
        "parts": [
            *(
                _number(
                    f"What do a million tokens cost on {name}, in USD?",
                    costs[i],
                    "USD",
                    wrong_costs(i),
                    "million tokens",
                )
                for i, name in enumerate(names)
            ),
            *(
                _number(
                    f"What do 1,000 correct answers cost on {name}, in USD?",
                    per_correct[i],
                    "USD",
                    wrong_per_correct(i),
                    "1,000 correct answers",
                )
                for i, name in enumerate(names)
            ),
            _word("Which one do you adopt, A or B?", names[best], _A_OR_B, why, (per_correct[0], per_correct[1])),
        ],
        "hints": (
            "Tokens in an hour = tokens/s × 3,600. Cost per token = price per hour / tokens in an hour.",
            "An answer costs its tokens. Of 1,000 answers only a share is right: divide by it.",
            "Adopt what makes a correct answer cheaper, not what makes a token cheaper.",
        ),
        "working": (
            *(
                f"{name}: {price:.2f} USD / ({rate:,} × 3,600 tokens) = {fmt(cost, 'USD')} per million tokens."
                for name, price, rate, cost in zip(names, prices, rates, costs, strict=True)
            ),
            *(
                f"{name}: 1,000 answers of {answer_tokens} tokens cost {fmt(paid, 'USD')}, of which {accuracy:.0%} are "
                f"right: {fmt(paid, 'USD')} / {accuracy:g} = {fmt(correct, 'USD')} per 1,000 correct answers."
                for name, paid, accuracy, correct in zip(names, per_1000, accuracies, per_correct, strict=True)
            ),
            f"A correct answer of {names[1 - best]} costs {per_correct[1 - best] / per_correct[best] - 1:.0%} more: "
            f"adopt {names[best]}.",
            "Both sides are measured: check first that the task has enough items to trust the difference in accuracy.",
        ),
    }


# --- the eight ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recipe:
    title: str
    default: Mapping[str, Any]
    draw: Callable[[random.Random], dict[str, Any]]
    build: Callable[[Mapping[str, Any]], dict[str, Any]]


_A100_LIKE = {"peak_flops_per_s": 312e12, "bandwidth_bytes_per_s": 2.0e12}
_RECIPES = {
    "q1": _Recipe(
        "One step of decode",
        {"parameters": 7e9, "bytes_per_weight": 2, "batch_size": 1, **_A100_LIKE},
        _draw_1,
        _build_1,
    ),
    "q2": _Recipe(
        "The batch that fills the machine",
        {**_A100_LIKE, "model": "llama-2-7b", "context_tokens": 2048, "memory_bytes": 80e9},
        _draw_2,
        _build_2,
    ),
    "q3": _Recipe(
        "The KV cache of two models",
        {"first": "llama-2-7b", "second": "llama-3.1-8b", "tokens": 4096, "kv_bits": 16},
        _draw_3,
        _build_3,
    ),
    "q4": _Recipe(
        "What the cache saves", {"prompt_tokens": 256, "output_tokens": 128, "hidden_size": 512}, _draw_4, _build_4
    ),
    "q5": _Recipe(
        "Does it fit?",
        {
            "parameters": 7e9,
            "group_size": 128,
            "memory_bytes": 8e9,
            "context_tokens": 4096,
            "gqa": "llama-3.1-8b",
            "mha": "llama-2-7b",
        },
        _draw_5,
        _build_5,
    ),
    "q6": _Recipe(
        "Eight weights and a large neighbor",
        {"row": (0.734, -0.216, 1.27, -0.583, 0.047, 0.391, -1.018, 0.862), "factor": 100, "bits": 8},
        _draw_6,
        _build_6,
    ),
    "q7": _Recipe("Sixteen requests", {"output_tokens": batching.REFERENCE_LENS, "lanes": 4}, _draw_7, _build_7),
    "q8": _Recipe(
        "Which deployment?",
        {
            "tokens_per_answer": 400,
            "a_tokens_per_s": 1600,
            "a_usd_per_hour": 2.5,
            "a_accuracy": 0.78,
            "b_tokens_per_s": 900,
            "b_usd_per_hour": 1.1,
            "b_accuracy": 0.56,
        },
        _draw_8,
        _build_8,
    ),
}


def _make(question_id: str, parameters: Mapping[str, Any], seed: int | None) -> Question:
    recipe = _RECIPES[question_id]
    body = recipe.build(parameters)
    parts = [
        dataclasses.replace(part, id=f"{question_id}.{letter}")
        for letter, part in zip("abcdefgh", body["parts"], strict=False)
    ]
    return Question(
        question_id, recipe.title, dict(parameters), body["prompt"], tuple(parts), body["hints"], body["working"], seed
    )


@lru_cache(maxsize=64)
def get_question(question_id: str, seed: int | None = None) -> Question:
    """A question by its id, with the course's own numbers or those drawn for `seed`.

    Numbers under which two answers of a part could not be told apart are drawn again. Raises ValueError for an
    unknown id or a seed below 0.
    """
    check_choice("question_id", question_id, _RECIPES)
    if seed is None:
        return _make(question_id, _RECIPES[question_id].default, None)
    rng = random.Random(f"{question_id} {check_count('seed', seed, 0)}")
    while True:
        drawn = _make(question_id, _RECIPES[question_id].draw(rng), seed)
        if all(part.is_clear for part in drawn.parts):
            return drawn


def get_part(part_id: str, seed: int | None = None) -> Part:
    """A part by its id, such as "q3.b"; a question's id means its last part. Raises ValueError for an unknown id."""
    asked = str(part_id).strip().lower()
    question_id, _, letter = asked.partition(".")
    if question_id not in _RECIPES:
        raise ValueError(f"part_id must be one of {', '.join(_RECIPES)}, or a part such as q3.b, got {part_id!r}")
    parts = get_question(question_id, seed).parts
    for part in parts:
        if part.id == asked:
            return part
    if letter:
        raise ValueError(f"part_id must be one of {', '.join(part.id for part in parts)}, got {part_id!r}")
    return parts[-1]


QUESTIONS: dict[str, Question] = {question_id: get_question(question_id) for question_id in _RECIPES}
