"""From raw input to clean documents: one ordered pipeline, with counts for every stage.

    python -m data_processing.build_corpus output=data/demo/corpus                        # the embedded corpus
    python -m data_processing.build_corpus output=data/mine/corpus source=text path='books/*.txt'
    python -m data_processing.build_corpus output=data/web/corpus source=warc path=crawl/ workers=8

A source streams documents, blocks of them go through the stages (in worker processes those that need no memory), and
each block is committed as one shard (build_corpus_blocks says how a killed run is resumed). deduplicate_near and mix
come last, over all blocks (build_corpus_passes). Memory: a few blocks, and what deduplication remembers.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table

from configs.errors import UserError
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.run_dir import write_text_atomic
from data_processing.build_corpus_blocks import BlockStore
from data_processing.build_corpus_config import (
    ALONE,
    WHOLE_CORPUS,
    WITH_MEMORY,
    BuildCorpusConfig,
    build_stage,
    chosen,
    identity_of,
)
from data_processing.build_corpus_engine import Engine, open_engine
from data_processing.build_corpus_passes import run_passes
from data_processing.build_corpus_report import render_report
from data_processing.build_corpus_stats import add_outputs, add_records, check_not_empty, run_stages
from data_processing.build_corpus_work import process_block, settings_text
from data_processing.deduplicate_near import choose_bands
from data_processing.document import Document
from data_processing.raw_document import text_bytes
from data_processing.sources import Source, build_source, limit_documents
from data_processing.stage import Stage


def cut_blocks(documents: Iterator[Document], block_bytes: int) -> Iterator[list[Document]]:
    """Lists of documents with about `block_bytes` of text (or raw bytes) each; the cuts depend on the stream alone."""
    block, size = [], 0
    for document in documents:
        block.append(document)
        size += text_bytes(document)
        if size >= block_bytes:
            yield block
            block, size = [], 0
    if block:
        yield block


class Clock:
    """Adds up the seconds between its calls under names, so that together they are the wall time."""

    def __init__(self):
        self.started = self.last = perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = perf_counter()
        seconds, self.last = now - self.last, now
        return seconds

    def total(self) -> float:
        """Seconds since the last total."""
        now = perf_counter()
        seconds, self.started = now - self.started, now
        return seconds


def timed_blocks(
    documents: Iterator[Document], block_bytes: int, seconds: dict[str, float]
) -> Iterator[list[Document]]:
    """cut_blocks, with the time that reading took added to seconds["read"]."""
    blocks = cut_blocks(documents, block_bytes)
    while True:
        started = perf_counter()
        block = next(blocks, None)
        seconds["read"] += perf_counter() - started
        if block is None:
            return
        yield block


def build_blocks(
    documents: Iterator[Document], stages: list[Stage], store: BlockStore, config: BuildCorpusConfig, engine: Engine
) -> Iterator[dict[str, Any]]:
    """Process and commit block after block, yielding each record; `stages` are those with a memory."""
    last = not chosen(config, WHOLE_CORPUS)
    reading, clock = {"read": 0.0}, Clock()
    blocks = timed_blocks(documents, config.block_bytes, reading)
    results = engine.map(partial(process_block, settings_text(config)), blocks)
    for index, (record, kept, dropped) in enumerate(results, store.next_block):
        waited = clock.lap()
        alone_s = sum(part["seconds"] for part in record["stages"].values())
        read_s, reading["read"] = reading["read"], 0.0
        kept, more = run_stages(record, kept, stages, config.examples_per_reason)
        clock.lap()
        record["block"] = index
        # Waiting: for the workers, or for the stages themselves where there are none.
        record["seconds"] = {
            "read": read_s,
            "wait": max(waited - read_s - (alone_s if config.workers == 1 else 0), 0.0),
        }
        store.write_block(record, kept, dropped + more, last)
        record["seconds"] |= {"write": clock.lap(), "wall": clock.total()}
        store.commit(record, stages)
        yield record


def skip_done(documents: Iterator[Document], records: list[dict[str, Any]]) -> None:
    """Read past the documents of committed blocks."""
    done = sum(record["documents_read"] for record in records)
    passed = sum(1 for _ in islice(documents, done))
    if passed < done:
        raise UserError(
            f"the input gives {passed} documents, the unfinished corpus had read {done}; set overwrite=true"
        )


def watch(documents: Iterator[Document], progress: Progress, task: Any) -> Iterator[Document]:
    """Pass documents on and move the progress bar by their bytes."""
    for document in documents:
        progress.advance(task, text_bytes(document))
        yield document


def make_progress() -> Progress:
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    ]
    return Progress(*columns, console=Console(stderr=True))


def run_blocks(config: BuildCorpusConfig, source: Source, store: BlockStore, engine: Engine) -> list[dict[str, Any]]:
    """The records of all blocks, those that an earlier run committed included."""
    stages = [build_stage(name, config) for name in chosen(config, WITH_MEMORY)]
    records = store.records
    store.replay_journals(records, stages)
    with make_progress() as progress:
        task = progress.add_task(f"{config.source} -> documents", total=source.total_bytes)
        documents = watch(limit_documents(source.documents(), config), progress, task)
        skip_done(documents, records)
        records = list(records)
        for record in build_blocks(documents, stages, store, config, engine):
            records.append(record)
    return records


def build_corpus(config: BuildCorpusConfig) -> dict[str, Any]:
    """Build, resume or find complete the corpus that the config describes, and return its statistics (stats.json).

    Raises UserError for input that cannot be read, an empty result, or an output directory with another corpus.
    """
    source = build_source(config)
    identity = identity_of(config, source)
    store = BlockStore(config.output, config.compression, config.held_out_share)
    finished = None if config.overwrite else store.finished_stats(identity)
    if finished is not None:
        store.remove_work()
        return finished
    if "deduplicate_near" in config.stages:
        choose_bands(config.deduplicate_near)  # what it lacks is said now, not after the blocks
    store.open(identity, config.overwrite)
    with open_engine(config.engine, config.workers) as engine, source.quarantine.writing_to(store.quarantine_path):
        records = run_blocks(config, source, store, engine)
        outputs, facts = run_passes(config, store, records, engine)
    stats = add_records(records, chosen(config, (*ALONE, *WITH_MEMORY, *WHOLE_CORPUS)), config.examples_per_reason)
    stats |= add_outputs(outputs) | {"identity": identity, "source_counts": dict(source.counts)} | facts
    stats["workers"] = config.workers
    if not stats["documents"]:
        store.remove_work()  # the next try starts afresh; _dropped stays to be read
    check_not_empty(stats, config.output)
    write_text_atomic(store.output / "report.html", render_report(stats))
    store.finish(stats)
    return stats


def print_summary(stats: dict[str, Any], output: str) -> None:
    """The drop table, and where everything is."""
    table = Table("stage", "in", "out", "dropped", "MB/s")
    for name, part in stats["stages"].items():
        total = part["total"]
        reasons = ", ".join(f"{reason} {count}" for reason, count in total["dropped"].items()) or "-"
        speed = f"{part['mb_per_s']:.1f}" if part["mb_per_s"] else "-"
        table.add_row(name, str(total["documents_in"]), str(total["documents_out"]), reasons, speed)
    console = Console()
    console.print(table)
    for name, count in stats["source_counts"].items():
        console.print(f"{name}: {count}")
    if held_out := stats["held_out"]["documents"]:
        console.print(f"{held_out} documents held out in {output}/_held_out")
    console.print(f"{stats['documents']} documents, {stats['bytes'] / 1e6:.2f} MB in {output} (report.html, _dropped/)")


def body(config: BuildCorpusConfig) -> dict[str, Any]:
    """What the script does: build and print the summary."""
    stats = build_corpus(config)
    print_summary(stats, config.output)
    return stats


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="build_corpus")
def main(config: DictConfig) -> None:
    run_script(body, BuildCorpusConfig, config)


if __name__ == "__main__":
    start_script(main, BuildCorpusConfig, "build_corpus")
