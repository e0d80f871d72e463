"""Benchmark: training and encoding beside `tokenizers`, tiktoken and rustbpe, each in a process bound to one core.

    python -m bench_mark.bench_mark_tokenizer [corpus=big.jsonl] [vocab_size=32000] [repeats=3]

Without corpus= it takes the embedded corpus (about 8 MB), too small for the project's bounds, which are for about 50 MB
of mixed text and code documentation. Anyone on Debian makes the like:

    apt-get update; apt-get download anarchism python3.11-doc git-doc dict-foldoc dict-jargon dict-gcide \\
        linux-doc-6.1 perl-doc; for package in *.deb; do dpkg -x $package extracted; done

then strips the tags of the .html files, unpacks .gz and .dz, keeps .txt, .rst, .pod and .dict as they are, and writes
about 49 MB of it as JSONL documents (or: python -m data_processing.build_corpus source=text path='extracted/**').
Peers: pip install -e '.[bench]'. Peak memory is the process's, Python and imports included. Times are processor
seconds (all threads): the clock's on an idle core, and steadier on a shared machine; training also shows the clock.
Encoding takes every n-th document, about encode_mb of text. Engines take turns; the table shows medians.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.errors import UserError, check_positive, missing_extra
from configs.loader import load_config
from configs.run_dir import write_json_atomic
from configs.version import git_commit
from data_processing.document import read_documents, write_documents
from data_processing.sources_embedded import EmbeddedSource

ROOT = Path(__file__).resolve().parents[1]
TRAIN_ENGINES = ("ours, tie_break=ids", "ours, tie_break=bytes", "tokenizers", "rustbpe")
ENCODE_ENGINES = ("ours", "tokenizers", "tiktoken")
HARD_ENGINES = ("ours", "tokenizers")  # tiktoken 0.14 panics on a million spaces
PACKAGES = ("numpy", "regex", "tokenizers", "tiktoken", "rustbpe")
MEGABYTE = 1e6


@dataclass
class TokenizerBenchConfig:
    """Settings, as key=value on the command line."""

    corpus: str = ""
    vocab_size: int = 32_000
    pattern: str = "gpt2"
    repeats: int = 3
    encode_mb: float = 10.0
    name: str = ""

    def __post_init__(self) -> None:
        check_positive(repeats=self.repeats, vocab_size=self.vocab_size, encode_mb=self.encode_mb)


def run_child(task: str, engine: str, corpus: Path, directory: Path, config: TokenizerBenchConfig) -> dict[str, Any]:
    """One measurement in a fresh process; UserError with its last line when it fails."""
    settings = {"task": task, "engine": f"'{engine}'", "corpus": corpus, "directory": directory}
    settings |= {"vocab_size": config.vocab_size, "pattern": config.pattern}
    command = ["env", "RAYON_NUM_THREADS=1", "TOKENIZERS_PARALLELISM=false", sys.executable, "-m"]
    command += ["bench_mark.bench_mark_tokenizer_child", *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{task} with {engine} failed: {lines[-1]}; is it installed? pip install -e '.[bench]'")
    return json.loads(done.stdout.strip().splitlines()[-1])


def installed_version(package: str) -> str:
    """A peer's version; UserError with the install command when it is not there."""
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise missing_extra(package, "bench") from error


def describe_machine() -> dict[str, Any]:
    """Processor, cores, versions, commit."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: installed_version(package) for package in PACKAGES},
        "commit": git_commit(),
    }


def measure_all(folder: Path, size_mb: float, config: TokenizerBenchConfig) -> dict[str, dict[str, list[dict]]]:
    """All measurements on folder/corpus.jsonl, the engines taking turns `repeats` times."""
    found: dict[str, dict[str, list[dict]]] = {}
    step = max(1, round(size_mb / config.encode_mb))
    write_documents(folder / "sample.jsonl", islice(read_documents(folder / "corpus.jsonl"), 0, None, step))
    for task, engines in (("train", TRAIN_ENGINES), ("encode", ENCODE_ENGINES), ("hard", HARD_ENGINES)):
        found[task] = {engine: [] for engine in engines}
        corpus = folder / ("corpus.jsonl" if task == "train" else "sample.jsonl")
        for turn in range(config.repeats):
            for engine in engines:
                print(f"{task} {turn + 1}/{config.repeats}: {engine}", file=sys.stderr, flush=True)
                found[task][engine].append(run_child(task, engine, corpus, folder / "tokenizer", config))
    return found


def median_of(runs: list[dict]) -> dict[str, Any]:
    """The median of each number over runs; texts (hashes) must agree between them."""
    first = runs[0]
    for key, value in first.items():
        assert not isinstance(value, str) or all(run[key] == value for run in runs), f"{key} differs between runs"
    return {
        key: value if isinstance(value, str) else statistics.median(run[key] for run in runs)
        for key, value in first.items()
    }


def ratios_of(runs: list[dict], peers: list[dict], key: str) -> float:
    """The median of run over peer, turn by turn: both had the same machine."""
    return statistics.median(run[key] / peer[key] for run, peer in zip(runs, peers, strict=True))


def summarise(found: dict[str, dict[str, list[dict]]]) -> dict[str, Any]:
    """Medians, and the figures the project bounds."""
    train, encode = found["train"], found["encode"]
    ours = train["ours, tie_break=ids"]
    medians = {task: {engine: median_of(runs) for engine, runs in engines.items()} for task, engines in found.items()}
    return medians | {
        "train_time_over_tokenizers": ratios_of(ours, train["tokenizers"], "cpu_s"),
        "train_time_over_rustbpe": ratios_of(ours, train["rustbpe"], "cpu_s"),
        "train_memory_over_tokenizers": ratios_of(ours, train["tokenizers"], "peak_mb"),
        "encode_cold_over_tokenizers": ratios_of(encode["ours"], encode["tokenizers"], "cold_mb_s"),
        "encode_warm_over_tokenizers": ratios_of(encode["ours"], encode["tokenizers"], "warm_mb_s"),
        "same_merges_as_tokenizers": ours[0]["merges"] == train["tokenizers"][0]["merges"],
        "same_ids": len({runs[0]["ids"] for runs in encode.values()}) == 1,
    }


BOUNDS = (
    ("train_time_over_tokenizers", "<=", 0.5),
    ("train_time_over_rustbpe", "<=", 2.0),
    ("train_memory_over_tokenizers", "<=", 2.0),
    ("encode_cold_over_tokenizers", ">=", 2.3),
    ("encode_warm_over_tokenizers", ">=", 3.5),
)


def print_table(summary: dict[str, Any]) -> None:
    print(f"\n{'training':<24}{'cpu s':>10}{'clock s':>10}{'peak MB':>10}")
    for engine, row in summary["train"].items():
        print(f"{engine:<24}{row['cpu_s']:>10.2f}{row['time_s']:>10.2f}{row['peak_mb']:>10.0f}")
    print(f"\n{'encoding, one core':<24}{'cold MB/s':>10}{'warm MB/s':>10}{'peak MB':>10}")
    for engine, row in summary["encode"].items():
        print(f"{engine:<24}{row['cold_mb_s']:>10.2f}{row['warm_mb_s']:>10.2f}{row['peak_mb']:>10.0f}")
    print(f"\n{'hard texts':<24}{'1e6 spaces s':>14}{'1e5 letters s':>14}")
    for engine, row in summary["hard"].items():
        print(f"{engine:<24}{row['spaces_1e6_s']:>14.3f}{row['letters_1e5_s']:>14.3f}")
    print(f"\n{'figure':<32}{'bound':>10}{'measured':>10}")
    for key, sign, bound in BOUNDS:
        print(f"{key:<32}{sign + ' ' + str(bound):>10}{summary[key]:>10.2f}")
    print(f"{'same_merges_as_tokenizers':<32}{'':>10}{summary['same_merges_as_tokenizers']!s:>10}")
    print(f"{'same_ids (all encoders)':<32}{'':>10}{summary['same_ids']!s:>10}\n")


def body(config: TokenizerBenchConfig) -> dict[str, Any]:
    """Measure, print the table and write bench_mark/results/."""
    machine = describe_machine()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_documents(corpus, read_documents(config.corpus) if config.corpus else EmbeddedSource().documents())
        size = sum(len(document.text.encode("utf-8")) for document in read_documents(corpus)) / MEGABYTE
        name = config.name or (Path(config.corpus).stem if config.corpus else "embedded")
        print(f"corpus {name}: {size:.1f} MB, vocab_size {config.vocab_size}, pattern {config.pattern}")
        summary = summarise(measure_all(Path(folder), size, config))
    print_table(summary)
    settings = {"corpus": name, "corpus_mb": size, "vocab_size": config.vocab_size, "pattern": config.pattern}
    result = {"benchmark": "tokenizer", "machine": machine, **settings, "repeats": config.repeats, **summary}
    write_json_atomic(ROOT / "bench_mark" / "results" / f"tokenizer_{name}_{config.pattern}.json", result)
    print(json.dumps(result))
    return result


def main() -> None:
    try:
        body(load_config(TokenizerBenchConfig, OmegaConf.from_dotlist(sys.argv[1:])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
