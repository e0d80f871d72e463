"""The inference engine beside transformers' generate and a compiled static-cache decode, in one run with one model.

    python -m bench_mark.bench_mark_engine --out engine.json          # on a GPU: Llama shape of 1.1B, bf16
    python -m bench_mark.bench_mark_engine --model mew-1m             # on a CPU: the quickstart's shape, float32

Random weights, greedy, every request exactly `new` tokens, so that all do the same work. Predicted is the roofline of
llm/cost_model_decode at the copy and matmul rates of this run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from bench_mark.bench_mark_engine_checks import check_engine
from bench_mark.bench_mark_engine_peers import compiled_decoder, transformers_generate, transformers_model
from bench_mark.bench_mark_engine_tune import tune_few, tune_single
from bench_mark.bench_mark_engine_turns import compare_in_turns
from configs.loader import CONFIG_DIR, load_config
from configs.version import git_commit
from llm.args import ModelConfig
from llm.cost_model_decode import DecodeRates, decode_step_time, generation_time
from llm.engine import Engine, EngineConfig, RequestParams
from llm.sampling import SamplingConfig
from llm.transformer import Transformer

GREEDY = SamplingConfig(temperature=0.0)


def build_model(name: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A model of configs/model with weights as at the start of training, made on the device."""
    config = load_config(ModelConfig, OmegaConf.load(f"{CONFIG_DIR}/model/{name}.yaml")).with_vocab_of(2048)
    with torch.device(device):
        model = Transformer(config).to(dtype).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model


def make_prompts(count: int, lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Random ids; prompt i has lengths[i % len(lengths)] tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, vocab_size, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)
    ]


def timed(
    call: Callable[[], Any], device: torch.device, repeats: int, warm_up: Callable[[], Any] | None = None
) -> tuple[float, Any]:
    """Median seconds of `repeats` calls after one (or after `warm_up`), and the last result."""
    (warm_up or call)()
    times = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        result = call()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Benchmark:
    """One model, the rates of its device, and the rows measured so far."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = build_model(arguments.model, self.device, self.dtype)
        self.rates = measured_rates(self.device, sum(p.nbytes for p in self.model.parameters()))
        self.rows: list[dict[str, Any]] = []
        self.foreign: Any = None
        self.few_rows: Any = None  # the tuned kernel.few_rows.FewRowsConfig

    def engine(self, **changes: Any) -> Engine:
        settings = dict(prefill_chunk=16384 if self.device.type == "cuda" else 2048, prefix_sharing=False)
        return Engine(self.model, EngineConfig(**(settings | changes)))

    def add(self, what: str, tokens: int, seconds: float, predicted_s: float, bound: str, **more: Any) -> None:
        """Keep and print one row, in tokens a second."""
        predicted, measured = tokens / predicted_s, tokens / seconds
        row = dict(what=what, predicted=predicted, measured=measured, ratio=measured / predicted, bound=bound, **more)
        self.rows.append(row)
        told = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in more.items()
        )
        print(
            f"{what:46} {predicted:10,.0f} {measured:10,.0f} {measured / predicted:6.2f}  {bound:7} {told}", flush=True
        )

    def predict(self, prompts: list[list[int]], new: list[int]) -> Any:
        itemsize = torch.empty(0, dtype=self.dtype).element_size()
        return generation_time(self.model.config, [len(p) for p in prompts], new, self.rates, itemsize)

    def throughput(self, name: str, prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        """All requests at once, prompts included, and beside them transformers' padded batch, run to the longest."""
        engine = self.engine(max_running=len(prompts), max_seq_len=max(map(len, prompts)) + max(new))
        params = [RequestParams(GREEDY, max_new_tokens=count) for count in new]
        self.tune_few(engine, prompts)
        seconds, completions = timed(lambda: engine.generate(prompts, params), self.device, 3)
        predicted = self.predict(prompts, new)
        ours = sum(new) / seconds
        one = RequestParams(GREEDY, max_new_tokens=1)
        times = self.token_times(lambda: engine.generate(prompts, one), seconds, max(new))
        self.add(f"{name}: engine", sum(new), seconds, predicted.seconds, predicted.bound, **times)
        engine = None  # its pages are the peer's now
        if not self.arguments.no_peers:
            run = lambda: transformers_generate(self.foreign, prompts, max(new))  # noqa: E731
            warm_up = lambda: transformers_generate(self.foreign, prompts, 4)  # noqa: E731
            seconds, _ = timed(run, self.device, 1, warm_up)
            times = self.token_times(lambda: transformers_generate(self.foreign, prompts, 1), seconds, max(new))
            times["engine_is"] = ours * seconds / sum(new)
            self.add(f"{name}: transformers", sum(new), seconds, predicted.seconds, predicted.bound, **times)
        return [completion.token_ids for completion in completions]

    def token_times(self, one_token: Callable[[], Any], seconds: float, longest: int) -> dict[str, float]:
        """Until all requests have their first token, and between two after that, of a batch that took `seconds`."""
        first_s, _ = timed(one_token, self.device, 2)
        return {"first_token_ms": 1e3 * first_s, "token_ms": 1e3 * (seconds - first_s) / max(1, longest - 1)}

    def tune_few(self, engine: Engine, prompts: list[list[int]]) -> None:
        """The kernels of a few rows, timed once, on the first batch that runs by them."""
        if engine.runner.few is None or not engine.runner.few.takes(len(prompts), engine.runner.max_len):
            return
        if self.few_rows is None:
            run = lambda: engine.generate(prompts, RequestParams(GREEDY, max_new_tokens=40))  # noqa: E731
            self.few_rows = tune_few(engine, lambda: timed(run, self.device, 2)[0])
        engine.runner.few.config, engine.runner.few.sums = self.few_rows, None

    def single(self, prompt_tokens: int, new: int) -> None:
        """Batch 1: the rate between tokens, without the prompt, beside the peers' decode."""
        (prompt,) = make_prompts(1, [prompt_tokens], self.model.config.vocab_size, 1)
        engine = self.engine(max_running=1, max_seq_len=prompt_tokens + new)
        if engine.runner.single is not None:
            run = lambda: engine.generate([prompt], RequestParams(GREEDY, max_new_tokens=64))  # noqa: E731
            tune_single(engine, self.device, lambda: timed(run, self.device, 3)[0])
        first_s, rest_s = [], []
        for _ in range(4):
            engine.submit(prompt, RequestParams(GREEDY, max_new_tokens=new))
            synchronise(self.device)
            start, first = time.perf_counter(), None
            while engine.has_work:
                if engine.step() and first is None:
                    first = time.perf_counter()
            first_s.append(first - start)
            rest_s.append(time.perf_counter() - first)
        step = decode_step_time(
            self.model.config, 1, prompt_tokens + new / 2, self.rates, torch.empty(0, dtype=self.dtype).element_size()
        )
        seconds = statistics.median(rest_s[1:])
        self.add("1 request: engine, decoding", new - 1, seconds, step.seconds * (new - 1), step.bound,
                 first_token_ms=1e3 * statistics.median(first_s[1:]), token_ms=1e3 * seconds / (new - 1))  # fmt: skip
        self.rows[-1]["of_bandwidth_bound"] = self.rows[-1]["ratio"]
        ours = (new - 1) / seconds
        if self.arguments.no_peers:
            return
        for name, call in self.single_peers(prompt, new):
            short, _ = timed(lambda call=call: call(1), self.device, 2)
            long, _ = timed(lambda call=call: call(new), self.device, 2, lambda call=call: call(8))
            rate = (new - 1) / (long - short)
            self.add(f"1 request: {name}, decoding", new - 1, long - short, step.seconds * (new - 1), step.bound,
                     engine_is=ours / rate, first_token_ms=1e3 * short)  # fmt: skip

    def single_peers(self, prompt: list[int], new: int) -> list[tuple[str, Callable[[int], Any]]]:
        peers = [("transformers", lambda count: transformers_generate(self.foreign, [prompt], count))]
        if self.device.type == "cuda":
            decode = compiled_decoder(self.model, len(prompt) + new)
            peers.append(("compiled static cache (gpt-fast)", lambda count: decode(prompt, count)))
        return peers


def measured_rates(device: torch.device, num_bytes: int = 2**26) -> DecodeRates:
    """This run's matmul and copy rates in the dtype that the model has there.

    On a CPU the copy is of `num_bytes`, a model's size: a small model's weights come from a cache and not from memory.
    """
    if device.type == "cuda":
        from bench_mark.bench_mark_flash_attention_cases import measured_peaks

        peaks = measured_peaks()
        return DecodeRates(peaks.matmul_flops, peaks.memory_bytes)
    a, b = torch.randn(2, 1024, 1024)
    matmul_s, _ = timed(lambda: a @ b, device, 5)
    source = torch.randn(num_bytes // 4)
    target = torch.zeros_like(source)
    copy_s, _ = timed(lambda: target.copy_(source), device, 20)
    return DecodeRates(2 * 1024**3 / matmul_s, 2 * source.nbytes / copy_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1b", help="a file of configs/model")
    parser.add_argument("--prompt", type=int, default=None, help="tokens; 128, or what the model's context allows")
    parser.add_argument("--new", type=int, default=None, help="tokens; as many")
    parser.add_argument("--requests", type=int, nargs="*", default=None, help="at once; 64 and 256, on a CPU 16")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the last line")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"commit": git_commit(), "torch": torch.__version__, "model": arguments.model}
    bench = Benchmark(arguments)
    on_gpu, name = bench.device.type == "cuda", "CPU"
    if on_gpu:
        name = torch.cuda.get_device_name()
    fitting = min(128, 4 * bench.model.config.max_seq_len // 11)  # the longest mixed request has 7/4 prompts
    prompt, new = arguments.prompt or fitting, arguments.new or fitting
    document |= {"device": name, "dtype": str(bench.dtype), "rates": vars(bench.rates), "rows": bench.rows}
    document |= {"prompt": prompt, "new": new}
    print(f"{name} · {bench.dtype} · torch {torch.__version__} · commit {document['commit']} · {arguments.model}")
    print(f"matmul {bench.rates.matmul_flops / 1e12:.4g} TFLOP/s, copy {bench.rates.memory_bytes / 1e12:.3f} TB/s")
    if not arguments.no_peers:
        bench.foreign = transformers_model(bench.model)
    document["checks"] = check_engine(bench.model)
    print(json.dumps(document["checks"]), flush=True)
    print(f"{'case':46} {'predicted':>10} {'measured':>10} {'ratio':>6}  bound   (tokens/s)")
    vocab_size = bench.model.config.vocab_size
    if on_gpu:
        bench.single(prompt, new)
        compare = bench.throughput
    else:
        compare = partial(compare_in_turns, bench)
        compare("1 request, first token", make_prompts(1, [prompt], vocab_size, 1), [1])
        compare("1 request", make_prompts(1, [prompt], vocab_size, 1), [new])
    for count in arguments.requests if arguments.requests is not None else ([64, 256] if on_gpu else [16]):
        compare(f"{count} requests, equal", make_prompts(count, [prompt], vocab_size, count), [new] * count)
        prompts = make_prompts(count, [prompt // 4, prompt, 7 * prompt // 4], vocab_size, count)
        lengths = [max(1, new * (1 + i % 8) // 8) for i in range(count)]
        compare(f"{count} requests, mixed", prompts, lengths)
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
