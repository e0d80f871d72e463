"""The counts of a corpus: per stage and source in, out, dropped by reason, bytes and seconds; and their totals.

A block's record and the whole corpus's statistics have the same shape, so that adding records up is all there is.
"""

from collections import Counter, defaultdict
from time import perf_counter
from typing import Any

from configs.errors import UserError
from data_processing.build_corpus_blocks import dropped_document
from data_processing.document import Document
from data_processing.stage import Stage

EXAMPLE_CHARACTERS = 300


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def _tally(block: list[Document]) -> dict[str, Counter]:
    """Documents and UTF-8 bytes of a block, by source."""
    totals: dict[str, Counter] = defaultdict(Counter)
    for document in block:
        totals[document.source].update(documents=1, bytes=utf8_bytes(document.text))
    return totals


def run_stages(
    block: list[Document], stages: list[Stage], examples: int
) -> tuple[dict, list[Document], list[Document]]:
    """Send a block through the stages: (its record, documents kept, documents dropped)."""
    record: dict[str, Any] = {"documents_read": len(block), "stages": {}, "examples": []}
    set_aside: list[Document] = []
    before = _tally(block)
    for stage in stages:
        started = perf_counter()
        kept, dropped = stage.run(block)
        seconds = perf_counter() - started
        assert len(kept) + len(dropped) == len(block), f"{stage.name}: {len(kept)} + {len(dropped)} != {len(block)}"
        after, reasons = _tally(kept), defaultdict(Counter)
        for item in dropped:
            reasons[item.document.source][item.reason] += 1
            if sum(e["stage"] == stage.name and e["reason"] == item.reason for e in record["examples"]) < examples:
                record["examples"].append(_example(item.document, stage.name, item.reason, item.detail))
            set_aside.append(dropped_document(item, stage.name))
        record["stages"][stage.name] = {
            "seconds": seconds,
            "sources": {name: _source_counts(before[name], after[name], reasons[name]) for name in before},
        }
        block, before = kept, after
    return record, block, set_aside


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
    seconds = {name: sum(record["seconds"][name] for record in records) for name in ("read", "write")}
    return {
        "documents_read": sum(record["documents_read"] for record in records),
        "documents": sum(record["documents_kept"] for record in records),
        "bytes": sum(record["bytes_kept"] for record in records),
        "shards": [record["shard"] for record in records if "shard" in record],
        "seconds": seconds,
        "stages": stages,
        "examples": kept_examples,
    }


def _add_counts(total: dict[str, Any], counts: dict[str, Any]) -> None:
    for name, value in counts.items():
        if name == "dropped":
            total[name] = dict(sorted((Counter(total[name]) + Counter(value)).items()))
        else:
            total[name] += value


def check_not_empty(stats: dict[str, Any], output: str) -> None:
    """Raise the UserError that says which stage dropped what when no document is left."""
    if stats["documents"]:
        return
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
