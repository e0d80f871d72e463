"""Benchmark of the data stages beside resiliparse, trafilatura, datatrove, datasketch, rensa, pypdf: one core, one run.

    python -m bench_mark.bench_mark_data raw=data/debian/raw            # what data_processing.debian_docs fetched
    python -m bench_mark.bench_mark_data raw=data/debian/raw stages='[html,minhash]' repeats=5
    python -m bench_mark.bench_mark_data raw=data/debian/raw stages='[pipeline]'   # one process against two

Peers: pip install -e '.[bench]'. Speeds are documents a processor second (pdf: pages), medians over turns in which the
contestants alternate; the pipeline is timed by the clock and wants an idle machine. Texts of 2 kB are cut from the
pages' main text, texts of 300 words likewise; verdicts are compared with datatrove's on the texts of the speed run.
"""

import hashlib
import json
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from bench_mark.bench_mark_data_pages import page_scores
from bench_mark.bench_mark_data_stages import STAGES, datatrove_verdict, our_verdict
from configs.errors import UserError, check_choice, check_positive
from configs.loader import compose_config, load_config
from configs.run_dir import write_json_atomic
from configs.version import git_commit
from data_processing.build_corpus import build_corpus
from data_processing.build_corpus_config import BuildCorpusConfig
from data_processing.cost_model import ProcessorRates, exact_per_s, minhash_per_s, quality_per_s
from data_processing.html_process import extract_html
from data_processing.pdf_process import extract_pdf

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "resiliparse", "trafilatura", "datatrove", "spacy", "datasketch", "rensa", "pypdfium2", "pypdf")
REACH = {"html": 500, "heuristics": 2_000, "minhash": 10_000, "exact": 40_000, "pdf": 400}


@dataclass
class DataBenchConfig:
    """Settings, as key=value on the command line."""

    raw: str = ""
    stages: list[str] = field(default_factory=lambda: [*STAGES, "pages", "pipeline"])
    documents: int = 400
    repeats: int = 3
    name: str = "cpu"

    def __post_init__(self) -> None:
        check_positive(documents=self.documents, repeats=self.repeats)
        for stage in self.stages:
            check_choice("stages", stage, [*STAGES, "pages", "pipeline"])
        if not self.raw:
            raise UserError("raw is empty; run python -m data_processing.debian_docs and give its output as raw=...")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, load, versions, commit; a package that is not there is "-"."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "-"
    machine = {"processor": models[0] if models else platform.processor(), "cores": os.cpu_count()}
    machine |= {"load_average": round(os.getloadavg()[0], 2), "python": platform.python_version()}
    return machine | {"dtype": "uint32 signatures", "commit": git_commit()} | versions


def sample_pages(raw: Path, count: int) -> list[bytes]:
    """Pages of 15 to 70 kB, about 33 on average, spread over all packages."""
    files = sorted(
        path for path in (raw / "html").rglob("*.html") if path.is_file() and 15_000 < path.stat().st_size < 70_000
    )
    if len(files) < count:
        raise UserError(f"{raw}/html holds {len(files)} pages of 15 to 70 kB, documents={count} are wanted; fetch more")
    return [path.read_bytes() for path in random.Random(1).sample(files, count)]


def inputs_of(raw: Path, count: int) -> dict[str, list[Any]]:
    """The items of each stage."""
    pages = sample_pages(raw, count)
    texts = [text for page in pages if len(text := extract_html(page).text) > 4_000]
    words = [text.split() for text in texts]
    short = [text[1_000:3_000] for text in texts]
    three_hundred = [" ".join(part[100:400]) for part in words if len(part) >= 400]
    pdfs = [path.read_bytes() for path in sorted((raw / "pdf").rglob("*.pdf"))]
    return {
        "html": pages,
        "heuristics": short,
        "minhash": three_hundred * (1 + 2 * count // max(len(three_hundred), 1)),
        "exact": [text + str(i) for i in range(20) for text in short],
        "mask_pii": short,
        "pdf": [data for data in pdfs if 20 < extract_pdf(data).pages < 400][:3],
    }


def time_contestants(stage: str, items: list[Any], repeats: int) -> dict[str, float | str]:
    """Documents (pdf: pages) a processor second of each contestant, or the line that says what it lacks."""
    count = sum(extract_pdf(data).pages for data in items) if stage == "pdf" else len(items)
    runs, speeds = {}, {}
    for contestant in STAGES[stage]:
        try:
            runs[contestant.name] = contestant.make()
            runs[contestant.name](items[: max(len(items) // 10, 1)])  # warm-up: imports, tables
        except ImportError as error:
            speeds[contestant.name] = f"not installed ({error.name}); pip install -e '.[bench]'"
            runs.pop(contestant.name, None)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = process_time()
            run(items)
            seconds[name].append(process_time() - started)
    return speeds | {name: count / statistics.median(taken) for name, taken in seconds.items()}


def measure_rates() -> ProcessorRates:
    """Elementary rates, on operations that are no stage's."""

    def best(function, number: int) -> float:
        taken = []
        for _ in range(7):
            started = process_time()
            for _ in range(number):
                function()
            taken.append((process_time() - started) / number)
        return statistics.median(taken)

    megabyte, tiny = b"x" * 1_000_000, np.arange(300, dtype=np.uint64)
    wide, sums = np.arange(1 << 16, dtype=np.uint64), np.empty(1 << 16, dtype=np.uint64)
    row, column = np.arange(300, dtype=np.uint32), np.arange(128, dtype=np.uint32)[:, None]
    table_of_products = np.empty((128, 300), dtype=np.uint32)
    text = " ".join(f"word{n % 150}" for n in range(300))
    table = {word: (n,) for n, word in enumerate(text.split())}
    return ProcessorRates(
        hash_bytes_per_s=1e6 / best(lambda: hashlib.blake2b(megabyte, digest_size=16).digest(), 5),
        element_uint64_s=best(lambda: np.cumsum(wide, out=sums), 50) / wide.size,
        element_uint32_s=best(lambda: np.multiply(column, row, out=table_of_products), 200) / 38_400,
        call_s=best(lambda: np.sort(tiny), 500),
        lookup_s=best(lambda: [n for word in text.split() for n in table[word]], 200) / 300,
    )


def predict(stage: str, items: list[Any], rates: ProcessorRates) -> float | None:
    """The cost model's documents a second, None where there is no model."""
    if stage not in ("heuristics", "minhash", "exact"):
        return None
    characters, words = (statistics.mean(map(measure, items)) for measure in (len, lambda text: len(text.split())))
    if stage == "exact":
        return exact_per_s(characters, rates)
    return minhash_per_s(characters, words, 128, rates) if stage == "minhash" else quality_per_s(words, rates)


def same_verdicts(texts: list[str]) -> float | str:
    """Share of texts that we and datatrove both keep or both drop."""
    try:
        theirs = datatrove_verdict()
        ours = our_verdict()
        return sum(bool(ours(text)) == bool(theirs(text)) for text in texts) / len(texts)
    except ImportError as error:
        return f"not compared: {error.name} is not installed; pip install -e '.[bench]'"


def processor_seconds() -> tuple[float, float]:
    """(this process's, its ended children's) processor seconds so far."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    mine, children = (usage.ru_utime + usage.ru_stime for usage in usages)
    return mine, children


def pipeline_speedup(raw: Path, folder: Path, repeats: int) -> dict[str, float]:
    """A build with one process and with two, in turns: least wall seconds, medians of processor seconds.

    `speedup_by_processor_s` is what two free cores allow: one process's work over the longer of the driver's own work
    and half of all work with two workers. Unlike the clock's it means something on a shared machine.
    """
    stages = "stages=[html_process,normalise,quality_filter,mask_pii,deduplicate,deduplicate_near]"
    walls: dict[int, list[float]] = {1: [], 2: []}
    work: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    shares = []
    for turn in range(repeats):
        for workers in walls:
            given = [f"output='{folder}/{turn}_{workers}'", "source=html", f"path='{raw}/html/sqlite3-doc'"]
            given += [f"workers={workers}", stages, "block_bytes=1000000"]
            started, before = perf_counter(), processor_seconds()
            stats = build_corpus(compose_config(BuildCorpusConfig, "build_corpus", given))
            walls[workers].append(perf_counter() - started)
            work[workers].append(tuple(now - then for now, then in zip(processor_seconds(), before, strict=True)))
            if workers == 1:
                parts = sum(stats["seconds"][name] for name in ("read", "wait", "stages", "write"))
                shares.append(parts / stats["seconds"]["wall"])
    alone = statistics.median(mine for mine, _ in work[1])
    driver, children = (statistics.median(part) for part in zip(*work[2], strict=True))
    return {
        "wall_1_s": min(walls[1]),
        "wall_2_s": min(walls[2]),
        "speedup_by_the_clock": min(walls[1]) / min(walls[2]),
        "processor_1_s": alone,
        "driver_2_s": driver,
        "workers_2_s": children,
        "speedup_by_processor_s": alone / max(driver, (driver + children) / 2),
        "share_of_wall_in_stages_and_io": statistics.median(shares),
    }


def print_stage(stage: str, speeds: dict[str, float | str], predicted: float | None) -> None:
    """One line a contestant: predicted, measured, ratio, bound (the reach asked for)."""
    for name, speed in speeds.items():
        if isinstance(speed, str):
            print(f"{stage:11} {name:26} {speed}")
            continue
        ours = name.startswith("ours")
        shown = f"{predicted:10,.0f}" if predicted and ours else f"{'-':>10}"
        ratio = f"{speed / predicted:6.2f}" if predicted and ours else f"{'-':>6}"
        bound = f">= {REACH[stage]:,}" if ours and stage in REACH else ""
        print(f"{stage:11} {name:26} {shown} {speed:10,.0f} {ratio}  {bound}")


def run_benchmark(config: DataBenchConfig) -> dict[str, Any]:
    """Measure what the config names, print the table, and return the JSON document."""
    raw = Path(config.raw).expanduser()
    result: dict[str, Any] = {"benchmark": "data", "machine": describe_machine(), "config": asdict(config)}
    print(" ".join(f"{name}={value}" for name, value in result["machine"].items()))
    timed = [stage for stage in STAGES if stage in config.stages]
    if timed:
        items, rates = inputs_of(raw, config.documents), measure_rates()
        result["rates"] = asdict(rates)
        print(f"{'stage':11} {'documents (pdf: pages) / s':26} {'predicted':>10} {'measured':>10} {'ratio':>6}  bound")
        for stage in timed:
            speeds, predicted = (
                time_contestants(stage, items[stage], config.repeats),
                predict(stage, items[stage], rates),
            )
            result[stage] = {"speeds": speeds, "predicted": predicted}
            print_stage(stage, speeds, predicted)
        if "heuristics" in timed:
            result["same_verdicts"] = same_verdicts(items["heuristics"])
            print(f"same verdicts as datatrove: {result['same_verdicts']}  (>= 0.99)")
    if "pages" in config.stages:
        scores = page_scores(raw / "html")
        result["page_f1"] = {name: {"pages": len(s), "f1": statistics.mean(s)} for name, s in scores.items()}
        for name, part in result["page_f1"].items():
            print(f"F1 {name:18} {part['pages']:3} pages  {part['f1']:.3f}")
        every = [score for part in scores.values() for score in part]
        if every:
            result["page_f1_mean"] = statistics.mean(every)
            print(f"F1 of {len(every)} pages: {result['page_f1_mean']:.3f}  (>= 0.92)")
    if "pipeline" in config.stages:
        with tempfile.TemporaryDirectory() as folder:
            result["pipeline"] = pipeline_speedup(raw, Path(folder), config.repeats)
        print(
            "pipeline: "
            + ", ".join(f"{name} {value:.2f}" for name, value in result["pipeline"].items())
            + "  (>= 1.7x)"
        )
    return result


def main() -> None:
    try:
        config = load_config(DataBenchConfig, OmegaConf.from_cli(sys.argv[1:]))
        result = run_benchmark(config)
        write_json_atomic(ROOT / "bench_mark" / "results" / f"data_{config.name}.json", result)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
