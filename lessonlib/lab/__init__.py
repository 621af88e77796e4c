"""Everything that runs for real on this machine: its memory, a model, and the time both take."""

from lessonlib.lab.llama import KVCache, Llama, generate, stream
from lessonlib.lab.machine import Machine, measure_machine
from lessonlib.lab.measure import fit_overhead, measure_decode, measure_generation, measure_prefill
from lessonlib.lab.pretrained import load_pretrained

__all__ = [
    "KVCache",
    "Llama",
    "Machine",
    "fit_overhead",
    "generate",
    "load_pretrained",
    "measure_decode",
    "measure_generation",
    "measure_machine",
    "measure_prefill",
    "stream",
]
