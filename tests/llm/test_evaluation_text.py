"""Reading texts to score: what counts as a text, whose it is, and what is refused."""

import gzip
import json

import pytest

from configs.errors import UserError
from data_processing.document import read_documents
from llm.bpe_tokenizer import Tokenizer
from llm.evaluation_text import cut_to_bytes, read_texts, validation_texts


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_text_files_and_documents_are_read_with_their_sources(tmp_path):
    (tmp_path / "a_novel.txt").write_text("Call me\n\n Ishmael. é\n", encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    write_lines(tmp_path / "c.jsonl", [{"id": "1", "source": "web", "text": "one"}, {"text": ""}, {"text": "two"}])
    texts = list(read_texts(str(tmp_path)))
    assert [(text.source, text.text) for text in texts] == [
        ("a_novel", "Call me\n\n Ishmael. é\n"), ("b", "packed"), ("web", "one"), ("c", "two")
    ]  # fmt: skip
    assert texts[0].num_bytes == len("Call me\n\n Ishmael. é\n".encode())
    assert texts[2].name.endswith("c.jsonl:1")


def test_another_field_may_hold_the_text(tmp_path):
    write_lines(tmp_path / "q.jsonl", [{"question": "how many?"}])
    assert [text.text for text in read_texts(str(tmp_path / "q.jsonl"), text_key="question")] == ["how many?"]


def test_max_bytes_bounds_each_source_and_never_cuts_a_character(tmp_path):
    lines = [{"source": source, "text": "é" * 10} for source in ("x", "x", "y", "x")]
    write_lines(tmp_path / "d.jsonl", lines)
    texts = list(read_texts(str(tmp_path / "d.jsonl"), max_bytes=25))
    assert [(text.source, text.num_bytes) for text in texts] == [("x", 20), ("x", 4), ("y", 20)]
    assert cut_to_bytes("aé", 2) == "a" and cut_to_bytes("aé", 3) == "aé"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": 3}\n', "d.jsonl:1: field 'text' is no text"),
        (b'{"body": "x"}\n', r"has: body"),
        (b'{"text": "a", "source": 1}\n', "'source' is a int"),
        (b"[1]\n", "instead of a JSON object"),
        (b'{"text": ""}\n', "holds no text that is not empty"),
    ],
)
def test_lines_that_hold_no_text_are_refused(tmp_path, content, words):
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=words):
        list(read_texts(str(tmp_path)))


def test_missing_files_and_bytes_that_are_not_utf8_are_refused(tmp_path):
    with pytest.raises(UserError, match="matches no file"):
        list(read_texts(str(tmp_path / "nothing*.txt")))
    (tmp_path / "latin.txt").write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"latin.txt:2: byte 0xe9 is not UTF-8"):
        list(read_texts(str(tmp_path)))


def test_validation_tokens_are_the_documents_again(tiny_corpus):
    tokenizer = Tokenizer.load(tiny_corpus.tokenizer)
    texts = list(validation_texts(tiny_corpus.tokens, tokenizer))
    documents = {document.text for document in read_documents(tiny_corpus.tokens.parent / "corpus")}
    assert len(texts) > 5 and {text.text for text in texts} <= documents
    cut = list(validation_texts(tiny_corpus.tokens, tokenizer, max_bytes=200))
    assert sum(text.num_bytes for text in cut) == 200 and texts[0].text.startswith(cut[0].text)
