"""What the engine itself takes on this device, measured on two small shapes of its own and never on a run's model.

One shape is too small for its work to matter: its steps are what the host needs, in all and for each row. The other is
two plain layers: with the host's share taken off, its steps give the rate of products of few rows and, with longer
contexts, the rate at which attention reads cached keys and values; a larger vocabulary, what sampling takes.
alignment/cost_model_rollout puts the constants together for a model of any shape. Two seconds, once a process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.cost_model_counts import block_matrices
from llm.cost_model_decode import cache_bytes_per_token, decode_step_flops
from llm.engine import Engine, EngineConfig, RequestParams
from llm.hardware_calibration import Points, interpolate
from llm.sampling import SamplingConfig
from llm.transformer import Transformer

TINY = ModelConfig(vocab_size=64, d_model=64, num_layers=1, num_heads=2, d_ff=64, max_seq_len=512)
PLAIN = ModelConfig(vocab_size=64, d_model=256, num_layers=2, num_heads=4, d_ff=768, max_seq_len=512)
FEW, MANY = 4, 64  # rows that the host's two numbers are read from
ROWS = (2, 8, 16, 32, 128)  # of products
SHORT, LONG = 8, 256  # tokens of prompts
LONG_ROWS = 16
STEPS = 16  # decoding steps; a time is the best of those of two rounds
WIDE = replace(TINY, vocab_size=4096)
SCORE_ROWS = 32


@dataclass(frozen=True)
class EngineRates:
    """Constants of an engine on one device.

    step_s, row_s: the host's part of a decoding step, and of each row in it. prompt_s: of a step with prompts, and
    request_s of each request in it. On a CPU also: stream_s, of a prompt's token beside the products, for each layer
    and unit of d_model; products, FLOP/s of a decoding step's products by rows; cache_bytes_per_s, keys and values that
    attention reads; score_s, sampling, for each score of a row.
    """

    step_s: float
    row_s: float
    prompt_s: float
    request_s: float
    stream_s: float = 0.0
    products: Points = ()
    cache_bytes_per_s: float = float("inf")
    score_s: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Where an engine is measured. matmul: FLOP/s of products of many rows, by width; the text of completions is made
    by `tokenizer`, if given; seconds are now_s's."""

    device: torch.device
    dtype: torch.dtype
    matmul: Points
    tokenizer: Tokenizer | None = None
    now_s: Callable[[], float] = time.perf_counter


def calibrate_engine(at: Setting) -> EngineRates:
    """The host's constants, and on a CPU the rates of the engine's work; a GPU's work is a roofline of its kernels."""
    tiny = build_engine(TINY, at)
    few, many = (time_steps(tiny, rows, SHORT, at.now_s) for rows in (FEW, MANY))
    row_s = max(0.0, (many.step_s - few.step_s) / (MANY - FEW))
    step_s = max(0.0, few.step_s - FEW * row_s)
    request_s = max(0.0, (many.first_s - few.first_s) / (MANY - FEW))
    host = EngineRates(step_s, row_s, max(0.0, few.first_s - FEW * request_s), request_s)
    return host if at.device.type == "cuda" else calibrate_work(host, at)


def calibrate_work(host: EngineRates, at: Setting) -> EngineRates:
    """`host` with what two plain layers take beside it."""
    plain, products, short_s = build_engine(PLAIN, at), [], 0.0
    for rows in ROWS:
        whole_s = time_steps(plain, rows, SHORT, at.now_s).step_s
        work_s = max(whole_s - host.step_s - rows * host.row_s, 0.05 * whole_s)
        products.append((float(rows), decode_step_flops(PLAIN, rows, SHORT + STEPS / 2) / work_s))
        short_s = whole_s if rows == LONG_ROWS else short_s
    long = time_steps(plain, LONG_ROWS, LONG, at.now_s)
    element_bytes = torch.empty(0, dtype=at.dtype).element_size()
    moved = LONG_ROWS * (LONG - SHORT) * cache_bytes_per_token(PLAIN, element_bytes)
    wide = build_engine(WIDE, replace(at, tokenizer=None))  # which may have fewer ids
    wide_s = time_steps(wide, SCORE_ROWS, SHORT, at.now_s).step_s
    scores = SCORE_ROWS * (WIDE.vocab_size - TINY.vocab_size)
    score_s = wide_s - host.step_s - SCORE_ROWS * host.row_s
    score_s -= 2 * TINY.d_model * scores / interpolate(tuple(products), SCORE_ROWS)
    tokens = LONG_ROWS * LONG
    products_s = prompt_flops(PLAIN, tokens) / interpolate(at.matmul, PLAIN.d_model)
    beside_s = max(0.0, long.first_s - host.prompt_s - LONG_ROWS * host.request_s - products_s)
    return replace(
        host,
        stream_s=beside_s / (tokens * PLAIN.num_layers * PLAIN.d_model),
        products=tuple(products),
        cache_bytes_per_s=moved / max(long.step_s - short_s, 0.05 * long.step_s),
        score_s=max(0.0, score_s) / scores,
    )


def prompt_flops(model: ModelConfig, tokens: float) -> float:
    """Products with the blocks' weights."""
    return tokens * model.num_layers * sum(matrix.flops_per_token for matrix in block_matrices(model))


def build_engine(shape: ModelConfig, at: Setting) -> Engine:
    """An engine with arbitrary weights of that shape, small enough for any generator."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02, generator=generator)
    model = model.to(device=at.device, dtype=at.dtype).eval()
    return Engine(model, EngineConfig(max_running=max(*ROWS, MANY), prefix_sharing=False), at.tokenizer)


@dataclass
class EngineTimes:
    """Seconds of the prompts, submission included, and of the best decoding step."""

    first_s: float
    step_s: float


def time_steps(engine: Engine, rows: int, prompt: int, now_s: Callable[[], float]) -> EngineTimes:
    """`rows` requests of `prompt` tokens decoded together, twice: graphs are captured and memory is touched first."""
    params = RequestParams(sampling=SamplingConfig(temperature=1.0, seed=1), max_new_tokens=STEPS + 1)
    first_s, step_s = [], []
    for _ in range(2):
        started_s = now_s()
        for row in range(rows):
            engine.submit([1 + (row + place) % (TINY.vocab_size - 1) for place in range(prompt)], params)
        while engine.scheduler.waiting or any(one.prefilling for one in engine.scheduler.running):
            engine.step()
        first_s.append(now_s() - started_s)
        while engine.has_work:
            began_s, before = now_s(), engine.counts.computed_tokens
            engine.step()
            if engine.counts.computed_tokens - before == rows:
                step_s.append(now_s() - began_s)
    return EngineTimes(min(first_s), min(step_s))
