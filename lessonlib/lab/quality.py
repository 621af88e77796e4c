"""What quantization costs: the model's weights or KV cache rounded by any scheme, and four measures of what that did.

Everything is measured on one fixed text and one fixed task, both written for this course: data/evaluation.txt, cut
into pieces of 512 tokens of which each begins without a past, and data/cloze.csv. Methods that look at activations see
another text, data/calibration.txt. The embedding, which is the output head too, and the norms stay at 16 bits.
Everything is computed in fp32: a scheme decides which values the weights may have, not how fast they are multiplied
(for that see lessonlib.lab.kernels).
"""

import copy
import csv
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import gguf
import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from lessonlib.checks import check_choice, check_count
from lessonlib.lab.llama import KVCache, Linear, Llama, LlamaConfig
from lessonlib.lab.tokenizer import Tokenizer
from lessonlib.quantization import (
    BITS,
    BLOCK_FORMATS,
    GRANULARITIES,
    SCALE_BITS,
    Granularity,
    awq,
    gptq,
    keep_channels,
    quantize,
    salient_channels,
)

CONTEXT = 512
"""tokens in a piece of the evaluation text"""
CALIBRATION_CONTEXT = 256
UNQUANTIZED_BITS = 16
"""what a value takes that a scheme leaves alone"""
NUM_ALPHAS = 11
"""exponents that AWQ tries, from 0 to 1"""
SALIENT_SHARE = 0.01
SALIENT_SCALE = 2.0
POSITIONS = 64  # whose logits are made at a time: 64 x 49152 x 4 bytes = 13 MB

MATRICES = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
"""a block's linear layers, and the tensors whose rows each of them holds: these have the same input"""

Method = Literal["none", "rtn", "gptq", "awq", "salient", "random", "scale", "same grid"]
METHODS = ("none", "rtn", "gptq", "awq", "salient", "random", "scale", "same grid")
CALIBRATED = ("gptq", "awq", "salient", "random", "scale")


# The text and the task


def load_text(name: Literal["evaluation", "calibration"]) -> str:
    """One of the course's two texts. Raises ValueError for another name."""
    check_choice("name", name, ("evaluation", "calibration"))
    return resources.files("lessonlib.data").joinpath(f"{name}.txt").read_text(encoding="utf-8")


def text_tokens(tokenizer: Tokenizer, name: Literal["evaluation", "calibration"]) -> Tensor:
    """Token ids (n) of one of the two texts."""
    return torch.tensor(tokenizer.encode(load_text(name)))


@dataclass(frozen=True)
class ClozeItem:
    """A beginning, the ending that is right, and some that are wrong. A space joins the two."""

    prompt: str
    right: str
    wrong: tuple[str, ...]

    @property
    def endings(self) -> tuple[str, ...]:
        """All endings, the right one first."""
        return self.right, *self.wrong


def load_cloze() -> list[ClozeItem]:
    """The items of data/cloze.csv."""
    text = resources.files("lessonlib.data").joinpath("cloze.csv").read_text(encoding="utf-8")
    rows = csv.reader(text.splitlines()[1:])
    return [ClozeItem(prompt, right, tuple(filter(None, wrong))) for prompt, right, *wrong in rows]


def data_hash() -> str:
    """The first 16 digits of the SHA-256 of both texts and the task: a measurement is comparable while it is equal."""
    digest = hashlib.sha256()
    for name in ("evaluation.txt", "calibration.txt", "cloze.csv"):
        text = resources.files("lessonlib.data").joinpath(name).read_text(encoding="utf-8")
        digest.update(text.encode())
    return digest.hexdigest()[:16]


# Four measures


@dataclass(frozen=True)
class Quality:
    """How good a model is on the text and on the task, and how near to the reference."""

    perplexity: float
    """per token, on `text` in pieces of `context` tokens: exp of the mean loss of all tokens but each piece's first"""
    start_perplexity: float
    """the same on the first piece only, for a quick comparison"""
    kl_divergence: float
    """nats per token, mean over positions: sum of p log(p / q), p the reference's probabilities and q this model's"""
    top1_agreement: float
    """the share of positions at which the likeliest token is the reference's"""
    task_accuracy: float
    """the share of `num_items` items whose right ending is the likeliest, per byte"""
    num_positions: int
    num_items: int
    context: int
    text: str
    unit: str = "token"

    @property
    def accuracy_error(self) -> float:
        """The standard error of `task_accuracy`, had the items been drawn at random."""
        return math.sqrt(self.task_accuracy * (1 - self.task_accuracy) / self.num_items)


@dataclass(frozen=True, eq=False)
class Reference:
    """What the other models are held against: a text, and what the reference model thinks of it.

    Its probabilities would take 4 bytes x 49152 x tokens, 800 MB. Its last hidden states are 1/85 of that, and the head
    turns them into the same numbers again, a few positions at a time.
    """

    tokens: Tensor
    context: int
    hidden: tuple[Tensor, ...]
    """of each piece (tokens, hidden size): what goes into the head"""
    head: Linear
    items: tuple[ClozeItem, ...]
    tokenizer: Tokenizer
    text: str


def make_reference(
    model: Llama,
    tokenizer: Tokenizer,
    tokens: Tensor | None = None,
    items: tuple[ClozeItem, ...] | None = None,
    context: int = CONTEXT,
) -> Reference:
    """Run the reference model on the text (by default the evaluation text) once, for `measure_quality`."""
    text = "data/evaluation.txt" if tokens is None else "tokens given"
    if tokens is None:
        tokens = text_tokens(tokenizer, "evaluation")
    hidden = tuple(_hidden_states(model, piece[None])[0] for piece in _pieces(tokens, context))
    chosen = tuple(load_cloze()) if items is None else items
    return Reference(tokens, context, hidden, model.head, chosen, tokenizer, text)


def measure_quality(
    model: Llama, reference: Reference, kv_bits: int = UNQUANTIZED_BITS, show_progress: bool = True
) -> Quality:
    """All four measures of `model`, with a KV cache of `kv_bits` (16: as it is), in one pass over text and task.

    Raises ValueError for bits that are neither 16 nor in BITS.
    """
    losses: list[list[Tensor]] = []
    divergences: list[Tensor] = []
    agreements: list[Tensor] = []
    pieces = _pieces(reference.tokens, reference.context)
    with tqdm(total=len(reference.tokens), desc="reading", unit="token", leave=False, disable=not show_progress) as bar:
        for piece, wanted in zip(pieces, reference.hidden, strict=True):
            hidden = _hidden_states(model, piece[None], kv_bits)[0]
            losses.append([])
            for start in range(0, len(piece), POSITIONS):
                stop = start + POSITIONS
                logits = model.head(hidden[start:stop])
                targets = piece[start + 1 : stop + 1]
                losses[-1].append(_loss(logits[: len(targets)], targets))
                divergence, agreement = _compare(reference.head(wanted[start:stop]), logits)
                divergences.append(divergence)
                agreements.append(agreement)
            bar.update(len(piece))
    accuracy = task_accuracy(model, reference.tokenizer, reference.items, kv_bits)
    return Quality(
        perplexity=_exp_mean([part for parts in losses for part in parts]),
        start_perplexity=_exp_mean(losses[0]),
        kl_divergence=float(torch.cat(divergences).double().mean()),
        top1_agreement=float(torch.cat(agreements).double().mean()),
        task_accuracy=accuracy,
        num_positions=len(reference.tokens),
        num_items=len(reference.items),
        context=reference.context,
        text=reference.text,
    )


def perplexity(model: Llama, tokens: Tensor, context: int = CONTEXT, kv_bits: int = UNQUANTIZED_BITS) -> float:
    """exp of the mean loss per token of `tokens` (n), in pieces of `context` tokens that do not see each other.

    Each piece's first token, which has no past, is not counted. Perplexities can be compared only on the same text,
    with the same context and the same tokens. Raises ValueError for a context or a last piece of fewer than 2 tokens.
    """
    losses: list[Tensor] = []
    for piece in _pieces(tokens, context):
        hidden = _hidden_states(model, piece[None], kv_bits)[0]
        losses += _losses(model.head, hidden[:-1], piece[1:])
    return _exp_mean(losses)


def kl_divergence(reference_logits: Tensor, logits: Tensor) -> float:
    """Mean over positions of sum p log(p / q), in nats; both logits (positions, vocabulary)."""
    return float(_compare(*_same_shape(reference_logits, logits))[0].double().mean())


def top1_agreement(reference_logits: Tensor, logits: Tensor) -> float:
    """The share of positions at which both logits (positions, vocabulary) are highest for the same token."""
    return float(_compare(*_same_shape(reference_logits, logits))[1].double().mean())


def log_probabilities(logits: Tensor) -> Tensor:
    """log of the probability of every token (positions, vocabulary), in nats, in single precision.

    PyTorch's log_softmax and cross_entropy sum the vocabulary with a bias that depends on the instructions a processor
    has (of 5e-5 nats where it lacks AVX-512); logsumexp does not.
    """
    logits = logits.float()
    return logits - torch.logsumexp(logits, dim=-1, keepdim=True)


def task_accuracy(
    model: Llama,
    tokenizer: Tokenizer,
    items: tuple[ClozeItem, ...] | None = None,
    kv_bits: int = UNQUANTIZED_BITS,
) -> float:
    """The share of items whose right ending has the highest log-likelihood per byte. A tie counts as wrong."""
    chosen = load_cloze() if items is None else items
    scores = ending_scores(model, tokenizer, tuple(chosen), kv_bits)
    return float(np.mean([right > max(wrong) for right, *wrong in scores]))


def ending_scores(
    model: Llama,
    tokenizer: Tokenizer,
    items: tuple[ClozeItem, ...],
    kv_bits: int = UNQUANTIZED_BITS,
) -> list[list[float]]:
    """For each item the log-likelihood of its endings after its prompt, in nats per byte, the right one first."""
    prompts = [tokenizer.encode(item.prompt) for item in items]
    endings = [[tokenizer.encode(f" {ending}") for ending in item.endings] for item in items]
    by_length: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for prompt, several in zip(prompts, endings, strict=True):
        for ending in several:  # its last token is foretold, never read: endings of one token share the prompt
            by_length[len(prompt) + len(ending) - 1].add((*prompt, *ending[:-1]))
    states: dict[tuple[int, ...], Tensor] = {}
    for texts in by_length.values():
        batch = sorted(texts)
        states |= zip(batch, _hidden_states(model, torch.tensor(batch), kv_bits), strict=True)

    hidden, targets = [], []
    for prompt, several in zip(prompts, endings, strict=True):
        for ending in several:
            hidden.append(states[(*prompt, *ending[:-1])][len(prompt) - 1 :])
            targets.append(torch.tensor(ending))
    losses = torch.cat([*_losses(model.head, torch.cat(hidden), torch.cat(targets))])
    totals = iter([float(part.sum()) for part in losses.split([len(target) for target in targets])])
    return [[-next(totals) / len(f" {ending}".encode()) for ending in item.endings] for item in items]


def _pieces(tokens: Tensor, context: int) -> tuple[Tensor, ...]:
    check_count("context", context, 2)
    if tokens.dim() != 1 or len(tokens) < 2 or len(tokens) % context == 1:
        raise ValueError(f"tokens must be a row whose last piece has 2 or more, got {tuple(tokens.shape)} / {context}")
    return tokens.split(context)


class _NoHead(Linear):
    """In the head's place: hands on what would have gone into it."""

    def __init__(self) -> None:
        pass

    def __call__(self, x: Tensor) -> Tensor:
        return x


def _hidden_states(model: Llama, tokens: Tensor, kv_bits: int = UNQUANTIZED_BITS) -> Tensor:
    """What goes into the head (B, L, E)."""
    body = copy.copy(model)
    body.head = _NoHead()
    cache = None
    if kv_bits != UNQUANTIZED_BITS:
        cache = RoundedKVCache(model.config, tokens.shape[0], tokens.shape[1], kv_bits, model.dtype)
    return body(tokens, cache, all_logits=True)


@torch.inference_mode()
def _losses(head: Linear, hidden: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """-log of the probability of each target, in nats, some positions at a time."""
    for states, wanted in zip(hidden.split(POSITIONS), targets.split(POSITIONS), strict=True):
        yield _loss(head(states), wanted)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return -log_probabilities(logits).gather(-1, targets[:, None])[:, 0]


def _exp_mean(losses: list[Tensor]) -> float:
    return math.exp(float(torch.cat(losses).double().mean()))


def _same_shape(reference_logits: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    if reference_logits.shape != logits.shape or logits.dim() != 2 or not logits.numel():
        raise ValueError(
            "reference_logits and logits must have the same shape (positions, vocabulary), "
            f"got {tuple(reference_logits.shape)} and {tuple(logits.shape)}"
        )
    return reference_logits, logits


@torch.inference_mode()
def _compare(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """KL divergence and top-1 agreement at each position, of two rows of logits."""
    agreement = p.argmax(dim=-1) == q.argmax(dim=-1)
    p, q = log_probabilities(p), log_probabilities(q)
    return (p.exp() * (p - q)).sum(dim=-1), agreement


# The model under a scheme


@dataclass(frozen=True)
class Scheme:
    """How the matrices of the blocks are rounded, and the KV cache.

    method "none": not at all; "rtn": round to nearest; "gptq", "awq"; "same grid": the Q4_1 grid the model is shipped
    on. For the ablation of AWQ's idea, all round to nearest: "salient" keeps the 1 % of input channels with the largest
    activations at 16 bits, "random" another 1 %, "scale" multiplies the salient 1 % by 2 before and divides after.
    Raises ValueError where these do not fit together.
    """

    method: Method = "none"
    bits: int = UNQUANTIZED_BITS
    granularity: Granularity = "channel"
    group_size: int | None = None
    symmetric: bool = False
    kv_bits: int = UNQUANTIZED_BITS
    seed: int = 0
    """of the channels that "random" keeps"""

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("kv_bits", self.kv_bits, (*BITS, UNQUANTIZED_BITS))
        fixed = {"none": UNQUANTIZED_BITS, "same grid": 4}
        if self.method in fixed:
            check_choice(f'bits of method "{self.method}"', self.bits, (fixed[self.method],))
        else:
            check_choice("bits", self.bits, BITS)
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError(
                f'group_size must be given for granularity "group" only, got {self.group_size} for "{self.granularity}"'
            )
        if self.granularity == "tensor" and self.method in ("gptq", "awq"):
            raise ValueError(f'granularity must be "channel" or "group" for {self.method}, got "tensor"')

    @property
    def name(self) -> str:
        """Short, unique and readable: "rtn 4 bits group 64"."""
        parts: list[str] = [self.method]
        if self.method not in ("none", "same grid"):
            parts += [f"{self.bits} bits", self.granularity]
            parts += [str(self.group_size)] if self.group_size else []
            parts += ["symmetric"] if self.symmetric else []
        parts += [f"seed {self.seed}"] if self.method == "random" else []
        parts += [f"KV {self.kv_bits} bits"] if self.kv_bits != UNQUANTIZED_BITS else []
        return "reference" if parts == ["none"] else " ".join(parts).removeprefix("none ")


@dataclass(frozen=True, eq=False)
class QuantizedModel:
    """The model with its matrices rounded, and what these would take."""

    model: Llama
    scheme: Scheme
    matrix_bits: float
    """effective bits per weight of the blocks' matrices, scales and zero points included"""
    effective_bits: float
    """the same over the whole model, whose embedding and norms stay at 16 bits"""
    num_bytes: int
    """of all weights of the model"""
    kv_bits: float
    """effective bits of a value in the KV cache"""


def quantized_model(model: Llama, scheme: Scheme, calibration: Tensor | None = None) -> QuantizedModel:
    """A copy of `model` (fp32) with every matrix of its blocks replaced by its values under `scheme`.

    The copy shares what is not changed: embedding, head, norms. GPTQ, AWQ and the ablation look at the inputs that a
    matrix has on the `calibration` tokens (n, of which whole pieces of 256 are used). All is done in one pass: a matrix
    is rounded at the moment its input arrives, made by the matrices before it, which are rounded already (GPTQ calls
    this true sequential). q, k and v have the same input and are treated as one matrix, as are gate and up.

    AWQ's input scales cost nothing where they can go into the layer before: into the norm for q, k, v, gate and up,
    into the rows of up for down. Before the attention's output they cannot, where query heads share a value head: 16
    bits a channel are counted there. Raises ValueError where a calibration text is needed and too short.
    """
    result = copy.copy(model)
    result.blocks = [copy.copy(block) for block in model.blocks]
    layers = [
        _Rounded(getattr(block, name), name, i, scheme, model.config)
        for i, block in enumerate(result.blocks)
        for name in MATRICES
    ]
    if scheme.method in CALIBRATED:
        if calibration is None or calibration.dim() != 1 or len(calibration) < CALIBRATION_CONTEXT:
            got = None if calibration is None else tuple(calibration.shape)
            raise ValueError(f"calibration must hold {CALIBRATION_CONTEXT} tokens or more, got {got}")
        for layer in layers:
            setattr(result.blocks[layer.index], layer.name, layer)
        whole = len(calibration) // CALIBRATION_CONTEXT * CALIBRATION_CONTEXT
        _hidden_states(result, calibration[:whole].view(-1, CALIBRATION_CONTEXT))
    num_bits = num_weights = 0
    for layer in layers:
        setattr(result.blocks[layer.index], layer.name, layer.finish())
        num_bits += layer.num_bits
        num_weights += layer.weight.numel()
    total = sum(math.prod(shape) for shape in model.config.tensor_shapes().values())
    all_bits = num_bits + (total - num_weights) * UNQUANTIZED_BITS
    kv_bits = effective_kv_bits(scheme.kv_bits, model.config.head_dim)
    return QuantizedModel(result, scheme, num_bits / num_weights, all_bits / total, -(-all_bits // 8), kv_bits)


class _Rounded(Linear):
    """A linear layer that is rounded when its first input arrives, and is an ordinary one from then on."""

    def __init__(self, linear: Linear, name: str, index: int, scheme: Scheme, config: LlamaConfig) -> None:
        self.weight, self.slices = linear.weight, linear.slices
        self.name, self.index, self.scheme = name, index, scheme
        shapes = config.tensor_shapes()
        self.rows = [shapes[f"blk.{index}.{part}.weight"][0] for part in MATRICES[name]]
        self.num_bits = 0
        self.done: Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.finish(x.reshape(-1, x.shape[-1]).numpy())(x)

    def finish(self, samples: np.ndarray | None = None) -> Linear:
        """The rounded layer; `samples` are inputs (tokens, in)."""
        if self.done is None:
            weight = self.weight.numpy()
            values, self.num_bits = _round(weight, self.rows, self.scheme, samples, self.name, self.index)
            changed = values is not weight
            self.done = Linear(torch.from_numpy(values.astype(np.float32)) if changed else self.weight)
        return self.done


def _round(
    weight: np.ndarray, rows: list[int], scheme: Scheme, samples: np.ndarray | None, name: str, index: int
) -> tuple[np.ndarray, int]:
    """The values of a matrix (out, in) under a scheme, and the bits they take. `rows`: of the tensors it is made of."""
    bits, size = scheme.bits, scheme.group_size
    if scheme.method == "none":
        return weight, weight.size * UNQUANTIZED_BITS
    if scheme.method == "same grid":
        kind = gguf.GGMLQuantizationType.Q4_1
        values = gguf.dequantize(gguf.quantize(weight, kind), kind)
        block = BLOCK_FORMATS["Q4_1"]
        return values, weight.size // block.num_weights * block.num_bytes * 8
    if scheme.method == "gptq":
        tensor = gptq(weight, samples, bits, size, scheme.symmetric)
        return tensor.dequantize(), tensor.num_bits
    if scheme.method == "awq":
        found = awq(weight, samples, bits, size, scheme.symmetric, NUM_ALPHAS)
        scale_bits = SCALE_BITS * weight.shape[1] if name == "output" else 0
        return found.dequantize(), found.quantized.num_bits + scale_bits
    scale = np.ones(weight.shape[1])
    channels = np.array([], int)
    if scheme.method in ("salient", "scale"):
        channels = salient_channels(samples, SALIENT_SHARE)
    elif scheme.method == "random":
        generator = np.random.default_rng([scheme.seed, index, list(MATRICES).index(name)])
        count = max(1, round(SALIENT_SHARE * weight.shape[1]))
        channels = np.sort(generator.choice(weight.shape[1], count, replace=False))
    if scheme.method == "scale":
        scale[channels] = SALIENT_SCALE
    parts = np.split(weight * scale, np.cumsum(rows)[:-1])
    tensors = [quantize(part, bits, scheme.granularity, size, scheme.symmetric) for part in parts]
    values = np.concatenate([tensor.dequantize() for tensor in tensors]) / scale
    num_bits = sum(tensor.num_bits for tensor in tensors)
    if scheme.method in ("salient", "random"):  # whole columns at 16 bits instead, and 16 bits to say which
        values = keep_channels(weight, values, channels)
        num_bits += len(channels) * (len(weight) * (UNQUANTIZED_BITS - bits) + 16)
    if scheme.method == "scale" and name == "output":
        num_bits += SCALE_BITS * weight.shape[1]
    return values, num_bits


# The KV cache under a scheme


class RoundedKVCache(KVCache):
    """A KV cache whose keys and values are rounded to `bits` when they are written.

    Each head of each token has a scale and a zero point of its own. Only the loss is real: the rounded values are kept
    as fp32. Attention reads what was written, also for the token that is being written.
    Raises ValueError as KVCache, and for bits that are not in BITS.
    """

    def __init__(
        self, config: LlamaConfig, batch_size: int, room: int, bits: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(config, batch_size, room, dtype)
        self.bits = int(check_choice("bits", bits, BITS))

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Round the new keys and values, and write them behind the old; return all of them."""
        return super().append(layer, self.rounded(k), self.rounded(v))

    def rounded(self, x: Tensor) -> Tensor:
        """`x` (B, K, L, D) with each row of D values on a grid of its own."""
        values = quantize(x.float().numpy(), self.bits, "channel", symmetric=False).dequantize()
        return torch.from_numpy(values).to(x.dtype)


def effective_kv_bits(bits: int, head_dim: int) -> float:
    """Bits of a value in the KV cache with its share of the scale (16 bits) and zero point (`bits`) of a head."""
    check_count("head_dim", head_dim)
    if check_choice("bits", bits, (*BITS, UNQUANTIZED_BITS)) == UNQUANTIZED_BITS:
        return float(UNQUANTIZED_BITS)
    return bits + (SCALE_BITS + bits) / head_dim
