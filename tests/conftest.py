"""The real model and its reference, loaded once."""

import pytest
import transformers

from lessonlib.lab.llama import Llama
from lessonlib.lab.pretrained import FILE_NAME, cached_path, fetch, load_pretrained
from lessonlib.lab.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def pretrained() -> tuple[Llama, Tokenizer]:
    return load_pretrained()


@pytest.fixture(scope="session")
def reference_model() -> transformers.PreTrainedModel:
    fetch()
    folder = cached_path().parent
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE_NAME, dtype="float32").eval()
    model.generation_config.eos_token_id = None  # the comparison goes on past the end of a text
    return model


@pytest.fixture(scope="session")
def reference_tokenizer() -> transformers.PreTrainedTokenizerBase:
    fetch()
    return transformers.AutoTokenizer.from_pretrained(cached_path().parent, gguf_file=FILE_NAME)
