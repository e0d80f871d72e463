"""Files that are read once, raw files, parquet, and the quarantine of what is no document."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from configs.errors import UserError
from data_processing.document import Document, write_documents
from data_processing.quarantine import Quarantine
from data_processing.raw_document import RawDocument
from data_processing.sources import SourceConfig, build_source
from data_processing.sources_files import duplicate_files


def waiting(source) -> list[dict]:
    return [json.loads(line) for line in source.quarantine._waiting]


def test_duplicates_are_found_by_size_then_head_then_content(tmp_path, monkeypatch):
    contents = {
        "a": b"x" * 5000,
        "b": b"x" * 5000,
        "c": b"x" * 4999 + b"y",
        "d": b"z" * 5000,
        "e": b"",
        "f": b"",
        "g": b"1",
    }
    files = []
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        files.append(tmp_path / name)
    hashed = []
    full = duplicate_files.__globals__["_full_hash"]
    monkeypatch.setitem(duplicate_files.__globals__, "_full_hash", lambda path: hashed.append(path.name) or full(path))
    assert duplicate_files(files) == {tmp_path / "b": tmp_path / "a"}
    assert hashed == ["a", "b", "c"], "d differs in its first kilobyte, g in its size"


def test_a_repeated_file_is_not_read_and_noted(tmp_path):
    for name in ("a.html", "b/a.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"<p>the same page")
    source = build_source(SourceConfig(source="html", path=str(tmp_path)))
    assert [d.id for d in source.documents()] == ["a.html"] and source.counts == {"duplicate_file": 1}
    (refused,) = waiting(source)
    assert refused["where"].endswith("b/a.html") and refused["detail"].endswith("a.html")
    both = build_source(SourceConfig(source="html", path=str(tmp_path), skip_duplicate_files=False))
    assert len(list(both.documents())) == 2


def test_raw_files_and_a_cut_gzip(tmp_path):
    packed = gzip.compress(b"<p>packed page " * 500)
    for name, data in {"a.html": b"<p>\xff", "b.htm.gz": packed, "c.html.gz": packed[:40], "d.pdf": b"%PDF"}.items():
        (tmp_path / name).write_bytes(data)
    source = build_source(SourceConfig(source="html", path=str(tmp_path)))
    documents = list(source.documents())
    assert [(d.id, d.kind) for d in documents] == [("a.html", "html"), ("b.htm.gz", "html")]
    assert isinstance(documents[0], RawDocument) and documents[0].raw == b"<p>\xff"
    (refused,) = waiting(source)
    assert refused["reason"] == "unreadable_file" and "c.html.gz" in refused["where"]
    (pdf,) = build_source(SourceConfig(source="pdf", path=str(tmp_path))).documents()
    assert (pdf.id, pdf.kind, pdf.raw) == ("d.pdf", "pdf", b"%PDF")


def test_broken_json_lines_are_quarantined_and_the_rest_comes(tmp_path):
    lines = [
        b'{"text": "one"}',
        b'{"text": "cut off',
        b"[1, 2]",
        b'{"body": "no text"}',
        b"{" * 2000,
        b'{"text": 5}',
        b'{"text": "two"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    source = build_source(SourceConfig(source="jsonl", path=str(tmp_path)))
    assert [d.text for d in source.documents()] == ["one", "two"]
    assert source.counts == {"invalid_json": 3, "no_text": 2}
    refused = waiting(source)
    assert [r["where"].split(":")[-1] for r in refused] == ["2", "3", "4", "5", "6"]
    assert refused[0]["data"] == '{"text": "cut off' and refused[2]["data"] == '{"body": "no text"}'


def test_a_wrong_text_key_is_the_users_to_mend(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n{"body": "y"}')
    with pytest.raises(UserError, match="text_key='text' is missing; the row's keys are body"):
        list(build_source(SourceConfig(source="jsonl", path=str(tmp_path))).documents())


def test_parquet_rows_in_batches(tmp_path):
    rows = [{"text": f"text {n}", "id": n, "tags": ["a"], "score": n / 2} for n in range(1200)]
    rows[700]["text"] = None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=300)
    source = build_source(SourceConfig(source="parquet", path=str(tmp_path), source_name="web"))
    documents = list(source.documents())
    assert len(documents) == 1199 and source.counts == {"no_text": 1}
    assert documents[3] == Document("3", "web", "text 3", meta={"score": 1.5})
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="is not readable parquet"):
        list(build_source(SourceConfig(source="parquet", path=str(tmp_path))).documents())


def test_the_quarantine_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "q.jsonl.gz"
    quarantine = Quarantine()
    quarantine.add("before", "early", "kept until there is a file")
    with quarantine.writing_to(path):
        quarantine.add("a:1", "bad", "why", b"\xff\xfe raw")
        assert not path.exists()
    found = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert [f["where"] for f in found] == ["before", "a:1"] and found[1]["data"] == "\\xff\\xfe raw"
    with Quarantine().writing_to(tmp_path / "none.jsonl"):
        pass
    with pytest.raises(KeyboardInterrupt), quarantine.writing_to(tmp_path / "half.jsonl"):
        quarantine.add("a:2", "bad")
        raise KeyboardInterrupt
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q.jsonl.gz"]
    assert quarantine.counts == {"early": 1, "bad": 2}


def test_documents_survive_an_empty_file_beside_them(tmp_path):
    write_documents(tmp_path / "a.jsonl", [Document("1", "s", "t")])
    (tmp_path / "b.jsonl").write_bytes(b"")
    assert len(list(build_source(SourceConfig(source="jsonl", path=str(tmp_path))).documents())) == 1
