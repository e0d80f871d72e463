"""Benchmark: our grader beside Math-Verify and mathruler on answers with known verdicts, and on GSM8K's solutions.

    python -m bench_mark.bench_mark_grading [gsm8k=../shared/data/gsm8k/test.jsonl] [repeats=3]

Verdicts: the pairs of tests/alignment/grader_cases.py, whose verdicts follow our policies (docs/grading.md), so a
peer's share says how far policies differ, not which grader is better. Pairs that hang sympy are left to ours. Times are
processor seconds of this process, contestants in turns, medians; nothing is predicted, since no model of a parser's
time would be better than a measurement. Peers: pip install -e '.[align,bench]'.
"""

import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from alignment.dataset import DatasetConfig, load_problems
from alignment.drgrpo_grader import Grader
from configs.errors import UserError, check_positive
from configs.loader import load_config
from configs.run_dir import write_json_atomic
from configs.version import git_commit

ROOT = Path(__file__).resolve().parents[1]
HANGS_SYMPY = ("9**9", "9^{", "100000", "10^{10", "^{50}", "^{60}")
CODE = ("import", "exit", "getcwd", "lambda", "range")  # mathruler would run these
BOUNDS = {"exact_share": (">=", 1.0), "drgrpo_agreement": (">=", 0.96), "exact_us": ("<=", 1_000.0)}
Pair = tuple[str, str]
Contestant = Callable[[str, str], bool]


@dataclass
class GradingBenchConfig:
    """Settings, as key=value on the command line."""

    gsm8k: str = str(ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl")
    repeats: int = 3
    name: str = "cpu"

    def __post_init__(self) -> None:
        check_positive(repeats=self.repeats)


def contestants() -> dict[str, Contestant]:
    """Ours, and the peers that are installed; a missing one is told in a line."""
    found: dict[str, Contestant] = {}
    for rules in ("exact", "drgrpo"):
        grader = Grader("pair", rules)
        found[rules] = lambda given, truth, grader=grader: grader.verdict(given, truth).correct
    for name, build in (("math-verify", math_verify), ("mathruler", mathruler)):
        try:
            found[name] = build()
        except ImportError as error:
            print(f"{name} is not installed ({error}); its row is left out")
    return found


def math_verify() -> Contestant:
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def grade(given: str, truth: str) -> bool:
        left, right = (parse(f"${text}$", parsing_timeout=None) for text in (given, truth))
        return bool(verify(right, left, timeout_seconds=None))

    return grade


def mathruler() -> Contestant:
    from mathruler.grader import grade_answer

    return lambda given, truth: bool(grade_answer(given, truth))


def known_pairs() -> dict[Pair, bool]:
    """The policies' pairs that every contestant may be given."""
    from tests.alignment.grader_cases import DIFFERENT, EQUAL

    pairs = dict.fromkeys(EQUAL, True) | dict.fromkeys(DIFFERENT, False)
    return {pair: right for pair, right in pairs.items() if not any(word in pair[0] for word in HANGS_SYMPY + CODE)}


def gsm8k_pairs(path: str) -> list[Pair]:
    """GSM8K's answers as models write them, against themselves; generated sums where the file is absent."""
    if Path(path).exists():
        problems = load_problems(DatasetConfig("jsonl", path, split="all", size=300))
    else:
        print(f"{path} is not here: 300 generated word problems in its place")
        problems = load_problems(DatasetConfig(level="word_problems", size=300))
    return [(f"${problem.answer}", problem.answer) for problem in problems]


def measure(grade: Contestant, pairs: list[Pair]) -> tuple[list[bool | None], float]:
    """Verdicts (None where the contestant raised) and microseconds of the processor for each."""
    start = time.process_time()
    verdicts: list[bool | None] = []
    for pair in pairs:
        try:
            verdicts.append(grade(*pair))
        except Exception:
            verdicts.append(None)
    return verdicts, 1e6 * (time.process_time() - start) / len(pairs)


def run_all(config: GradingBenchConfig) -> dict[str, Any]:
    known, plain = known_pairs(), gsm8k_pairs(config.gsm8k)
    engines = contestants()
    times: dict[str, list[float]] = {name: [] for name in engines}
    plain_times: dict[str, list[float]] = {name: [] for name in engines}
    verdicts: dict[str, list[bool | None]] = {}
    for _ in range(config.repeats):
        for name, grade in engines.items():
            verdicts[name], took = measure(grade, list(known))
            times[name].append(took)
            plain_times[name].append(measure(grade, plain)[1])
    rows = {
        name: {
            "share": sum(a is b for a, b in zip(verdicts[name], known.values(), strict=True)) / len(known),
            "raised": verdicts[name].count(None),
            "us": statistics.median(times[name]),
            "plain_us": statistics.median(plain_times[name]),
        }
        for name in engines
    }
    figures = {"exact_share": rows["exact"]["share"], "exact_us": rows["exact"]["us"]}
    if "mathruler" in verdicts:
        same = [a is b for a, b in zip(verdicts["drgrpo"], verdicts["mathruler"], strict=True)]
        figures["drgrpo_agreement"] = sum(same) / len(same)
    return {"pairs": len(known), "plain_pairs": len(plain), "graders": rows, "figures": figures}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def body(config: GradingBenchConfig) -> dict[str, Any]:
    """Measure, print the tables and write bench_mark/results/."""
    packages = {name: installed(name) for name in ("math-verify", "sympy", "mathruler")}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)}
    machine |= {"python": platform.python_version(), **packages, "commit": git_commit()}
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    result = run_all(config)
    print(f"\n{'grader':<14}{'as our policies':>16}{'raised':>8}{'us, pairs':>11}{'us, plain':>11}")
    for name, row in result["graders"].items():
        print(f"{name:<14}{row['share']:>16.3f}{row['raised']:>8}{row['us']:>11.0f}{row['plain_us']:>11.0f}")
    print(f"\n{'figure':<20}{'predicted':>10}{'measured':>10}{'ratio':>8}{'bound':>10}")
    for key, measured in result["figures"].items():
        sign, bound = BOUNDS[key]
        print(f"{key:<20}{'-':>10}{measured:>10.3f}{'-':>8}{f'{sign} {bound:g}':>10}")
    result = {"benchmark": "grading", "machine": machine, "repeats": config.repeats} | result
    write_json_atomic(ROOT / "bench_mark" / "results" / f"grading_{config.name}.json", result)
    print(json.dumps(result))
    return result


def main() -> None:
    try:
        body(load_config(GradingBenchConfig, OmegaConf.from_dotlist(sys.argv[1:])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
