"""transformers' own server, on this machine and without a network: the second server that our clients are tried on.

It needs a folder as transformers writes them: `transformers serve` does not get far with a GGUF file
(5.24 looks for a field in its config that a GGUF file has not).
"""

import copy
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
import transformers


def write_folder(
    folder: Path,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """A Llama that was read from a GGUF file, as files for transformers.

    transformers does not save what it read from a quantized file: the weights go into a model that does not know.
    """
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        plain = transformers.LlamaForCausalLM(config)
    weights = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def transformers_server(folder: Path, timeout_s: float = 60) -> Iterator[str]:
    """The address of a server of the model in `folder`, which is ended afterwards, whatever happens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    log = folder / "server.log"
    with log.open("wb") as out:
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | offline)
    try:
        deadline = time.monotonic() + timeout_s
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"transformers serve is not ready: {log.read_text(encoding='utf-8')[-2000:]}")
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.ConnectError:
        return False
