"""The command: `python -m lessonlib.lab.load_test --help`."""

import argparse
import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lessonlib.lab.load_test import CLIENTS, COMMAND, KEY_ENV, OUTPUT_LEN, PROMPT_LEN, TIMEOUT_S, load_test
from lessonlib.lab.load_test.client import PATHS
from lessonlib.lab.server import LlamaCppServer

SLOTS, MARGIN = 8, 128  # of the server that is started; tokens for a chat's template
INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a load test as the arguments say, and print its table."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.output and not asked.output.parent.is_dir():
        parser.error(f"--output must be in a folder that exists, got {asked.output}")
    try:
        with contextlib.nullcontext() if asked.url else _server(asked) as server:
            url = server.url if server else asked.url
            result = load_test(
                url,
                asked.clients,
                rates_per_s=asked.rates,
                api=asked.api,
                model=asked.model,
                prompt_len=_lengths(asked.prompt_len),
                output_len=_lengths(asked.output_len),
                requests=asked.requests,
                seed=asked.seed,
                timeout_s=asked.timeout_s,
                api_key_env=asked.api_key_env or None,
                show_progress=not asked.quiet,
            )
    except ValueError as error:
        parser.error(str(error))
    except (ConnectionError, RuntimeError, TimeoutError, ModuleNotFoundError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if server:
        command = result.provenance["command"].replace(shlex.join(["--url", url]), "--start")
        result = dataclasses.replace(result, provenance={**result.provenance, "command": command})
    print(result)
    if asked.output:
        result.save(asked.output)
        print(f"Saved in {asked.output}; read it with lessonlib.lab.LoadTest.read(path).")
    if result.interrupted:
        sys.exit(INTERRUPTED)
    if not any(level.completed for level in result.levels):
        sys.exit("no request was answered; why is in the last column")


def _server(asked: argparse.Namespace) -> LlamaCppServer:
    """The course's own, with room for the longest prompt and answer."""
    longest = max(asked.prompt_len) + max(asked.output_len) + MARGIN
    return LlamaCppServer(slots=SLOTS, context_len=max(1024, longest))


def _lengths(typed: Sequence[int]) -> int | Sequence[int]:
    return typed[0] if len(typed) == 1 else typed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=" ".join(COMMAND),
        description="Load a server with an OpenAI-compatible interface level by level, and see when its tokens arrive.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="the server's address, such as http://127.0.0.1:8080")
    where.add_argument(
        "--start", action="store_true", help="start the course's llama.cpp with SmolLM2 (so without --url)"
    )
    load, add = parser.add_mutually_exclusive_group(), parser.add_argument
    levels, default = ", ".join(map(str, CLIENTS)), "(default: %(default)s)"
    load.add_argument(
        "--clients", type=int, nargs="+", default=CLIENTS, metavar="N", help=f"requests at a time (default: {levels})"
    )
    load.add_argument("--rates", type=float, nargs="+", metavar="R", help="instead: requests that arrive in a second")
    add("--api", choices=tuple(PATHS), default="completions", help=default)
    add("--model", help="its name (default: the first that the server names)")
    for name, what, length in (("prompt", "of a prompt", PROMPT_LEN), ("output", "asked for", OUTPUT_LEN)):
        said = f"tokens {what}: a number, or the lowest and the highest (default: {length})"
        add(f"--{name}-len", type=int, nargs="+", default=[length], metavar="N", help=said)
    add("--requests", type=int, metavar="N", help="of each level (default: as many as suit it)")
    add("--seed", type=int, default=0, metavar="N", help=f"for lengths, arrivals and prompts {default}")
    add("--timeout-s", type=float, default=TIMEOUT_S, metavar="S", help=f"seconds that a request may take {default}")
    add("--api-key-env", default=KEY_ENV, metavar="NAME", help=f"variable with the key, '' for none {default}")
    add("--output", type=Path, metavar="FILE", help="write everything there, as JSON")
    add("--quiet", action="store_true", help="show no progress")
    return parser


if __name__ == "__main__":
    main()
