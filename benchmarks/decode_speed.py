"""How fast one request is decoded: our Llama against transformers on the same weights, and against memory."""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from lessonlib.lab.llama import generate
from lessonlib.lab.machine import measure_machine
from lessonlib.lab.pretrained import fetch, load_pretrained

NEW_TOKENS = 64
REPEATS = 5
PROMPT = "The capital of France is"


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print tokens/s of both, the ratio, and the share of the machine's read bandwidth."""
    bandwidth = measure_machine(refresh=True).read_bandwidth.median
    model, tokenizer = load_pretrained()
    path = fetch()
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    prompt = tokenizer.encode(PROMPT)
    tokens = torch.tensor([prompt])
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}

    def ours() -> list[int]:
        return generate(model, [prompt], NEW_TOKENS)[0]

    def theirs() -> list[int]:
        return reference.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0, len(prompt) :].tolist()

    same = ours() == theirs()  # warms both up
    # interleaved, so that whatever else this machine does meets both
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(REPEATS)]
    ours_s, theirs_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [other / own for own, other in pairs]
    read = model.weight_bytes * NEW_TOKENS / ours_s
    print(f"batch 1, fp32, {NEW_TOKENS} greedy tokens, median of {REPEATS}; the same tokens: {same}")
    print(f"ours           {NEW_TOKENS / ours_s:6.1f} tokens/s")
    print(f"transformers   {NEW_TOKENS / theirs_s:6.1f} tokens/s")
    print(f"ratio          {statistics.median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"weights read   {read / 1e9:6.1f} GB/s, {read / bandwidth:.0%} of the {bandwidth / 1e9:.1f} GB/s measured")


if __name__ == "__main__":
    main()
