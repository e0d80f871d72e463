"""Many clients at once, half of which hang up: afterwards nothing is held, and memory is where it was."""

import asyncio
import gc
import json
import random

import pytest

from llm.bpe_tokenizer import Tokenizer
from llm.engine_config import EngineConfig
from llm.serve_config import ServeLimits
from llm.serve_metrics import resident_bytes
from tests.llm.serve_server import RunningServer, ServerOptions, running_server
from tests.tolerances import RESIDENT_GROWTH_BYTES


@pytest.fixture(scope="module")
def tokenizer(tiny_corpus) -> Tokenizer:
    return Tokenizer.load(tiny_corpus.tokenizer)


def request_bytes(number: int, stream: bool, max_tokens: int) -> bytes:
    body = {"prompt": f"number {number}", "stream": stream, "max_tokens": max_tokens, "seed": number, "logprobs": 2}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + content


async def client(port: int, number: int, draw: random.Random) -> str:
    """One client; every second one hangs up somewhere: at once, after its request, or in the middle of its answer."""
    leaves, stream = number % 2 == 1, draw.random() < 0.7
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = request_bytes(number, stream, max_tokens=40 if leaves else 6)
    try:
        if leaves and draw.random() < 0.2:
            writer.write(content[: draw.randrange(len(content))])  # not even the whole request
            await writer.drain()
            return "left"
        writer.write(content)
        await writer.drain()
        if leaves:
            for _ in range(draw.randrange(4) if stream else 0):
                await reader.readline()
            await asyncio.sleep(draw.random() * 0.2)
            return "left"
        answer = await reader.read()
        status = int(answer.split(b" ", 2)[1])
        whole = answer.rstrip().endswith((b"data: [DONE]", b"0", b"}"))
        return f"{status}" if whole or status != 200 else "cut short"
    finally:
        writer.close()


async def crowd(port: int, count: int, seed: int) -> dict[str, int]:
    """How many clients ended in which way."""
    draw = random.Random(seed)
    ends = await asyncio.gather(*(client(port, number, draw) for number in range(count)))
    return {end: ends.count(end) for end in set(ends)}


def run_crowd(server: RunningServer, count: int, seed: int) -> dict[str, int]:
    ends = asyncio.run(crowd(int(server.url.rsplit(":", 1)[1]), count, seed))
    server.wait_until_idle()
    return ends


def check_nothing_is_held(server: RunningServer, tasks_before: int) -> None:
    worker = server.worker
    assert worker._ids == {} and worker._inbox.empty() and not worker.engine.requests
    server.wait_until(lambda: server.count_tasks() <= tasks_before)


def check_crowds(tokenizer: Tokenizer, count: int, rounds: int, max_waiting: int) -> None:
    options = ServerOptions(
        max_seq_len=64,
        limits=ServeLimits(max_waiting=max_waiting),
        engine=EngineConfig(page_size=16, num_pages=40, max_running=8),
    )
    with running_server(tokenizer, options) as server:
        run_crowd(server, count, seed=0)  # what is made once (threads, buffers, caches) is made here
        tasks, sizes = server.count_tasks(), []
        for seed in range(1, rounds + 1):
            ends = run_crowd(server, count, seed)
            assert ends["left"] == count // 2 and set(ends) <= {"left", "200", "429"}, ends
            assert ends["200"] > 0
            check_nothing_is_held(server, tasks)
            gc.collect()
            sizes.append(resident_bytes())
        assert sizes[-1] - sizes[0] < RESIDENT_GROWTH_BYTES, sizes
        with server.client() as http:  # and it still answers as on the first day
            body = {"prompt": "number 1", "max_tokens": 3, "temperature": 0}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3


def test_a_crowd_of_clients_half_of_which_hang_up_leaves_nothing(tokenizer):
    check_crowds(tokenizer, count=60, rounds=2, max_waiting=20)


@pytest.mark.slow
def test_five_hundred_clients_half_of_which_hang_up_leave_nothing(tokenizer):
    check_crowds(tokenizer, count=500, rounds=5, max_waiting=200)
