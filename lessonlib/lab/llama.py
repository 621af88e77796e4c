"""A Llama you can read in one sitting: RMSNorm, rotary positions, grouped-query attention, a KV cache, SwiGLU.

Shapes in comments: B batch, L new tokens, S tokens attended to, H query heads, K KV heads, G = H / K query heads that
share a KV head, D head size, E hidden size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama with a tied output head."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rope_base: float
    norm_epsilon: float

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by its name in a GGUF file. Matrices are (outputs, inputs)."""
        hidden, width = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            block = {
                "attn_norm": (hidden,), "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
                "attn_output": (hidden, q), "ffn_norm": (hidden,), "ffn_gate": (width, hidden),
                "ffn_up": (width, hidden), "ffn_down": (hidden, width),
            }  # fmt: skip
            shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
        return shapes | {"output_norm.weight": (hidden,)}


class Linear:
    """y = x W^T. Reading W is the cost; how it is asked for decides how many cores share in the reading.

    W times a single column is done by one core. Cut into slices of rows it is a batch of products, which all cores
    share. With several rows in x the plain product is shared well, and W times the columns of x is its fastest form.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()  # (outputs, inputs)
        self.slices = self.weight.view(math.gcd(len(weight), 8), -1, weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        columns = x.reshape(-1, x.shape[-1]).t()
        if columns.shape[1] == 1:
            y = torch.bmm(self.slices, columns.expand(len(self.slices), -1, -1))
        else:
            y = (self.weight @ columns).t().contiguous()
        return y.view(*x.shape[:-1], -1)


class RMSNorm:
    """x divided by its root mean square, times a weight for each column."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight, self.epsilon = weight, epsilon

    def __call__(self, x: Tensor) -> Tensor:
        mean_square = (x * x).sum(dim=-1, keepdim=True) / len(self.weight)
        return x * torch.rsqrt(mean_square + self.epsilon) * self.weight


class KVCache:
    """Keys and values of the tokens so far, in one piece of memory of shape (layers, 2, B, K, room, D).

    `room` is how many tokens it is made for. It doubles when they are too few, up to the model's longest context.
    """

    def __init__(self, config: LlamaConfig, batch_size: int, room: int, dtype: torch.dtype = torch.float32) -> None:
        if batch_size < 1 or not 1 <= room <= config.max_context:
            raise ValueError(
                f"batch_size must be at least 1 and room 1 to {config.max_context}, got {batch_size} and {room}"
            )
        shape = (config.num_layers, 2, batch_size, config.num_kv_heads, room, config.head_dim)
        self.values = torch.zeros(shape, dtype=dtype)
        self.max_len = config.max_context
        self.length = 0

    @property
    def room(self) -> int:
        """Tokens that fit before more memory is taken."""
        return self.values.shape[-2]

    @property
    def num_bytes(self) -> int:
        """Bytes taken, filled or not."""
        return self.values.numel() * self.values.element_size()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values (B, K, L, D) behind the old; return all of them (B, K, S, D).

        Raises ValueError where they are more than the context.
        """
        end = self.length + k.shape[2]
        if end > self.max_len:
            raise ValueError(f"the cache keeps up to {self.max_len} tokens, {end} were to be kept")
        if end > self.room:
            more = min(max(2 * self.room, end), self.max_len) - self.room
            self.values = F.pad(self.values, (0, 0, 0, more))
        keys, values = self.values[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]


class Block:
    """One layer: attention, then the MLP, each added to what came in."""

    def __init__(self, config: LlamaConfig, weights: dict[str, Tensor], index: int) -> None:
        def weight(name: str) -> Tensor:
            return weights[f"blk.{index}.{name}.weight"]

        self.config, self.index = config, index
        self.attention_norm = RMSNorm(weight("attn_norm"), config.norm_epsilon)
        self.mlp_norm = RMSNorm(weight("ffn_norm"), config.norm_epsilon)
        self.qkv = Linear(torch.cat([weight("attn_q"), weight("attn_k"), weight("attn_v")]))
        self.output = Linear(weight("attn_output"))
        self.gate_up = Linear(torch.cat([weight("ffn_gate"), weight("ffn_up")]))
        self.down = Linear(weight("ffn_down"))

    def __call__(self, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, mask, cache)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def attention(self, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        c, (batch_size, length, _) = self.config, x.shape
        heads = self.qkv(x).view(batch_size, length, -1, c.head_dim).transpose(1, 2)  # (B, H + 2K, L, D)
        q_and_k, v = heads.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], dim=1)
        q, k = rotate(q_and_k, rotation).split([c.num_heads, c.num_kv_heads], dim=1)
        if cache is not None:
            k, v = cache.append(self.index, k, v)
        # The G query heads of a KV head attend to the same keys, just as G times as many queries would.
        q = q.reshape(batch_size, c.num_kv_heads, -1, c.head_dim)  # (B, K, G L, D)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        y = y.reshape(batch_size, c.num_heads, length, c.head_dim).transpose(1, 2)
        return self.output(y.reshape(batch_size, length, -1))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions: neighbors (2i, 2i + 1) as one complex number, turned by position x frequency.

    (GGUF stores q and k so that the pairs are neighbors; files for transformers keep them half a head apart.)
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


class Llama:
    """The whole model. Call it with token ids (B, L) to get logits."""

    def __init__(self, config: LlamaConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.embedding = weights["token_embd.weight"]
        self.blocks = [Block(config, weights, layer) for layer in range(config.num_layers)]
        self.final_norm = RMSNorm(weights["output_norm.weight"], config.norm_epsilon)
        self.head = Linear(self.embedding)  # tied: the same numbers, read as a matrix
        frequencies = config.rope_base ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        angles = torch.arange(config.max_context).double()[:, None] * frequencies
        self.rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)  # (max_context, D / 2)

    @property
    def dtype(self) -> torch.dtype:
        """What weights, activations and cache are kept in."""
        return self.embedding.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads."""
        layers: list[Linear | RMSNorm] = [self.head, self.final_norm]
        for b in self.blocks:
            layers += [b.attention_norm, b.qkv, b.output, b.mlp_norm, b.gate_up, b.down]
        return sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)

    @torch.inference_mode()
    def __call__(
        self, tokens: Tensor, cache: KVCache | None = None, padding: Tensor | None = None, all_logits: bool = False
    ) -> Tensor:
        """Logits (B, 1, vocabulary) of the last position, or (B, L, vocabulary) of all.

        With a `cache`, `tokens` follow those it holds, and are added to it. `padding` (B) says how many tokens at the
        start of each row only fill it up. Raises ValueError for ids outside the vocabulary, too many tokens, and a
        cache or a padding for another number of requests.
        """
        start = cache.length if cache is not None else 0
        end = start + tokens.shape[1]
        room = cache.max_len if cache is not None else self.config.max_context
        if tokens.shape[1] < 1 or end > room:
            raise ValueError(f"{start} tokens and {tokens.shape[1]} new ones: there must be 1 to {room} in all")
        rows = len(tokens)
        for name, size in (
            ("cache", cache.values.shape[2] if cache is not None else rows),
            ("padding", len(padding) if padding is not None else rows),
        ):
            if size != rows:
                raise ValueError(f"{name} must be for as many requests as there are rows of tokens, {rows}, got {size}")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ValueError(f"token ids must be 0 to {self.config.vocab_size - 1}")
        rotation, mask = self.rotations[start:end], self._mask(start, end, padding)
        if padding is not None:
            positions = (torch.arange(start, end) - padding[:, None]).clamp(min=0)
            rotation = self.rotations[positions][:, None]  # (B, 1, L, D / 2)
        x = self.embedding[tokens]  # (B, L, E)
        for block in self.blocks:
            x = block(x, rotation, mask, cache)
        if cache is not None:
            cache.length = end
        if not all_logits:
            x = x[:, -1:]
        return self.head(self.final_norm(x))

    def _mask(self, start: int, end: int, padding: Tensor | None) -> Tensor | None:
        """Which of the S tokens each of the L new ones may see: itself, those before it, no padding."""
        if end - start == 1 and padding is None:
            return None
        seen, new = torch.arange(end), torch.arange(start, end)[:, None]
        mask = seen <= new  # (L, S)
        if padding is not None:
            # a padding token sees itself alone, so that its (unused) softmax has something to sum
            mask = mask & (seen >= padding[:, None, None]) | (seen == new)
            mask = mask[:, None]  # (B, 1, L, S)
        return mask.repeat(*[1] * (mask.dim() - 2), self.config.num_heads // self.config.num_kv_heads, 1)


def stream(model: Llama, prompts: Sequence[Sequence[int]], use_cache: bool = True) -> Iterator[Tensor]:
    """The likeliest next token of each prompt, then the next, without end: token ids (B, 1) at a time.

    With a cache the model is given the new tokens only; without, everything so far, again and again. Raises ValueError
    for no prompts, an empty prompt, or (when it comes to that) more tokens than the model's context holds.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("prompts must hold at least one prompt, and each at least one token")
    longest = max(map(len, prompts))
    missing = torch.tensor([longest - len(prompt) for prompt in prompts])
    padding = missing if missing.any() else None
    so_far = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    room = min(longest + 64, model.config.max_context)
    cache = KVCache(model.config, len(prompts), room, model.dtype) if use_cache else None
    new = so_far
    while True:
        new = model(new if use_cache else so_far, cache, padding).argmax(dim=-1)  # (B, 1)
        so_far = torch.cat([so_far, new], dim=1)
        yield new


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_id: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """The likeliest continuation of each prompt (token ids), all decoded as one batch, with or without a KV cache.

    Each ends after `max_new_tokens`, or with `eos_id`. Raises ValueError for no prompts, an empty prompt, or more
    tokens than the model's context holds.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    longest = max(map(len, prompts), default=0)
    if longest + max_new_tokens > model.config.max_context:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones are more than the context, "
            f"{model.config.max_context}"
        )
    outputs: list[list[int]] = [[] for _ in prompts]
    for tokens in islice(stream(model, prompts, use_cache), max_new_tokens):
        for output, token in zip(outputs, tokens[:, 0].tolist(), strict=True):
            if not output or output[-1] != eos_id:
                output.append(token)
        if all(output[-1] == eos_id for output in outputs):
            break
    return outputs
