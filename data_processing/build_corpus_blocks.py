"""The blocks of a corpus on disk: what makes build_corpus resumable without doing or losing a document twice.

    output/documents_00000.jsonl        one shard a block (none for a block of which nothing is left)
    output/_dropped/dropped_00000.jsonl.gz   what its stages dropped: documents whose meta.dropped says where and why
    output/_work/plan.json              identity of the build: config, input, versions
    output/_work/block_00000.json       written last: the block counts if and only if this file exists
    output/_work/block_00000.deduplicate.journal   what a stage with memory learnt from the block
    output/stats.json, report.html      written at the end, when _work goes

Names beginning with "_" are not input to later readers (document.expand_paths).
"""

import shutil
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.run_dir import read_json, write_bytes_atomic, write_json_atomic
from data_processing.document import Document, write_documents
from data_processing.stage import Dropped, Stage

SUFFIXES = {"none": "", "gz": ".gz", "zst": ".zst"}


def dropped_document(dropped: Dropped, stage: str) -> Document:
    """The document as it is set aside: meta.dropped holds stage, reason and detail."""
    document = dropped.document
    document.meta = document.meta | {"dropped": {"stage": stage, "reason": dropped.reason, "detail": dropped.detail}}
    return document


class BlockStore:
    """Reads and writes the files of one output directory; all writes are atomic."""

    def __init__(self, output: str | Path, compression: str):
        self.output = Path(output).expanduser()
        self.suffix = ".jsonl" + SUFFIXES[compression]
        self.dropped, self.work = self.output / "_dropped", self.output / "_work"
        self.stats_path, self.plan_path = self.output / "stats.json", self.work / "plan.json"

    def finished_stats(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """stats.json when this very corpus is complete, else None."""
        if not self.stats_path.exists():
            return None
        stats = read_json(self.stats_path)
        return stats if stats.get("identity") == identity else None

    def open(self, identity: dict[str, Any], overwrite: bool) -> list[dict[str, Any]]:
        """The records of the blocks that an earlier run of the same build committed; prepares the directory.

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
        for partial in [*self.output.glob(".*.tmp"), *self.dropped.glob(".*.tmp"), *self.work.glob(".*.tmp")]:
            partial.unlink()
        paths = sorted(self.work.glob("block_*.json"))
        return [read_json(path) for path in paths]

    def _shards(self) -> list[Path]:
        return sorted(self.output.glob("documents_*.jsonl*"))

    def clear(self) -> None:
        """Remove what builds write, and nothing else."""
        self.stats_path.unlink(missing_ok=True)
        (self.output / "report.html").unlink(missing_ok=True)
        for path in self._shards():
            path.unlink()
        for folder in (self.dropped, self.work):
            if folder.exists():
                shutil.rmtree(folder)

    def write_documents(self, record: dict[str, Any], kept: list[Document], dropped: list[Document]) -> None:
        """Write a block's documents; they count only once `commit` has written its record."""
        index = record["block"]
        if kept:
            record["shard"] = f"documents_{index:05d}{self.suffix}"
            write_documents(self.output / record["shard"], kept)
        if dropped:
            write_documents(self.dropped / f"dropped_{index:05d}.jsonl.gz", dropped)

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
