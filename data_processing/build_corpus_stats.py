"""The counts of a corpus: per stage and source in, out, dropped by reason, bytes and seconds; and their totals.

A block's record and the whole corpus's statistics have the same shape, so that adding records up is all there is.
"""

from collections import Counter, defaultdict
from time import perf_counter
from typing import Any

from configs.errors import UserError
from data_processing.build_corpus_blocks import dropped_document
from data_processing.document import Document
from data_processing.raw_document import text_bytes
from data_processing.stage import Dropped, Stage

EXAMPLE_CHARACTERS = 300


def tally(block: list[Document]) -> dict[str, Counter]:
    """Documents and UTF-8 bytes of a block, by source."""
    totals: dict[str, Counter] = defaultdict(Counter)
    for document in block:
        totals[document.source].update(documents=1, bytes=text_bytes(document))
    return totals


def new_record(block: list[Document]) -> dict[str, Any]:
    """The record of a block before any stage."""
    return {"documents_read": len(block), "stages": {}, "examples": []}


def run_stages(
    record: dict[str, Any], block: list[Document], stages: list[Stage], examples: int
) -> tuple[list[Document], list[Document]]:
    """Send a block through the stages and write their counts into its record: (documents kept, documents dropped)."""
    set_aside: list[Document] = []
    for stage in stages:
        before = tally(block)
        started = perf_counter()
        kept, dropped = stage.run(block)
        seconds = perf_counter() - started
        assert len(kept) + len(dropped) == len(block), f"{stage.name}: {len(kept)} + {len(dropped)} != {len(block)}"
        set_aside += add_stage(record, stage.name, (before, kept, dropped), seconds, examples)
        if counts := stage.take_counts():
            record["stages"][stage.name]["counts"] = dict(sorted(counts.items()))
        block = kept
    return block, set_aside


def add_stage(
    record: dict[str, Any],
    name: str,
    outcome: tuple[dict[str, Counter], list[Document], list[Dropped]],
    seconds: float,
    examples: int,
) -> list[Document]:
    """Write what a stage did with a block, (tally before, kept, dropped), into its record; returns the dropped."""
    before, kept, dropped = outcome
    after, reasons = tally(kept), defaultdict(Counter)
    for item in dropped:
        reasons[item.document.source][item.reason] += 1
        if sum(e["stage"] == name and e["reason"] == item.reason for e in record["examples"]) < examples:
            record["examples"].append(_example(item.document, name, item.reason, item.detail))
    record["stages"][name] = {
        "seconds": seconds,
        "sources": {source: _source_counts(before[source], after[source], reasons[source]) for source in before},
    }
    return [dropped_document(item, name) for item in dropped]


def _source_counts(before: Counter, after: Counter, reasons: Counter) -> dict[str, Any]:
    return {
        "documents_in": before["documents"],
        "documents_out": after["documents"],
        "bytes_in": before["bytes"],
        "bytes_out": after["bytes"],
        "dropped": dict(sorted(reasons.items())),
    }


def _example(document: Document, stage: str, reason: str, detail: str) -> dict[str, str]:
    text = document.text[:EXAMPLE_CHARACTERS]
    return {
        "stage": stage,
        "reason": reason,
        "detail": detail,
        "id": document.id,
        "source": document.source,
        "text": text,
    }


def add_records(records: list[dict[str, Any]], stage_names: list[str], examples: int) -> dict[str, Any]:
    """The statistics of all blocks: stages in order, sources under them, examples up to the limit per reason."""
    stages: dict[str, dict] = {name: {"seconds": 0.0, "sources": {}} for name in stage_names}
    kept_examples, per_reason = [], Counter()
    for record in records:
        for name, part in record["stages"].items():
            stages[name]["seconds"] += part["seconds"]
            if "counts" in part:
                stages[name]["counts"] = dict(
                    sorted((Counter(stages[name].get("counts", {})) + Counter(part["counts"])).items())
                )
            for source, counts in part["sources"].items():
                total = stages[name]["sources"].setdefault(source, _source_counts(Counter(), Counter(), Counter()))
                _add_counts(total, counts)
        for example in record["examples"]:
            per_reason[example["stage"], example["reason"]] += 1
            if per_reason[example["stage"], example["reason"]] <= examples:
                kept_examples.append(example)
    for part in stages.values():
        part["total"] = _source_counts(Counter(), Counter(), Counter())
        for counts in part["sources"].values():
            _add_counts(part["total"], counts)
        part["mb_per_s"] = part["total"]["bytes_in"] / 1e6 / part["seconds"] if part["seconds"] else None
    return {
        "documents_read": sum(record["documents_read"] for record in records),
        "seconds": add_seconds(records, stages),
        "stages": stages,
        "examples": kept_examples,
    }


def add_seconds(records: list[dict[str, Any]], stages: dict[str, dict]) -> dict[str, float]:
    """Where the time went: reading and writing (and waiting for workers) in the driver, stages in all processes.

    With one process read + stages + write + other is the wall time; with more the stages overlap.
    """
    names = ("read", "wait", "write", "wall")
    seconds = {name: sum(record["seconds"].get(name, 0.0) for record in records) for name in names}
    seconds["stages"] = sum(part["seconds"] for part in stages.values())
    return seconds


def _add_counts(total: dict[str, Any], counts: dict[str, Any]) -> None:
    for name, value in counts.items():
        if name == "dropped":
            total[name] = dict(sorted((Counter(total[name]) + Counter(value)).items()))
        else:
            total[name] += value


def add_outputs(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the output directory holds, from what write_output said of each shard."""
    totals = {
        side: {name: sum(output[side][name] for output in outputs) for name in ("documents", "bytes")}
        for side in ("kept", "held_out")
    }
    shards = [output["shard"] for output in outputs if output["shard"]]
    return totals["kept"] | {"held_out": totals["held_out"], "shards": shards}


def check_not_empty(stats: dict[str, Any], output: str) -> None:
    """Raise the UserError that says which stage dropped what when no document is left."""
    if stats["documents"]:
        return
    if stats["held_out"]["documents"]:
        raise UserError("the corpus is empty: every document is held out; set a smaller held_out_share")
    if not stats["documents_read"]:
        raise UserError("the corpus is empty: the source gave no document; check path, max_documents and max_tokens")
    losses = []
    for name, part in stats["stages"].items():
        dropped = part["total"]["dropped"]
        if dropped:
            losses.append(
                f"{name} dropped {sum(dropped.values())} ({', '.join(f'{k} {v}' for k, v in dropped.items())})"
            )
    raise UserError(
        f"the corpus is empty: {stats['documents_read']} documents in, {', '.join(losses)}, none left;"
        f" read {output}/_dropped and loosen the stage"
    )
