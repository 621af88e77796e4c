"""Measure the ladder of quantization again: `python -m lessonlib.lab.ladder`.

Each row is one scheme applied to SmolLM2-135M and measured on the evaluation text and the cloze task. Rows are measured
side by side, each by a process with a single thread: on few cores that beats sharing each product among threads, and
by far where something else runs beside it. Every finished row is written at once, the file being replaced in one step;
a second start measures what is missing. Everything that is random has a seed.
"""

import argparse
import contextlib
import datetime
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

import lessonlib
from lessonlib.checks import check_count
from lessonlib.lab.llama import Llama
from lessonlib.lab.machine import processor_name
from lessonlib.lab.pretrained import FILE_NAME, FILE_SHA256, cached_path, load_pretrained
from lessonlib.lab.quality import (
    CALIBRATED,
    CALIBRATION_CONTEXT,
    CONTEXT,
    Method,
    Reference,
    Scheme,
    data_hash,
    load_cloze,
    make_reference,
    measure_quality,
    quantized_model,
    text_tokens,
)
from lessonlib.lab.tokenizer import Tokenizer
from lessonlib.quantization.ladder import Ladder, LadderRow, parse_ladder, write_ladder_text

GROUPS = (192, 64, 32)  # SmolLM2's 576 columns cannot be divided by the usual 128
SECONDS = {"rtn": 35, "awq": 130, "gptq": 90}  # of one core, for a row; others as rtn, with calibration as well
BYTES_PER_WORKER = 3 * 10**9


def _schemes() -> tuple[Scheme, ...]:
    rows = [Scheme(), Scheme("same grid", 4)]
    for bits in (8, 6, 4, 3, 2):
        rows += [Scheme("rtn", bits, "tensor"), Scheme("rtn", bits, "channel")]
        rows += [Scheme("rtn", bits, "group", size) for size in GROUPS]
    rows += [Scheme("rtn", bits, "group", 64, symmetric=True) for bits in (4, 3)]
    methods: tuple[Method, ...] = ("gptq", "awq")
    for bits in (4, 3, 2):
        for method in methods:
            rows += [Scheme(method, bits, "channel"), Scheme(method, bits, "group", 64)]
    rows += [Scheme("salient", 3, "group", 64), *(Scheme("random", 3, "group", 64, seed=seed) for seed in range(3))]
    rows += [Scheme("scale", 3, "group", 64), Scheme(kv_bits=8), Scheme(kv_bits=4)]
    return tuple(rows)


LADDER = _schemes()
"""all rows, in the order in which they are taught"""


class _Work(TypedDict):
    """What a worker keeps between rows."""

    model: Llama
    reference: Reference
    calibration: Tensor


_work: list[_Work] = []


def measure_row(model: Llama, reference: Reference, calibration: Tensor, scheme: Scheme) -> LadderRow:
    """One row of the ladder: `scheme` applied to `model` and measured."""
    start = time.process_time()
    rounded = quantized_model(model, scheme, calibration)
    middle = time.process_time()
    quality = measure_quality(rounded.model, reference, scheme.kv_bits, show_progress=False)
    return LadderRow(
        name=scheme.name,
        method=scheme.method,
        bits=scheme.bits,
        granularity=scheme.granularity,
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
        seed=scheme.seed,
        kv_bits=scheme.kv_bits,
        matrix_bits=rounded.matrix_bits,
        model_bits=rounded.effective_bits,
        num_bytes=rounded.num_bytes,
        cache_bits=rounded.kv_bits,
        perplexity=quality.perplexity,
        start_perplexity=quality.start_perplexity,
        kl_divergence=quality.kl_divergence,
        top1_agreement=quality.top1_agreement,
        task_accuracy=quality.task_accuracy,
        rounding_cpu_s=middle - start,
        evaluation_cpu_s=time.process_time() - middle,
    )


def _prepare(listen: Connection, num_tokens: int | None, num_items: int | None) -> None:
    """Once in each worker. It ends when the other end of `listen` closes: on an interruption, or with the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers too; the command decides
    threading.Thread(target=_end_with, args=(listen,), daemon=True).start()
    torch.set_num_threads(1)
    model, tokenizer = load_pretrained()
    _work.append(prepare(model, tokenizer, num_tokens, num_items))


def _end_with(listen: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        listen.recv()
    os._exit(1)


def prepare(model: Llama, tokenizer: Tokenizer, num_tokens: int | None = None, num_items: int | None = None) -> _Work:
    """What `measure_row` needs: by default all of the text and the task, else so much of their beginning."""
    tokens = text_tokens(tokenizer, "evaluation")[:num_tokens]
    reference = make_reference(model, tokenizer, tokens, tuple(load_cloze()[:num_items]))
    return {"model": model, "reference": reference, "calibration": text_tokens(tokenizer, "calibration")}


def _measure(scheme: Scheme) -> LadderRow:
    [work] = _work
    return measure_row(work["model"], work["reference"], work["calibration"], scheme)


def provenance(num_tokens: int | None = None, num_items: int | None = None) -> dict[str, str]:
    """Where a ladder measured here and now comes from."""
    return {
        "what": "SmolLM2-135M-Instruct under quantization schemes; columns: lessonlib.quantization.LadderRow",
        "command": "python -m lessonlib.lab.ladder",
        "model": f"{FILE_NAME}, SHA-256 {FILE_SHA256[:16]}",
        "data": f"evaluation.txt, calibration.txt, cloze.csv, SHA-256 {data_hash()}",
        "settings": f"context {CONTEXT}, calibration context {CALIBRATION_CONTEXT}, "
        f"tokens {num_tokens or 'all'}, items {num_items or 'all'}, fp32, one thread for each row",
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "versions": f"torch {torch.__version__}, numpy {np.__version__}, lessonlib {lessonlib.__version__}",
        "date": datetime.date.today().isoformat(),
    }


def measure_ladder(
    path: Path,
    schemes: Sequence[Scheme] = LADDER,
    workers: int | None = None,
    num_tokens: int | None = None,
    num_items: int | None = None,
) -> Ladder:
    """Measure the rows that the file at `path` lacks, and add each to it as soon as it is there.

    Rows that are damaged are measured again. A file of other data, settings or versions, or of another processor, is
    put aside as *.old.csv, and all rows are measured. `workers` processes take 3 GB and a core each; by default there
    are as many as there are cores, but at most 4. With 0 the rows are measured in this process.
    Raises ValueError for a number of workers below 0.
    """
    here = provenance(num_tokens, num_items)
    rows = _rows_so_far(path, here)
    missing = [scheme for scheme in schemes if scheme.name not in rows]
    if workers is None:
        workers = min(os.cpu_count() or 1, 4)
    workers = min(check_count("workers", workers, 0), len(missing))

    def add(row: LadderRow) -> None:
        rows[row.name] = row
        _write(path, Ladder(tuple(rows[s.name] for s in schemes if s.name in rows), here))
        bar.set_postfix_str(f"{row.name}: perplexity {row.perplexity:.4g}")
        bar.update(seconds[row.name])

    seconds = {scheme.name: _seconds(scheme) for scheme in schemes}
    with tqdm(
        total=sum(seconds.values()),
        initial=sum(seconds[scheme.name] for scheme in schemes if scheme.name in rows),
        desc="measuring the ladder",
        bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} so far, {remaining} to go  {postfix}",
    ) as bar:
        if workers == 0 and missing:
            work = prepare(*load_pretrained(), num_tokens, num_items)
            for scheme in missing:
                add(measure_row(work["model"], work["reference"], work["calibration"], scheme))
        elif missing:
            # The longest rows go first, so that no worker is left alone with one at the end.
            first = sorted(missing, key=_seconds, reverse=True)
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
                os.environ[name] = "1"  # what a worker's numpy reads when it starts
            context = multiprocessing.get_context("spawn")
            listen, alive = context.Pipe(duplex=False)
            with ProcessPoolExecutor(workers, context, _prepare, (listen, num_tokens, num_items)) as pool:
                try:
                    for done in as_completed([pool.submit(_measure, scheme) for scheme in first]):
                        add(done.result())
                except BaseException:
                    alive.close()
                    raise
    return Ladder(tuple(rows[scheme.name] for scheme in schemes), here)


def _seconds(scheme: Scheme) -> int:
    calibration = 15 if scheme.method in CALIBRATED else 0
    return SECONDS.get(scheme.method, SECONDS["rtn"] + calibration)


def _rows_so_far(path: Path, here: Mapping[str, str]) -> dict[str, LadderRow]:
    if not path.is_file():
        return {}
    ladder, _ = parse_ladder(path.read_text(encoding="utf-8", errors="replace"))
    if all(ladder.provenance.get(key) == value for key, value in here.items() if key != "date"):
        return {row.name: row for row in ladder.rows}
    path.replace(path.with_suffix(".old.csv"))
    return {}


def _write(path: Path, ladder: Ladder) -> None:
    """All at once: whoever reads the file sees the old rows or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8", newline="\n") as file:
        file.write(write_ladder_text(ladder))
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lessonlib.lab.ladder", description="Measure the ladder again.")
    default = cached_path().parent / "quantization_ladder.csv"
    parser.add_argument("--output", type=Path, default=default, help="the file that is written, and continued")
    parser.add_argument("--workers", type=int, help="rows measured at a time, each on one core and in 3 GB of memory")
    chosen = parser.parse_args(arguments)
    minutes = sum(map(_seconds, LADDER)) / 60 / min(os.cpu_count() or 1, chosen.workers or 4)
    print(f"{len(LADDER)} rows, about {minutes:.0f} minutes when nothing else runs here.")
    print("Interrupt it whenever you like: the same command continues.", flush=True)
    try:
        ladder = measure_ladder(chosen.output, workers=chosen.workers)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command to continue")
    print(f"{len(ladder.rows)} rows are in {chosen.output}; read them with lessonlib.quantization.read_ladder(path)")


if __name__ == "__main__":
    main()
