"""Serve a model over HTTP: OpenAI's completions and chat API, Prometheus metrics, and a page to talk to it.

    python -m llm.serve run=runs/quickstart                       # then open http://127.0.0.1:8000/
    python -m llm.serve run=runs/x host=0.0.0.0 token_file=token.txt allowed_hosts=[gpu-box]

Settings: llm/serve_config.py. Routes: llm/serve_app.py. docs/serving.md says what of the API is there.
"""

import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from configs.errors import UserError, missing_extra
from configs.loader import CONFIG_DIR, run_script, start_script
from llm.chat_prompt import load_chat_prompt
from llm.engine import Engine
from llm.model_loading import choose_dtype, load_model, resolve_checkpoint
from llm.serve_config import ServeConfig
from parallel.mesh import choose_device


def serve(config: ServeConfig) -> None:
    """Load the model, listen, and answer until a signal or a failed engine ends it."""
    uvicorn = import_server()
    token = config.read_token()
    listener = listen(config.host, config.port)
    path = resolve_checkpoint(config.run, config.checkpoint)
    service = make_service(config, path)
    from llm.serve_app import create_app
    from llm.serve_guard import GuardRules, hosts_of

    rules = GuardRules(token, hosts_of(config.host, config.allowed_hosts))
    settings = uvicorn.Config(
        create_app(service, rules), log_level="warning", lifespan="on", server_header=False, ws="none",
        limit_concurrency=config.limits.max_connections, timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = uvicorn.Server(settings)

    def stop() -> None:
        server.should_exit = True

    service.worker.on_failure = stop
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    sys.setswitchinterval(config.switch_interval_ms / 1e3)
    listener.listen(2048)  # from here on a client waits instead of being refused, whoever reads the next line
    print(f"{service.model_name} from {path} on http://{shown}:{port}/", flush=True)
    server.run(sockets=[listener])
    if service.worker.failure is not None:
        sys.exit(1)


def make_service(config: ServeConfig, path: Path) -> Any:
    """The engine and all that the routes work with (serve_app.Service)."""
    from llm.serve_app import Service
    from llm.serve_prepare import Bounds
    from llm.serve_worker import EngineWorker

    device = choose_device(config.device, local_rank=0)
    model, tokenizer, _ = load_model(path, device, choose_dtype(config.dtype, device))
    # Ids beyond the tokenizer's pad the model's vocabulary: nobody could read them.
    settings = replace(config.engine, num_ids=config.engine.num_ids or tokenizer.vocab_size)
    engine = Engine(model, settings, tokenizer)
    name = config.model_name or (Path(config.run).resolve().name if config.run else path.resolve().name)
    return Service(
        worker=EngineWorker(engine, config.engine.max_running + config.limits.max_waiting),
        prompt=load_chat_prompt(path, tokenizer, config.document_start),
        bounds=Bounds(tokenizer.vocab_size, context_of(engine), config.limits),
        model_name=name,
    )


def context_of(engine: Engine) -> int:
    """Tokens of a prompt and its completion: the model's context, or what the whole cache holds if that is less."""
    held = engine.stats().pages_total * engine.config.page_size
    return min(engine.config.sequence_limit(engine.model.config), held)


def import_server() -> Any:
    """uvicorn, with a line for whoever has not installed the extra."""
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise missing_extra(error.name or "fastapi", "serve") from error
    return uvicorn


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, made before the model is loaded: a port that is taken is known at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(f"host={host} port={port} cannot be listened on ({error}); choose another port=") from error
    return listener


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="serve")
def main(config: DictConfig) -> None:
    run_script(serve, ServeConfig, config)


if __name__ == "__main__":
    start_script(main, ServeConfig, "serve")
