"""A real server on this machine: llama.cpp with an OpenAI-compatible interface, from start to stop.

It runs in a process of its own. So it can always be ended, whatever it is doing; and it ends by itself when the
kernel that started it is gone, because then the pipe to its standard input is closed.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from collections import deque
from pathlib import Path
from typing import IO, Any

from lessonlib.checks import check_count, check_number

LOOPBACK = "127.0.0.1"
LOG_LINES = 10_000  # kept; a request takes some 25
TAIL_LINES = 12  # shown in an error
POLL_S = 0.02
# llama.cpp's threads meet hundreds of times for each token. Where something else has one of few cores, those that spin
# until the last arrives keep it from arriving: one token then takes ten times as long and more. So they sleep.
PATIENT = {"GOMP_SPINCOUNT": "0"}


class LlamaCppServer:
    """A llama.cpp server on a loopback port, for a `with` block; or `start()` it and later `stop()` it.

    `model` is a GGUF file; SmolLM2-135M if left out, which is fetched first where it is not there yet. `slots` requests
    run at once, each with room for `context_len` tokens of prompt and output; more requests wait. `threads` None lets
    llama.cpp choose. `port` 0 takes a free one.

    Raises ValueError for what is out of range or a port that is taken, FileNotFoundError for no model file,
    ModuleNotFoundError without the package xllamacpp. `start` raises TimeoutError if the server is not ready within
    `timeout_s` seconds, and RuntimeError if it ends before; both with the last lines of its log.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        slots: int = 8,
        context_len: int = 1024,
        threads: int | None = None,
        port: int = 0,
        timeout_s: float = 60,
    ) -> None:
        self.slots = check_count("slots", slots)
        self.context_len = check_count("context_len", context_len)
        self.timeout_s = check_number("timeout_s", timeout_s, exclusive=True)
        if threads is not None:
            check_count("threads", threads)
        if check_count("port", port, 0) > 65535:
            raise ValueError(f"port must be at most 65535, or 0 for a free one, got {port}")
        if model is not None and not Path(model).is_file():
            raise FileNotFoundError(
                f"model must be a GGUF file, but there is none at {str(model)[:200]!r}: leave model out for SmolLM2"
            )
        self._model, self._threads, self._port = model, threads, port
        self._process: subprocess.Popen[bytes] | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._url = ""

    def start(self) -> "LlamaCppServer":
        """Start the server and wait until it is ready. Does nothing if it is running."""
        if self.running:
            return self
        self.stop()
        if importlib.util.find_spec("xllamacpp") is None:
            raise ModuleNotFoundError(
                "the package xllamacpp (llama.cpp) is missing: run `make lab` again, or `pip install xllamacpp`",
                name="xllamacpp",
            )
        if self._port and _is_taken(self._port):
            raise ValueError(f"port {self._port} is taken: name another, or leave port out to take a free one")
        if self._model is None:
            from lessonlib.lab.pretrained import fetch  # noqa: PLC0415  (torch, which the server's process can spare)

            self._model = fetch()
        settings = {
            "model": str(Path(self._model).resolve()),
            "slots": self.slots,
            "context_len": self.context_len,
            "threads": self._threads,
            "port": self._port,
        }
        self._log = deque(maxlen=LOG_LINES)
        # -P: this file's folder is not a place to import from. A session (or group) of its own, so that interrupting
        # a cell does not reach a server that is meant to outlive the cell.
        alone: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            alone = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **PATIENT},
            **alone,
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process)  # also when nobody refers to this object any more
        try:
            self._wait_until_ready(process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server's process. Does nothing if it has ended."""
        if self._process is not None:
            self._end()
            self._process = None

    @property
    def running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The number of the server's process; None before it is started and after it is stopped."""
        return self._process.pid if self._process is not None else None

    @property
    def url(self) -> str:
        """Where it listens, such as http://127.0.0.1:41323. Raises RuntimeError if it is not running."""
        if not self.running:
            raise RuntimeError(f"the server is not running: use it in a `with` block, or start() it{self._tail()}")
        return self._url

    @property
    def log(self) -> str:
        """What the server has said since it was started (the last lines, if it said much)."""
        return "\n".join(self._log)

    def __enter__(self) -> "LlamaCppServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.running else "not running"
        return f"LlamaCppServer, {self.slots} slots of {self.context_len:,} tokens, {state}"

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        said: deque[str] = deque()
        follow_log = _follow(process.stderr, self._log)
        follow_said = _follow(process.stdout, said)
        deadline = time.monotonic() + self.timeout_s
        while not said:
            if process.poll() is not None:
                follow_log.join(1)
                follow_said.join(1)
                raise RuntimeError(f"the llama.cpp server could not start: {self._advice()}{self._tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the llama.cpp server was not ready after {self.timeout_s:g} s: close what else keeps this "
                    f"machine busy, or give it longer (timeout_s){self._tail()}"
                )
            time.sleep(POLL_S)
        self._url = said[0]
        self._check_context()

    def _check_context(self) -> None:
        """llama.cpp cuts a context that is too long for the model to what the model was trained for: refuse instead."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{self._url}/slots", timeout=self.timeout_s) as answer:
            longest = min(slot["n_ctx"] for slot in json.load(answer))
        if longest < self.context_len:
            raise ValueError(f"context_len must be at most {longest}, the model's longest, got {self.context_len}")

    def _advice(self) -> str:
        """What to do about a server that ended, as far as its log tells."""
        if "failed to load model" in self.log or "failed to read" in self.log:
            return (
                f"{Path(self._model or '').name} could not be loaded. Is it a complete GGUF file? Leave model out "
                "to use SmolLM2, which is checked"
            )
        return "try fewer slots, a shorter context_len, or another port"

    def _tail(self) -> str:
        lines = list(self._log)[-TAIL_LINES:]
        return "".join(f"\n  {line}" for line in ["The end of its log:", *lines]) if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process for certain; it has nothing to lose."""
    process.kill()
    process.wait()
    if process.stdin:
        process.stdin.close()


def _follow(stream: IO[bytes] | None, lines: deque[str]) -> threading.Thread:
    """Collect a pipe's lines as they come, until it is closed at the other end."""
    assert stream is not None

    def read() -> None:
        with stream:
            for line in stream:
                lines.append(line.decode("utf-8", "replace").rstrip())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _is_taken(port: int) -> bool:
    """Whether something listens on this loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0


# --- the server's own process ---------------------------------------------------------------------------------------


def _serve(settings: dict[str, Any]) -> None:
    """Run llama.cpp's server until standard input is closed; say its address, once it is ready, on standard output."""
    import xllamacpp  # noqa: PLC0415  (loaded in this process only)

    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever llama.cpp prints belongs in the log
    threading.Thread(target=_exit_when_alone, daemon=True).start()
    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.model_alias = [Path(settings["model"]).stem]
    params.hostnames = [LOOPBACK]
    params.port = settings["port"]
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["slots"] * settings["context_len"]
    if settings["threads"]:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.fit_params = False  # all as asked for, or an error
    params.cache_ram_mib = 0  # no copies of finished requests' caches
    params.verbosity = 4  # from here on it says what its memory goes to
    params.ui = False
    params.offline = True
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    print(server.listening_address, file=answer, flush=True)
    threading.Event().wait()


def _exit_when_alone() -> None:
    """End this process when the one that started it has closed the pipe, or has died."""
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
