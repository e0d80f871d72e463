"""Every source of build_corpus on small input: text, jsonl, hf (a local directory) and the embedded corpus."""

import gzip
import json
import sys
import tracemalloc

import datasets
import pytest
import torch
import zstandard

from configs.errors import UserError
from data_processing.document import Document, read_documents, write_documents
from data_processing.sources import SourceConfig, build_source, limit_documents
from data_processing.sources_embedded import EmbeddedSource
from tests.stories import make_stories


def read(**settings) -> list[Document]:
    config = SourceConfig(**settings)
    return list(limit_documents(build_source(config).documents(), config))


@pytest.fixture(scope="module")
def embedded_and_imports() -> tuple[list[Document], set[str]]:
    before = set(sys.modules)
    documents = list(EmbeddedSource().documents())
    return documents, set(sys.modules) - before


@pytest.fixture
def embedded(embedded_and_imports) -> list[Document]:
    return embedded_and_imports[0]


def test_embedded_corpus_is_large_and_distinct(embedded):
    assert sum(len(d.text.encode()) for d in embedded) > 3_000_000
    assert len({d.text for d in embedded}) == len({d.id for d in embedded}) == len(embedded)
    assert {d.source for d in embedded} == {"embedded"}
    assert {d.meta["part"] for d in embedded} == {"pydoc", "stdlib", "numpy", "torch"}


def test_embedded_docstrings_match_the_imported_objects(embedded):
    """What ast finds in the files is what the interpreter shows as __doc__."""
    by_title = {d.title: d.text for d in embedded}
    squeeze = lambda text: "".join(text.split())  # noqa: E731
    assert squeeze(json.__doc__) in squeeze(by_title["json"])
    assert squeeze(json.JSONDecoder.__doc__) in squeeze(by_title["json.decoder"])
    assert squeeze(torch.nn.Linear.__doc__) in squeeze(by_title["torch.nn.modules.linear"])
    assert squeeze(torch.allclose.__doc__)[:200] in squeeze(by_title["torch.allclose"])
    assert "class Linear(Module)\n" in by_title["torch.nn.modules.linear"]


def test_embedded_corpus_imports_nothing(embedded_and_imports):
    packages = {name.split(".")[0] for name in embedded_and_imports[1]}
    assert not packages & {"torch", "numpy", "turtle", "tkinter", "this", "antigravity"}


def test_text_files_plain_and_packed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress("zwei ü".encode()))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/c.txt.zst").write_bytes(zstandard.compress(b"three"))
    (tmp_path / "ignored.csv").write_text("no")
    documents = read(source="text", path=str(tmp_path))
    assert [(d.id, d.title, d.text) for d in documents] == [
        ("a.txt", "a", "one\r\n"),
        ("b.md.gz", "b", "zwei ü"),
        ("sub/c.txt.zst", "c", "three"),
    ]
    assert {d.source for d in documents} == {"text"}
    assert len(read(source="text", path=f"{tmp_path}/*.txt", source_name="mine")) == 1


@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n\n\n", "§"])
def test_separator_matches_str_split(tmp_path, separator):
    texts = [story.text.strip() + " ü" for story in make_stories(3000, seed=5)]
    (tmp_path / "all.txt").write_text(separator.join(texts) + separator, encoding="utf-8")
    documents = read(source="text", path=f"{tmp_path}/all.txt", separator=separator)
    assert [d.text for d in documents] == texts, "over 1 MB, so pieces straddle the chunks"
    assert documents[7].id == "all.txt#7"


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"one\ntwo\ncaf\xe9\nfour")
    with pytest.raises(UserError, match=r"latin\.txt:3: byte 0xe9 is not UTF-8; .*errors=replace"):
        read(source="text", path=str(path))
    with pytest.raises(UserError, match=r"latin\.txt:3: "):
        read(source="text", path=str(path), separator="\n")
    source = build_source(SourceConfig(source="text", path=str(path), errors="replace"))
    assert [d.text for d in source.documents()] == ["one\ntwo\ncaf\ufffd\nfour"]
    assert source.counts == {"replaced_characters": 1}


def test_a_single_line_of_many_megabytes_costs_a_few_times_its_size(tmp_path):
    """The 200 MB line of the issue, at 20 MB: memory and the number of passes scale."""
    path = tmp_path / "line.txt"
    path.write_bytes(b"word " * 4_000_000)
    tracemalloc.start()
    (document,) = read(source="text", path=str(path), separator="<|endoftext|>")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(document.text) == 20_000_000
    assert peak < 5 * 20_000_000


def test_jsonl_documents_come_through_unchanged(tmp_path):
    documents = make_stories(20, seed=2)
    documents[3].meta = {"score": 0.5}
    write_documents(tmp_path / "a.jsonl.zst", documents)
    assert read(source="jsonl", path=str(tmp_path)) == documents
    renamed = read(source="jsonl", path=str(tmp_path), source_name="tales")
    assert {d.source for d in renamed} == {"tales"}


def test_jsonl_of_other_people(tmp_path):
    rows = [{"question": "q1", "answer": "a1", "id": 7}, {"question": "q2", "title": 3, "url": "http://x"}]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read(source="jsonl", path=str(tmp_path), text_key="question") == [
        Document("7", "jsonl", "q1", meta={"answer": "a1"}),
        Document("x.jsonl:2", "jsonl", "q2", url="http://x", meta={"title": 3}),
    ]
    with pytest.raises(UserError, match=r"x\.jsonl:1: text_key='text' is missing; the row's keys are answer, id, que"):
        read(source="jsonl", path=str(tmp_path))


def test_budgets_end_the_stream(tmp_path):
    write_documents(tmp_path / "a.jsonl", [Document(str(i), "s", "é" * 50) for i in range(10)])
    assert len(read(source="jsonl", path=str(tmp_path), max_documents=3)) == 3
    assert len(read(source="jsonl", path=str(tmp_path), max_tokens=100, bytes_per_token=4.0)) == 4
    assert len(read(source="jsonl", path=str(tmp_path))) == 10


@pytest.mark.parametrize("kind", ["saved", "saved_dict", "parquet"])
def test_hf_source_reads_local_directories(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {
        "text": [f"text {i}" for i in range(6)],
        "id": [f"r{i}" for i in range(6)],
        "score": [i / 2 for i in range(6)],
    }
    dataset, path = datasets.Dataset.from_dict(rows), tmp_path / "data"
    if kind == "saved":
        dataset.save_to_disk(path)
    elif kind == "saved_dict":
        datasets.DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(path)
    else:
        path.mkdir()
        dataset.to_parquet(path / "train-00000.parquet")
    documents = read(source="hf", path=str(path), max_documents=4)
    assert documents == [Document(f"r{i}", "hf", f"text {i}", meta={"score": i / 2}) for i in range(4)]
    with pytest.raises(UserError, match="text_key='body' is missing"):
        read(source="hf", path=str(path), text_key="body")
    if kind != "saved":
        with pytest.raises(UserError, match="hf_split='nope' cannot be opened"):
            read(source="hf", path=str(path), hf_split="nope")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"source": "web"}, "source='web' is unknown; use one of embedded, text, jsonl, hf"),
        ({"source": "text"}, "source=text needs a path"),
        ({"path": "x"}, "path='x' has no meaning for source=embedded"),
        ({"errors": "ignore"}, "errors='ignore' is unknown"),
        ({"max_tokens": -1}, "max_tokens=-1 is negative"),
        ({"bytes_per_token": 0.0}, "bytes_per_token=0.0 must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(bad, problem):
    with pytest.raises(UserError, match=problem):
        SourceConfig(**bad)


def test_real_text_comes_through_byte_for_byte(shared_data):
    for path in sorted((shared_data / "text").rglob("*.txt")):
        (document,) = read(source="text", path=str(path), cut_characters=0)
        assert document.text.encode("utf-8") == path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    problems = read(source="jsonl", path=str(shared_data / "gsm8k"), text_key="question")
    assert len(problems) == 7473 + 1319 and len({d.id for d in problems}) == len(problems)
    assert sum(1 for _ in read_documents([])) == 0


def test_a_book_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    paragraphs = [f"paragraph {number} " + "word " * 30 for number in range(100)]
    (tmp_path / "book.txt").write_text("\r\n\r\n".join(paragraphs), newline="")
    documents = read(source="text", path=f"{tmp_path}/book.txt", cut_characters=1000)
    assert len(documents) > 10 and len({document.id for document in documents}) == len(documents)
    assert "\r\n\r\n".join(document.text for document in documents) == "\r\n\r\n".join(paragraphs)
    assert all(1000 <= len(document.text) < 1000 + 200 for document in documents[:-1])
    (whole,) = read(source="text", path=f"{tmp_path}/book.txt", cut_characters=0)
    assert whole.id == "book.txt" and whole.text.startswith("paragraph 0")
