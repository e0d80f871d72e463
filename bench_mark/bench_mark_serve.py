"""The HTTP server under streaming clients, beside `transformers serve` and beside the engine without HTTP, in one run.

    python -m bench_mark.bench_mark_serve --model 1b --clients 1 64 256 --out serve.json     # on a GPU, bf16
    python -m bench_mark.bench_mark_serve --model mew-1m --clients 1 8 32 --new 32           # on a CPU, float32

Random weights, greedy, `new` tokens for each client, all clients at once, medians of three. Predicted is the roofline
of llm/cost_model_decode for the batch of all clients, which knows nothing of HTTP; "of engine" is the share of what
the engine gives alone that arrives at the clients. Needs the extras serve and align for the peer (fastapi, uvicorn,
openai, transformers).
"""

import argparse
import json
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench_mark.bench_mark_engine import measured_rates, synchronise
from bench_mark.bench_mark_serve_clients import Load, median_load, run_clients
from bench_mark.bench_mark_serve_model import make_model
from configs.version import git_commit
from llm.chat_prompt import load_chat_prompt
from llm.cost_model_decode import DecodeTime, generation_time
from llm.engine import Engine, EngineConfig, RequestParams
from llm.model_loading import load_model
from llm.sampling import SamplingConfig
from parallel.mesh import choose_device

START_TIMEOUT_S = 240


def message(number: int, num_chars: int) -> str:
    """A prompt of its own for each client, so that nothing is shared."""
    return (f"{number} " * num_chars)[:num_chars]


def request_body(model: str, number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": model, "messages": [{"role": "user", "content": message(number, arguments.prompt_chars)}],
        "temperature": 0, "max_tokens": arguments.new, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def child(command: list[str]) -> Iterator[subprocess.Popen]:
    """A server process; it is ended whatever happens."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_for(url: str, process: subprocess.Popen) -> None:
    """Until the server answers; RuntimeError with its output if it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).read()
            return
        except OSError:
            time.sleep(0.3)
    process.kill()
    raise RuntimeError(f"{' '.join(process.args[:6])} did not come up:\n{process.stdout.read()[-2000:]}")


@contextmanager
def our_server(checkpoint: Path, arguments: argparse.Namespace) -> Iterator[tuple[int, int, str]]:
    """llm.serve; yields port, process id and the model's name."""
    settings = [
        f"checkpoint={checkpoint}",
        "port=0",
        "model_name=bench",
        f"engine.max_running={max(arguments.clients)}",
    ]
    settings += arguments.serve or []
    with child([sys.executable, "-m", "llm.serve", *settings]) as process:
        line = said = ""
        while "http://" not in line:
            ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
            line = process.stdout.readline() if ready else ""
            said += line
            if not line:
                raise RuntimeError(f"llm.serve did not come up:\n{said[-2000:]}")
        yield int(re.search(r"http://127\.0\.0\.1:(\d+)/", line).group(1)), process.pid, "bench"


@contextmanager
def peer_server(exported: Path, batching: bool) -> Iterator[tuple[int, int, str]]:
    """`transformers serve`, with its continuous batching where the device has it."""
    port = free_port()
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(exported)]
    command += ["--port", str(port), "--host", "127.0.0.1", *(["--continuous-batching"] if batching else [])]
    with child(command) as process:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield port, process.pid, str(exported)


def measure(server: tuple[int, int, str], count: int, arguments: argparse.Namespace) -> Load:
    port, pid, model = server
    bodies = [request_body(model, number, arguments) for number in range(count)]
    run_clients(port, pid, bodies)
    return median_load([run_clients(port, pid, bodies) for _ in range(arguments.repeats)])


@dataclass(frozen=True)
class Alone:
    """The engine without HTTP: tokens a second, and processor time a token."""

    rate: float
    cpu_ms: float


class Table:
    """Rows as they are measured, in tokens a second."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.engine: dict[int, Alone] = {}
        print(f"{'case':38} {'predicted':>10} {'measured':>10} {'ratio':>6}  bound   of engine  (tokens/s)")

    def add(self, what: str, count: int, rate: float, predicted: tuple[float, DecodeTime], load: Load | None) -> None:
        expected, bound = predicted[0] / predicted[1].seconds, predicted[1].bound
        row: dict[str, Any] = dict(what=what, clients=count, predicted=expected, measured=rate, bound=bound)
        row |= {"ratio": rate / expected, "of_engine": rate / self.engine[count].rate}
        times = {"cpu_ms_a_token": self.engine[count].cpu_ms}
        if load is not None:
            times = {
                "first_ms": load.first_ms(0.5), "first_ms_p95": load.first_ms(0.95), "token_ms": load.token_ms(0.5),
                "token_ms_p95": load.token_ms(0.95), "cpu_ms_a_token": 1e3 * load.cpu_s / load.tokens,
            }  # fmt: skip
        told = "  ".join(f"{name} {value:.3g}" for name, value in times.items())
        self.rows.append(row | times)
        name = f"{count} clients: {what}"
        line = f"{name:38} {expected:10,.0f} {rate:10,.0f} {rate / expected:6.2f}  {bound:7} {row['of_engine']:9.2f}"
        print(f"{line}  {told}", flush=True)


def engine_alone(checkpoint: Path, arguments: argparse.Namespace) -> dict[int, Alone]:
    """The same requests in one process, without HTTP."""
    device = choose_device("auto", local_rank=0)
    model, tokenizer, _ = load_model(checkpoint, device, dtype_of(device))
    prompt = load_chat_prompt(checkpoint, tokenizer)
    engine = Engine(model, EngineConfig(max_running=max(arguments.clients), num_ids=tokenizer.vocab_size), tokenizer)
    params = RequestParams(SamplingConfig(temperature=0.0), arguments.new, prompt.stop_ids)
    rates = {}
    for count in arguments.clients:
        prompts = [
            prompt.encode_chat([{"role": "user", "content": message(i, arguments.prompt_chars)}]) for i in range(count)
        ]
        engine.generate(prompts, params)
        times, cpu_s = [], time.process_time()
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            completions = engine.generate(prompts, params)
            synchronise(device)
            times.append(time.perf_counter() - start)
        tokens = sum(len(one.token_ids) for one in completions)
        cpu_ms = 1e3 * (time.process_time() - cpu_s) / arguments.repeats / tokens
        rates[count] = Alone(tokens / statistics.median(times), cpu_ms)
    return rates


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    device = choose_device("auto", local_rank=0)
    dtype = dtype_of(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    commit = git_commit()
    print(f"{name} · {dtype} · torch {torch.__version__} · commit {commit}")
    print(f"{arguments.model}, {arguments.new} new tokens, prompts of {arguments.prompt_chars} characters")
    rates = measured_rates(device)
    checkpoint, exported, config = make_model(arguments.model, directory, dtype)
    table = Table()
    table.engine = engine_alone(checkpoint, arguments)
    prompt_tokens = len(message(0, arguments.prompt_chars)) // 2

    def predict(count: int) -> tuple[float, DecodeTime]:
        shape = (config, [prompt_tokens] * count, [arguments.new] * count, rates, dtype.itemsize)
        return count * arguments.new, generation_time(*shape)

    if device.type == "cuda":
        torch.cuda.empty_cache()
    for count in arguments.clients:
        table.add("engine alone", count, table.engine[count].rate, predict(count), None)
    with our_server(checkpoint, arguments) as server:
        for count in arguments.clients:
            load = measure(server, count, arguments)
            table.add("llm.serve", count, load.tokens / load.wall_s, predict(count), load)
    if not arguments.no_peer:
        try:
            with peer_server(exported, arguments.peer_batching) as server:
                for count in arguments.clients:
                    load = measure(server, count, arguments)
                    table.add("transformers serve", count, load.tokens / load.wall_s, predict(count), load)
        except (RuntimeError, OSError) as error:
            print(f"no figures of transformers serve: {' '.join(str(error).split())[-400:]}", flush=True)
    facts = {"device": name, "dtype": str(dtype), "torch": torch.__version__, "commit": commit, "rates": vars(rates)}
    settings = {key: getattr(arguments, key) for key in ("model", "prompt_chars", "new", "serve", "peer_batching")}
    return facts | settings | {"rows": table.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mew-1m", help="a file of configs/model")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompt-chars", type=int, default=100, help="about two a token")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", nargs="*", help="settings of llm.serve, such as switch_interval_ms=1")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer-batching", action="store_true", help="the peer's continuous batching")
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the last line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        document = run(arguments, Path(directory))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
