"""The engine's benchmark on a CPU: contestants take turns, so that what else the machine does meets all of them alike.

Three are timed: the engine, the engine through the model's own layers (cpu_kernel=False), and transformers' generate.
Beside wall time stands the process's CPU time, which other processes disturb less.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from bench_mark.bench_mark_engine_peers import transformers_generate
from llm.engine import RequestParams
from llm.sampling import SamplingConfig

ROUNDS = 5


def take_turns(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, tuple[float, float]]:
    """Median seconds and CPU seconds of each call, after one turn that warms up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: tuple(statistics.median(turn[i] for turn in turns[1:]) for i in range(2)) for name, turns in times.items()
    }


def compare_in_turns(bench: Any, case: str, prompts: list[list[int]], new: list[int]) -> None:
    """Rows of a bench_mark_engine.Benchmark: all requests at once, prompts included, in tokens a second."""
    params = [RequestParams(SamplingConfig(temperature=0.0), max_new_tokens=count) for count in new]
    sizes = dict(max_running=len(prompts), max_seq_len=max(map(len, prompts)) + max(new))
    engines = {"engine": bench.engine(**sizes), "engine by layers": bench.engine(**sizes, cpu_kernel=False)}
    calls = {name: lambda engine=engine: engine.generate(prompts, params) for name, engine in engines.items()}
    if not bench.arguments.no_peers:
        calls["transformers"] = lambda: transformers_generate(bench.foreign, prompts, max(new))
    turns, predicted = take_turns(calls), bench.predict(prompts, new)
    own = turns["engine"]
    for name, (seconds, cpu_s) in turns.items():
        more = {"cpu_s": cpu_s}
        if name != "engine":
            more |= {"engine_is": seconds / own[0], "engine_is_by_cpu": cpu_s / own[1]}
        bench.add(f"{case}: {name}", sum(new), seconds, predicted.seconds, predicted.bound, **more)
