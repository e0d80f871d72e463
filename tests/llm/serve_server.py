"""A server in a thread of the test's process, on a free port, over the real engine or one that a test scripts."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import torch
import uvicorn

from configs.errors import UserError
from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.chat_prompt import ChatPrompt
from llm.engine import Engine
from llm.engine_config import EngineConfig
from llm.engine_request import EngineStats, RequestParams, TokenEvent
from llm.serve import context_of, listen
from llm.serve_app import Service, create_app
from llm.serve_config import ServeLimits
from llm.serve_guard import GuardRules
from llm.serve_prepare import Bounds
from llm.serve_worker import EngineWorker
from llm.transformer import Transformer

MODEL_NAME = "tiny"


class GatedEngine:
    """An engine whose every step waits for the test: `permits` tokens may be given out; it can be told to fail."""

    def __init__(self) -> None:
        self.running: dict[int, RequestParams] = {}
        self.permits = threading.Semaphore(0)
        self.cancelled: list[int] = []
        self.fault: Exception | None = None
        self.next_id = 0
        self.text = "x"  # of every token
        self.max_prompt_tokens = 5

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def submit(self, prompt_ids: list[int], params: RequestParams) -> int:
        if len(prompt_ids) > self.max_prompt_tokens:
            raise UserError("the cache has no room for this prompt; shorten it")
        self.next_id += 1
        self.running[self.next_id] = params
        return self.next_id

    def cancel(self, request_id: int) -> None:
        del self.running[request_id]
        self.cancelled.append(request_id)

    def step(self) -> list[TokenEvent]:
        """A token for each request if the test permits one within a moment, else nothing."""
        if self.fault is not None:
            raise self.fault
        if not self.permits.acquire(timeout=0.005):
            return []
        return [TokenEvent(request_id, 65, -1.0, 1.0, 0, text=self.text) for request_id in self.running]

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running))


@dataclass
class ServerOptions:
    max_seq_len: int = 64
    limits: ServeLimits = field(default_factory=ServeLimits)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(page_size=16, max_running=8))
    rules: GuardRules = field(default_factory=GuardRules)


@dataclass
class RunningServer:
    url: str
    service: Service
    model: Transformer | None
    loop: asyncio.AbstractEventLoop

    @property
    def worker(self) -> EngineWorker:
        return self.service.worker

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **settings)

    def wait_until(self, condition, timeout_s: float = 30.0) -> None:
        """Poll until `condition()` holds: what a client's leaving causes comes a moment after it."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"still in flight: {self.worker.in_flight}, {self.worker.stats}"
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        """Nothing admitted, nothing running, no page held: what every test leaves behind."""
        stats = lambda: self.worker.stats  # noqa: E731
        self.wait_until(lambda: self.worker.in_flight == 0 and stats().running == stats().waiting == 0)
        assert self.worker.stats.pages_used == 0

    def count_tasks(self) -> int:
        """Tasks alive on the server's event loop."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(10)


def random_model(tokenizer: Tokenizer, max_seq_len: int) -> Transformer:
    """Two layers whose tokens depend on the whole context; the table is padded beyond the tokenizer's ids."""
    shape = dict(d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)
    model = Transformer(ModelConfig(vocab_size=tokenizer.vocab_size + 7, max_seq_len=max_seq_len, **shape))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.6 if name.startswith("blocks") else 0.2
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return model.eval()


@contextmanager
def running_server(tokenizer: Tokenizer, options: ServerOptions | None = None, engine: Any = None) -> Iterator:
    """Serve a random model, or the `engine` given; yields a RunningServer and stops it at the end."""
    options = options or ServerOptions()
    model, context = None, options.max_seq_len
    if engine is None:
        model = random_model(tokenizer, options.max_seq_len)
        engine = Engine(model, replace(options.engine, num_ids=tokenizer.vocab_size), tokenizer)
        context = context_of(engine)
    bounds = Bounds(tokenizer.vocab_size, context, options.limits)
    worker = EngineWorker(engine, options.engine.max_running + options.limits.max_waiting)
    service = Service(worker, ChatPrompt(tokenizer), bounds, MODEL_NAME)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(service, options.rules), log_level="warning", lifespan="on", timeout_graceful_shutdown=2
    )  # fmt: skip
    server = uvicorn.Server(config)
    loops = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server")
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield RunningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", service, model, loops[0])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"
