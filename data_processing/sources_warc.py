"""WARC and WET archives as a source, read by fastwarc: pages and PDFs of responses, texts of conversion records.

fastwarc ends in silence where an archive is cut off. Here each payload's length is compared with its header, and of a
gzip archive the last member is unpacked once more to see whether it is whole; what is cut goes to the quarantine.
Bodies are taken as they were stored, so that those lengths compare, and undone here (chunked, gzip, deflate).
"""

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import missing_extra
from data_processing.document import Document
from data_processing.quarantine import Quarantine
from data_processing.raw_document import RawDocument
from data_processing.sources_files import describe_files, relative_names

WARC_SUFFIXES = (".warc", ".warc.gz", ".wet", ".wet.gz", ".warc.zst")
HTML_TYPES = ("text/html", "application/xhtml+xml")
GZIP_MAGIC = b"\x1f\x8b"
GZIP_WRAPPER = 31  # zlib's window bits for gzip
ANY_WRAPPER = 47  # zlib's window bits for "gzip or zlib, see the header"


def import_warc():
    """fastwarc.warc, or the UserError that names the install command."""
    try:
        from fastwarc import warc
    except ImportError as error:
        raise missing_extra("fastwarc", "data") from error
    return warc


def _unchunk(body: bytes) -> bytes:
    """The body of a chunked transfer; as it stands when it is not chunked (crawlers undo it and keep the header)."""
    parts, at = [], 0
    while True:
        end = body.find(b"\r\n", at, at + 32)
        try:
            size = int(body[at : end if end >= 0 else at].split(b";")[0], 16)
        except ValueError:
            return b"".join(parts) if parts else body
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def decode_body(body: bytes, transfer: str, coding: str) -> bytes:
    """A stored HTTP body without its transfer and content codings; what cannot be undone stays as it is."""
    if "chunked" in transfer.lower():
        body = _unchunk(body)
    if coding.lower() in ("gzip", "x-gzip", "deflate"):
        for bits in (ANY_WRAPPER, -zlib.MAX_WBITS):
            try:
                return zlib.decompressobj(wbits=bits).decompress(body)
            except zlib.error:
                continue
    return body


def find_cut(path: Path, last_start: int) -> str:
    """Where a gzip archive ends too early: "this" in the member that begins at `last_start`, "later", or "" nowhere."""
    with open(path, "rb") as file:
        if file.read(2) != GZIP_MAGIC:
            return ""
        file.seek(last_start)
        member, where = zlib.decompressobj(wbits=GZIP_WRAPPER), "this"
        while chunk := file.read(1 << 20):
            while chunk:
                try:
                    member.decompress(chunk)
                except zlib.error:
                    return where
                chunk = member.unused_data
                if member.eof and chunk:
                    member, where = zlib.decompressobj(wbits=GZIP_WRAPPER), "later"
        return "" if member.eof else where


@dataclass
class WarcSource:
    """Responses with status 200 whose type is HTML or PDF, and WET texts; the rest is counted as skipped_*."""

    files: list[Path]
    source_name: str
    counts: Counter = field(default_factory=Counter)
    total_bytes: int | None = None
    quarantine: Quarantine = field(init=False)

    def __post_init__(self):
        self.quarantine = Quarantine(self.counts)

    def identity(self) -> dict[str, Any]:
        return describe_files(self.files)

    def documents(self) -> Iterator[Document]:
        for path, name in zip(self.files, relative_names(self.files), strict=True):
            yield from self._documents_of(path, name)

    def _documents_of(self, path: Path, name: str) -> Iterator[Document]:
        """One archive's documents; each is held back until the next record shows that it was not the cut one."""
        warc = import_warc()
        wanted = warc.WarcRecordType.response | warc.WarcRecordType.resource | warc.WarcRecordType.conversion
        held, start, known, broken = None, 0, self.counts["truncated_record"], ""
        try:
            with open(path, "rb") as file:
                for record in warc.ArchiveIterator(file, record_types=wanted, parse_http=True, auto_decode="none"):
                    start = record.stream_pos
                    if held is not None:
                        yield held
                    held = self._document(record, f"{path}:{start}", f"{name}:{start}")
        except (OSError, EOFError, ValueError) as error:  # what fastwarc raises for broken compressed data
            broken = str(error)[:200]
        cut = find_cut(path, start)
        if cut and self.counts["truncated_record"] == known:
            what = "this record" if cut == "this" else "a record after this"
            self.quarantine.add(f"{path}:{start}", "truncated_record", f"the archive ends within {what}")
        elif broken and not cut:
            self.quarantine.add(f"{path}:{start}", "broken_archive", broken)
        if cut == "this":
            held = None
        if held is not None:
            yield held

    def _document(self, record, where: str, default_id: str) -> Document | None:
        """The record's document, None when it is none (counted)."""
        headers, http = record.headers, record.http_headers
        length = record.content_length
        body = record.reader.read()
        if len(body) < length:
            self.quarantine.add(where, "truncated_record", f"{len(body)} of {length} bytes")
            return None
        document_id = (headers.get("WARC-Record-ID") or "").strip("<>") or default_id
        known = {"url": headers.get("WARC-Target-URI") or "", "date": headers.get("WARC-Date") or ""}
        if headers.get("WARC-Type") == "conversion":
            text = body.decode("utf-8", errors="replace")
            self.counts["replaced_characters"] += text.count("\ufffd") - body.count("\ufffd".encode())
            return Document(document_id, self.source_name, text, **known)
        if http is not None and http.status_code != 200:
            self.counts["skipped_status"] += 1
            return None
        kind = (record.http_content_type if http is not None else headers.get("Content-Type")) or ""
        kind = kind.split(";")[0].strip().lower()
        if http is not None:
            body = decode_body(body, http.get("Transfer-Encoding") or "", http.get("Content-Encoding") or "")
        if body.startswith(b"%PDF-") or kind == "application/pdf":
            return RawDocument(document_id, self.source_name, "", **known, raw=body, kind="pdf")
        if kind not in HTML_TYPES:
            self.counts["skipped_type"] += 1
            return None
        declared = (record.http_charset or "") if http is not None else ""
        return RawDocument(document_id, self.source_name, "", **known, raw=body, kind="html", declared=declared)
