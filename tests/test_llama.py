"""Our Llama against transformers on the same file, and against itself with and without a cache."""

import pytest
import torch

from lessonlib.lab.llama import KVCache, generate
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


def test_a_cache_changes_nothing_but_the_time(pretrained):
    model, tokenizer = pretrained
    tokens = torch.tensor([tokenizer.encode(PROMPTS[2])])
    whole = model(tokens, all_logits=True)
    cache = KVCache(model.config, 1, tokens.shape[1])
    pieces = [model(piece, cache, all_logits=True) for piece in (tokens[:, :1], tokens[:, 1:6], tokens[:, 6:])]
    assert relative_error(torch.cat(pieces, dim=1), whole) < 1e-4


def test_a_batch_of_different_lengths_equals_one_at_a_time(pretrained):
    model, tokenizer = pretrained
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len({len(prompt) for prompt in prompts}) > 2
    assert generate(model, prompts, 16) == [generate(model, [prompt], 16)[0] for prompt in prompts]


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
    cache = KVCache(model.config, 1, 4)
    model(torch.tensor([[1, 2, 3]]), cache)
    before = cache.values.clone()
    with pytest.raises(ValueError, match="3 tokens and 2 new ones: there must be 1 to 4 in all"):
        model(torch.tensor([[4, 5]]), cache)
    with pytest.raises(ValueError, match="room for 4 tokens"):
        cache.append(0, torch.zeros(1, 3, 2, 64), torch.zeros(1, 3, 2, 64))
    assert cache.length == 3
    assert torch.equal(cache.values, before)
    with pytest.raises(ValueError, match="batch_size"):
        KVCache(model.config, 0, 4)
