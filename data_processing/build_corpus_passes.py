"""The steps of build_corpus that need every document before the first verdict: deduplicate_near, then mix.

They read the blocks' files in _work and write the final shards; a run killed here starts them anew from those files,
which stay until the corpus is complete, so the result is the same. Their counts go into the blocks' records.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from data_processing.build_corpus_blocks import BlockStore
from data_processing.build_corpus_config import WHOLE_CORPUS, BuildCorpusConfig, chosen
from data_processing.build_corpus_engine import Engine
from data_processing.build_corpus_mix import MixStep
from data_processing.build_corpus_near import NearDuplicates, describe_near, split_by_keepers
from data_processing.build_corpus_stats import add_stage, tally
from data_processing.document import Document, write_documents
from data_processing.mix import describe_shares, plan_mix
from data_processing.stage import Dropped

Split = Iterator[tuple[list[Document], list[Document], list[Dropped]]]


def run_passes(
    config: BuildCorpusConfig, store: BlockStore, records: list[dict[str, Any]], engine: Engine
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(what write_output said of each final shard, facts for stats.json); without steps, the blocks' own."""
    steps = chosen(config, WHOLE_CORPUS)
    if not steps:
        return [record["output"] for record in records], {}
    facts: dict[str, Any] = {}
    filled = [record for record in records if store.work_path(record["block"]).exists()]
    files = [store.work_path(record["block"]) for record in filled]
    outputs: list[dict[str, Any]] = []
    started = perf_counter()
    if "deduplicate_near" in steps:
        near = NearDuplicates(config.deduplicate_near, engine, store.work)
        best = near.find(files)
        facts["deduplicate_near"] = describe_near(config.deduplicate_near, best)
        kept = _account(split_by_keepers(files, best), filled, "deduplicate_near", (store, config, started))
        if "mix" in steps:
            files = _write_between(kept, filled, store)
        else:
            outputs = [store.write_output(record["block"], documents) for record, documents in kept]
    if "mix" in steps:
        mixed, facts["mix"] = _mix(config, store, filled, files)
        outputs = [store.write_output(bucket, documents) for bucket, documents in mixed]
    if records:
        records[-1]["seconds"]["wall"] += perf_counter() - started
    return outputs, facts


def _account(
    split: Split, records: list[dict[str, Any]], name: str, build: tuple[BlockStore, BuildCorpusConfig, float]
) -> Iterator[tuple[dict[str, Any], list[Document]]]:
    """(record, kept documents) of each block; writes the counts and what was dropped.

    `build` ends in when the step began: what it did before its first block is part of its time.
    """
    store, config, started = build
    for record, (documents, kept, dropped) in zip(records, split, strict=True):
        before = tally(documents)
        seconds = perf_counter() - started
        set_aside = add_stage(record, name, (before, kept, dropped), seconds, config.examples_per_reason)
        store.write_dropped(f"{name}_{record['block']:05d}", set_aside)
        yield record, kept
        started = perf_counter()


def _write_between(
    kept: Iterator[tuple[dict[str, Any], list[Document]]], records: list[dict[str, Any]], store: BlockStore
) -> list[Path]:
    """The documents between two steps, a file a block."""
    files = []
    for record, documents in kept:
        path = store.work / f"near_{record['block']:05d}.jsonl"
        write_documents(path, documents)
        files.append(path)
    return files


def _bytes_by_source(records: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes of each source after the last stage that ran."""
    total: Counter = Counter()
    for record in records:
        last = list(record["stages"].values())[-1] if record["stages"] else {"sources": {}}
        for source, counts in last["sources"].items():
            total[source] += counts["bytes_out"]
    return {source: size for source, size in sorted(total.items()) if size}


def _mix(
    config: BuildCorpusConfig, store: BlockStore, records: list[dict[str, Any]], files: list[Path]
) -> tuple[Iterator[tuple[int, list[Document]]], dict[str, Any]]:
    """(blocks of the mixed corpus, the shares for stats.json)."""
    started, available = perf_counter(), _bytes_by_source(records)
    shares = plan_mix(config.mix, available, config.bytes_per_token)
    step = MixStep(config.mix, shares, config.block_bytes, store.work)
    for _ in _account(step.deal(files, sum(available.values())), records, "mix", (store, config, started)):
        pass  # the documents are in the step's buckets now
    if records and step.counts["repeated_documents"]:
        records[-1]["stages"]["mix"]["counts"] = dict(step.counts)
    return step.blocks(), describe_shares(shares)
