"""The blocks of a corpus on disk: what makes build_corpus resumable without doing or losing a document twice.

    output/documents_00000.jsonl        one shard a block (none for a block of which nothing is left)
    output/_held_out/documents_00000.jsonl   the documents held out by a hash of their text
    output/_dropped/dropped_00000.jsonl.gz   what its stages dropped: documents whose meta.dropped says where and why
    output/_dropped/quarantine.jsonl.gz      what the source could not make a document of
    output/_work/plan.json              identity of the build: config, input, versions
    output/_work/block_00000.json       written last: the block counts if and only if this file exists
    output/_work/block_00000.deduplicate.journal   what a stage with memory learnt from the block
    output/_work/documents_00000.jsonl  the blocks' documents, when deduplicate_near or mix are still to come
    output/stats.json, report.html      written at the end, when _work goes

Names beginning with "_" are not input to later readers (document.expand_paths).
"""

import shutil
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.run_dir import read_json, write_bytes_atomic, write_json_atomic
from data_processing.build_corpus_config import SUFFIXES
from data_processing.document import Document, write_documents
from data_processing.raw_document import text_bytes
from data_processing.stage import Dropped, Stage
from data_processing.text_hash import in_share


def dropped_document(dropped: Dropped, stage: str) -> Document:
    """The document as it is set aside: meta.dropped holds stage, reason and detail."""
    document = dropped.document
    document.meta = document.meta | {"dropped": {"stage": stage, "reason": dropped.reason, "detail": dropped.detail}}
    return document


class BlockStore:
    """Reads and writes the files of one output directory; all writes are atomic."""

    def __init__(self, output: str | Path, compression: str, held_out_share: float = 0.0):
        self.output = Path(output).expanduser()
        self.suffix, self.held_out_share = ".jsonl" + SUFFIXES[compression], held_out_share
        self.dropped, self.work = self.output / "_dropped", self.output / "_work"
        self.held_out, self.quarantine_path = self.output / "_held_out", self.dropped / "quarantine.jsonl.gz"
        self.records: list[dict[str, Any]] = []  # of the blocks that earlier runs committed
        self.stats_path, self.plan_path = self.output / "stats.json", self.work / "plan.json"

    def finished_stats(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """stats.json when this very corpus is complete, else None."""
        if not self.stats_path.exists():
            return None
        stats = read_json(self.stats_path)
        return stats if stats.get("identity") == identity else None

    @property
    def next_block(self) -> int:
        return len(self.records)

    def open(self, identity: dict[str, Any], overwrite: bool) -> None:
        """Prepare the directory and read the records of the blocks that an earlier run of the same build committed.

        Raises UserError when the directory holds another corpus and `overwrite` is false.
        """
        planned = read_json(self.plan_path) if self.plan_path.exists() else None
        if self.stats_path.exists():
            planned = read_json(self.stats_path).get("identity", {})
        if overwrite or planned != identity:
            if not overwrite and (planned is not None or self._shards()):
                changed = _changed_keys(planned or {}, identity)
                raise UserError(
                    f"output={str(self.output)!r} holds another corpus ({changed});"
                    " choose another output or set overwrite=true"
                )
            self.clear()
            write_json_atomic(self.plan_path, identity)
        for folder in (self.output, self.dropped, self.work, self.held_out):
            for partial in folder.glob(".*.tmp"):
                partial.unlink()
        paths = sorted(self.work.glob("block_*.json"))
        self.records = [read_json(path) for path in paths]

    def _shards(self) -> list[Path]:
        return sorted(self.output.glob("documents_*.jsonl*"))

    def clear(self) -> None:
        """Remove what builds write, and nothing else."""
        self.stats_path.unlink(missing_ok=True)
        (self.output / "report.html").unlink(missing_ok=True)
        for path in self._shards():
            path.unlink()
        for folder in (self.dropped, self.work, self.held_out):
            if folder.exists():
                shutil.rmtree(folder)

    def write_block(self, record: dict[str, Any], kept: list[Document], dropped: list[Document], last: bool) -> None:
        """Write a block's documents, to the output if this is the `last` step; they count once `commit` has run."""
        index = record["block"]
        if last:
            record["output"] = self.write_output(index, kept)
        elif kept:
            write_documents(self.work_path(index), kept)
        self.write_dropped(f"dropped_{index:05d}", dropped)

    def work_path(self, index: int) -> Path:
        """Where a block's documents wait for the stages that need the whole corpus."""
        return self.work / f"documents_{index:05d}.jsonl"

    def write_dropped(self, name: str, dropped: list[Document]) -> None:
        if dropped:
            write_documents(self.dropped / f"{name}.jsonl.gz", dropped)

    def write_output(self, index: int, documents: list[Document]) -> dict[str, Any]:
        """Write one shard of the corpus and of what is held out, and say what is in them."""
        name, facts = f"documents_{index:05d}{self.suffix}", {}
        sides = {"kept": (self.output, []), "held_out": (self.held_out, [])}
        for document in documents:
            side = "held_out" if in_share(document.text, self.held_out_share) else "kept"
            sides[side][1].append(document)
        for side, (folder, chosen) in sides.items():
            if chosen:
                write_documents(folder / name, chosen)
            facts[side] = {"documents": len(chosen), "bytes": sum(map(text_bytes, chosen))}
        return facts | {"shard": name if sides["kept"][1] else ""}

    def commit(self, record: dict[str, Any], stages: list[Stage]) -> None:
        """Write the stages' journals and, last, the record that makes the block count."""
        for stage in stages:
            journal = stage.take_journal()
            if journal:
                write_bytes_atomic(self._journal_path(record["block"], stage), journal)
        write_json_atomic(self.work / f"block_{record['block']:05d}.json", record)

    def _journal_path(self, index: int, stage: Stage) -> Path:
        return self.work / f"block_{index:05d}.{stage.name}.journal"

    def replay_journals(self, records: list[dict[str, Any]], stages: list[Stage]) -> None:
        """Give the stages back what they knew after the last committed block."""
        for record in records:
            for stage in stages:
                path = self._journal_path(record["block"], stage)
                if path.exists():
                    stage.replay_journal(path.read_bytes())

    def finish(self, stats: dict[str, Any]) -> None:
        """Write stats.json, which makes the corpus complete, and remove the work folder."""
        write_json_atomic(self.stats_path, stats)
        self.remove_work()

    def remove_work(self) -> None:
        if self.work.exists():
            shutil.rmtree(self.work)


def _changed_keys(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings that differ between two identities, for the error message."""
    old, new = ({**identity.get("config", {}), "input": identity.get("input")} for identity in (before, now))
    names = [name for name in new if name in old and old[name] != new[name]]
    return "other " + ", ".join(names) if names else "not of this build"
