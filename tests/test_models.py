"""Shapes and counts: against published counts, and against the models that transformers builds."""

import json
import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from lessonlib.catalog import read_table
from lessonlib.models import ModelConfig, effective_bits, get_model, list_models

ROWS = {row["key"]: row for row in read_table("models.csv")}


@pytest.mark.parametrize("key", list_models())
def test_counts_match_the_published_ones(key):
    model, row = get_model(key), ROWS[key]
    published, extra = int(row["published_params"]), int(row["published_extra"])
    if row["published_note"] and not extra:  # a rounded name or figure
        assert model.num_parameters == pytest.approx(published, rel=0.012)
    else:
        assert model.num_parameters + extra == published
        assert bool(extra) == bool(row["published_note"])
    assert model.num_layers * model.kv_values_per_token_per_layer * 2 == int(row["kv_bytes_per_token_bf16"])
    assert model.source


@pytest.mark.parametrize(
    ("key", "with_embedding", "without"),
    [
        ("mixtral-8x7b", 12.880, 12.749),
        ("qwen3-235b-a22b", 22.191, 21.568),
        ("qwen3-30b-a3b", 3.353, 3.042),
        ("deepseek-v2-lite", 2.661, 2.451),
        ("deepseek-v3", 37.552, 36.626),
        ("gpt-oss-20b", 4.187, 3.608),
        ("gpt-oss-120b", 5.712, 5.133),
    ],
)
def test_active_parameters(key, with_embedding, without):
    model = get_model(key)
    assert model.num_active_parameters / 1e9 == pytest.approx(with_embedding, abs=5e-4)
    assert model.matmul_params / 1e9 == pytest.approx(without, abs=5e-4)
    headline = float(ROWS[key]["headline_active_params_b"])  # publishers count the embedding or not
    assert without * 0.94 < headline < with_embedding * 1.06


def test_attention_kinds():
    kinds = {key: get_model(key).attention_kind for key in ("llama-2-7b", "llama-3.1-8b", "falcon-7b", "deepseek-v3")}
    assert list(kinds.values()) == ["MHA", "GQA", "MQA", "MLA"]


def test_an_unknown_model_names_near_ones():
    with pytest.raises(ValueError, match=r"llama-3\.1-8b"):
        get_model("llama-3-8b")
    assert get_model("Llama 2 7B") is get_model("llama-2-7b")


def test_quantized_sizes():
    model = get_model("llama-3.1-70b")
    assert model.weight_bytes(8) / 2**30 == pytest.approx(65.71, abs=0.005)
    assert model.weight_bytes(8, unquantized=("embedding", "head")) / 2**30 == pytest.approx(67.67, abs=0.006)
    assert effective_bits(4, 32) == 4.5
    assert effective_bits(8, 32) == 8.5
    assert effective_bits(4, 128) == 4.125
    assert effective_bits(4, 32, zero_bits=16) == 5
    assert effective_bits(16, 128) == 16  # nothing to scale


def test_a_tied_table_is_one_table():
    model = get_model("smollm2-135m")
    assert model.streamed_params() == model.num_parameters
    one = model.weight_bytes(8, unquantized=("embedding",))
    assert (
        one == model.weight_bytes(8, unquantized=("head",)) == model.weight_bytes(8, unquantized=("embedding", "head"))
    )
    assert model.streamed_weight_bytes(8, unquantized=("embedding", "head")) == one


def test_what_is_not_read_saves_nothing():
    model = get_model("llama-3.1-8b")
    assert model.streamed_weight_bytes(8, unquantized=("embedding",)) == model.streamed_weight_bytes(8)


@pytest.mark.parametrize("bits", [5, 0, -4, 4.5, "4", float("nan"), True, None])
def test_weight_bits_that_no_kernel_stores(bits):
    with pytest.raises(ValueError, match="weight_bits must be one of 2, 3, 4, 6, 8, 16, 32"):
        get_model("llama-2-7b").weight_bytes(bits)


@given(st.integers(1, 400))
def test_experts_read_grow_with_the_batch_up_to_all(num_tokens):
    model = get_model("mixtral-8x7b")
    assert model.experts_per_token <= model.distinct_experts(num_tokens) <= model.num_experts
    assert model.distinct_experts(num_tokens) < model.distinct_experts(num_tokens + 1) or num_tokens > 100
    assert model.matmul_params <= model.streamed_params(num_tokens) <= model.num_parameters


# One small shape for each family, with the fields its configs on the Hub have. Widths are odd on purpose.
BASE = {
    "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    **BASE, "num_key_value_heads": 6, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4,
    "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
SMALL = {
    "llama": BASE,
    "llama biased": {**BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "mistral": {**BASE, "sliding_window": 16},
    "mistral of old": {**BASE, "model_type": "mistral"},  # where the key is missing the window is 4096
    "mixtral": {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {**BASE, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
    "qwen2 tied": {**BASE, "model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 16},
    "qwen2_moe": {**BASE, **MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen3": {**BASE, "head_dim": 16},
    "qwen3_moe": {**BASE, **MOE, "head_dim": 16, "decoder_sparse_step": 2},
    "gemma2": {**BASE, "head_dim": 16, "sliding_window": 16},
    "gemma3_text": {**BASE, "head_dim": 16, "num_hidden_layers": 13, "sliding_window": 16},
    "phi3": {**BASE, "sliding_window": 15, "pad_token_id": 0},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": 101, "n_positions": 64},
    "gpt_bigcode": {"n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": 101, "n_positions": 64, "multi_query": True},
    "gpt_neox": {k: v for k, v in BASE.items() if k != "num_key_value_heads"},
    "opt": {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_dim": 80, "vocab_size": 101,
        "max_position_embeddings": 64, "word_embed_proj_dim": 48,
    },
    "falcon": {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 101, "multi_query": True,
        "num_kv_heads": 6, "new_decoder_architecture": False, "parallel_attn": True, "bias": False, "alibi": False,
    },
    "falcon new": {
        "model_type": "falcon", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 101,
        "num_kv_heads": 2, "new_decoder_architecture": True, "bias": False, "alibi": False,
    },
    "gpt_oss": {**BASE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 20},
}  # fmt: skip
WINDOWED_LAYERS = {
    "mistral": 5,
    "mistral of old": 5,
    "qwen2": 2,
    "gemma2": 3,
    "gemma3_text": 11,
    "phi3": 5,
    "gpt_oss": 3,
}


def built_by_transformers(config: dict) -> tuple[int, dict]:
    """Parameters of the model that transformers builds (no memory is taken), and the config it would save."""
    settings = {k: v for k, v in config.items() if k != "model_type"}
    full = transformers.AutoConfig.for_model(config["model_type"], **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(full)
    model.tie_weights()
    buffers = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(p.numel() for p in model.parameters()) + buffers, full.to_dict()


@pytest.mark.parametrize("name", SMALL)
def test_families_as_transformers_builds_them(name):
    config = {"model_type": name, **SMALL[name]}
    expected, saved = built_by_transformers(config)
    shape = ModelConfig.from_hf_config(config)
    assert shape.num_parameters == expected
    assert shape.num_windowed_layers == WINDOWED_LAYERS.get(name, 0)
    again = ModelConfig.from_hf_config(json.loads(json.dumps(saved, default=str)))
    assert (again.num_parameters, again.num_windowed_layers) == (shape.num_parameters, shape.num_windowed_layers)
    assert again.kv_values_per_token_per_layer == shape.kv_values_per_token_per_layer


HUB = {  # what these files on the Hub hold, shortened to the fields that give the shape
    "gemma-3-27b": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
            "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "falcon-7b": {
        "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
        "num_kv_heads": 71, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
        "bias": False, "vocab_size": 65024,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24, "num_local_experts": 32,
        "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128, "vocab_size": 201088,
        "attention_bias": True, "tie_word_embeddings": False, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 3, "vocab_size": 129280, "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
    },
    "mistral-7b-v0.1": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "gpt2-small": {
        "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
    },
}  # fmt: skip


@pytest.mark.parametrize("key", HUB)
def test_configs_of_the_hub_give_the_catalog(key, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB[key]), encoding="utf-8")
    read, listed = ModelConfig.from_hf_config(tmp_path), get_model(key)
    for name in ("num_parameters", "num_active_parameters", "matmul_params", "kv_values_per_token_per_layer",
                 "sliding_window", "num_windowed_layers", "tied_embeddings", "max_context"):  # fmt: skip
        assert getattr(read, name) == getattr(listed, name) or (name == "max_context" and key == "falcon-7b"), name


LLAMA = {"model_type": "llama", **BASE}


def without(*names: str) -> dict:
    return {key: value for key, value in LLAMA.items() if key not in names}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba", **BASE}, "'mamba'.*supported families.*num_kv_heads"),
        (BASE, "'model_type' is None"),
        (without("num_attention_heads"), "lacks the fields: num_attention_heads"),
        (without("num_attention_heads", "vocab_size"), "num_attention_heads.*vocab_size"),
        ({**LLAMA, "hidden_size": -48}, "'hidden_size' must be a whole number of at least 1, got -48"),
        ({**LLAMA, "hidden_size": "48"}, "'hidden_size' must be a whole number"),
        ({**LLAMA, "hidden_size": True}, "'hidden_size' must be a whole number"),
        ({**LLAMA, "hidden_size": math.nan}, "'hidden_size' must be a whole number"),
        ({**LLAMA, "num_key_value_heads": 4}, "num_heads must be a multiple of num_kv_heads, got 6 and 4"),
        ({**LLAMA, "num_attention_heads": 7, "num_key_value_heads": 7}, "multiple of the 7 heads"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "true or false"),
        ({"model_type": "gpt2"}, "n_head"),
        ({"model_type": "falcon"}, "lacks the fields"),
        ({"model_type": "opt"}, "ffn_dim"),
        ({"model_type": "deepseek_v3", **BASE}, "kv_lora_rank"),
        ({"model_type": "gpt_oss", **BASE, "num_local_experts": 4, "num_experts_per_tok": 8}, "at most num_experts"),
        ({"model_type": "gemma2", **BASE, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "opt", **SMALL["opt"], "do_layer_norm_before": False}, "OPT-350m"),
        ({"model_type": "opt", **SMALL["opt"], "enable_bias": False}, "without biases"),
        ({"model_type": "gpt2", **SMALL["gpt2"], "add_cross_attention": True}, "cross-attention"),
        ({"model_type": "deepseek_v3", **DEEPSEEK, "attention_bias": True}, "attention biases"),
        ({"model_type": "qwen3_moe", **BASE, **MOE, "mlp_only_layers": 3}, "mlp_only_layers"),
        (None, "as a path, as text or as a dict, not as NoneType"),
        ([1], "not as list"),
    ],
)
def test_bad_configs_say_what_is_wrong(config, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_hf_config(config)


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "lla', "[1, 2]", "null", "\x00"])
def test_files_that_are_not_a_config(text, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_hf_config(file)


def test_pasted_text_and_a_byte_order_mark(tmp_path):
    text = json.dumps(LLAMA)
    (tmp_path / "config.json").write_text("\ufeff" + text, encoding="utf-8")
    pasted, saved = ModelConfig.from_hf_config(f"  {text}"), ModelConfig.from_hf_config(tmp_path)
    assert pasted.num_parameters == saved.num_parameters
    with pytest.raises(ValueError, match="not complete JSON"):
        ModelConfig.from_hf_config(text[:-5])


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json at"):
        ModelConfig.from_hf_config(tmp_path)
