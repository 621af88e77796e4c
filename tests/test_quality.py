"""What quantization costs and gains on the real model: the measures, the schemes, the stored ladder, the kernels."""

import contextlib
import dataclasses
import itertools
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lessonlib.lab import kernels, ladder, quality
from lessonlib.lab.llama import KVCache, Linear, Llama, LlamaConfig
from lessonlib.lab.pretrained import FILE_BYTES, load_pretrained
from lessonlib.lab.quality import ClozeItem, RoundedKVCache, Scheme, quantized_model
from lessonlib.quantization import (
    encode_blocks,
    gptq,
    keep_channels,
    mean_relative_error,
    quantize,
    salient_channels,
)
from lessonlib.quantization.ladder import Ladder, LadderRow, parse_ladder, read_ladder, write_ladder_text

TINY = LlamaConfig(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=300,
    max_context=512, rope_base=10_000.0, norm_epsilon=1e-5,
)  # fmt: skip
TINY_TOKENS = torch.randint(0, 300, (512,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products need no help, and threads that wait for each other are slow where other things run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> Llama:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        for name, shape in TINY.tensor_shapes().items()
    }
    weights["blk.0.attn_norm.weight"][::16] = 8  # activations with channels that stand out, as real ones have
    weights["blk.1.ffn_norm.weight"][3::16] = 8
    return Llama(TINY, weights)


@pytest.fixture(scope="module")
def reference(pretrained):
    """The first tokens and items only: what does not need all of them takes a second."""
    model, tokenizer = pretrained
    tokens = quality.text_tokens(tokenizer, "evaluation")[:150]
    return quality.make_reference(model, tokenizer, tokens, tuple(quality.load_cloze()[:6]), context=100)


def weight(model: Llama, index: int, layer: str) -> np.ndarray:
    return getattr(model.blocks[index], layer).weight.numpy()


def layer_inputs(model: Llama, tokens: torch.Tensor, index: int, layer: str) -> np.ndarray:
    """What goes into a layer, seen by standing in its place."""
    block, seen = model.blocks[index], []
    linear = getattr(block, layer)

    class Spy(Linear):
        def __call__(self, x):
            seen.append(x.reshape(-1, x.shape[-1]).numpy().copy())
            return linear(x)

    setattr(block, layer, Spy(linear.weight))
    try:
        model(tokens)
    finally:
        setattr(block, layer, linear)
    return np.concatenate(seen)


# The text and the task


def test_the_texts_are_long_enough_and_have_nothing_in_common(pretrained):
    _, tokenizer = pretrained
    texts = {name: quality.load_text(name) for name in ("evaluation", "calibration")}
    assert len(quality.text_tokens(tokenizer, "evaluation")) >= 4000
    assert len(quality.text_tokens(tokenizer, "calibration")) >= 2000
    phrases = [
        {tuple(words[i : i + 8]) for i in range(len(words) - 7)} for words in (text.split() for text in texts.values())
    ]
    assert not phrases[0] & phrases[1]
    cloze = " ".join(item.prompt for item in quality.load_cloze()).split()
    assert not phrases[0] & {tuple(cloze[i : i + 8]) for i in range(len(cloze) - 7)}


def test_the_task_is_well_formed():
    items = quality.load_cloze()
    assert len(items) >= 60
    assert len({item.prompt for item in items}) == len(items)
    for item in items:
        assert 2 <= len(item.wrong) <= 3
        assert len({ending.lower() for ending in item.endings}) == len(item.endings)
        assert all(part == part.strip() and part for part in (item.prompt, *item.endings))


# The measures


@pytest.mark.numeric
def test_log_probabilities_are_those_of_double_precision(pretrained):
    model, tokenizer = pretrained
    logits = model(quality.text_tokens(tokenizer, "evaluation")[None, :256], all_logits=True)[0]
    error = quality.log_probabilities(logits).double() - logits.double().log_softmax(-1)
    assert float(error.abs().max()) < 1e-5
    assert abs(float(error.mean(-1).mean())) < 1e-6  # no bias


@pytest.mark.numeric
@pytest.mark.parametrize("context", [20, 64, 200])
def test_perplexity_equals_a_direct_computation_and_transformers(context, pretrained, reference_model):
    model, tokenizer = pretrained
    tokens = quality.text_tokens(tokenizer, "evaluation")[300:400]
    direct, theirs = [], []
    for start in range(0, len(tokens), context):
        piece = tokens[start : start + context]
        with torch.inference_mode():
            logits = {"ours": model(piece[None], all_logits=True)[0], "theirs": reference_model(piece[None]).logits[0]}
        direct += _losses(logits["ours"], piece)
        theirs += _losses(logits["theirs"], piece)
    measured = quality.perplexity(model, tokens, context)
    assert measured == pytest.approx(math.exp(np.mean(direct)), rel=3e-6)
    assert measured == pytest.approx(math.exp(np.mean(theirs)), rel=1e-4)


def _losses(logits, piece) -> list[float]:
    """-log of the probability of each token but the first, in double precision."""
    rows = logits.double().numpy()
    rows = rows - rows.max(-1, keepdims=True)
    return [math.log(np.exp(row).sum()) - row[token] for row, token in zip(rows, piece[1:], strict=False)]


def test_a_shorter_context_costs_perplexity(pretrained):
    model, tokenizer = pretrained
    tokens = quality.text_tokens(tokenizer, "evaluation")[:128]
    assert quality.perplexity(model, tokens, 16) > 1.5 * quality.perplexity(model, tokens, 128)


@pytest.mark.parametrize(("tokens", "context"), [(TINY_TOKENS, 1), (TINY_TOKENS[:5], 4), (TINY_TOKENS[None], 64)])
def test_perplexity_needs_a_past(tokens, context, tiny):
    with pytest.raises(ValueError, match=r"context must be|tokens must be"):
        quality.perplexity(tiny, tokens, context)


@pytest.mark.numeric
def test_divergence_and_agreement_equal_a_direct_computation():
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(50, 40, generator=generator) for _ in range(2))
    q[:20] = p[:20] + 0.1 * q[:20]
    exact = torch.nn.functional.kl_div(
        q.double().log_softmax(-1), p.double().log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert quality.kl_divergence(p, q) == pytest.approx(float(exact), rel=1e-5)
    assert quality.kl_divergence(p, p) == 0
    assert quality.kl_divergence(p + 5, p) == pytest.approx(0, abs=1e-6)  # logits are known up to a constant
    assert quality.top1_agreement(p, q) == np.mean(np.argmax(p.numpy(), 1) == np.argmax(q.numpy(), 1))
    with pytest.raises(ValueError, match="same shape"):
        quality.kl_divergence(p, q[:, :-1])


def test_a_model_equals_itself(pretrained, reference):
    model, tokenizer = pretrained
    same = quality.measure_quality(model, reference)
    assert (same.kl_divergence, same.top1_agreement) == (0, 1)
    assert same.perplexity == pytest.approx(quality.perplexity(model, reference.tokens, 100), rel=1e-6)
    assert same.start_perplexity == pytest.approx(quality.perplexity(model, reference.tokens[:100], 100), rel=1e-6)
    assert same.task_accuracy == quality.task_accuracy(model, tokenizer, reference.items)
    assert (same.num_positions, same.num_items, same.context) == (150, 6, 100)


@pytest.mark.numeric
def test_all_measures_at_once_equal_each_alone(pretrained, reference):
    model, _ = pretrained
    changed = quantized_model(model, Scheme("rtn", 3, "group", 64)).model
    measured = quality.measure_quality(changed, reference)
    pieces = reference.tokens.split(100)
    before, after = (torch.cat([m(p[None], all_logits=True)[0] for p in pieces]) for m in (model, changed))
    assert measured.kl_divergence == pytest.approx(quality.kl_divergence(before, after), rel=1e-4)
    assert measured.top1_agreement == pytest.approx(quality.top1_agreement(before, after), abs=0.011)
    assert measured.perplexity == pytest.approx(quality.perplexity(changed, reference.tokens, 100), rel=1e-5)
    assert 0.1 < measured.kl_divergence < 3
    assert measured.top1_agreement < 0.9


def test_the_reference_is_good_at_the_task_but_not_perfect(pretrained):
    model, tokenizer = pretrained
    assert 0.40 <= quality.task_accuracy(model, tokenizer) <= 0.95


@pytest.mark.numeric
def test_endings_are_scored_by_the_log_likelihood_of_their_bytes(pretrained):
    model, tokenizer = pretrained
    items = (
        ClozeItem("The capital of France is", "Paris", ("the bottom of the sea", "Rome")),
        ClozeItem("She opened her", "umbrella", ("refrigerator",)),
    )
    for item, scores in zip(items, quality.ending_scores(model, tokenizer, items), strict=True):
        for ending, score in zip(item.endings, scores, strict=True):
            prompt, ids = tokenizer.encode(item.prompt), tokenizer.encode(f"{item.prompt} {ending}")
            losses = model(torch.tensor([ids]), all_logits=True)[0].log_softmax(-1)
            total = sum(float(losses[i - 1, ids[i]]) for i in range(len(prompt), len(ids)))
            assert score == pytest.approx(total / len(f" {ending}"), rel=1e-4)
    wrong_way_round = ClozeItem("The capital of France is", "Rome", ("Paris",))
    assert quality.task_accuracy(model, tokenizer, (wrong_way_round,)) == 0
    assert quality.task_accuracy(model, tokenizer, (ClozeItem("A", "b", ("b",)),)) == 0  # a tie is no success


# The model under a scheme


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (Scheme(), 16),
        (Scheme("same grid", 4), 5),
        (Scheme("rtn", 8, "group", 64), 8 + (16 + 8) / 64),
        (Scheme("rtn", 4, "group", 32, symmetric=True), 4.5),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_is_rounded_is_counted_and_the_rest_stays(scheme, bits, pretrained):
    model, _ = pretrained
    before = weight(model, 7, "gate_up").copy()
    result = quantized_model(model, scheme)
    matrices, total = 106_168_320, 134_515_008  # SmolLM2-135M: 30 layers of 3,538,944, and embedding and norms
    assert result.matrix_bits == bits
    assert result.num_bytes == (matrices * bits + (total - matrices) * 16) / 8
    assert result.effective_bits == pytest.approx(8 * result.num_bytes / total, rel=1e-9)
    assert result.model.embedding is model.embedding
    assert result.model.head is model.head
    assert np.array_equal(weight(model, 7, "gate_up"), before)


def test_a_grid_is_free_the_second_time_and_another_of_the_same_size_is_not(pretrained):
    model, _ = pretrained
    shipped = quantized_model(model, Scheme("same grid", 4)).model
    other = quantized_model(model, Scheme("rtn", 4, "group", 32)).model
    for index, name in itertools.product(range(30), quality.MATRICES):
        assert np.array_equal(weight(shipped, index, name), weight(model, index, name))
        assert not np.array_equal(weight(other, index, name), weight(model, index, name))


def test_eight_bits_are_close_and_two_are_not(pretrained, reference):
    model, _ = pretrained
    exact = quality.measure_quality(model, reference)
    eight, two = (
        quality.measure_quality(quantized_model(model, Scheme("rtn", bits, "group", 64)).model, reference)
        for bits in (8, 2)
    )
    assert eight.perplexity == pytest.approx(exact.perplexity, rel=0.02)
    assert eight.kl_divergence < 0.005
    assert eight.top1_agreement > 0.93
    assert two.perplexity > 20 * exact.perplexity


def test_a_tensor_is_rounded_with_one_scale_for_each_of_its_own(tiny):
    result = quantized_model(tiny, Scheme("rtn", 4, "tensor")).model
    q, k, v = np.split(weight(tiny, 0, "qkv"), [64, 96])
    rounded = [quantize(part, 4, "tensor", symmetric=False).dequantize() for part in (q, k, v)]
    assert np.allclose(weight(result, 0, "qkv"), np.concatenate(rounded), atol=1e-7)


def test_each_matrix_is_calibrated_on_the_output_of_those_rounded_before(tiny):
    scheme = Scheme("gptq", 3, "group", 32)
    result = quantized_model(tiny, scheme, TINY_TOKENS).model
    batch = TINY_TOKENS.view(-1, quality.CALIBRATION_CONTEXT)
    for index, name in itertools.product(range(2), quality.MATRICES):
        samples = layer_inputs(result, batch, index, name)  # of the finished model
        right = gptq(weight(tiny, index, name), samples, 3, 32, symmetric=False).dequantize()
        assert np.allclose(weight(result, index, name), right, atol=1e-5), (index, name)
    assert not np.allclose(
        layer_inputs(result, batch, 1, "down"), layer_inputs(tiny, batch, 1, "down"), rtol=0.01, atol=0.01
    )


def test_methods_that_look_at_activations_beat_round_to_nearest(tiny):
    exact = tiny(TINY_TOKENS.view(2, -1), all_logits=True).flatten(0, 1)
    lost = {}
    for method in ("rtn", "gptq", "awq"):
        changed = quantized_model(tiny, Scheme(method, 3, "group", 32), TINY_TOKENS).model
        lost[method] = quality.kl_divergence(exact, changed(TINY_TOKENS.view(2, -1), all_logits=True).flatten(0, 1))
    assert lost["gptq"] < lost["rtn"]
    assert lost["awq"] < lost["rtn"]


def test_the_ablation_changes_what_it_says(tiny):
    samples = layer_inputs(tiny, TINY_TOKENS.view(2, -1), 0, "qkv")
    exact, nearest = weight(tiny, 0, "qkv"), quantize(weight(tiny, 0, "qkv"), 3, "group", 32, False).dequantize()
    kept = {
        method: quantized_model(tiny, Scheme(method, 3, "group", 32), TINY_TOKENS)
        for method in ("salient", "random", "scale")
    }
    [channel] = salient_channels(samples, 0.01)
    assert channel % 16 == 0  # the norm makes these stand out
    assert np.allclose(weight(kept["salient"].model, 0, "qkv"), keep_channels(exact, nearest, [channel]), atol=1e-7)
    differs = np.flatnonzero(np.abs(weight(kept["random"].model, 0, "qkv") - nearest).max(axis=0) > 1e-7)
    assert len(differs) == 1
    assert np.array_equal(weight(kept["random"].model, 0, "qkv")[:, differs], exact[:, differs])
    again = quantized_model(tiny, Scheme("random", 3, "group", 32), TINY_TOKENS).model
    other = quantized_model(tiny, Scheme("random", 3, "group", 32, seed=1), TINY_TOKENS).model
    names = list(itertools.product(range(2), quality.MATRICES))
    assert all(np.array_equal(weight(again, *n), weight(kept["random"].model, *n)) for n in names)
    assert not all(np.array_equal(weight(other, *n), weight(again, *n)) for n in names)
    plain = quantized_model(tiny, Scheme("rtn", 3, "group", 32)).matrix_bits
    assert plain < kept["scale"].matrix_bits < kept["salient"].matrix_bits == kept["random"].matrix_bits < plain + 0.3


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "magic"},
        {"method": "rtn"},  # at 16 bits there is nothing to round
        {"method": "rtn", "bits": 9},
        {"method": "none", "bits": 4},
        {"method": "same grid", "bits": 8},
        {"method": "rtn", "bits": 4, "granularity": "group"},
        {"method": "rtn", "bits": 4, "granularity": "row"},
        {"method": "rtn", "bits": 4, "group_size": 64},
        {"method": "awq", "bits": 4, "granularity": "tensor"},
        {"kv_bits": 1},
    ],
)
def test_a_scheme_that_does_not_fit_together_is_refused(fields):
    with pytest.raises(ValueError, match="must be"):
        Scheme(**fields)


@pytest.mark.parametrize("calibration", [None, TINY_TOKENS[:255], TINY_TOKENS.view(2, -1)])
def test_a_calibration_text_is_needed(calibration, tiny):
    with pytest.raises(ValueError, match="calibration must hold 256 tokens or more"):
        quantized_model(tiny, Scheme("awq", 4, "group", 32), calibration)


# The KV cache under a scheme


def test_keys_and_values_are_rounded_for_each_head_of_each_token():
    x = torch.randn(2, 2, 5, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None]
    for bits in (8, 4, 2):
        cache = RoundedKVCache(TINY, 2, 5, bits)
        k, v = cache.append(1, x, -x)
        step = (x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)) / (2**bits - 1)
        assert torch.all((k - x).abs() <= step[..., None] * 0.5001)
        assert (k - x).abs().max() > 0.2 * step.max()
        assert torch.allclose(cache.rounded(k), k, rtol=1e-5)  # the second time it is free
        assert torch.all((v + x).abs() <= step[..., None] * 0.5001)
    with pytest.raises(ValueError, match="bits must be one of"):
        RoundedKVCache(TINY, 2, 5, 16)


def test_attention_reads_the_rounded_values(tiny):
    tokens = TINY_TOKENS[None, :40]
    caches = KVCache(TINY, 1, 40), RoundedKVCache(TINY, 1, 40, 4)
    plain, rounded = (tiny(tokens, cache, all_logits=True) for cache in caches)
    assert torch.equal(caches[1].values[0], caches[1].rounded(caches[0].values[0]))  # of the first layer
    assert float((plain - rounded).abs().max()) > 1e-4
    in_pieces = RoundedKVCache(TINY, 1, 40, 4)
    parts = [tiny(piece, in_pieces, all_logits=True) for piece in tokens.split(8, dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), rounded, atol=1e-4)  # however the tokens come


def test_a_smaller_cache_costs_more(pretrained, reference):
    model, _ = pretrained
    lost = [quality.measure_quality(model, reference, bits).kl_divergence for bits in (16, 8, 4, 2)]
    assert 0 == lost[0] < lost[1] < 0.01 < lost[2] < lost[3]
    assert [quality.effective_kv_bits(bits, 64) for bits in (16, 8, 4)] == [16, 8.375, 4.3125]


# The ladder, measured


def made_up_row(scheme: Scheme) -> LadderRow:
    numbers = {field.name: 0.5 for field in dataclasses.fields(LadderRow) if field.type is float}
    return LadderRow(name=scheme.name, num_bytes=100, **dataclasses.asdict(scheme), **numbers)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A ladder of three rows, and what was measured: made up, as these tests are about the file."""
    measured = []

    def measure(model, reference, calibration, scheme):
        measured.append(scheme.name)
        return made_up_row(scheme)

    monkeypatch.setattr(ladder, "measure_row", measure)
    monkeypatch.setattr(ladder, "load_pretrained", lambda: (None, None))
    monkeypatch.setattr(ladder, "prepare", lambda *_: dict.fromkeys(("model", "reference", "calibration")))
    schemes = [Scheme(), Scheme("same grid", 4), Scheme(kv_bits=4)]
    path = tmp_path / "results" / "ladder.csv"

    def run(**changes) -> Ladder:
        usual = {"schemes": schemes, "workers": 0, "num_tokens": 40, "num_items": 2}
        return ladder.measure_ladder(path, **usual | changes)

    return run, path, measured


def test_an_interrupted_ladder_goes_on(small, monkeypatch):
    run, path, measured = small
    write = ladder._write

    def write_twice(*arguments):
        write(*arguments)
        if len(measured) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "_write", write_twice)
    with contextlib.suppress(KeyboardInterrupt):
        run()
    assert [row.name for row in read_ladder(path).rows] == ["reference", "same grid"]
    monkeypatch.setattr(ladder, "_write", write)
    finished = run()
    assert measured == ["reference", "same grid", "KV 4 bits"]
    assert [row.name for row in read_ladder(path).rows] == measured == [row.name for row in finished.rows]
    run()
    assert len(measured) == 3
    assert [file.name for file in path.parent.iterdir()] == ["ladder.csv"]


def test_damaged_rows_are_measured_again(small):
    run, path, measured = small
    run()
    whole = path.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    for damaged, lost in (
        (whole[:-1], 1),  # all is there but the end of the line
        (whole[:-40], 1),
        ("".join(lines[:-2]) + lines[-1], 1),
        (whole.replace("same grid,same grid,4", "same grid,same grid,four"), 1),
        (whole.replace("\nreference,", "\nref"), 1),
        ("".join(lines[:4]), 3),
        ("", 3),
        ("\x00\x00", 3),
    ):
        path.write_text(damaged, encoding="utf-8")
        measured.clear()
        finished = run()
        assert len(measured) == lost, damaged[-200:]
        assert [row.name for row in finished.rows] == ["reference", "same grid", "KV 4 bits"]
        assert read_ladder(path) == parse_ladder(whole)[0]


def test_rows_of_other_settings_are_put_aside(small):
    run, path, measured = small
    run()
    before = path.read_text(encoding="utf-8")
    run(num_tokens=50)
    assert len(measured) == 6
    assert path.with_suffix(".old.csv").read_text(encoding="utf-8") == before
    assert "tokens 50" in read_ladder(path).provenance["settings"]


def test_a_damaged_ladder_is_not_read(small):
    run, path, _ = small
    run()
    whole = path.read_text(encoding="utf-8")
    assert write_ladder_text(read_ladder(path)) == whole
    for damaged, problem in (
        (whole[:-1], "cut off"),
        (whole.replace(",no,", ",maybe,", 1), "line 10 is damaged .*symmetric must be one of yes, no, got 'maybe'"),
        (whole.replace("perplexity,", "", 1), "must have the columns"),
        ("", "line 0 is cut off"),
    ):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(ValueError, match=problem):
            read_ladder(path)
    with pytest.raises(FileNotFoundError):
        read_ladder(path.with_name("none.csv"))


def test_workers_measure_what_this_process_would(tmp_path, pretrained):
    scheme = Scheme("rtn", 4, "group", 64)
    work = ladder.prepare(*pretrained, 40, 2)
    here = ladder.measure_row(work["model"], work["reference"], work["calibration"], scheme)
    [there] = ladder.measure_ladder(tmp_path / "ladder.csv", [scheme], workers=1, num_tokens=40, num_items=2).rows
    for field in dataclasses.fields(LadderRow):
        one, other = getattr(here, field.name), getattr(there, field.name)
        if not field.name.endswith("_cpu_s"):
            assert one == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other), field.name
    with pytest.raises(ValueError, match="workers must be a whole number of at least 0, got -1"):
        ladder.measure_ladder(tmp_path / "other.csv", [scheme], workers=-1)


def test_what_lesson_3_says_of_a_layer(pretrained):
    down = weight(pretrained[0], 15, "down")
    sharing = (("tensor", None), ("channel", None), ("group", 64))
    errors = [mean_relative_error(down, quantize(down, 4, *how).dequantize()) for how in sharing]
    assert [round(100 * error) for error in errors] == [89, 44, 31]


def test_the_sizes_that_lesson_3_names(pretrained):
    model, tokenizer = pretrained
    whole_pieces = len(quality.text_tokens(tokenizer, "calibration")) // quality.CALIBRATION_CONTEXT
    assert whole_pieces * quality.CALIBRATION_CONTEXT == 2304
    assert model.config.vocab_size == 49_152


# The ladder as it is stored


@pytest.fixture(scope="module")
def stored() -> Ladder:
    return read_ladder()


def test_the_stored_ladder_is_whole_and_says_where_it_comes_from(stored):
    assert [row.name for row in stored.rows] == [scheme.name for scheme in ladder.LADDER]
    for row, scheme in zip(stored.rows, ladder.LADDER, strict=True):
        assert {name: getattr(row, name) for name in dataclasses.asdict(scheme)} == dataclasses.asdict(scheme)
    now = ladder.provenance()
    assert stored.provenance.keys() == now.keys()
    for key in ("what", "command", "model", "data", "settings"):  # the rest is the machine's and the day's
        assert stored.provenance[key] == now[key]
    with pytest.raises(KeyError, match="'rtn 5 bits' is no row of the ladder; there are reference, same grid, "):
        stored["rtn 5 bits"]


@pytest.mark.numeric
@pytest.mark.parametrize("scheme", [Scheme("rtn", 4, "group", 64), Scheme(kv_bits=4)], ids=lambda scheme: scheme.name)
def test_a_sample_of_the_stored_ladder_comes_out_again(stored, pretrained, scheme):
    model, tokenizer = pretrained
    start = quality.text_tokens(tokenizer, "evaluation")[: quality.CONTEXT]
    rounded = quantized_model(model, scheme)
    row = stored[scheme.name]
    assert quality.perplexity(rounded.model, start, kv_bits=scheme.kv_bits) == pytest.approx(
        row.start_perplexity, rel=0.005
    )
    assert row.matrix_bits == pytest.approx(rounded.matrix_bits, rel=1e-5)
    assert row.model_bits == pytest.approx(rounded.effective_bits, rel=1e-5)
    assert (row.num_bytes, row.cache_bits) == (rounded.num_bytes, rounded.kv_bits)


def test_the_reference_is_a_fair_one(stored):
    reference = stored["reference"]
    assert 0.4 < reference.task_accuracy < 0.95
    assert reference.kl_divergence < 1e-6 and reference.top1_agreement == 1
    same = stored["same grid"]  # the grid that the weights are shipped on
    assert (same.perplexity, same.task_accuracy) == (reference.perplexity, reference.task_accuracy)


def test_the_stored_ladder_has_the_shape_that_the_lesson_tells(stored):
    def of(name: str) -> float:
        return stored[name].perplexity

    for bits in (8, 6, 4, 3):
        group, channel, tensor = (
            of(f"rtn {bits} bits group 64"),
            of(f"rtn {bits} bits channel"),
            of(f"rtn {bits} bits tensor"),
        )
        assert group < channel < tensor
    assert of("rtn 4 bits group 32") < of("rtn 4 bits group 64") < of("rtn 4 bits group 192")
    for bits in (4, 3):
        rounded = of(f"rtn {bits} bits group 64")
        assert max(of(f"{method} {bits} bits group 64") for method in ("awq", "gptq")) < rounded
    random = [of(f"random 3 bits group 64 seed {seed}") for seed in range(3)]
    assert of("salient 3 bits group 64") < 0.8 * min(random)
    assert of("KV 8 bits") == pytest.approx(of("reference"), rel=0.005)


# What it gains


@pytest.mark.parametrize("name", kernels.available_kernels())
def test_a_kernel_multiplies_by_the_weights_it_says(name):
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(96, 64, generator=generator) * torch.logspace(-1, 1, 96)[:, None]
    x = torch.randn(3, 5, 64, generator=generator)
    layer = kernels.KERNELS[name](exact)
    weights = layer.dequantized() if isinstance(layer, kernels.Kernel) else layer.weight
    bits = {"fp32": 32, "bf16": 16, "int8": 8, "int8 dynamic": 8, "int4": 4}[name]
    largest = {"fp32": 0.0, "bf16": 2**-8, "int8": 1 / 127, "int8 dynamic": 0.5 / 127, "int4": 0.6 / 7}[name]
    assert torch.all((weights - exact).abs() <= largest * exact.abs().amax(1, keepdim=True))
    if name in ("int8", "int8 dynamic"):
        rounded = torch.from_numpy(quantize(exact.numpy(), 8, "channel").dequantize()).float()
        assert torch.allclose(weights, rounded, rtol=2**-8)
    assert layer.weight.nbytes == exact.numel() * bits // 8
    right = x @ weights.t()
    error = float((layer(x) - right).norm() / right.norm())
    assert error < (1e-6 if name == "fp32" else 0.01)
    assert layer(x).dtype == torch.float32
    for rows in (x[0, 0], x[:, :1], torch.zeros(1, 64)):
        assert torch.allclose(layer(rows), rows @ weights.t(), rtol=0.02, atol=0.02 * float(right.abs().max()))


@pytest.mark.parametrize("name", kernels.available_kernels())
def test_the_model_with_a_kernel_agrees(name, pretrained):
    model, tokenizer = pretrained
    tokens = torch.tensor([tokenizer.encode("The capital of France is Paris. The capital of Italy is")])
    changed = kernels.with_kernel(model, name)
    exact, result = model(tokens, all_logits=True)[0], changed(tokens, all_logits=True)[0]
    assert quality.kl_divergence(exact, result) < {"fp32": 1e-9, "int4": 1.0}.get(name, 0.1)
    assert tokenizer.decode([int(exact[-1].argmax())]) == " Rome"
    if name != "int4":
        assert torch.equal(result[-1].argmax(), exact[-1].argmax())
    share = kernels.kernel_bytes(changed) / model.weight_bytes
    assert share == pytest.approx({"fp32": 1, "bf16": 0.5, "int4": 0.176}.get(name, 0.25), rel=0.02)
    assert isinstance(model.head, Linear)
    assert not isinstance(model.head, kernels.Kernel)


def test_kernels_are_timed(pretrained):
    model, _ = pretrained
    fp32, int8 = kernels.measure_kernels(model, ["fp32", "int8"], batch_sizes=(1,), context_len=4, steps=3)
    assert (fp32.kernel, int8.kernel) == ("fp32", "int8")
    assert fp32.weight_bytes == model.weight_bytes
    assert fp32.read_bandwidth == pytest.approx(fp32.weight_bytes * fp32.tokens_per_s)
    assert 0 < int8.decode.step_s < 60
    with pytest.raises(ValueError, match="kernel must be one of fp32, bf16"):
        kernels.with_kernel(model, "int3")


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory, tiny) -> Path:
    """The tiny model as the course's file is: matrices in Q4_1, embedding in Q8_0, norms in fp32."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_rope_freq_base(10_000.5)
    writer.add_vocab_size(300)
    writer.add_token_list([f"t{i}é" for i in range(300)])
    writer.add_token_types([1] * 300)
    writer.add_add_bos_token(False)
    writer.add_languages(["en", "fr"])
    parts = {"token_embd.weight": tiny.embedding, "output_norm.weight": tiny.final_norm.weight}
    for i, block in enumerate(tiny.blocks):
        parts |= {
            f"blk.{i}.attn_norm.weight": block.attention_norm.weight,
            f"blk.{i}.ffn_down.weight": block.down.weight,
        }
    for name, values in parts.items():
        kind = {"token_embd.weight": "Q8_0"}.get(name, "Q4_1" if values.dim() == 2 else "F32")
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values.numpy(), raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("file_format", ["F16", "Q8_0", "Q4_0"])
def test_a_model_file_says_the_same_in_another_format(file_format, tiny_file, tmp_path):
    path = kernels.write_gguf(tmp_path / "model.gguf", file_format, tiny_file)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    source, reader = gguf.GGUFReader(tiny_file), gguf.GGUFReader(path)
    assert set(reader.fields) == set(source.fields)
    for name, field in source.fields.items():
        assert reader.fields[name].types == field.types
        if name != "general.file_type":
            assert reader.fields[name].contents() == field.contents(), name
    assert reader.fields["general.file_type"].contents() == {"F16": 1, "Q8_0": 7, "Q4_0": 2}[file_format]
    for old, new in zip(source.tensors, reader.tensors, strict=True):
        assert (new.name, list(new.shape)) == (old.name, list(old.shape))
        if len(old.shape) == 1 or (old.name == "token_embd.weight" and file_format != "F16"):
            assert new.tensor_type == old.tensor_type
            assert np.array_equal(new.data, old.data)
            continue
        values = gguf.dequantize(old.data, old.tensor_type)
        assert new.tensor_type.name == file_format
        assert np.array_equal(new.data, gguf.quantize(values, new.tensor_type))
        if file_format != "F16":
            assert np.array_equal(new.data, encode_blocks(values, file_format))


def test_the_real_model_in_another_format(tmp_path, pretrained):
    model, tokenizer = pretrained
    path = kernels.write_gguf(tmp_path / "model.gguf", "Q4_0")
    matrices, embedding, norms = 106_168_320, 49152 * 576, 61 * 576
    smaller = matrices * (20 - 18) // 32  # bytes: Q4_1 has 20 for 32 weights, Q4_0 18
    assert path.stat().st_size == pytest.approx(FILE_BYTES - smaller, abs=4096)
    assert path.stat().st_size > matrices * 4.5 / 8 + embedding * 8.5 / 8 + norms * 4
    again, _ = load_pretrained(path)
    exact = weight(model, 7, "down")
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    assert np.array_equal(weight(again, 7, "down"), gguf.dequantize(gguf.quantize(exact, q4_0), q4_0))
    tokens = torch.tensor([tokenizer.encode("The capital of France is Paris. The capital of Italy is")])
    lost = quality.kl_divergence(*(m(tokens, all_logits=True)[0] for m in (model, again)))
    assert 0.01 < lost < 2


def test_only_formats_that_can_be_written_are_asked_for(tmp_path):
    with pytest.raises(ValueError, match="file_format must be one of F16, Q8_0, Q4_0, got 'Q2_K'"):
        kernels.write_gguf(tmp_path / "model.gguf", "Q2_K")
    assert not list(Path(tmp_path).iterdir())
