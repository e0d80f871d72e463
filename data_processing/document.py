"""The document contract: one JSON object a line, `id, source, text, title, url, date, meta`, plain, .gz or .zst.

Every stage of the stack reads and writes text through this module. Reading is streamed, so memory is bounded by
the longest document. Bytes that are not UTF-8 and lone surrogates (raw, or written as an escape such as `\\ud800`)
never get in: they are refused with file and line (errors="strict") or become U+FFFD and are counted
(errors="replace"). Writing is atomic: beside the file's place, synced, renamed.
"""

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

from configs.errors import UserError, check_choice
from configs.run_dir import sync_directory
from data_processing.document_zstd import open_zstd_reader, open_zstd_writer

Errors = Literal["strict", "replace"]
DOCUMENT_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
UTF8_BOM, REPLACEMENT_UTF8 = b"\xef\xbb\xbf", "\ufffd".encode()
SURROGATE = re.compile("[\ud800-\udfff]")
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(slots=True)
class Document:
    """One text and where it comes from; `meta` holds whatever JSON values a source or a stage adds."""

    id: str
    source: str
    text: str
    title: str = ""
    url: str = ""
    date: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


FIELD_TYPES = {f.name: dict if f.name == "meta" else str for f in fields(Document)}
REQUIRED_FIELDS = ("id", "source", "text")


def expand_paths(pattern: str | Path, suffixes: tuple[str, ...] = DOCUMENT_SUFFIXES) -> list[Path]:
    """The files that a file name, a directory or a glob stands for, sorted.

    A directory gives its files with one of `suffixes`, recursively, without names that begin with "." or "_"
    (what is half written or set aside). `~` and `**` work. Raises UserError when nothing matches.
    """
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.name.endswith(suffixes) and not _is_hidden(p.relative_to(path))]
        rule = f"holds no {', '.join(suffixes)} file"
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        rule = "matches no file"
    found = sorted(p for p in found if p.is_file())
    if not found:
        raise UserError(
            f"path={str(pattern)!r} {rule}; name a file, a directory or a quoted glob such as 'data/*.jsonl'"
        )
    return found


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith((".", "_")) for part in relative.parts)


@contextmanager
def open_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed by suffix; cut or broken compressed data is a UserError."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; check the path or make it first")
    try:
        with open(path, "rb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield io.BufferedReader(file, 1 << 20)
            elif path.suffix == ".zst":
                yield open_zstd_reader(raw)
            else:
                yield raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is cut off or broken ({error}); compress or fetch it again") from error


def decode_utf8(data: bytes, path: str | Path, line: int, errors: Errors, counts: Counter | None = None) -> str:
    """Bytes that begin at `line` of a file, as text; "strict" raises a UserError with the line, "replace" counts."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "strict":
            where = f"{path}:{line + data.count(10, 0, error.start)}"
            byte = data[error.start]
            raise UserError(
                f"{where}: byte 0x{byte:02x} is not UTF-8; convert the file or set errors=replace"
            ) from error
    text = data.decode("utf-8", errors="replace")
    _count_replaced(counts, text.count("\ufffd") - data.count(REPLACEMENT_UTF8))
    return text


def _count_replaced(counts: Counter | None, number: int) -> None:
    if counts is not None:
        counts["replaced_characters"] += number


@contextmanager
def open_text(path: str | Path, errors: Errors = "strict") -> Iterator[TextIO]:
    """Open a text file (plain, .gz, .zst) as UTF-8, its BOM dropped, line ends kept; "strict" names the bad line."""
    check_choice("errors", errors, ("strict", "replace"))
    with open_bytes(path) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8-sig", errors=errors, newline="")
        try:
            yield file
        except UnicodeDecodeError as error:
            raise _find_bad_line(path) from error
        finally:
            file.detach()


def _find_bad_line(path: str | Path) -> UserError:
    """The error that names the first line that is not UTF-8, found in a second pass."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            try:
                decode_utf8(line, path, number, "strict")
            except UserError as error:
                return error
    return UserError(f"{path} changed while it was read; run again")


def read_json_objects(
    path: str | Path,
    errors: Errors = "strict",
    counts: Counter | None = None,
    refuse: Callable[[str, str, bytes], None] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Stream (line number, object) of one JSONL file; blank lines are passed over.

    Raises UserError, with file and line, for broken JSON, a line that is no object, and (strict) bad characters;
    with `refuse`, lines that are no JSON object go to refuse(where, problem, line) and reading goes on.
    """
    check_choice("errors", errors, ("strict", "replace"))
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(UTF8_BOM)
            if line.isspace() or not line:
                continue
            where = f"{path}:{number}"
            text = decode_utf8(line, path, number, errors, counts)
            try:
                value = _parse_object(text, where)
            except UserError as error:
                if refuse is None:
                    raise
                refuse(where, str(error), line)
                continue
            if SURROGATE_ESCAPE.search(line):
                value = _mend_surrogates(value, where, errors, counts)
            yield number, value


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); mend or remove the line") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: a {type(value).__name__} instead of a JSON object; one object a line is the format")
    return value


def _mend_surrogates(value: Any, where: str, errors: Errors, counts: Counter | None) -> Any:
    """Refuse or replace lone surrogates in every string of a JSON value (pairs are one character by now)."""
    if isinstance(value, str):
        mended, number = SURROGATE.subn("\ufffd", value)
        if number and errors == "strict":
            raise UserError(f"{where}: a lone surrogate escape is no character; mend the line or set errors=replace")
        _count_replaced(counts, number)
        return mended
    if isinstance(value, list):
        return [_mend_surrogates(item, where, errors, counts) for item in value]
    if isinstance(value, dict):
        return {
            _mend_surrogates(k, where, errors, counts): _mend_surrogates(v, where, errors, counts)
            for k, v in value.items()
        }
    return value


def document_from_json(value: dict[str, Any], where: str) -> Document:
    """A checked Document; UserError names `where`, the field, the rule and the fix."""
    for name in REQUIRED_FIELDS:
        if name not in value:
            raise UserError(
                f"{where}: field {name!r} is missing; a document has id, source and text (for other JSONL files:"
                f" python -m data_processing.build_corpus source=jsonl text_key=...)"
            )
    for name, item in value.items():
        wanted = FIELD_TYPES.get(name)
        if wanted is None:
            raise UserError(f"{where}: field {name!r} is unknown; put it under meta")
        if not isinstance(item, wanted):
            raise UserError(f"{where}: field {name!r} is a {type(item).__name__}; it must be a {wanted.__name__}")
    return Document(**value)


def read_documents(
    paths: str | Path | Iterable[str | Path], errors: Errors = "strict", counts: Counter | None = None
) -> Iterator[Document]:
    """Stream the documents of files in the given order; a single path may be a directory or a glob (expand_paths).

    errors="replace" turns bad characters into U+FFFD and adds their number to counts["replaced_characters"].
    Raises UserError, with file and line, for anything that is not a document.
    """
    for path in expand_paths(paths) if isinstance(paths, str | Path) else paths:
        for number, value in read_json_objects(path, errors, counts):
            yield document_from_json(value, f"{path}:{number}")


def document_to_json(document: Document) -> bytes:
    """The document's line, with its line end: all seven fields, UTF-8, always in the same order."""
    value = {name: getattr(document, name) for name in FIELD_TYPES}
    return json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n"


@contextmanager
def open_atomic(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing beside its place, compressed by suffix; synced and renamed when the block ends well.

    The bytes depend on what is written alone (no time stamp, no name in a .gz), so that equal runs give equal files.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0) as file:
                    yield file
            elif path.suffix == ".zst":
                with open_zstd_writer(raw) as file:
                    yield file
            else:
                yield raw
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_documents(path: str | Path, documents: Iterable[Document]) -> int:
    """Write documents to one JSONL file, atomically, and return how many; .gz and .zst compress."""
    count = 0
    with open_atomic(path) as file:
        for document in documents:
            file.write(document_to_json(document))
            count += 1
    return count
