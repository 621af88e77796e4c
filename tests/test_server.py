"""A real llama.cpp server: it starts, answers and stops; and its clients, also when it dies under them."""

import _thread
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import psutil
import pytest

from lessonlib.lab import LlamaCppServer, measure_batching, measure_clients
from lessonlib.lab.load_test import client as client_module
from lessonlib.lab.pretrained import fetch


@pytest.fixture(scope="module", autouse=True)
def model_file() -> None:
    fetch()


@pytest.fixture(scope="module")
def server():
    with LlamaCppServer(slots=4, context_len=256) as running:
        yield running


def is_gone(pid: int, within_s: float = 5) -> bool:
    """Whether the process ends within a time; one that only waits for its parent to take note has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def ask(url: str, **body) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30, trust_env=False)


# --- the server -----------------------------------------------------------------------------------------------------


def test_it_starts_answers_and_stops():
    with LlamaCppServer(slots=2, context_len=256) as running:
        pid, url = running.pid, running.url
        assert url.startswith("http://127.0.0.1:")
        answer = ask(url, prompt="The capital of France is", max_tokens=4, temperature=0).json()
        assert "Paris" in answer["choices"][0]["text"]
        assert len(httpx.get(f"{url}/slots", trust_env=False).json()) == 2
        assert "model loaded" in running.log and "listening on" in running.log
        assert repr(running) == "LlamaCppServer, 2 slots of 256 tokens, running"
        assert not psutil.Process(pid).children()  # one process is all that was started
        assert running.start() is running and running.pid == pid
    assert is_gone(pid, 0.1)
    assert running.pid is None and not running.running and "model loaded" in running.log
    with pytest.raises(httpx.ConnectError):
        ask(url, prompt="x", max_tokens=1)
    with pytest.raises(RuntimeError, match="the server is not running: use it in a `with` block"):
        _ = running.url
    running.stop()


def test_two_in_a_row_on_one_port():
    with LlamaCppServer(slots=1, context_len=128) as running:
        port = int(running.url.rsplit(":", 1)[1])
    for _ in range(2):
        with LlamaCppServer(slots=1, context_len=128, port=port) as running:
            assert running.url == f"http://127.0.0.1:{port}"
            assert ask(running.url, prompt="One, two,", max_tokens=1).status_code == 200


def test_a_port_that_is_taken_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is taken: name another, or leave port out"):
            LlamaCppServer(port=port).start()


def test_a_bad_model_file(tmp_path):
    for name, content in (("empty.gguf", b""), ("cut.gguf", fetch().read_bytes()[:100_000]), ("text.gguf", b"hello")):
        path = tmp_path / name
        path.write_bytes(content)
        broken = LlamaCppServer(path)
        with pytest.raises(RuntimeError, match=f"{name} could not be loaded. Is it a complete GGUF file") as refused:
            broken.start()
        assert "The end of its log:" in str(refused.value)
        assert broken.pid is None
    with pytest.raises(FileNotFoundError, match=r"model must be a GGUF file, but there is none at 'nowhere\.gguf'"):
        LlamaCppServer("nowhere.gguf")


def test_a_context_beyond_the_model_s_is_refused_not_cut():
    server = LlamaCppServer(slots=1, context_len=8193)
    with pytest.raises(ValueError, match="context_len must be at most 8192, the model's longest, got 8193"):
        server.start()
    assert server.pid is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slots": 0}, "slots must be a whole number of at least 1, got 0"),
        ({"context_len": 1.5}, "context_len must be a whole number"),
        ({"threads": 0}, "threads must be a whole number"),
        ({"port": -1}, "port must be a whole number of at least 0"),
        ({"port": 65536}, "port must be at most 65535, or 0 for a free one, got 65536"),
        ({"timeout_s": 0}, "timeout_s must be a finite number above 0"),
    ],
)
def test_bad_arguments(options, said):
    with pytest.raises(ValueError, match=said):
        LlamaCppServer(**options)


def test_one_that_is_not_ready_in_time_is_ended():
    server = LlamaCppServer(timeout_s=0.001)
    started = []
    popen = subprocess.Popen

    class Remembered(popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self.pid)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError, match=r"was not ready after 0\.001 s"):
        patch.setattr(subprocess, "Popen", Remembered)
        server.start()
    assert len(started) == 1 and is_gone(started[0], 0.1)


def test_without_the_package_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="`make lab` again, or `pip install xllamacpp`"):
        LlamaCppServer().start()


def test_one_that_nobody_refers_to_is_ended():
    server = LlamaCppServer(slots=1, context_len=128).start()
    pid = server.pid
    del server
    assert is_gone(pid)


@pytest.mark.skipif(sys.platform == "win32", reason="a kernel is killed in another way there")
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_it_ends_when_the_kernel_that_started_it_is_killed(how):
    code = (
        "from lessonlib.lab.server import LlamaCppServer; import time\n"
        "server = LlamaCppServer(slots=1, context_len=128).start(); print(server.pid, flush=True); time.sleep(60)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(kernel.stdout.readline())
    assert not is_gone(pid, 0.2)
    os.kill(kernel.pid, getattr(signal, how))
    kernel.wait()
    kernel.stdout.close()
    assert is_gone(pid)


# --- its clients ----------------------------------------------------------------------------------------------------


def test_clients_are_measured(server):
    one, four = measure_clients(server.url, (1, 4), prompt_len=20, output_len=12, requests_per_client=2)
    for result, clients in ((one, 1), (four, 4)):
        assert result.clients == clients and len(result.served) == 2 * clients and not result.failures
        assert result.output_tokens == 12 * 2 * clients
        assert result.tokens_per_s == pytest.approx(result.output_tokens / result.wall_s)
        assert len(result.ttft_s) == len(result.tpot_s) == 2 * clients
        for served in result.served:
            assert 0 <= served.sent_s < served.token_s[0] <= served.token_s[-1] <= served.end_s <= result.wall_s
            assert served.end_s - served.sent_s >= served.ttft_s + 11 * served.tpot_s
            assert 15 <= served.prompt_tokens <= 25
    # one client's requests follow each other, four clients' are under way together
    first, second = one.served
    assert first.end_s <= second.sent_s
    assert sum(served.sent_s < min(s.end_s for s in four.served) for served in four.served) == 4
    assert repr(four).startswith("4 clients: ") and "failed" not in repr(four)


def test_static_and_continuous_batches(server):
    lens = (24, 2, 2, 2, 24, 2, 2, 2)
    both = measure_batching(server.url, lens, slots=4, prompt_len=8)
    for result in (both.static, both.continuous):
        assert sorted(served.output_tokens for served in result.served) == sorted(lens) and not result.failures
    assert both.speedup == pytest.approx(both.static.wall_s / both.continuous.wall_s)
    assert repr(both).startswith("static ") and repr(both).endswith(f": {both.speedup:.2f} times as fast")
    static = sorted(both.static.served, key=lambda served: served.sent_s)
    assert max(served.end_s for served in static[:4]) <= min(served.sent_s for served in static[4:])
    continuous = sorted(both.continuous.served, key=lambda served: served.sent_s)
    assert continuous[4].sent_s < max(served.end_s for served in continuous[:4])
    under_way = [sum(s.sent_s <= at.sent_s < s.end_s for s in continuous) for at in continuous]
    assert max(under_way) == 4


def test_no_prompt_is_sent_twice(server, monkeypatch):
    sent = []
    ask_one = client_module.Api.ask

    async def watched(self, client, request, *rest):
        monkeypatch.setattr(client, "stream", watch(client.stream))
        return await ask_one(self, client, request, *rest)

    def watch(stream):
        def note(method, url, json):
            sent.append(json["prompt"])
            return stream(method, url, json=json)

        return note if stream.__name__ == "stream" else stream

    monkeypatch.setattr(client_module.Api, "ask", watched)
    for _ in range(2):
        measure_clients(server.url, (2,), prompt_len=16, output_len=1)
    assert len(sent) == len(set(sent)) == 2 * (1 + 4)


def test_a_server_that_dies_half_way():
    with LlamaCppServer(slots=2, context_len=256) as dying:
        pid = dying.pid
        threading.Timer(1.5, lambda: psutil.Process(pid).kill()).start()
        start = time.monotonic()
        two, four = measure_clients(dying.url, (2, 4), output_len=200, requests_per_client=40, timeout_s=60)
        assert time.monotonic() - start < 30
        assert len(two.served) == 80 and len(four.served) == 160
        assert two.failures >= 1 and len(two.completed) == 80 - two.failures
        assert four.failures == sum(four.errors.values()) == 160 and all(four.errors)
        assert four.tokens_per_s == 0 and not four.ttft_s.size
        assert "160 of 160 requests failed (ConnectError" in repr(four)
        assert not dying.running
        with pytest.raises(RuntimeError, match="The end of its log"):
            _ = dying.url


def test_a_server_that_hangs(server):
    paused = psutil.Process(server.pid)
    timer = threading.Timer(0.7, paused.suspend)
    try:
        timer.start()
        start = time.monotonic()
        [result] = measure_clients(server.url, (4,), output_len=200, requests_per_client=20, timeout_s=2)
        assert time.monotonic() - start < 8
    finally:
        timer.join()
        paused.resume()
    assert len(result.served) == 80 and result.failures >= 4
    assert result.errors["not done in time"] == result.failures


def test_an_interrupted_cell_leaves_nothing():
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt), LlamaCppServer(slots=2, context_len=512) as running:
        pid = running.pid
        threading.Timer(1, _thread.interrupt_main).start()
        measure_clients(running.url, (2,), output_len=400, requests_per_client=20)
    assert is_gone(pid, 0.1)
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads


def test_it_works_while_an_event_loop_runs_as_in_a_notebook(server):
    async def cell():
        return measure_clients(server.url, (1,), output_len=2, requests_per_client=1)

    with ThreadPoolExecutor(1) as pool:  # this thread may have a loop already: the browser tests' own
        [result] = pool.submit(asyncio.run, cell()).result()
    assert not result.failures


def test_nothing_answers():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match=r"no OpenAI-compatible server answers at .*start one, for example"):
        measure_clients(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "127.0.0.1:80"}, "url must be a server's address such as http://127.0.0.1:8080, got '127.0.0.1:80'"),
        ({"url": None}, "url must be"),
        ({"clients": ()}, "clients must be a list of whole numbers"),
        ({"clients": (0,)}, "clients must be at least 1"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"output_len": 0}, "output_len"),
        ({"requests_per_client": 0}, "requests_per_client"),
        ({"timeout_s": -1}, "timeout_s"),
    ],
)
def test_bad_measurements(options, said):
    with pytest.raises(ValueError, match=said):
        measure_clients(**{"url": "http://127.0.0.1:9", **options})
    with pytest.raises(ValueError, match="slots"):
        measure_batching("http://127.0.0.1:9", slots=0)


class Odd(BaseHTTPRequestHandler):
    """A server whose answers are not what they should be, one kind after the other."""

    answers = iter(())

    def do_GET(self):
        self.reply(200, b'{"data": [{"id": "odd"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(*next(self.answers))

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_odd_answers_are_failures_with_a_reason():
    good = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [], "usage": {"completion_tokens": 1}}\n\n'
    Odd.answers = iter(
        [
            (200, good),  # the warm-up
            (503, b"busy"),
            (200, b'data: {"error": {"message": "out of memory"}}\n\n'),
            (200, b"data: {cut"),
            (200, b""),
            (200, good),
        ]
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as odd:
        threading.Thread(target=odd.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{odd.server_port}/v1/"
        [result] = measure_clients(url, (1,), output_len=1, requests_per_client=5)
        odd.shutdown()
    reasons = [served.error for served in result.served]
    assert "HTTP 503" in reasons[0] and "out of memory" in reasons[1] and "not JSON" in reasons[2]
    assert reasons[3] == "it ended before 1 tokens were made" and reasons[4] == ""
    assert result.failures == 4 and result.output_tokens == 1 and not result.tpot_s.size
    assert "4 of 5 requests failed" in repr(result)
