"""Everything that runs for real on this machine: its memory, a model, and the time both take."""

import os

# A thread that waits for work spins for a while before it sleeps. By default it is so long that, with a browser or a
# second notebook beside it on few cores, threads keep each other from working: a decode step then takes twice as long
# and more. Spinning less costs nothing measurable on a quiet machine. (For GNU's OpenMP, which torch brings on Linux;
# it reads this when torch is first imported. Whoever has set it keeps their own setting.)
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from lessonlib.lab.answers import Answers, compare_answers, measure_answers
from lessonlib.lab.kernels import available_kernels, measure_kernels, with_kernel, write_gguf
from lessonlib.lab.llama import KVCache, Llama, generate, stream
from lessonlib.lab.load_test import LoadResult, LoadTest, Served, load_test
from lessonlib.lab.machine import Machine, measure_machine
from lessonlib.lab.measure import fit_overhead, measure_decode, measure_generation, measure_prefill
from lessonlib.lab.measure_server import BatchingResult, measure_batching, measure_clients
from lessonlib.lab.originals import load_original
from lessonlib.lab.pretrained import load_pretrained
from lessonlib.lab.quality import (
    Quality,
    QuantizedModel,
    Reference,
    Scheme,
    make_reference,
    measure_quality,
    perplexity,
    quantized_model,
    text_tokens,
)
from lessonlib.lab.server import LlamaCppServer

__all__ = [
    "Answers",
    "BatchingResult",
    "KVCache",
    "Llama",
    "LlamaCppServer",
    "LoadResult",
    "LoadTest",
    "Machine",
    "Quality",
    "QuantizedModel",
    "Reference",
    "Scheme",
    "Served",
    "available_kernels",
    "compare_answers",
    "fit_overhead",
    "generate",
    "load_original",
    "load_pretrained",
    "load_test",
    "make_reference",
    "measure_answers",
    "measure_batching",
    "measure_clients",
    "measure_decode",
    "measure_generation",
    "measure_kernels",
    "measure_machine",
    "measure_prefill",
    "measure_quality",
    "perplexity",
    "quantized_model",
    "stream",
    "text_tokens",
    "with_kernel",
    "write_gguf",
]
