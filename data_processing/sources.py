"""Where build_corpus takes its documents from, chosen by name: embedded, text, jsonl, hf, parquet, html, pdf, warc.

A source streams documents in the same order each time (a killed run is resumed by reading past what it had), and
says what it read in `identity`, so that an unfinished corpus is never continued from other input.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from configs.errors import UserError, check_choice, check_positive
from data_processing.document import (
    DOCUMENT_SUFFIXES,
    UTF8_BOM,
    Document,
    Errors,
    decode_utf8,
    expand_paths,
    open_bytes,
    read_json_objects,
)
from data_processing.quarantine import Quarantine
from data_processing.sources_embedded import EmbeddedSource
from data_processing.sources_files import describe_files, duplicate_files, plain_bytes, relative_names
from data_processing.sources_hf import HfSource
from data_processing.sources_parquet import PARQUET_SUFFIXES, ParquetSource
from data_processing.sources_raw import HTML_SUFFIXES, PDF_SUFFIXES, RawFileSource
from data_processing.sources_rows import RowFields, document_or_refusal
from data_processing.sources_warc import WARC_SUFFIXES, WarcSource

SOURCES = ("embedded", "text", "jsonl", "hf", "parquet", "html", "pdf", "warc")
TEXT_SUFFIXES = tuple(kind + packed for kind in (".txt", ".md", ".text", ".rst") for packed in ("", ".gz", ".zst"))
FILE_SUFFIXES = {"text": TEXT_SUFFIXES, "jsonl": DOCUMENT_SUFFIXES, "parquet": PARQUET_SUFFIXES}
FILE_SUFFIXES |= {"html": HTML_SUFFIXES, "pdf": PDF_SUFFIXES, "warc": WARC_SUFFIXES}
CHUNK_BYTES = 1 << 20


@dataclass
class SourceConfig:
    """The settings of all sources; each reads its own."""

    source: str = "embedded"
    path: str = ""  # file, directory or glob; hf: dataset name or local directory
    skip_duplicate_files: bool = True  # a file with the bytes of an earlier one is not read
    errors: str = "strict"  # bytes that are not UTF-8: strict refuses, replace makes U+FFFD and counts
    separator: str = ""  # text: what stands between documents in one file; "" is one document a file
    cut_characters: int = 100_000  # text: a longer one is cut at blank lines into documents of about this; 0 never cuts
    text_key: str = "text"
    id_key: str = "id"
    source_name: str = ""  # the documents' `source`; "" keeps their own, or names the kind; html, pdf: {folder} works
    hf_config: str = ""
    hf_split: str = "train"
    max_documents: int = 0  # stop after so many documents; 0 is no limit
    max_tokens: int = 0  # stop after about so many tokens; 0 is no limit
    bytes_per_token: float = 4.0  # the estimate that max_tokens is counted with

    def __post_init__(self):
        check_choice("source", self.source, SOURCES)
        check_choice("errors", self.errors, ("strict", "replace"))
        check_positive(bytes_per_token=self.bytes_per_token)
        for name in ("max_documents", "max_tokens", "cut_characters"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} is negative; use 0 for no limit")
        if self.source != "embedded" and not self.path:
            raise UserError(f"source={self.source} needs a path; add path=... (a file, a directory or a quoted glob)")
        if self.source == "embedded" and self.path:
            raise UserError(f"path={self.path!r} has no meaning for source=embedded; add source=text or source=jsonl")


class Source(Protocol):
    """A stream of documents; `counts` grows while it is read, `total_bytes` is an estimate for the progress bar."""

    counts: Counter
    quarantine: Quarantine
    total_bytes: int | None

    def identity(self) -> dict[str, Any]:
        """What the stream consists of: equal identities give equal documents."""

    def documents(self) -> Iterator[Document]:
        """The documents, from the first, in an order that never changes."""


def build_source(config: SourceConfig) -> Source:
    """The source that the config names, with its input files found (UserError when there are none)."""
    if config.source == "embedded":
        return EmbeddedSource()
    names = RowFields(config.text_key, config.id_key, config.source_name, config.source)
    if config.source == "hf":
        return HfSource(config.path, config.hf_config, config.hf_split, names)
    files = expand_paths(config.path, FILE_SUFFIXES[config.source])
    repeated = duplicate_files(files) if config.skip_duplicate_files else {}
    source = _file_source(config, [path for path in files if path not in repeated], names)
    for path, first in repeated.items():
        source.quarantine.add(str(path), "duplicate_file", f"same bytes as {first}")
    return source


def _file_source(config: SourceConfig, files: list[Path], names: RowFields) -> Source:
    """The source that reads these files."""
    name = config.source_name or config.source
    if config.source == "jsonl":
        return JsonlSource(files, config.errors, names)
    if config.source == "parquet":
        return ParquetSource(files, names)
    if config.source == "warc":
        return WarcSource(files, name)
    if config.source in ("html", "pdf"):
        return RawFileSource(files, config.source, name)
    return TextSource(files, config.errors, config.separator, config.cut_characters, name)


def limit_documents(documents: Iterator[Document], config: SourceConfig) -> Iterator[Document]:
    """End the stream at the document budget, or before the document that would pass the token budget."""
    budget = config.max_tokens * config.bytes_per_token if config.max_tokens else float("inf")
    for index, document in enumerate(documents):
        budget -= len(document.text.encode("utf-8", errors="surrogatepass"))
        if budget < 0 or (config.max_documents and index >= config.max_documents):
            return
        yield document


BLANK_LINE = re.compile(r"\r?\n[ \t\r]*\n")


def cut_text(text: str, limit: int) -> list[str]:
    """`text` cut at the first blank line after each `limit` characters (0: not at all)."""
    parts, start = [], 0
    while limit and len(text) - start > limit and (gap := BLANK_LINE.search(text, start + limit)):
        parts.append(text[start : gap.start()])
        start = gap.end()
    rest = text[start:]
    return [*parts, rest] if rest.strip() or not parts else parts


@dataclass
class TextSource:
    """Plain text files, one document a file or, with a separator, one a piece; decoded piece by piece.

    A book is cut into documents, so that some of it can be held out for validation.
    """

    files: list[Path]
    errors: Errors
    separator: str
    cut_characters: int
    source_name: str
    counts: Counter = field(default_factory=Counter)
    quarantine: Quarantine = field(init=False)

    def __post_init__(self):
        self.quarantine = Quarantine(self.counts)

    @property
    def total_bytes(self) -> int | None:
        return plain_bytes(self.files)

    def identity(self) -> dict[str, Any]:
        return describe_files(self.files) | {"separator": self.separator, "cut_characters": self.cut_characters}

    def documents(self) -> Iterator[Document]:
        for path, name in zip(self.files, relative_names(self.files), strict=True):
            title = Path(name).name.split(".")[0]
            for index, (line, piece) in enumerate(self._pieces(path)):
                text = decode_utf8(piece, path, line, self.errors, self.counts)
                piece_id = f"{name}#{index}" if self.separator else name
                parts = cut_text(text, self.cut_characters)
                for number, part in enumerate(parts):
                    part_id = f"{piece_id}#part{number}" if len(parts) > 1 else piece_id
                    yield Document(part_id, self.source_name, part, title=title)

    def _pieces(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """(line number of its start, bytes) of each piece; UTF-8 lets a file be cut at bytes of the separator."""
        with open_bytes(path) as file:
            if not self.separator:
                yield 1, file.read().removeprefix(UTF8_BOM)
                return
            separator, line, rest = self.separator.encode("utf-8"), 1, b""
            while chunk := file.read(max(CHUNK_BYTES, len(rest))):  # doubling: a huge piece costs linear time
                *pieces, rest = (rest + chunk).split(separator)
                for piece in pieces:
                    yield line, piece
                    line += piece.count(b"\n") + separator.count(b"\n")
            if rest.strip():  # a file may end in its separator
                yield line, rest


@dataclass
class JsonlSource:
    """JSONL files, our own documents or any rows with a text key; lines that are neither go to the quarantine."""

    files: list[Path]
    errors: Errors
    row_fields: RowFields
    counts: Counter = field(default_factory=Counter)
    quarantine: Quarantine = field(init=False)

    def __post_init__(self):
        self.quarantine = Quarantine(self.counts)

    @property
    def total_bytes(self) -> int | None:
        return plain_bytes(self.files)

    def identity(self) -> dict[str, Any]:
        return describe_files(self.files) | {"row_fields": [self.row_fields.text_key, self.row_fields.id_key]}

    def _refuse(self, where: str, problem: str, line: bytes) -> None:
        self.quarantine.add(where, "invalid_json", problem, line.rstrip(b"\r\n"))

    def documents(self) -> Iterator[Document]:
        any_yet = False
        for path, name in zip(self.files, relative_names(self.files), strict=True):
            for number, row in read_json_objects(path, self.errors, self.counts, self._refuse):
                places = (f"{path}:{number}", f"{name}:{number}")
                document = document_or_refusal(row, self.row_fields, places, self.quarantine, not any_yet)
                if document is not None:
                    any_yet = True
                    yield document
