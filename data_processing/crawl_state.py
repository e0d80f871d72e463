"""What a crawl has done and still has to do, in one SQLite file: the frontier, the outcome of each item, a bookmark.

An item is a page or a paper, known by its key. Its outcome, its document and the links found on it are committed
together, so that a crawl killed at any point goes on without doing or losing an item twice: what was not committed is
pending still, and its response lies in the cache.
"""

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import UserError
from data_processing.crawl_documents import DocumentLog
from data_processing.document import Document

KEPT = "kept"
SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, host TEXT NOT NULL, depth INTEGER NOT NULL, hops INTEGER NOT NULL,
    outcome TEXT NOT NULL, detail TEXT NOT NULL, fingerprint BLOB);
CREATE INDEX IF NOT EXISTS pending ON items (depth, host, id) WHERE outcome = '';
CREATE INDEX IF NOT EXISTS outcomes ON items (outcome, host) WHERE outcome <> '';
CREATE INDEX IF NOT EXISTS fingerprints ON items (fingerprint) WHERE fingerprint IS NOT NULL;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(slots=True)
class Item:
    """Something to fetch: its key (a normalised URL, a DOI), its host, links from a seed, redirects on the way."""

    key: str
    host: str
    depth: int = 0
    hops: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of an item: KEPT with its documents (a page has one), or the reason why there are none."""

    item: Item
    reason: str
    detail: str = ""
    documents: list[Document] = field(default_factory=list)
    fingerprint: bytes | None = None  # of the content, to know the same content under another key
    found: list[Item] = field(default_factory=list)


class CrawlState:
    """The state below one output directory. Used from one thread."""

    def __init__(self, output: str | Path, shard_bytes: int):
        self.output = Path(output).expanduser()
        self.work = self.output / "_crawl"
        self.cache_directory = self.work / "cache"
        self.log = DocumentLog(self.output, shard_bytes)
        self._database: sqlite3.Connection | None = None

    def open(self, identity: dict[str, Any], overwrite: bool = False) -> None:
        """Begin a crawl, or go on with the one that the directory holds.

        Raises UserError when that is another crawl and `overwrite` is false, or when another process works on it.
        """
        if overwrite:
            self.clear()
        path = self.work / "state.sqlite"
        if not path.exists() and any(self.output.glob("*.jsonl*")):
            raise UserError(f"output={str(self.output)!r} holds other documents; choose another or set overwrite=true")
        self.work.mkdir(parents=True, exist_ok=True)
        # The first writer keeps the file to itself: a second crawl into one directory fails here, not in the middle.
        database = sqlite3.connect(path, timeout=1.0, isolation_level=None)
        self._database = database
        try:
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.executescript(SCHEMA)
            database.execute("BEGIN IMMEDIATE")
            known = self._get("identity")
            if known is not None and known != identity:
                changed = ", ".join(name for name in identity if identity[name] != known.get(name)) or "version"
                raise UserError(
                    f"output={str(self.output)!r} holds another crawl (other {changed});"
                    " choose another output or set overwrite=true"
                )
            self._set("identity", identity)
            database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise UserError(f"{path} cannot be used ({error}); does another crawl run on it?") from error
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path} is broken ({error}); set overwrite=true to crawl anew") from error
        self.log.open(*self._get("position", (0, 0)))
        self._roll()  # a run killed right after its commit left a full shard

    def close(self) -> None:
        self.log.close()
        if self._database is not None:
            self._database.close()
            self._database = None

    def clear(self) -> None:
        """Remove what crawls write, the cache included, and nothing else."""
        self.log.clear()
        (self.output / "stats.json").unlink(missing_ok=True)
        if self.work.exists():
            shutil.rmtree(self.work)

    def _get(self, name: str, default: Any = None) -> Any:
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return default if row is None else json.loads(row[0])

    def _set(self, name: str, value: Any) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    # What is to be done

    def add(self, items: Iterable[Item]) -> None:
        """Make items pending that were never seen; a pending one that is found nearer to a seed takes that depth."""
        self._transaction(lambda: self._insert(items))

    def _insert(self, items: Iterable[Item]) -> None:
        self._database.executemany(
            "INSERT INTO items (key, host, depth, hops, outcome, detail) VALUES (?, ?, ?, ?, '', '')"
            " ON CONFLICT (key) DO UPDATE SET depth = min(depth, excluded.depth) WHERE outcome = ''",
            [(item.key, item.host, item.depth, item.hops) for item in items],
        )

    def pending_depth(self) -> int | None:
        """The smallest depth at which something is pending, None when nothing is."""
        return self._database.execute("SELECT min(depth) FROM items WHERE outcome = ''").fetchone()[0]

    def pending_hosts(self, depth: int) -> list[str]:
        query = "SELECT DISTINCT host FROM items WHERE outcome = '' AND depth = ?"
        return [row[0] for row in self._database.execute(query, (depth,))]

    def next_item(self, depth: int, host: str) -> Item | None:
        """The item of that depth and host that was found first."""
        query = "SELECT key, host, depth, hops FROM items WHERE outcome = '' AND depth = ? AND host = ?"
        row = self._database.execute(query + " ORDER BY id LIMIT 1", (depth, host)).fetchone()
        return None if row is None else Item(*row)

    def retry(self, reasons: Iterable[str]) -> int:
        """Make items pending again whose outcome is one of `reasons`; returns how many."""
        names = list(reasons)
        marks = ", ".join("?" * len(names))
        query = f"UPDATE items SET outcome = '', detail = '' WHERE outcome IN ({marks})"
        return self._transaction(lambda: self._database.execute(query, names).rowcount)

    # What is done

    def is_done(self, key: str) -> bool:
        query = "SELECT 1 FROM items WHERE key = ? AND outcome <> ''"
        return self._database.execute(query, (key,)).fetchone() is not None

    def key_with(self, fingerprint: bytes) -> str | None:
        """The key of the item that had this content first."""
        query = "SELECT key FROM items WHERE fingerprint = ? ORDER BY id LIMIT 1"
        row = self._database.execute(query, (fingerprint,)).fetchone()
        return None if row is None else row[0]

    @property
    def bookmark(self) -> Any:
        """Where an API source goes on: what the last commit stored, None at the start."""
        return self._get("bookmark")

    def commit(self, outcomes: list[Outcome], bookmark: Any = None, seconds: float = 0.0) -> None:
        """Store outcomes, their documents and what they led to: all of it, or (killed) nothing."""
        before = self.log.position[1]
        number = self.log.append(document for outcome in outcomes for document in outcome.documents)
        added = self.log.position[1] - before

        def write() -> None:
            self._insert(item for outcome in outcomes for item in (outcome.item, *outcome.found))
            self._database.executemany(
                "UPDATE items SET outcome = ?, detail = ?, fingerprint = ? WHERE key = ?",
                [(done.reason, done.detail[:500], done.fingerprint, done.item.key) for done in outcomes],
            )
            self._set("position", self.log.position)
            for name, value in (("seconds", seconds), ("documents", number), ("bytes", added)):
                self._set(name, self._get(name, 0) + value)
            if bookmark is not None:
                self._set("bookmark", bookmark)

        self._transaction(write)
        self._roll()

    def _roll(self, force: bool = False) -> None:
        if self.log.roll(force):
            self._transaction(lambda: self._set("position", self.log.position))

    def finish(self) -> None:
        """Give the last shard its name, so that readers find it; a later run goes on in a new one."""
        self._roll(force=True)

    def _transaction(self, body: Callable[[], Any]) -> Any:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            result = body()
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
        return result

    # What is told about it

    def counts(self) -> dict[str, int]:
        """Items by outcome; the pending ones under "pending"."""
        rows = self._database.execute("SELECT outcome, count(*) FROM items GROUP BY outcome ORDER BY count(*) DESC")
        return {outcome or "pending": count for outcome, count in rows}

    def counts_by_host(self) -> dict[str, dict[str, int]]:
        table: dict[str, dict[str, int]] = {}
        query = "SELECT host, outcome, count(*) FROM items WHERE outcome <> '' GROUP BY host, outcome"
        for host, outcome, count in self._database.execute(query + " ORDER BY host, outcome"):
            table.setdefault(host, {})[outcome] = count
        return table

    def examples(self, reason: str, number: int) -> list[dict[str, str]]:
        query = "SELECT key, detail FROM items WHERE outcome = ? ORDER BY id LIMIT ?"
        return [{"key": key, "detail": detail} for key, detail in self._database.execute(query, (reason, number))]

    def outcomes(self) -> Iterator[dict[str, Any]]:
        """Every item that is done, in the order in which it was found."""
        query = "SELECT key, host, depth, outcome, detail FROM items WHERE outcome <> '' ORDER BY id"
        for key, host, depth, outcome, detail in self._database.execute(query):
            yield {"key": key, "host": host, "depth": depth, "outcome": outcome, "detail": detail}

    def total(self, name: str) -> float:
        """What all runs have committed: "documents", their "bytes" of JSONL, the "seconds" spent."""
        return self._get(name, 0)
