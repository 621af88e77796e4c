"""SmolLM2-135M-Instruct as it was published: in bf16, before anybody put its weights on a 4-bit grid.

It comes from the Hugging Face Hub, for those who have a network. The course does not need it.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lessonlib.checks import check_number
from lessonlib.lab.llama import Llama, LlamaConfig
from lessonlib.lab.pretrained import fetch, read_gguf
from lessonlib.lab.tokenizer import Tokenizer
from lessonlib.models import ModelConfig

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
FILES_SHA256 = {  # at REVISION
    "config.json": "8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a",
    "model.safetensors": "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
}
TIMEOUT_S = 10  # for the Hub's first answer
# Their names in a file for transformers, beside those that LlamaConfig.tensor_shapes has from GGUF.
MODEL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def load_original(
    path: str | os.PathLike[str] | None = None, dtype: torch.dtype = torch.float32, revision: str = REVISION
) -> tuple[Llama, Tokenizer]:
    """The model with its original weights (bf16, kept as `dtype`), and the tokenizer that `load_pretrained` has too.

    `path` is a folder with a Llama's config.json and model.safetensors, as transformers writes them. Without one, both
    (269 MB) are downloaded once from the Hugging Face Hub: the files whose SHA-256 this module knows, or another
    `revision` (a commit, a branch or a tag) of the same repository.

    Raises ConnectionError if they cannot be downloaded, FileNotFoundError if the folder lacks one, and ValueError for
    a revision that does not exist, another kind of model, and a file that is not complete or lacks a tensor.
    """
    folder = Path(path) if path is not None else _download(revision)
    config = _config(folder)
    weights = _weights(folder / "model.safetensors", config, dtype)
    fields, _ = read_gguf(fetch())
    known = len(fields["tokenizer.ggml.tokens"])
    if config.vocab_size != known:
        raise ValueError(f"config.json says vocab_size is {config.vocab_size}; the tokenizer has {known} tokens")
    return Llama(config, weights), Tokenizer(fields)


def _download(revision: str) -> Path:
    """The folder in the Hub's own cache that holds both files."""
    import huggingface_hub as hub  # noqa: PLC0415  (only here is it needed)
    from huggingface_hub.errors import RevisionNotFoundError  # noqa: PLC0415

    try:
        for name in FILES_SHA256:
            if not isinstance(hub.try_to_load_from_cache(REPOSITORY, name, revision=revision), str):
                # hf_hub_download would try for half a minute to reach a Hub that cannot be reached; this asks once
                hub.get_hf_file_metadata(hub.hf_hub_url(REPOSITORY, name, revision=revision), timeout=TIMEOUT_S)
            file = Path(hub.hf_hub_download(REPOSITORY, name, revision=revision, etag_timeout=TIMEOUT_S))
    except RevisionNotFoundError as error:
        raise ValueError(f"revision must be a commit, a branch or a tag of {REPOSITORY}, got {revision!r}") from error
    except Exception as error:  # errors of its HTTP libraries among them; whatever it is, the way out is the same
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConnectionError(
            f"{REPOSITORY} at revision {revision} could not be downloaded from {hub.constants.ENDPOINT} ({reason}). "
            "Try again with a network connection, or give path, a folder that holds its config.json and "
            "model.safetensors. The course works without: load_pretrained() has the same model in 4 bits"
        ) from error
    for name, sha256 in FILES_SHA256.items() if revision == REVISION else ():
        kept = (file.parent / name).resolve()  # where the link in the folder leads
        with kept.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != sha256:
                raise ValueError(f"{name} is not the file expected: delete {kept} and load again")
    return file.parent


def _config(folder: Path) -> LlamaConfig:
    """The shape in a config.json, if it describes the kind of Llama that is implemented here."""
    shape = ModelConfig.from_hf_config(folder / "config.json")
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    # transformers 5 writes rope_parameters; before, there were rope_theta and, for longer contexts, rope_scaling.
    rope: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json says that the rotary positions' parameters are {rope!r}; they must be a table")
    for name, value, needed in (
        ("model_type", fields.get("model_type"), "llama"),
        ("hidden_act", fields.get("hidden_act", "silu"), "silu"),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("quantization_config", fields.get("quantization_config"), None),
        ("tie_word_embeddings", shape.tied_embeddings, True),
        ("attention_bias", shape.qkv_bias, False),
        ("mlp_bias", shape.mlp_bias, False),
    ):
        if value != needed:
            raise ValueError(f"config.json says {name} is {value!r}; the Llama that is implemented here has {needed!r}")
    if shape.head_dim % 2:
        raise ValueError(f"config.json says head_dim is {shape.head_dim}; rotary positions need an even number")
    return LlamaConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        max_context=shape.max_context,
        rope_base=check_number("rope_theta", rope.get("rope_theta", fields.get("rope_theta", 10_000.0)), 1),
        norm_epsilon=check_number("rms_norm_eps", fields.get("rms_norm_eps", 1e-6)),
    )


def _weights(file: Path, config: LlamaConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors under their GGUF names, q and k in GGUF's order of rows."""
    if not file.is_file():
        raise FileNotFoundError(f"no {file.name} in {file.parent}")
    weights: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            there = set(tensors.keys())
            for name, shape in config.tensor_shapes().items():
                theirs = _hf_name(name)
                found = tuple(tensors.get_slice(theirs).get_shape()) if theirs in there else None
                if found != shape:
                    said = f"has {theirs} in shape {found}" if found else f"lacks {theirs}"
                    raise ValueError(f"{file.name} {said}: it must have it in shape {shape}, as config.json says")
                weight = tensors.get_tensor(theirs)
                if "attn_q" in name or "attn_k" in name:
                    weight = neighbors_from_halves(weight, config.head_dim)
                weights[name] = weight.to(dtype, copy=True)  # the file is only mapped: keep no part of it
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file.name} is not a complete safetensors file ({error}): download it again") from error
    return weights


def _hf_name(name: str) -> str:
    """What transformers calls a tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def neighbors_from_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k, (heads x head_dim, inputs), so that the pairs which rotary positions turn are neighbors.

    Files for transformers have a pair's members half a head apart: rows 0 and D/2 become 0 and 1.
    """
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
