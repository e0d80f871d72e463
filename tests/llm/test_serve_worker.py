"""What the server does when things go wrong: clients that leave, queues that are full, an engine that fails."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from llm.bpe_tokenizer import Tokenizer
from llm.engine_config import EngineConfig
from llm.engine_request import RequestParams
from llm.serve_config import ServeLimits
from llm.serve_worker import EngineWorker, Job
from tests.llm.serve_server import GatedEngine, RunningServer, ServerOptions, running_server


@pytest.fixture(scope="module")
def tokenizer(tiny_corpus) -> Tokenizer:
    return Tokenizer.load(tiny_corpus.tokenizer)


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine()


@pytest.fixture
def server(tokenizer, engine):
    limits = ServeLimits(max_waiting=2, body_timeout_s=0.5, send_timeout_s=0.5)
    options = ServerOptions(max_seq_len=10_000_000, limits=limits, engine=EngineConfig(max_running=2))
    with running_server(tokenizer, options, engine) as running:
        yield running


def post_and_leave(server: RunningServer, body: dict, wait_for: bytes | None) -> None:
    """Send a request, read until `wait_for` has come, and close the connection."""
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
        connection.settimeout(30)
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        received = b""
        while wait_for is not None and wait_for not in received:
            received += connection.recv(4096)
        server.wait_until(lambda: server.worker.in_flight > 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_while_waiting_takes_its_sequences_along(server, engine, stream):
    post_and_leave(server, {"prompt": [1, 2], "n": 2, "stream": stream}, None)
    server.wait_until_idle()
    assert engine.cancelled == [1, 2]
    assert server.service.metrics.cancelled == 2


def test_a_client_that_leaves_in_the_middle_of_its_stream(server, engine):
    engine.permits.release(3)
    post_and_leave(server, {"prompt": [1], "stream": True, "max_tokens": 1000}, b'"text":"x')
    server.wait_until_idle()
    assert engine.cancelled == [1]


def test_a_full_queue_refuses_with_retry_after_and_takes_again_later(server, engine):
    with server.client() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": [1], "n": 3, "stream": True}) as first:
            assert first.status_code == 200
            refused = http.post("/v1/completions", json={"prompt": [1], "n": 2})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            with http.stream("POST", "/v1/completions", json={"prompt": [1], "stream": True}) as last:
                assert last.status_code == 200
                # Nothing fits any more: refused before the body is looked at.
                assert http.post("/v1/completions", json={"prompt": ""}).status_code == 429
        server.wait_until_idle()
        with http.stream("POST", "/v1/completions", json={"prompt": [1], "n": 4, "stream": True}) as again:
            assert again.status_code == 200
    server.wait_until_idle()


def test_what_the_engine_refuses_is_the_clients_error(server, engine):
    with server.client() as http:
        response = http.post("/v1/completions", json={"prompt": [[1], [1, 2, 3, 4, 5, 6]]})
    assert response.status_code == 400 and "no room for this prompt" in response.json()["error"]["message"]
    server.wait_until_idle()
    assert engine.cancelled == [1], "the other sequence of the request goes with it"


def test_a_failing_engine_ends_every_answer_and_the_server(server, engine):
    ended = threading.Event()
    server.worker.on_failure = ended.set
    answers = []

    def ask(body: dict) -> None:
        with server.client() as http:
            answers.append(http.post("/v1/completions", json=body))

    asking = [threading.Thread(target=ask, args=({"prompt": [1], "stream": stream},)) for stream in (False, True)]
    for thread in asking:
        thread.start()
    server.wait_until(lambda: server.worker.in_flight == 2)
    engine.fault = RuntimeError("a fault in the engine, made by the test")
    for thread in asking:
        thread.join(20)
    assert ended.wait(10) and sorted(answer.status_code for answer in answers) == [200, 500]
    for answer in answers:
        assert "engine_failed" in answer.text and "made by the test" not in answer.text
        assert answer.status_code == 500 or answer.text.rstrip().endswith("data: [DONE]")
    with server.client() as http:
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={"prompt": [1]}).status_code == 500
    assert server.worker.in_flight == 0


def test_a_job_put_into_the_queue_as_the_engine_fails_is_answered(monkeypatch):
    """The thread has taken its last look at the queue when the job comes."""
    engine = GatedEngine()

    async def run() -> None:
        worker = EngineWorker(engine, 8)
        worker.start()
        first, late = Job([([1], RequestParams())]), Job([([1], RequestParams()), ([2], RequestParams())])
        engine.fault = RuntimeError("a fault in the engine, made by the test")
        worker.submit(first)
        worker._thread.join(10)  # the event loop is held here, so it has not heard of the failure
        monkeypatch.setattr(EngineWorker, "alive", True)  # as it was when the late job's request asked
        worker.submit(late)
        errors = [(await asyncio.wait_for(job.deliveries.get(), 5)).error for job in (first, late, late)]
        assert [error.code for error in errors] == ["engine_failed"] * 3 and worker.in_flight == 0

    asyncio.run(run())


def test_a_client_that_reads_nothing_is_cut_off(server, engine):
    """Its stream fills the buffers of both ends; then the server gives up and the sequence leaves the engine."""
    engine.permits.release(10**6)
    body = json.dumps({"prompt": [1], "n": 4, "stream": True, "logprobs": 0, "max_tokens": 10**6}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        server.wait_until(lambda: engine.cancelled == [1, 2, 3, 4])
    server.wait_until_idle()


def test_a_body_that_never_comes_is_given_up(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n"
            b'Content-Type: application/json\r\n\r\n{"prompt"'
        )
        connection.settimeout(20)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_server_that_stops_lets_go_of_what_runs(tokenizer, engine):
    with running_server(tokenizer, ServerOptions(), engine) as server:
        answer = threading.Thread(target=lambda: expect_end(server))
        answer.start()
        server.wait_until(lambda: server.worker.in_flight == 1)
    answer.join(20)
    assert not answer.is_alive() and engine.cancelled == [1] and not engine.running


def expect_end(server: RunningServer) -> None:
    """A stream that the server's end cuts short."""
    with pytest.raises(httpx.HTTPError), server.client() as http:
        http.post("/v1/completions", json={"prompt": [1], "stream": True})


def test_time_to_first_token_is_measured_from_the_request(server, engine):
    with (
        server.client() as http,
        http.stream("POST", "/v1/completions", json={"prompt": [1], "stream": True}) as answer,
    ):
        time.sleep(0.2)
        engine.permits.release(2)
        lines = answer.iter_lines()
        while "data" not in next(lines):
            pass
    server.wait_until_idle()
    assert server.service.metrics.time_to_first_token.total >= 0.2


def test_tokens_that_came_together_share_a_piece(tokenizer, engine):
    """At most so many pieces a second; the first token does not wait, and no token is lost or doubled."""
    limits = ServeLimits(max_pieces_per_s=2)  # with one answer under way: one piece in half a second
    options = ServerOptions(max_seq_len=1000, limits=limits, engine=EngineConfig(max_running=2))
    engine.permits.release(40)
    with running_server(tokenizer, options, engine) as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": [1], "stream": True, "max_tokens": 900}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            texts: list[str] = []
            while sum(map(len, texts)) < 40:
                texts.append(json.loads(next(lines)[6:])["choices"][0]["text"])
        assert len(texts) < 10 and "".join(texts) == "x" * 40
        server.wait_until_idle()
