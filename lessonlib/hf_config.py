"""A model's shape from the config.json that the Hugging Face Hub keeps beside its weights.

Families name the same thing differently and leave out what is their own default. A family here is a function from
its config to the fields in which it differs from a plain Llama.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lessonlib.models import ModelConfig

BY_HAND = (
    "num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size, max_context, "
    "tied_embeddings"
)


class _Config:
    """A config's values, checked as they are read; what is missing is collected and named all at once."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values = {**defaults, **values}
        self.missing: list[str] = []

    def count(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number under the first of `names` that is given and not null."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(f"config field {name!r} must be a whole number of at least {minimum}, got {value!r}")
            return value
        if default is None:
            self.missing.append(" or ".join(names))
            return 1
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"config field {name!r} must be true or false, got {value!r}")
        return value

    def refuse(self, name: str, value: bool, why: str) -> None:
        """Raise for a variant whose parameters would be counted wrongly."""
        if self.flag(name, not value) is value:
            raise ValueError(f"config field {name!r} is {str(value).lower()}: {why} is not supported")


def _llama(c: _Config) -> dict[str, Any]:
    heads = c.count("num_attention_heads", "n_head")
    hidden = c.count("hidden_size", "n_embd")
    bias = c.flag("attention_bias")
    # Where heads are missing that is reported, not what follows from it.
    if c.values.get("head_dim") is None and not c.missing and hidden % heads:
        raise ValueError(f"config field 'hidden_size' ({hidden}) must be a multiple of the {heads} heads")
    return {
        "num_layers": c.count("num_hidden_layers", "n_layer"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": c.count("num_key_value_heads", default=heads),
        "head_dim": c.count("head_dim", default=max(1, hidden // heads)),
        "intermediate_size": c.count("intermediate_size"),
        "vocab_size": c.count("vocab_size"),
        "max_context": c.count("max_position_embeddings", "n_positions", "max_sequence_length", default=2048),
        "tied_embeddings": c.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": c.flag("mlp_bias"),
    }


def _window(c: _Config, shape: dict[str, Any], windowed: Callable[[int], bool]) -> dict[str, int]:
    """The window, and how many layers have one: as `layer_types` lists them, else those that `windowed` names."""
    window = c.count("sliding_window", default=0, minimum=0)
    layers = shape["num_layers"]
    types = c.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ValueError(f"config field 'layer_types' must list one type for each of the {layers} layers")
        number = types.count("sliding_attention")
    else:
        number = sum(windowed(layer) for layer in range(layers))
    return {"sliding_window": window, "num_windowed_layers": number} if window and number else {}


def _mistral(c: _Config) -> dict[str, Any]:
    shape = _llama(c)
    return shape | _window(c, shape, lambda _: True)


def _phi3(c: _Config) -> dict[str, Any]:
    return _mistral(c) | {"qkv_bias": False, "output_bias": False}


def _mixtral(c: _Config) -> dict[str, Any]:
    experts = {"num_experts": c.count("num_local_experts"), "experts_per_token": c.count("num_experts_per_tok")}
    return _mistral(c) | experts


def _qwen_window(c: _Config, shape: dict[str, Any]) -> dict[str, int]:
    if not c.flag("use_sliding_window"):
        return {}  # these configs carry a window that is switched off
    full = c.count("max_window_layers", default=28, minimum=0)
    return _window(c, shape, lambda layer: layer >= full)


def _qwen_experts(c: _Config, shape: dict[str, Any]) -> dict[str, Any]:
    step, dense = c.count("decoder_sparse_step", default=1), c.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"config field 'mlp_only_layers' must be a list of layer numbers, got {dense!r}")
    layers = range(shape["num_layers"])
    num_dense = sum(layer in dense or bool((layer + 1) % step) for layer in layers)
    return {
        "num_experts": c.count("num_experts", "num_local_experts"),
        "experts_per_token": c.count("num_experts_per_tok"),
        "intermediate_size": c.count("moe_intermediate_size"),
        "num_dense_layers": num_dense,
        "dense_intermediate_size": shape["intermediate_size"] if num_dense else 0,
    }


def _qwen2(c: _Config) -> dict[str, Any]:
    shape = _llama(c) | {"qkv_bias": True, "output_bias": False}
    return shape | _qwen_window(c, shape)


def _qwen2_moe(c: _Config) -> dict[str, Any]:
    shape = _qwen2(c) | {"qkv_bias": c.flag("qkv_bias", True)}
    shared = {"shared_intermediate_size": c.count("shared_expert_intermediate_size"), "shared_expert_gate": True}
    return shape | _qwen_experts(c, shape) | shared


def _qwen3(c: _Config) -> dict[str, Any]:
    shape = _llama(c) | {"qk_norm": True}
    return shape | _qwen_window(c, shape)


def _qwen3_moe(c: _Config) -> dict[str, Any]:
    shape = _qwen3(c)
    return shape | _qwen_experts(c, shape)


def _gemma2(c: _Config) -> dict[str, Any]:
    shape = _llama(c) | {"norms_per_layer": 4}
    return shape | _window(c, shape, lambda layer: layer % 2 == 0)


def _gemma3(c: _Config) -> dict[str, Any]:
    shape = _llama(c) | {"norms_per_layer": 4, "qk_norm": True}
    pattern = c.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return shape | _window(c, shape, lambda layer: (layer + 1) % pattern > 0)


_GPT2_STYLE = {
    "gated_mlp": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True, "norm_bias": True
}  # fmt: skip


def _gpt2(c: _Config) -> dict[str, Any]:
    c.refuse("add_cross_attention", True, "cross-attention")
    c.values.setdefault("intermediate_size", None)
    width = c.count("n_inner", "intermediate_size", default=4 * c.count("n_embd", "hidden_size"))
    shape = _llama(_Config({**c.values, "intermediate_size": width}, {})) if _has_shape(c) else {}
    return shape | _GPT2_STYLE | {"num_positions": shape.get("max_context", 0)}


def _has_shape(c: _Config) -> bool:
    c.count("num_attention_heads", "n_head"), c.count("num_hidden_layers", "n_layer"), c.count("vocab_size")
    return not c.missing


def _gpt_bigcode(c: _Config) -> dict[str, Any]:
    shape = _gpt2(c)
    return shape | ({"num_kv_heads": 1} if c.flag("multi_query", True) else {})


def _gpt_neox(c: _Config) -> dict[str, Any]:
    bias = c.flag("attention_bias", True)
    return _llama(c) | _GPT2_STYLE | {"qkv_bias": bias, "output_bias": bias}


def _opt(c: _Config) -> dict[str, Any]:
    c.refuse("do_layer_norm_before", False, "normalization after each block (OPT-350m)")
    c.refuse("enable_bias", False, "an OPT without biases")
    c.refuse("layer_norm_elementwise_affine", False, "an OPT without norm weights")
    c.refuse("_remove_final_layer_norm", True, "an OPT without its last norm")
    c.values.setdefault("intermediate_size", c.values.get("ffn_dim"))
    if c.values.get("intermediate_size") is None:
        c.missing.append("ffn_dim")
        c.values["intermediate_size"] = 1
    shape = _llama(c) | _GPT2_STYLE
    if c.count("word_embed_proj_dim", default=shape["hidden_size"]) != shape["hidden_size"]:
        raise ValueError(
            "config field 'word_embed_proj_dim' must equal hidden_size: projected embeddings (OPT-350m) "
            "are not supported"
        )
    return shape | {"num_positions": shape["max_context"] + 2}


def _falcon(c: _Config) -> dict[str, Any]:
    hidden = c.count("hidden_size", "n_embed", "n_embd")
    width = c.count("ffn_hidden_size", default=4 * hidden)
    shape = (
        _llama(_Config({**c.values, "hidden_size": hidden, "intermediate_size": width}, {})) if _has_shape(c) else {}
    )
    new, bias = c.flag("new_decoder_architecture"), c.flag("bias")
    if new:
        shape["num_kv_heads"] = c.count("num_kv_heads", default=shape.get("num_heads", 1))
        norms = c.count("num_ln_in_parallel_attn", default=2)
    else:
        shape["num_kv_heads"] = 1 if c.flag("multi_query", True) else shape.get("num_heads", 1)
        norms = 1 if c.flag("parallel_attn", True) else 2
    return shape | {
        "gated_mlp": False, "norm_bias": True, "norms_per_layer": norms,
        "qkv_bias": bias, "output_bias": bias, "mlp_bias": bias,
    }  # fmt: skip


def _gpt_oss(c: _Config) -> dict[str, Any]:
    shape = _llama(c) | {
        "num_experts": c.count("num_local_experts", "num_experts"),
        "experts_per_token": c.count("num_experts_per_tok", "experts_per_token"),
        "mlp_bias": True,
        "router_bias": True,
        "attention_sinks": True,
    }
    return shape | _window(c, shape, lambda layer: layer % 2 == 0)


def _deepseek_v2(c: _Config) -> dict[str, Any]:
    c.refuse("attention_bias", True, "a DeepSeek model with attention biases")
    nope, rope = c.count("qk_nope_head_dim"), c.count("qk_rope_head_dim")
    c.values["head_dim"] = nope + rope  # transformers stores the rotary part alone under this name
    shape = _llama(c)
    shape["num_kv_heads"] = shape["num_heads"]
    width = c.count("moe_intermediate_size")
    dense, every = c.count("first_k_dense_replace", default=0, minimum=0), c.count("moe_layer_freq", default=1)
    num_dense = sum(layer < dense or bool(layer % every) for layer in range(shape["num_layers"]))
    return shape | {
        "q_lora_rank": c.count("q_lora_rank", default=0, minimum=0),
        "kv_lora_rank": c.count("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": c.count("v_head_dim"),
        "num_experts": c.count("n_routed_experts"),
        "experts_per_token": c.count("num_experts_per_tok"),
        "intermediate_size": width,
        "num_dense_layers": num_dense,
        "dense_intermediate_size": shape["intermediate_size"] if num_dense else 0,
        "shared_intermediate_size": width * c.count("n_shared_experts", default=0, minimum=0),
        "qkv_bias": False,
        "output_bias": False,
    }


def _deepseek_v3(c: _Config) -> dict[str, Any]:
    return _deepseek_v2(c) | {"router_bias": True}


_TIED = {"tie_word_embeddings": True}
# model_type: how to read it, and what its configs may leave out because it is the family's default
FAMILIES: dict[str, tuple[Callable[[_Config], dict[str, Any]], dict[str, Any]]] = {
    "llama": (_llama, {}),
    "mistral": (_mistral, {"sliding_window": 4096}),
    "mixtral": (_mixtral, {}),
    "qwen2": (_qwen2, {}),
    "qwen2_moe": (_qwen2_moe, {}),
    "qwen3": (_qwen3, {"head_dim": 128}),
    "qwen3_moe": (_qwen3_moe, {}),
    "gemma2": (_gemma2, {**_TIED, "head_dim": 256, "sliding_window": 4096}),
    "gemma3_text": (
        _gemma3,
        {
            **_TIED, "head_dim": 256, "sliding_window": 4096, "vocab_size": 262_208, "num_attention_heads": 8,
            "num_key_value_heads": 4, "max_position_embeddings": 131_072,
        },
    ),
    "phi3": (_phi3, {}),
    "gpt2": (_gpt2, {**_TIED, "n_positions": 1024}),
    "gpt_bigcode": (_gpt_bigcode, {**_TIED, "n_positions": 1024}),
    "gpt_neox": (_gpt_neox, {}),
    "opt": (_opt, _TIED),
    "falcon": (_falcon, _TIED),
    "gpt_oss": (_gpt_oss, {"head_dim": 64, "sliding_window": 128, "attention_bias": True}),
    "deepseek_v2": (_deepseek_v2, {}),
    "deepseek_v3": (_deepseek_v3, {}),
}  # fmt: skip
FAMILIES["gemma3"] = FAMILIES["gemma3_text"]


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
    """See `ModelConfig.from_hf_config`."""
    if isinstance(config, str) and config.lstrip().startswith("{"):  # the text itself, pasted
        values, label = _parse(config, "the text"), ""
    elif isinstance(config, (str, os.PathLike)):
        values, label = _load(Path(config))
    elif isinstance(config, Mapping):
        values, label = config, ""
    else:
        raise ValueError(f"give a config.json as a path, as text or as a dict, not as {type(config).__name__}")
    name = str(values.get("_name_or_path") or label or values.get("model_type") or "model")
    if isinstance(values.get("text_config"), Mapping):  # a multimodal model: its language part
        outer = {key: values[key] for key in ("model_type", "tie_word_embeddings") if key in values}
        values = {**outer, **values["text_config"]}
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"config field 'model_type' is {family!r}, which is not one of the supported families "
            f"({', '.join(sorted(FAMILIES))}). Another one can be described by hand: ModelConfig(name=..., ...) "
            f"needs {BY_HAND}"
        )
    read, defaults = FAMILIES[family]
    reader = _Config(values, defaults)
    shape = read(reader)
    if reader.missing:
        raise ValueError(f"this {family} config lacks the fields: {', '.join(dict.fromkeys(reader.missing))}")
    return ModelConfig(name=name, source="config.json", **shape)


def _load(path: Path) -> tuple[Mapping[str, Any], str]:
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no config.json at {path}: give the file, the folder it is in, or its content as a dict"
        )
    return _parse(path.read_text(encoding="utf-8-sig"), path.name), path.parent.name


def _parse(text: str, name: str) -> Mapping[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not complete JSON ({error}): download it or copy it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name} holds a {type(values).__name__}, where a table of fields is needed")
    return values
