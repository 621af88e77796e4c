"""A second server, transformers' own: the same model, the same questions, another implementation of the interface."""

import json
import tempfile
from pathlib import Path

import httpx
import pytest
from hf_serve import transformers_server, write_folder

from lessonlib.lab.llama import generate
from lessonlib.lab.load_test import load_test

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def url(reference_model, reference_tokenizer):
    with tempfile.TemporaryDirectory(prefix="lessonlib-test-", ignore_cleanup_errors=True) as folder:
        write_folder(Path(folder), reference_model, reference_tokenizer)
        with transformers_server(Path(folder)) as address:
            yield address


def ask(url: str, **more) -> tuple[int, list[str]]:
    """The status and the lines of a streamed chat."""
    model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | more, timeout=30, trust_env=False) as answer:
        return answer.status_code, [line for line in answer.iter_lines() if line]


def chunks(lines: list[str]) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_streamed_chat(url, pretrained):
    model, tokenizer = pretrained
    prompt = tokenizer.chat(QUESTION)
    expected = tokenizer.decode(generate(model, [prompt], 20, tokenizer.eos_id)[0]).removesuffix("<|im_end|>")
    status, lines = ask(url, max_tokens=20)
    first, *pieces, last = (chunk["choices"][0] for chunk in chunks(lines))
    assert status == 200
    assert first["delta"] == {"role": "assistant"}
    assert "".join(piece["delta"]["content"] for piece in pieces) == expected == "The capital of France is Paris."
    assert len(pieces) == 7 and not any("finish_reason" in piece for piece in pieces)
    assert last["delta"] == {} and last["finish_reason"] == "stop"
    usage = chunks(lines)[-1]["usage"]
    assert usage["prompt_tokens"] == len(prompt) and usage["completion_tokens"] == 8


def test_where_it_differs_from_llama_cpp(url):
    """What a client must put up with that wants to work with both."""
    status, lines = ask(url, max_tokens=3, stream_options={"include_usage": True})
    with_usage = [chunk for chunk in chunks(lines) if "usage" in chunk]
    assert status == 200 and len(with_usage) == 1
    assert with_usage[0]["choices"][0]["finish_reason"] == "length"  # not a chunk of its own
    assert not any("[DONE]" in line for line in lines)
    status, lines = ask(url, max_tokens=3, ignore_eos=True)
    assert status == 422 and "ignore_eos" in lines[0]


def test_our_load_test_works_with_it_too(url):
    result = load_test(url, clients=(1, 2), api="chat", output_len=6, requests=2, show_progress=False)
    assert result.provenance["left_out"] == ["ignore_eos"]
    for level, clients in zip(result.levels, (1, 2), strict=True):
        assert level.clients == clients and not level.failures, level
        assert all(0 < served.output_tokens <= 6 and served.counted_by == "usage" for served in level.served)
        assert all(served.prompt_tokens > 30 for served in level.served)  # the template's among them
