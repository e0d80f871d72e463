"""WARC and WET: what a whole archive gives, and what is said of one that is cut at any place."""

import gzip
import json
import zlib

import pytest

from data_processing.document import Document
from data_processing.raw_document import RawDocument
from data_processing.sources import SourceConfig, build_source
from data_processing.sources_warc import decode_body

PAGE = b"<html><body><p>" + b"Words of a page. " * 30 + b"</p></body></html>"
RECORDS = 4


def http(body: bytes, status: str = "200 OK", kind: str = "text/html; charset=Shift_JIS", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{extra}\r\n".encode() + body


def record(number: int, block: bytes, kind: str = "response", content: str = "application/http") -> bytes:
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number:04d}>\r\n"
        f"WARC-Date: 2024-05-06T07:08:09Z\r\nWARC-Target-URI: http://example.com/{number}\r\n"
        f"Content-Type: {content}\r\nContent-Length: {len(block)}\r\n\r\n"
    )
    return head.encode() + block + b"\r\n\r\n"


def archive(packed: bool = True) -> tuple[bytes, list[int]]:
    """(an archive of RECORDS pages, where each record ends)."""
    data, ends = b"", []
    for number in range(RECORDS):
        member = record(number, http(PAGE + str(number).encode()))
        data += gzip.compress(member) if packed else member
        ends.append(len(data))
    return data, ends


def read(path) -> tuple[list[Document], dict, list[dict]]:
    source = build_source(SourceConfig(source="warc", path=str(path)))
    documents = list(source.documents())
    return documents, dict(source.counts), [json.loads(line) for line in source.quarantine._waiting]


def test_pages_pdfs_and_texts_come_and_the_rest_is_counted(tmp_path):
    parts = [
        record(0, http(PAGE)),
        record(1, http(b"gone", "404 Not Found")),
        record(2, http(b"\x89PNG", kind="image/png")),
        record(3, http(b"%PDF-1.4 ...", kind="application/octet-stream")),
        record(4, "Text of a WET file, größer.".encode(), "conversion", "text/plain"),
        record(5, http(gzip.compress(PAGE), extra="Content-Encoding: gzip\r\n")),
        record(6, b"software: test\r\n", "warcinfo", "application/warc-fields"),
    ]
    for name, data in (("a.warc.gz", b"".join(map(gzip.compress, parts))), ("b.warc", b"".join(parts) + b"")):
        (tmp_path / name).write_bytes(data)
        documents, counts, refused = read(tmp_path / name)
        assert [d.id for d in documents] == [f"urn:uuid:000{n}" for n in (0, 3, 4, 5)] and not refused
        page, pdf, text, packed = documents
        assert isinstance(page, RawDocument) and page.raw == PAGE and page.declared.lower() == "shift_jis"
        assert (page.url, page.date) == ("http://example.com/0", "2024-05-06T07:08:09Z")
        assert pdf.kind == "pdf" and packed.raw == PAGE
        assert not isinstance(text, RawDocument) and text.text == "Text of a WET file, größer."
        assert counts["skipped_status"] == counts["skipped_type"] == 1


@pytest.mark.parametrize("packed", [True, False])
def test_an_archive_cut_anywhere_gives_its_whole_records_and_says_so(tmp_path, packed):
    data, ends = archive(packed)
    path = tmp_path / ("cut.warc.gz" if packed else "cut.warc")
    for cut in [*range(60, len(data), len(data) // 23), ends[0] - 1, ends[1] + 5]:
        path.write_bytes(data[:cut])
        documents, counts, refused = read(path)
        slack = 0 if packed else 4  # a plain record's last line ends are no loss
        whole = sum(end - slack <= cut for end in ends)
        assert [d.raw for d in documents] == [PAGE + str(n).encode() for n in range(whole)], cut
        if packed and cut not in ends:
            assert counts["truncated_record"] == len(refused) == 1 and str(path) in refused[0]["where"], cut
    path.write_bytes(data)
    documents, counts, refused = read(path)
    assert len(documents) == RECORDS and not refused


def test_a_plain_archive_cut_within_a_body_is_noticed(tmp_path):
    data, ends = archive(packed=False)
    (tmp_path / "cut.warc").write_bytes(data[: ends[1] - 40])
    documents, counts, refused = read(tmp_path / "cut.warc")
    assert len(documents) == 1 and counts == {"truncated_record": 1}
    assert refused[0]["reason"] == "truncated_record" and " of " in refused[0]["detail"]


def test_http_codings_are_undone():
    chunked = b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in (PAGE[:7], PAGE[7:])) + b"0\r\n\r\n"
    assert decode_body(chunked, "chunked", "") == PAGE
    assert decode_body(PAGE, "chunked", "") == PAGE, "the header lies"
    assert decode_body(gzip.compress(PAGE), "", "gzip") == PAGE
    assert decode_body(zlib.compress(PAGE), "", "deflate") == PAGE
    bare = zlib.compressobj(wbits=-15)
    assert decode_body(bare.compress(PAGE) + bare.flush(), "", "deflate") == PAGE
    assert decode_body(PAGE, "", "gzip") == PAGE


def test_real_archives(shared_data):
    documents, counts, refused = read(shared_data / "warc")
    assert [d.url for d in documents] == ["http://example.com/"]
    assert counts["truncated_record"] == 1 and "clipped.warc.gz" in refused[0]["where"]
