"""The HTTP application: OpenAI's routes, health, metrics and the page.

Requests are checked on the event loop, their text is encoded in one worker thread (the tokenizer is not shared between
threads), and the engine has its own (llm/serve_worker.py). Errors have OpenAI's shape whatever raised them.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from llm.chat_prompt import ChatPrompt
from llm.serve_answer import Answer, ChatAnswer, CompletionAnswer
from llm.serve_errors import ApiError, too_busy
from llm.serve_guard import Guard, GuardRules
from llm.serve_metrics import CONTENT_TYPE, ServeMetrics, resident_bytes
from llm.serve_prepare import Bounds, Sequences, prepare_chat, prepare_completion
from llm.serve_schema import ChatBody, CompletionBody, GenerationBody, parse_body
from llm.serve_stream import (
    ClientGone,
    Collector,
    EventStream,
    Pace,
    collect,
    finish_job,
    stream_events,
    while_connected,
)
from llm.serve_worker import EngineWorker, Job

STATIC = Path(__file__).resolve().parent / "serve_static"
COUNTED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/")


@dataclass
class Service:
    """What the routes work with."""

    worker: EngineWorker
    prompt: ChatPrompt
    bounds: Bounds
    model_name: str
    metrics: ServeMetrics = field(default_factory=ServeMetrics)
    created: int = field(default_factory=lambda: int(time.time()))
    encoder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "encoder"))

    def __post_init__(self) -> None:
        self.pace = Pace(self.bounds.limits.max_pieces_per_s)

    def count(self, path: str, status: int) -> None:
        """Count an answer; unknown paths count as one, so that strangers cannot make the metrics grow."""
        self.metrics.count_request(path if path in COUNTED else "other", status)

    def check_room(self, count: int) -> None:
        """ApiError 429 when `count` more sequences are over what may run and wait."""
        if not self.worker.room_for(count):
            wait_s = min(60, max(1, math.ceil(self.metrics.request_time.mean)))
            raise too_busy(f"{self.worker.in_flight} sequences run or wait and {count} more do not fit", wait_s)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(404, f"model {name[:200]!r} is not served here; use {self.model_name!r}", "model_not_found")

    def description(self) -> dict[str, Any]:
        """The entry of /v1/models; what follows `owned_by` is ours."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "mew",
            "max_model_len": self.bounds.max_seq_len,
            "chat_template": self.prompt.template is not None,
        }

    def gauges(self) -> dict[str, tuple[str, float]]:
        stats = self.worker.stats
        return {
            "running": ("Sequences that the engine computes now.", stats.running),
            "waiting": ("Sequences that wait in the engine.", stats.waiting),
            "in_flight": ("Sequences admitted and not finished.", self.worker.in_flight),
            "pages_used": ("Pages of the KV cache held by sequences.", stats.pages_used),
            "pages_cached": ("Pages kept for sharing, used by nobody now.", stats.pages_cached),
            "pages": ("Pages of the KV cache.", stats.pages_total),
            "shared_prompt_tokens": ("Prompt tokens found in the cache, so far.", stats.shared_tokens),
            "preemptions": ("Sequences put back for want of pages, so far.", stats.preemptions),
            "engine_steps": ("Steps of the engine, so far.", stats.steps),
            "resident_memory_bytes": ("Memory of the process.", resident_bytes()),
        }


def create_app(service: Service, rules: GuardRules) -> ASGIApp:
    """The application; its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.stop)
        service.encoder.shutdown(wait=False, cancel_futures=True)

    # FastAPI's own pages of documentation load scripts from elsewhere; docs/serving.md is ours.
    app = FastAPI(title="mew", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    add_information_routes(app, service)
    add_generation_routes(app, service)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return Guard(app, rules, service.count)  # outside of all else, so that every answer is counted and has its headers


def add_information_routes(app: FastAPI, service: Service) -> None:
    """The page, /health, /metrics and /v1/models."""

    @app.get("/")
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    @app.get("/health")
    async def health() -> Response:
        alive = service.worker.alive
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.render(service.gauges()), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.description()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.description())


def add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, service, Kind(CompletionBody, prepare_completion, CompletionAnswer))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, service, Kind(ChatBody, prepare_chat, ChatAnswer))


@dataclass(frozen=True)
class Kind:
    """What tells completions from chats."""

    body: type[GenerationBody]
    prepare: Callable[[Any, ChatPrompt, Bounds], Sequences]
    answer: type[Answer]


async def generate(request: Request, service: Service, kind: Kind) -> Response:
    """Check, encode, admit, and answer whole or as a stream."""
    started_s = time.perf_counter()
    service.check_room(1)  # a full server says so before it reads and encodes
    body = parse_body(kind.body, await read_body(request, service.bounds.limits))
    service.check_model(body.model)
    loop = asyncio.get_running_loop()
    sequences = await loop.run_in_executor(service.encoder, kind.prepare, body, service.prompt, service.bounds)
    service.check_room(len(sequences))
    job = Job(sequences)
    num_prompt_tokens = sum(len(prompt_ids) for prompt_ids, _ in sequences[:: body.num_choices])
    answer = kind.answer(service.model_name, service.prompt.tokenizer, num_prompt_tokens, body.num_alternatives)
    collector = Collector(job, service.metrics, started_s, keep=not body.stream)
    service.metrics.prompt_tokens += num_prompt_tokens
    service.worker.submit(job)
    service.pace.answers += 1

    def finish() -> None:
        service.pace.answers -= 1
        finish_job(service.worker, job, service.metrics)

    if body.stream:
        pieces = stream_events(collector, answer, service.pace, body.wants_usage)
        return EventStream(pieces, service.bounds.limits.send_timeout_s, finish)
    try:
        return JSONResponse(answer.complete(await while_connected(collect(collector, service.pace), request.receive)))
    except ClientGone:
        return Response(status_code=499)  # nobody reads it; the metrics count it
    finally:
        finish()


async def read_body(request: Request, limits: Any) -> bytes:
    """The request's bytes; ApiError for too many of them (413) or too slow a client (408)."""
    too_large = ApiError(413, f"the body is over {limits.max_body_bytes:,} bytes; send less", "body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                content += piece
                if len(content) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {limits.body_timeout_s:g} s; send it faster") from error
    return bytes(content)


async def on_api_error(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())


async def on_http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own refusals (no such path, wrong method) in our shape."""
    reasons = {404: "no such path; see docs/serving.md for those that there are", 405: "this path takes another method"}
    own = ApiError(error.status_code, reasons.get(error.status_code, str(error.detail)))
    return JSONResponse(own.body(), own.status, dict(error.headers or {}))


async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    """The client left while its body was read; nobody reads this, the metrics count it."""
    return Response(status_code=499)


async def on_fault(request: Request, error: Exception) -> Response:
    """A fault of ours; uvicorn logs its traceback."""
    own = ApiError(500, "a fault of the server; its log says more")
    return JSONResponse(own.body(), own.status)


HANDLERS = {ApiError: on_api_error, HTTPException: on_http_error, ClientDisconnect: on_disconnect, Exception: on_fault}
