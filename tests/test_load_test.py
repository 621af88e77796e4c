"""Load tests: of a real llama.cpp server, which is also killed under one, and of servers that misbehave."""

import _thread
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lessonlib.batching import SLO
from lessonlib.lab import LlamaCppServer, LoadResult, LoadTest, Served, load_test
from lessonlib.lab.load_test import client as client_module
from lessonlib.lab.load_test.__main__ import main
from lessonlib.lab.pretrained import fetch

KEY = "sk-Secret/_0123456789"


@pytest.fixture(scope="module")
def server():
    fetch()
    with LlamaCppServer(slots=4, context_len=1024) as running:
        yield running


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def after_pieces(monkeypatch, count: int, act) -> None:
    """Do something, once, when so many pieces of text have arrived."""
    add, seen = client_module._Answer.add, []

    def watched(self, event, now_s):
        has_text = add(self, event, now_s)
        seen.extend([1] * has_text)
        if has_text and len(seen) == count:
            act()
        return has_text

    monkeypatch.setattr(client_module._Answer, "add", watched)


# --- a real server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_clients_that_wait_for_their_answers(server, api):
    test = load_test(
        server.url, (1, 4), api=api, prompt_len=(8, 40), output_len=(2, 9), requests=6, show_progress=False
    )
    assert [level.clients for level in test.levels] == [1, 4] and not test.failures and not test.interrupted
    asked = np.random.default_rng((0, 1)).integers(2, 9, 6, endpoint=True).tolist()
    for level in test.levels:
        assert sorted(one.output_tokens for one in level.served) == sorted(asked)
        assert level.counted_by == "usage" and level.output_tokens == sum(asked)
        for one in level.served:
            assert 0 <= one.sent_s < one.token_s[0] <= one.token_s[-1] <= one.end_s <= level.wall_s
            assert one.e2e_s == pytest.approx(one.ttft_s + (one.output_tokens - 1) * one.tpot_s)
            assert one.engine_prompt_s > 0 and one.engine_tpot_s > 0
        assert level.tokens_per_s == pytest.approx(level.output_tokens / level.wall_s)
        assert level.requests_per_s == pytest.approx(6 / level.wall_s)
        assert len(level.itl_s) == sum(len(one.token_s) - 1 for one in level.served)
        assert level.itl_s.sum() == pytest.approx((level.e2e_s - level.ttft_s).sum())
    one, four = test.levels
    assert one.served[0].end_s <= one.served[1].sent_s
    assert sum(served.sent_s < min(s.end_s for s in four.served) for served in four.served) == 4
    words = 0 if api == "completions" else 25  # of the template
    assert all(8 + words <= s.prompt_tokens <= 44 + 2 * words for level in test.levels for s in level.served)


def test_requests_that_arrive_at_a_rate(server):
    options = {"output_len": (2, 12), "prompt_len": 8, "requests": 8, "show_progress": False}
    first, again = (load_test(server.url, rates_per_s=(20,), seed=3, **options).levels[0] for _ in range(2))
    other = load_test(server.url, rates_per_s=(20,), seed=4, **options).levels[0]
    gaps = np.random.default_rng((3, 2)).exponential(1 / 20, 8)
    in_order = [sorted(level.served, key=lambda one: one.sent_s) for level in (first, again, other)]
    for one, arrival_s in zip(in_order[0], np.cumsum(gaps) - gaps[0], strict=True):
        assert one.sent_s >= arrival_s  # never early
    lens = [[one.output_tokens for one in served] for served in in_order]
    assert lens[0] == lens[1] == np.random.default_rng((3, 1)).integers(2, 12, 8, endpoint=True).tolist() != lens[2]
    assert first.clients is None and first.rate_per_s == 20 and not first.failures
    assert repr(first).startswith("20 requests/s: ")


def test_times_agree_with_the_engine_s_own(server):
    """One client, so that there is no queue, and a long prompt: connecting and reading the request count for little."""
    [level] = load_test(server.url, (1,), prompt_len=256, output_len=64, requests=5, show_progress=False).levels
    assert not level.failures
    measured = np.median(level.ttft_s), np.median(level.tpot_s)
    engine = np.median([[one.engine_prompt_s, one.engine_tpot_s] for one in level.served], axis=0)
    assert measured == pytest.approx(engine, rel=0.1)


def test_killing_the_server_in_the_middle(monkeypatch, tmp_path):
    with LlamaCppServer(slots=4, context_len=256) as dying:
        after_pieces(monkeypatch, 100, lambda: os.kill(dying.pid, signal.SIGTERM))
        test = load_test(dying.url, (4, 8), prompt_len=8, output_len=(8, 16), requests=200, show_progress=False)
    four, eight = test.levels
    assert len(four.served) == len(eight.served) == 200
    assert 1 <= len(four.completed) < 100 / 8 and eight.failures == 200
    assert set(four.reasons) == {"cut off", "no connection"} and set(eight.reasons) == {"no connection"}
    assert 1 <= four.reasons["cut off"] <= 8  # what was under way, or about to be
    assert eight.tokens_per_s == eight.requests_per_s == eight.goodput_per_s(SLO(1, 1)) == 0
    assert four.percentiles("ttft_s") and eight.percentiles("ttft_s") == {}
    assert "200 of 200: no connection (200)" in repr(test)
    test.save(tmp_path / "killed.json")
    assert LoadTest.read(tmp_path / "killed.json") == test


def test_an_interruption_keeps_what_was_measured(server, monkeypatch, tmp_path):
    threads = threading.active_count()
    after_pieces(monkeypatch, 50, _thread.interrupt_main)
    test = load_test(server.url, (1, 2), prompt_len=8, output_len=10, requests=50)
    [level] = test.levels
    assert test.interrupted and 1 <= len(level.served) < 50 and not level.failures
    assert "interrupted" in repr(test)
    test.save(tmp_path / "part.json")
    assert LoadTest.read(tmp_path / "part.json") == test
    assert threading.active_count() <= threads


def test_an_interruption_before_anything_was_measured(server, monkeypatch):
    after_pieces(monkeypatch, 1, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        load_test(server.url, (1,), output_len=400)


def test_the_command_starts_a_server_by_itself(capsys, tmp_path):
    path = tmp_path / "result.json"
    options = "--clients 1 2 --requests 2 --prompt-len 8 --output-len 2 4 --quiet --output"
    main([*options.split(), str(path)])
    test = LoadTest.read(path)
    assert [level.clients for level in test.levels] == [1, 2] and not test.failures
    assert capsys.readouterr().out.startswith(f"{test!r}\nSaved in ")
    said = (
        " --start --clients 1 2 --api completions --prompt-len 8 --output-len 2 4 --requests 2 --seed 0 --timeout-s 60"
    )
    assert test.provenance["command"] == "python -m lessonlib.lab.load_test" + said
    assert str(tmp_path) not in path.read_text(encoding="utf-8")


# --- servers that misbehave -----------------------------------------------------------------------------------------

EVENTS = {  # what a good server streams
    "completions": [{"choices": [{"text": "a", "finish_reason": None}]}, {"choices": [{"text": "b"}]}],
    "chat": [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "a", "content": None}}]},
        {"choices": [{"delta": {"content": "b"}}]},
    ],
}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
STOP = {"choices": [{"text": "", "delta": {}, "finish_reason": "stop"}]}


def stream(*events, end: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


GOOD = stream(*EVENTS["completions"], STOP, USAGE)


def http(body: str | bytes = "", status: str = "200 OK", kind: str = "text/event-stream", more: str = "") -> bytes:
    body = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n{more}\r\n".encode() + body


class Server(socketserver.ThreadingTCPServer):
    """Answers the first POST, the warm-up, and lists its model, as it should; the rest with `answer(request)`."""

    daemon_threads = True

    def __init__(self, answer, warm_up=None, model="tiny", stays_open=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.stays_open = stays_open
        self.answer, self.warm_up, self.model = answer, warm_up or (lambda _: http(GOOD)), model
        self.asked = []
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        first, *lines = iter(lambda: self.rfile.readline().decode().strip(), "")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if not first.startswith("POST"):
            self.wfile.write(http(json.dumps({"data": [{"id": self.server.model}]})))
            return
        request = json.loads(self.rfile.read(int(headers["content-length"]))) | {"headers": headers}
        self.server.asked.append(request)
        answer = self.server.answer if len(self.server.asked) > 1 else self.server.warm_up
        self.wfile.write(answer(request) or b"")
        if self.server.stays_open and len(self.server.asked) > 1:
            self.server.stopped.wait(20)


@contextmanager
def serving(answer, **options):
    with Server(answer, **options) as running:
        threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield running
        finally:
            running.stopped.set()
            running.shutdown()


def measured(answer, requests: int = 2, **options) -> LoadResult:
    with serving(answer) as running:
        [level] = load_test(running.url, (1,), requests=requests, output_len=2, show_progress=False, **options).levels
    assert len(level.served) == requests
    return level


HTML = "<!DOCTYPE html><html><body>Welcome to nginx!</body></html>"


@pytest.mark.parametrize(
    ("answer", "reason", "said"),
    [
        (http("out of memory", "500 Internal Server Error"), "HTTP 500", "out of memory"),
        (http("", "503 Busy"), "HTTP 503", ""),
        (http("", "307 Temporary Redirect", more="Location: /elsewhere\r\n"), "HTTP 307", ""),
        (http("data: {cut\n\n"), "not JSON", "{cut"),
        (http("data: " + "[" * 100_000), "not JSON", "[[["),
        (http("data: 5\n\n"), "no event", "5"),
        (http('data: {"error": {"message": "broken"}}\n\n'), "error event", "broken"),
        (http('error: {"message": "broken"}\n\n'), "error event", "broken"),
        (http('data: {"object": "error", "message": "broken"}\n\n'), "error event", "broken"),
        (http(HTML, kind="text/html"), "not a stream", "Welcome to nginx!"),
        (http('{"choices": [{"text": "ab"}]}', kind="application/json"), "not a stream", "choices"),
        (http(), "no tokens", ""),
        (http(": ping\n\n"), "no tokens", ""),
        (http(stream(STOP)), "no tokens", ""),
        (http(stream({"choices": 5}, {"choices": [None, {"text": 7, "delta": "x"}]}, USAGE)), "no tokens", ""),
        (http(stream(EVENTS["completions"][0], end="")), "cut off", "ended too early"),
        (http("5\r\ndata:\r\n", more="Transfer-Encoding: chunked\r\n"), "cut off", "incomplete"),
        (http("zip?", more="Content-Encoding: gzip\r\n"), "DecodingError", ""),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "cut off", ""),
        (b"", "cut off", "without sending a response"),
        (http("x" * 3 * 2**20), "too long", "bytes"),
        (http(stream(*EVENTS["completions"] * 30_000, end="")), "too long", "bytes"),
    ],
)
def test_what_is_no_answer_is_a_failure_with_a_reason(answer, reason, said):
    level = measured(lambda _: answer)
    assert level.reasons == {reason: 2}
    assert all(said in error and len(error) <= 200 for error in level.errors)
    assert not level.completed and level.tokens_per_s == 0 and not level.itl_s.size


def test_one_bad_answer_among_good_ones():
    answers = iter([http(GOOD), http("", "500 Oh"), http(GOOD), http(stream(EVENTS["completions"][0], end=""))])
    level = measured(lambda _: next(answers), requests=4)
    assert level.reasons == {"HTTP 500": 1, "cut off": 1} and level.output_tokens == 4
    assert level.slo_share(SLO(60, 60)) == 0.5
    assert level.goodput_per_s(SLO(60, 60)) == pytest.approx(2 / level.wall_s)
    assert level.goodput_per_s(SLO(1e-9, 60)) == 0


@pytest.mark.parametrize("how", ["clients", "rate"])
@pytest.mark.parametrize("headers", [b"", http()], ids=["silent", "headers only"])
def test_a_server_that_hangs_is_given_up(how, headers):
    with serving(lambda _: headers, stays_open=True) as running:
        test = load_test(
            running.url,
            (1, 2),
            rates_per_s=(20, 0.01) if how == "rate" else None,
            requests=40,
            timeout_s=0.3,
            show_progress=False,
        )
        asked = len(running.asked) - 1
    assert [len(level.served) for level in test.levels] == [40, 40]
    assert all(level.reasons == {"not done in time": 40} for level in test.levels)
    assert sum(level.wall_s for level in test.levels) < 60  # the last arrival would be in an hour
    assert asked == 3 if how == "clients" else 3 <= asked < 40  # the others need not be sent


def test_one_that_hangs_now_and_then_is_not_gone():
    def answer(_):
        return http("", "500 Oh", more="Content-Length: 0\r\n") if len(running.asked) % 3 == 1 else b""

    with serving(answer, stays_open=True) as running:
        [level] = load_test(running.url, (1,), requests=8, timeout_s=0.2, show_progress=False).levels
    assert len(running.asked) == 9 and level.reasons == {"not done in time": 6, "HTTP 500": 2}


def test_one_that_goes_silent_after_a_token_is_out_of_time_but_not_gone():
    first = http(stream(EVENTS["completions"][0], end=""))
    with serving(lambda _: first, stays_open=True) as running:
        [level] = load_test(running.url, (1,), requests=5, timeout_s=0.2, show_progress=False).levels
    assert level.reasons == {"not done in time": 5} and len(running.asked) == 6
    assert all(len(one.token_s) == 1 for one in level.served) and not level.ttft_s.size


def test_a_server_that_nobody_reaches(capsys):
    with serving(lambda _: http(GOOD)) as running:
        url = running.url
    with pytest.raises(ConnectionError, match=r"no OpenAI-compatible server answers at .* \(ConnectError.*start one"):
        load_test(url)
    with pytest.raises(SystemExit) as ended:
        main(["--url", url, "--quiet"])
    assert "no OpenAI-compatible server answers" in ended.value.code  # which a shell sees as status 1


def test_the_command_ends_with_1_if_no_request_was_answered(capsys):
    with serving(lambda _: http(HTML)) as running, pytest.raises(SystemExit) as ended:
        main(["--url", running.url, "--clients", "2", "--quiet"])
    assert ended.value.code == "no request was answered; why is in the last column"
    assert "8 of 8: not a stream (8)" in capsys.readouterr().out


def test_an_interrupted_command_still_prints_and_saves(monkeypatch, capsys, tmp_path):
    path = tmp_path / "part.json"
    after_pieces(monkeypatch, 20, _thread.interrupt_main)
    with serving(lambda _: http(GOOD)) as running, pytest.raises(SystemExit) as ended:
        main(["--url", running.url, "--requests", "10000", "--quiet", "--output", str(path)])
    test = LoadTest.read(path)
    assert ended.value.code == 130 and test.interrupted and not test.failures
    assert len(test.levels) == 1 and 1 <= len(test.levels[0].served) < 10_000
    assert repr(test) in capsys.readouterr().out


# --- servers that are different -------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [None, -5, 0, "2", True, 2.5, 10**400, [], {"completion_tokens": "x"}])
def test_no_usage_or_rubbish_means_that_pieces_are_counted(usage):
    last = {"choices": [], "usage": {"prompt_tokens": usage, "completion_tokens": usage}} if usage is not None else STOP
    level = measured(lambda _: http(stream(*EVENTS["completions"], STOP, last)), prompt_len=5)
    assert not level.failures and level.counted_by == "pieces"
    assert {(one.prompt_tokens, one.output_tokens) for one in level.served} == {(5, 2)}
    assert "Tokens are pieces of text here" in repr(LoadTest((level,), PROVENANCE))


@pytest.mark.parametrize("usage", [5, "rubbish", None, [1]])
def test_a_usage_that_is_no_object(usage):
    level = measured(lambda _: http(stream(*EVENTS["completions"], STOP | {"usage": usage, "timings": usage})))
    assert not level.failures and level.counted_by == "pieces" and level.served[0].engine_tpot_s is None


@pytest.mark.parametrize("value", [-1, "5", True, None, 10**400])
def test_timings_that_are_rubbish_are_left_alone(value):
    timings = {"prompt_ms": value, "predicted_ms": value, "predicted_n": value}
    [one, _] = measured(lambda _: http(stream(*EVENTS["completions"], STOP | {"timings": timings}))).served
    assert one.engine_prompt_s is None and one.engine_tpot_s is None and not one.error


def test_a_timing_is_divided_by_the_gaps():
    timings = {"prompt_ms": 250.0, "predicted_ms": 70.0, "predicted_n": 8}
    [one, _] = measured(lambda _: http(stream(*EVENTS["completions"], STOP | {"timings": timings}))).served
    assert (one.engine_prompt_s, one.engine_tpot_s) == (0.25, pytest.approx(0.01))


def test_several_tokens_in_a_piece():
    level = measured(lambda _: http(stream(*EVENTS["completions"], USAGE | {"usage": {"completion_tokens": 6}})))
    assert level.output_tokens == 12 and len(level.itl_s) == 2
    assert level.tpot_s == pytest.approx(level.itl_s / 5)
    all_at_once = measured(lambda _: http(stream(EVENTS["completions"][0], USAGE)))
    assert not all_at_once.failures and all_at_once.output_tokens == 4
    assert not all_at_once.tpot_s.size and not all_at_once.itl_s.size  # nothing can be said about it


@pytest.mark.parametrize("end", ["done", "finish_reason", "all"])
def test_an_answer_is_whole_if_it_says_so_or_has_all_tokens(end):
    events = EVENTS["completions"][: 2 if end == "all" else 1]
    said = {"done": stream(*events), "finish_reason": stream(*events, STOP, end=""), "all": stream(*events, end="")}
    level = measured(lambda _: http(said[end]))
    assert not level.failures and level.output_tokens == 2 * len(events)  # one that is shorter is no failure


def test_a_connection_that_stays_open_after_the_end():
    with serving(lambda _: http(GOOD), stays_open=True) as running:
        [level] = load_test(running.url, (2,), requests=4, timeout_s=5, show_progress=False).levels
    assert not level.failures and level.output_tokens == 8


def test_the_signs_that_end_a_line_in_unicode_do_not_end_an_event():
    text = 'data: {"choices": [{"text": "a\u2028b\x85c"}]}\r\n\r\ndata: {"choices": [{"text": "d"}]}\r\n\r\n'
    level = measured(lambda _: http(text))
    assert not level.failures and level.output_tokens == 4


@pytest.mark.parametrize("unknown", [{"ignore_eos"}, {"stream_options"}, {"ignore_eos", "stream_options"}])
@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
def test_a_server_that_refuses_what_it_does_not_know(unknown, status):
    def answer(request):
        return http("unknown field", status) if unknown & set(request) else http(GOOD)

    with serving(answer, warm_up=answer) as running:
        test = load_test(running.url, (1,), requests=3, show_progress=False)
    assert not test.failures and set(test.provenance["left_out"]) == unknown
    assert not any(unknown & set(request) for request in running.asked[-3:])
    assert sum(bool(unknown & set(request)) for request in running.asked) <= 3  # decided once, to begin with


def test_one_that_refuses_everything():
    def refuse(_):
        return http("no such model", "400 Bad Request")

    with serving(refuse, warm_up=refuse) as running, pytest.raises(ConnectionError, match="HTTP 400: no such model"):
        load_test(running.url)


def test_what_is_sent():
    with serving(lambda _: http(GOOD)) as running:
        load_test(f"{running.url}/v1/", (2,), requests=3, prompt_len=(2, 9), output_len=5, show_progress=False)
        load_test(f"{running.url}/", (2,), requests=3, prompt_len=(2, 9), output_len=5, show_progress=False)
    first, again = running.asked[1:4], running.asked[5:8]
    for request in [*first, *again]:
        assert request["model"] == "tiny" and request["max_tokens"] == 5 and request["temperature"] == 0
        assert request["stream"] and request["stream_options"] == {"include_usage": True} and request["ignore_eos"]
        assert "authorization" not in request["headers"]
    prompts = [sorted((r["prompt"].split() for r in requests), key=len) for requests in (first, again)]
    expected = np.random.default_rng((0, 0)).integers(2, 9, 3, endpoint=True)
    assert [len(prompt) for prompt in prompts[0]] == sorted(expected)
    assert [prompt[3:] for prompt in prompts[0]] == [prompt[3:] for prompt in prompts[1]]  # the seed's
    assert prompts[0][-1][:3] != prompts[1][-1][:3]  # so that no cache helps


def test_what_a_chat_sends():
    with serving(lambda _: http(stream(*EVENTS["chat"], STOP, USAGE))) as running:
        [level] = load_test(
            running.url, (1,), api="chat", model="other", requests=2, prompt_len=4, show_progress=False
        ).levels
    assert {len(one.token_s) for one in level.served} == {2} and not level.failures  # one of them of reasoning
    for request in running.asked:
        [message] = request["messages"]
        assert message["role"] == "user" and request["model"] == "other" and "prompt" not in request
    assert len(message["content"].split()) == 4


# --- keys -----------------------------------------------------------------------------------------------------------


def echo(request):
    """A server that knows no manners: every word it says holds the key."""
    key = request["headers"].get("authorization", "no key")
    kind = len(request["prompt"]) % 3
    if kind == 0:
        escaped = key.replace("/", "\\/")
        return http(f"bad key {key} {escaped}", f"500 {key}")
    return http(f'data: {{"error": "{key}"}}\n\n' if kind == 1 else f"data: {{{key}\n\n")


def test_a_key_is_sent_and_never_shown(monkeypatch, tmp_path, capsys, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("SOME_KEY", f" {KEY}\n")
    with serving(echo, model=f"model-{KEY}") as running:
        test = load_test(running.url, (2,), api_key_env="SOME_KEY", prompt_len=(4, 12), requests=12)
        assert {request["headers"]["authorization"] for request in running.asked} == {f"Bearer {KEY}"}
        test.save(tmp_path / "saved.json")
        with pytest.raises(SystemExit):
            main(["--url", running.url, "--api-key-env", "SOME_KEY", "--requests", "3", "--clients", "1"])
    assert test.failures == 12 and set(test.levels[0].reasons) == {"HTTP 500", "error event", "not JSON"}
    assert all("[key]" in error for error in test.levels[0].errors)
    saved = (tmp_path / "saved.json").read_text(encoding="utf-8")
    said = capsys.readouterr()
    for text in (saved, repr(test), repr(test.levels), str(test.provenance), said.out, said.err, caplog.text):
        assert "Secret" not in text
    assert test.provenance["model"] == "model-[key]"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", "HTTP 401: it wants a key, set the environment variable OPENAI_API_KEY. It says: no Bearer here"),
        (
            KEY,
            "HTTP 401: it does not take the key in the environment variable OPENAI_API_KEY. It says: no Bearer [key]",
        ),
    ],
)
def test_a_server_that_wants_a_key(monkeypatch, key, said):
    monkeypatch.setenv("OPENAI_API_KEY", key)

    def refuse(request):
        return http("no " + request["headers"].get("authorization", "Bearer here"), "401 Unauthorized")

    with serving(refuse, warm_up=refuse) as running, pytest.raises(ConnectionError) as refused:
        load_test(running.url)
    assert said in str(refused.value) and KEY not in str(refused.value)
    assert measured(refuse).reasons == {"HTTP 401": 2}


@pytest.mark.parametrize("name", ["sk-Secret", "hf_Secret", "", 5])
def test_a_key_in_place_of_its_name_is_not_repeated(name):
    with pytest.raises(ValueError, match="api_key_env must be the name of an environment variable") as refused:
        load_test("http://127.0.0.1:9", api_key_env=name)
    assert "ecret" not in str(refused.value)


@pytest.mark.parametrize("key", ["two words", "\u00fcber", "a\tb"])
def test_what_is_no_key_is_refused_without_showing_it(monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match="the environment variable OPENAI_API_KEY must hold a key") as refused:
        load_test("http://127.0.0.1:9")
    assert key not in str(refused.value)


# --- arguments, results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "127.0.0.1:80"}, "url must be a server's address such as http://127.0.0.1:8080, got '127.0.0.1:80'"),
        ({"url": "http://[::1"}, "url must be"),
        ({"url": "http://"}, "url must be"),
        ({"url": "http://a:b"}, "url must be"),
        ({"url": None}, "url must be"),
        ({"clients": ()}, "clients must be a list of whole numbers"),
        ({"clients": (0,)}, "clients must be at least 1"),
        ({"rates_per_s": ()}, "rates_per_s must hold at least one"),
        ({"rates_per_s": (0,)}, "rates_per_s must be a finite number above 0"),
        ({"api": "images"}, "api must be one of completions, chat"),
        ({"prompt_len": 0}, "prompt_len must be a whole number"),
        ({"output_len": (5, 2)}, "output_len must be a number of tokens, or the lowest and the highest, got"),
        ({"output_len": (1, 2, 3)}, "output_len must be a number of tokens"),
        ({"requests": 0}, "requests must be"),
        ({"seed": -1}, "seed must be"),
        ({"timeout_s": 0}, "timeout_s must be"),
    ],
)
def test_bad_arguments(options, said):
    with pytest.raises(ValueError, match=said):
        load_test(**{"url": "http://127.0.0.1:9", **options})


@pytest.mark.parametrize(
    "url", ["http://me:Secret@localhost:80", "http://localhost:80/v1?key=Secret", "http://a/#Secret"]
)
def test_an_address_with_a_secret_is_refused_without_showing_it(url):
    with pytest.raises(ValueError, match=r"without @, \? and #: a key belongs in an environment variable") as refused:
        load_test(url)
    assert "Secret" not in str(refused.value)


@pytest.mark.parametrize(
    "model", ["/home/me/models/tiny.gguf", "C:\\Users\\me\\tiny.gguf", "~/me/tiny.gguf", "./me/tiny.gguf"]
)
def test_a_model_s_path_is_not_kept(model):
    with serving(lambda _: http(GOOD), model=model) as running:
        test = load_test(running.url, (1,), requests=1, show_progress=False)
    assert running.asked[-1]["model"] == model and test.provenance["model"] == "tiny.gguf"
    with serving(lambda _: http(GOOD), model="org/tiny") as running:
        assert load_test(running.url, (1,), requests=1, show_progress=False).provenance["model"] == "org/tiny"


PROVENANCE = {"model": "tiny", "api": "chat", "prompt_len": [4, 9], "output_len": 3}


def result() -> LoadTest:
    good = Served(0.0, (0.1, 0.3, 0.4), 0.5, 4, 3, engine_prompt_s=0.05, engine_tpot_s=0.1)
    late = Served(0.5, (1.1, 1.2, 2.0), 2.0, 4, 3)
    bad = [Served(1.0, (), 1.5, 4, 0, error) for error in ("HTTP 500: oh", "HTTP 500: no", "ConnectError: refused")]
    levels = LoadResult(1, 2.0, (good, late)), LoadResult(None, 4.0, (good, *bad), 0.5), LoadResult(8, 1.0, (bad[0],))
    return LoadTest(levels, PROVENANCE)


def test_percentiles_are_numpy_s():
    level = result().levels[0]
    assert level.itl_s == pytest.approx([0.2, 0.1, 0.1, 0.8])
    assert level.percentiles("itl_s", (50, 99)) == {
        "p50": pytest.approx(0.15),
        "p99": pytest.approx(np.percentile([0.1, 0.1, 0.2, 0.8], 99)),
    }
    assert level.percentiles("ttft_s", [50]) == {"p50": pytest.approx((0.1 + 0.6) / 2)}
    assert level.percentiles("tpot_s", [100]) == {"p100": pytest.approx(0.45)}
    assert level.percentiles("e2e_s", [0]) == {"p0": pytest.approx(0.4)}
    with pytest.raises(ValueError, match="measure must be one of"):
        level.percentiles("speed")
    with pytest.raises(ValueError, match="percents must be from 0 to 100"):
        level.percentiles("itl_s", [101])


def test_goodput_is_what_keeps_both_limits():
    level = result().levels[0]
    assert level.goodput_per_s(SLO(1, 1)) == 1.0
    assert level.goodput_per_s(SLO(0.5, 1)) == level.goodput_per_s(SLO(1, 0.4)) == 0.5
    assert result().levels[1].slo_share(SLO(1, 1)) == 0.25  # what failed does not


def test_the_table():
    assert repr(result()).splitlines() == [
        "tiny, chat: 4 to 9 tokens of prompt, 3 of output",
        "                tokens/s  TTFT p50  TTFT p99  ITL p50  ITL p99  TPOT p50  end to end p50  failed",
        "1 client               3    350 ms    595 ms   150 ms   782 ms    300 ms          950 ms  0 of 2",
        "0.5 requests/s      0.75    100 ms    100 ms   150 ms   199 ms    150 ms          400 ms  3 of 4: "
        "HTTP 500 (2), no connection (1)",
        "8 clients              0         -         -        -        -         -               -  1 of 1: "
        "HTTP 500 (1)",
    ]


def test_saving_and_reading(tmp_path):
    path = tmp_path / "result.json"
    result().save(path)
    assert LoadTest.read(path) == result() and repr(LoadTest.read(str(path))) == repr(result())
    with pytest.raises(FileNotFoundError, match="there is no saved load test at"):
        LoadTest.read(tmp_path / "none.json")


def damages() -> dict[str, str]:
    content = {"format": "lessonlib load test 1", "interrupted": False, "provenance": PROVENANCE}
    one = {"sent_s": 0.0, "token_s": [0.1], "end_s": 0.2, "prompt_tokens": 1, "output_tokens": 1, "error": ""}
    one |= {"counted_by": "usage", "engine_prompt_s": None, "engine_tpot_s": None}

    def text(served=None, level=None, **test) -> str:
        changed = {"clients": 1, "rate_per_s": None, "wall_s": 1.0, "served": [one | (served or {})]} | (level or {})
        return json.dumps(content | {"levels": [changed]} | test)

    return {
        "whole": text(),
        "cut": text()[:-30],
        "empty": "",
        "list": "[]",
        "number": "5",
        "deep": "[" * 100_000,
        "NaN": text({"end_s": float("nan")}),
        "NaN elsewhere": text(provenance=PROVENANCE | {"seed": float("nan")}),
        "format": text(format="other"),
        "level": text(levels=[{}]),
        "levels": text(levels=5),
        "provenance": text(provenance={}),
        "interrupted": text(interrupted="no"),
        "unknown": text(more=1),
        "fields": text({"more": 1}),
        "falls": text({"token_s": [0.3]}),
        "negative": text({"sent_s": -1}),
        "text": text({"end_s": "1"}),
        "tokens": text({"output_tokens": 0}),
        "no tokens": text({"token_s": []}),
        "error": text({"error": None}),
        "counted": text({"counted_by": "guess"}),
        "engine": text({"engine_tpot_s": "x"}),
        "wall": text(level={"wall_s": 0}),
        "both": text(level={"rate_per_s": 1}),
        "neither": text(level={"clients": None}),
        "clients": text(level={"clients": 1.5}),
        "served": text(level={"served": None}),
        "binary": "\udcff",
    }


@pytest.mark.parametrize("name", damages())
def test_a_damaged_file_is_refused(tmp_path, name):
    path = tmp_path / "saved.json"
    path.write_text(damages()[name], encoding="utf-8", errors="surrogateescape")
    if name == "whole":
        assert LoadTest.read(path).levels[0].clients == 1
    else:
        with pytest.raises(ValueError, match=r"^saved\.json must be a load test as LoadTest\.save writes it"):
            LoadTest.read(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--url http://127.0.0.1:9 --start", "not allowed with"),
        ("--clients 1 --rates 2", "not allowed with"),
        ("--url http://127.0.0.1:9 --clients 0", "clients must be at least 1"),
        ("--url 127.0.0.1", "url must be"),
        ("--prompt-len 0 --output-len 0 --clients 1 2 --output nowhere/result.json", "a folder that exists"),
    ],
)
def test_the_command_refuses_bad_arguments(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_command_explains_itself():
    command = [sys.executable, "-W", "error", "-m", "lessonlib.lab.load_test", "--help"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
    assert asked.returncode == 0 and not asked.stderr
    assert "--rates" in asked.stdout
