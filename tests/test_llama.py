"""Our Llama against transformers on the same file, and against itself with and without a cache."""

from dataclasses import replace

import pytest
import torch

from lessonlib.lab.llama import KVCache, Llama, generate, stream
from lessonlib.models import get_model

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "Q: What is 12 + 30?\nA:",
]


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def test_the_shape_is_the_catalog_s(pretrained):
    model, _ = pretrained
    listed = get_model("smollm2-135m")
    assert model.weight_bytes == listed.streamed_weight_bytes(32)
    cache = KVCache(model.config, 3, 100)
    assert cache.num_bytes == 3 * 100 * listed.num_layers * listed.kv_values_per_token_per_layer * 4


@pytest.mark.numeric
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_continuations_equal_transformers(prompt, pretrained, reference_model):
    model, tokenizer = pretrained
    ids = tokenizer.encode(prompt)
    with torch.inference_mode():
        expected = reference_model(torch.tensor([ids])).logits
        continued = reference_model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, pad_token_id=2)[
            0, len(ids) :
        ].tolist()
    assert relative_error(model(torch.tensor([ids]), all_logits=True), expected) < 1e-3
    assert relative_error(model(torch.tensor([ids])), expected[:, -1:]) < 1e-3
    assert generate(model, [ids], 32)[0] == continued


@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [
        ([14], [1, 5, 8]),  # chunked prefill
        ([1], [1]),  # a prompt of one token
        ([1], [1, 1, 1, 1]),  # token by token from the first on
        ([3, 9, 14, 1], [14, 1, 1]),  # a batch of different lengths
        ([3, 9, 14, 1], [7, 7, 1]),  # which is prefilled in chunks: some rows are all padding in the first
        ([40, 33], [20, 20, 1, 1]),
    ],
)
@pytest.mark.parametrize("room", [1, 16, 64])  # 1 and 16: the cache grows past its first allocation
def test_a_cache_changes_nothing_but_the_time(lengths, pieces, room, pretrained):
    model, _ = pretrained
    longest, total = max(lengths), sum(pieces)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1000, (len(lengths), total), generator=generator)
    padding = torch.tensor([longest - length for length in lengths])
    cache = KVCache(model.config, len(lengths), room)
    parts = [model(piece, cache, padding, all_logits=True) for piece in tokens.split(pieces, dim=1)]
    cached = torch.cat(parts, dim=1)
    assert cache.length == total <= cache.room
    for row, skipped in enumerate(padding.tolist()):  # each row by itself, without padding and without a cache
        alone = model(tokens[row : row + 1, skipped:], all_logits=True)
        assert relative_error(cached[row, skipped:], alone[0]) < 1e-4


def test_a_batch_of_different_lengths_equals_one_at_a_time(pretrained):
    model, tokenizer = pretrained
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len({len(prompt) for prompt in prompts}) > 2
    batched = generate(model, prompts, 12)
    assert batched == [generate(model, [prompt], 12)[0] for prompt in prompts]
    assert batched == generate(model, prompts, 12, use_cache=False)


def test_with_and_without_a_cache_past_its_first_allocation(pretrained):
    model, tokenizer = pretrained
    prompt = tokenizer.encode("A short story about a")
    assert generate(model, [prompt], 80) == generate(model, [prompt], 80, use_cache=False)


def test_generation_to_the_last_position_of_the_context(pretrained):
    model = Llama(replace(pretrained[0].config, max_context=24), weights_of(pretrained[0]))
    prompts = [[5, 6, 7, 8], [9]]
    with_cache, without = (generate(model, prompts, 20, use_cache=used) for used in (True, False))
    assert with_cache == without
    assert [len(output) for output in with_cache] == [20, 20]
    with pytest.raises(ValueError, match="4 tokens and 21 new ones are more than the context, 24"):
        generate(model, prompts, 21)
    tokens = stream(model, [[1] * 23])
    next(tokens)
    next(tokens)
    with pytest.raises(ValueError, match="there must be 1 to 24 in all"):
        next(tokens)


def weights_of(model: Llama) -> dict[str, torch.Tensor]:
    """The tensors that make up a model, by their names in the file."""
    c = model.config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    weights = {"token_embd.weight": model.embedding, "output_norm.weight": model.final_norm.weight}
    for index, block in enumerate(model.blocks):
        names = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
        parts = [*block.qkv.weight.split([q, kv, kv]), *block.gate_up.weight.chunk(2)]
        rest = {"attn_norm": block.attention_norm, "ffn_norm": block.mlp_norm, "attn_output": block.output}
        rest |= {"ffn_down": block.down}
        named = dict(zip(names, parts, strict=True)) | {name: layer.weight for name, layer in rest.items()}
        weights |= {f"blk.{index}.{name}.weight": weight for name, weight in named.items()}
    return weights


def test_generation_stops_at_the_end_of_text(pretrained):
    model, tokenizer = pretrained
    [answer] = generate(model, [tokenizer.chat("What is the capital of France?")], 60, tokenizer.eos_id)
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_last_position_of_the_context_can_be_used(pretrained):
    model, _ = pretrained
    cache = KVCache(model.config, 1, model.config.max_context)
    cache.length = model.config.max_context - 1
    assert torch.isfinite(model(torch.tensor([[5]]), cache)).all()
    with pytest.raises(ValueError, match="8192 tokens and 1 new ones"):
        model(torch.tensor([[5]]), cache)


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "said"),
    [
        ([], 5, "at least one prompt"),
        ([[1], []], 5, "at least one token"),
        ([[1]], 0, "max_new_tokens"),
        ([[1]], -3, "max_new_tokens"),
        ([[1] * 8000], 193, "context"),
        ([[49152]], 5, "token ids must be 0 to 49151"),
        ([[-1]], 5, "token ids"),
    ],
)
def test_bad_requests(prompts, new_tokens, said, pretrained):
    with pytest.raises(ValueError, match=said):
        generate(pretrained[0], prompts, new_tokens)


def test_a_full_cache_refuses_and_keeps_what_it_has(pretrained):
    model, _ = pretrained
    small = replace(model.config, max_context=4)
    cache = KVCache(small, 1, 2)
    model(torch.tensor([[1, 2, 3]]), cache)
    before = cache.values.clone()
    with pytest.raises(ValueError, match="3 tokens and 2 new ones: there must be 1 to 4 in all"):
        model(torch.tensor([[4, 5]]), cache)
    with pytest.raises(ValueError, match="keeps up to 4 tokens, 5 were to be kept"):
        cache.append(0, torch.zeros(1, 3, 2, 64), torch.zeros(1, 3, 2, 64))
    assert cache.length == 3
    assert torch.equal(cache.values, before)
    with pytest.raises(ValueError, match="batch_size"):
        KVCache(model.config, 0, 4)
    with pytest.raises(ValueError, match="room 1 to 4"):
        KVCache(small, 1, 5)


def test_a_cache_or_padding_for_another_batch(pretrained):
    model, _ = pretrained
    cache = KVCache(model.config, 3, 8)
    with pytest.raises(ValueError, match="cache must be for as many requests as there are rows of tokens, 1, got 3"):
        model(torch.tensor([[1, 2]]), cache)
    assert cache.length == 0 and not cache.values.any()
    with pytest.raises(ValueError, match="padding must be for as many requests as there are rows of tokens, 2, got 1"):
        model(torch.tensor([[1, 2], [3, 4]]), padding=torch.tensor([1]))
