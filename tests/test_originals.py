"""The original weights: folders that transformers wrote, and a Hub made here. The real one is never asked."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers
from hf_serve import write_folder
from safetensors.torch import load_file, save_file

from lessonlib.lab.llama import Llama
from lessonlib.lab.originals import REPOSITORY, REVISION, load_original

# The fields of the published config.json that matter here, for a model of 1.6 MB.
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 100000,
    "rope_scaling": None, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def small(tmp_path) -> Path:
    """A small Llama as files for transformers, with a config.json as the published one is written."""
    folder = tmp_path / "small"
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SMALL, initializer_range=0.5)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    return folder


def tensors(model: Llama) -> Iterator[torch.Tensor]:
    yield from (model.embedding, model.final_norm.weight)
    for block in model.blocks:
        for part in (block.attention_norm, block.mlp_norm, block.qkv, block.output, block.gate_up, block.down):
            yield part.weight


def logits_differ(model: Llama, folder: Path) -> float:
    """How far our logits are from those of transformers on the same files, of the largest."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    ids = torch.randint(49152, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids).logits
    return float((model(ids, all_logits=True) - expected).abs().max() / expected.abs().max())


def test_what_transformers_wrote_from_the_same_file_has_the_same_weights(pretrained, reference_model):
    ours, tokenizer = pretrained
    with tempfile.TemporaryDirectory(prefix="lessonlib-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_folder(folder, reference_model, dtype=torch.bfloat16)  # its own reading of the GGUF file, its own layout
        model, same_tokenizer = load_original(folder)
        assert logits_differ(model, folder) < 1e-3
    assert model.config == ours.config
    assert all(torch.equal(a, b.bfloat16().float()) for a, b in zip(tensors(model), tensors(ours), strict=True))
    assert same_tokenizer.encode("Hello <|im_end|>") == tokenizer.encode("Hello <|im_end|>")


def test_a_config_as_it_was_published(small):
    model, _ = load_original(small)
    assert model.config.rope_base == 100_000 and model.config.head_dim == 4
    assert logits_differ(model, small) < 1e-4
    exact, _ = load_original(small, dtype=torch.bfloat16)
    assert exact.dtype == torch.bfloat16
    assert all(torch.equal(a, b.float()) for a, b in zip(tensors(model), tensors(exact), strict=True))


@pytest.mark.parametrize("part", [0, 4, 100, 0.5, -1])
def test_a_cut_off_file_is_refused(part, small):
    file = small / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * part) if isinstance(part, float) else part])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file .*: download"):
        load_original(small)


def test_a_tensor_that_is_missing(small):
    weights = load_file(small / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, small / "model.safetensors")
    with pytest.raises(ValueError, match=r"safetensors lacks model\.layers\.1\.mlp\.up_proj\.weight: .*\(24, 16\)"):
        load_original(small)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "bert"}, "'model_type' is 'bert'"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'; the Llama that is implemented here has 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": 2}, "parameters are 2; they must be a table"),
        ({"rope_theta": "much"}, "rope_theta must be a finite number"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
        ({"head_dim": 3}, "head_dim is 3; rotary positions need an even number"),
        ({"hidden_size": None}, "lacks the fields: hidden_size"),
        ({"intermediate_size": 25}, r"has model.layers.0.mlp.gate_proj.weight in shape \(24, 16\): .*\(25, 16\)"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\.input_layernorm\.weight"),
    ],
)
def test_another_architecture_is_refused(change, said, small):
    (small / "config.json").write_text(json.dumps(SMALL | change), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        load_original(small)


def test_a_vocabulary_that_is_not_the_tokenizer_s(small):
    weights = load_file(small / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:1000].clone()
    save_file(weights, small / "model.safetensors")
    (small / "config.json").write_text(json.dumps(SMALL | {"vocab_size": 1000}), encoding="utf-8")
    with pytest.raises(ValueError, match="vocab_size is 1000; the tokenizer has 49152 tokens"):
        load_original(small)


def test_files_that_are_not_there(small):
    (small / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in "):
        load_original(small)
    with pytest.raises(FileNotFoundError, match=r"no config\.json at "):
        load_original(small / "nowhere")


# --- the Hub --------------------------------------------------------------------------------------------------------


def load_from(endpoint: str, home: Path, *revisions: str) -> list[str]:
    """What becomes of loading each revision from a Hub, in a process whose Hub it is."""
    code = (
        "import sys, time; from lessonlib.lab.originals import load_original\n"
        "for revision in sys.argv[1:]:\n"
        "    start_s = time.monotonic()\n"
        "    try: said = load_original(revision=revision)[0].config\n"
        "    except (ValueError, ConnectionError) as error: said = f'{type(error).__name__}: {error}'\n"
        "    print(f'{time.monotonic() - start_s:.0f} s, {said}')\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", code, *revisions]
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as hands out files: `folder` is every revision but `nothing`."""

    folder = Path()
    commit = "0123456789" * 4

    def do_HEAD(self):
        where, _, name = self.path.rpartition("/")
        file = self.folder / name
        there = where.startswith(f"/{REPOSITORY}/resolve/") and not where.endswith("/nothing") and file.is_file()
        revision = where.rpartition("/")[2]
        content = file.read_bytes() if there else b""
        self.send_response(200 if there else 404)
        self.send_header("Content-Length", str(len(content)))
        if there:
            self.send_header("ETag", f'"{name}-{len(content)}"')
            self.send_header("X-Repo-Commit", revision if revision == REVISION else self.commit)
        else:
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


def test_from_a_hub_and_then_without_it(small, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "folder", small)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        main, pinned, nothing = load_from(endpoint, tmp_path / "home", "main", REVISION, "nothing")
        hub.shutdown()
    expected = str(load_original(small)[0].config)
    assert expected in main
    assert "ValueError" in pinned and re.search(
        r"config\.json is not the file expected: delete .* and load again", pinned
    )
    assert f"revision must be a commit, a branch or a tag of {REPOSITORY}, got 'nothing'" in nothing
    kept, never_fetched = load_from(endpoint, tmp_path / "home", "main", "elsewhere")
    assert expected in kept
    assert re.match(
        rf"\d s, ConnectionError: {REPOSITORY} at revision elsewhere could not be downloaded from {endpoint} "
        r"\(ConnectError: .*\)\. Try again with a network connection, or give path, a folder that holds its "
        r"config\.json and model\.safetensors\. The course works without",
        never_fetched,
    )
