"""From raw text to clean documents: one ordered pipeline, with counts for every stage.

    python -m data_processing.build_corpus output=data/demo/corpus                        # the embedded corpus
    python -m data_processing.build_corpus output=data/mine/corpus source=text path='books/*.txt'

A source streams documents, blocks of them go through the stages, and each block is committed as one shard
(build_corpus_blocks says how a killed run is resumed). Memory: two blocks and what deduplicate remembers.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script
from configs.run_dir import write_text_atomic
from data_processing.build_corpus_blocks import SUFFIXES, BlockStore
from data_processing.build_corpus_report import render_report
from data_processing.build_corpus_stats import add_records, check_not_empty, run_stages, utf8_bytes
from data_processing.deduplicate import Deduplicate
from data_processing.document import Document
from data_processing.normalise import Normalise, NormaliseConfig
from data_processing.quality_filter import QualityFilter, QualityFilterConfig
from data_processing.sources import Source, SourceConfig, build_source, limit_documents
from data_processing.stage import Stage

# In order of cost, and so that each finds what it needs: equal texts are equal only once they are normalised, and
# the memory of deduplicate is spent on documents that passed the rest.
STAGES = ("normalise", "quality_filter", "deduplicate")


@dataclass
class BuildCorpusConfig(SourceConfig):
    """The whole build; the fields of SourceConfig choose the input."""

    output: str = "data/corpus"
    overwrite: bool = False
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    normalise: NormaliseConfig = field(default_factory=NormaliseConfig)
    quality_filter: QualityFilterConfig = field(default_factory=QualityFilterConfig)
    block_bytes: int = 32_000_000
    compression: str = "none"
    examples_per_reason: int = 3

    def __post_init__(self):
        super().__post_init__()
        for name in self.stages:
            check_choice("stages", name, STAGES)
        check_choice("compression", self.compression, list(SUFFIXES))
        check_positive(block_bytes=self.block_bytes)


def build_stage(name: str, config: BuildCorpusConfig) -> Stage:
    """The stage of that name, with its settings."""
    if name == "normalise":
        return Normalise(config.normalise)
    if name == "quality_filter":
        return QualityFilter(config.quality_filter)
    assert name == "deduplicate", f"{name} is not in {STAGES}"
    return Deduplicate()


def identity_of(config: BuildCorpusConfig, source: Source) -> dict[str, Any]:
    """What decides the output's bytes: the settings but for where and how it is written, and the input."""
    settings = asdict(config)
    for name in ("output", "overwrite", "examples_per_reason"):
        del settings[name]
    return {"config": settings, "input": source.identity()}


def cut_blocks(documents: Iterator[Document], block_bytes: int) -> Iterator[list[Document]]:
    """Lists of documents with about `block_bytes` of text each; the cuts depend on the stream alone."""
    block, size = [], 0
    for document in documents:
        block.append(document)
        size += utf8_bytes(document.text)
        if size >= block_bytes:
            yield block
            block, size = [], 0
    if block:
        yield block


def build_blocks(
    documents: Iterator[Document], stages: list[Stage], store: BlockStore, config: BuildCorpusConfig, first: int
) -> Iterator[dict[str, Any]]:
    """Process and commit block after block from index `first`, yielding each record."""
    started = perf_counter()
    for index, block in enumerate(cut_blocks(documents, config.block_bytes), first):
        read_s = perf_counter() - started
        record, kept, dropped = run_stages(block, stages, config.examples_per_reason)
        started = perf_counter()
        record |= {"block": index, "documents_kept": len(kept), "bytes_kept": sum(utf8_bytes(d.text) for d in kept)}
        record["seconds"] = {"read": read_s}
        store.write_documents(record, kept, dropped)
        record["seconds"]["write"] = perf_counter() - started
        store.commit(record, stages)
        yield record
        started = perf_counter()


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
        progress.advance(task, utf8_bytes(document.text))
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


def build_corpus(config: BuildCorpusConfig) -> dict[str, Any]:
    """Build, resume or find complete the corpus that the config describes, and return its statistics (stats.json).

    Raises UserError for input that cannot be read, an empty result, or an output directory with another corpus.
    """
    source = build_source(config)
    identity = identity_of(config, source)
    store = BlockStore(config.output, config.compression)
    finished = None if config.overwrite else store.finished_stats(identity)
    if finished is not None:
        store.remove_work()
        return finished
    stages = [build_stage(name, config) for name in STAGES if name in config.stages]
    records = store.open(identity, config.overwrite)
    store.replay_journals(records, stages)
    with make_progress() as progress:
        task = progress.add_task(f"{config.source} -> documents", total=source.total_bytes)
        documents = watch(limit_documents(source.documents(), config), progress, task)
        skip_done(documents, records)
        for record in build_blocks(documents, stages, store, config, first=len(records)):
            records.append(record)
    stats = add_records(records, [stage.name for stage in stages], config.examples_per_reason)
    stats |= {"identity": identity, "source_counts": dict(source.counts)}
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
    main()
