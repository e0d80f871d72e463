"""Texts to score: any text file, JSONL documents, or JSONL lines with a text field, in the order of their files.

A text's source is its `source` field, else the name of its file; results are kept a source. Nothing is cleaned: the
bytes that are divided by are the bytes of the text as it stands in the file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from configs.errors import UserError
from data_processing.document import DOCUMENT_SUFFIXES, expand_paths, open_text, read_json_objects
from llm.bpe_tokenizer import Tokenizer
from llm.data_loader import open_sources

TEXT_SUFFIXES = (".txt", ".txt.gz", ".txt.zst", ".md", *DOCUMENT_SUFFIXES)


@dataclass(frozen=True)
class Text:
    """One document to score; `name` says where it stands, for people."""

    source: str
    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode("utf-8"))


def read_texts(path: str, text_key: str = "text", max_bytes: int | None = None) -> Iterator[Text]:
    """The texts that are not empty below a file, a directory or a glob; `max_bytes` of each source at most.

    A source's first texts are taken, the last of them cut at a character. Raises UserError for a missing path, bytes
    that are not UTF-8 (with file and line), a line without `text_key`, and when there is no text at all.
    """
    left: dict[str, int] = {}
    count = 0
    for file in expand_paths(path, TEXT_SUFFIXES):
        for text in read_file(file, text_key):
            room = left.get(text.source, max_bytes)
            if room is not None:
                if room <= 0:
                    continue
                text = Text(text.source, text.name, cut_to_bytes(text.text, room))
                left[text.source] = room - text.num_bytes if text.text else 0
            if text.text:
                count += 1
                yield text
    if not count:
        raise UserError(f"text={path} holds no text that is not empty; give files with text in them")


def read_file(file: Path, text_key: str) -> Iterator[Text]:
    """The texts of one file: all of a text file, one a line of a JSONL file."""
    stem = file.name.split(".")[0]
    if not file.name.endswith(DOCUMENT_SUFFIXES):
        with open_text(file) as opened:
            yield Text(stem, str(file), opened.read())
        return
    for line, value in read_json_objects(file):
        where = f"{file}:{line}"
        text, source = value.get(text_key), value.get("source", stem)
        if not isinstance(text, str):
            keys = ", ".join(sorted(value)) or "none"
            raise UserError(f"{where}: field {text_key!r} is no text; name the text's field by text_key= (has: {keys})")
        if not isinstance(source, str):
            raise UserError(f"{where}: field 'source' is a {type(source).__name__}; it must be a name")
        yield Text(source, where, text)


def cut_to_bytes(text: str, num_bytes: int) -> str:
    """The longest beginning of a text that takes at most `num_bytes` as UTF-8."""
    if len(text) * 4 <= num_bytes:
        return text
    return text[:num_bytes].encode("utf-8")[:num_bytes].decode("utf-8", "ignore")


def validation_texts(tokens: str | Path, tokenizer: Tokenizer, max_bytes: int | None = None) -> Iterator[Text]:
    """The documents of token files' validation split as text again, `max_bytes` of each source at most."""
    for source, split in open_sources(tokens, "val", tokenizer.sha256).items():
        left = max_bytes
        metas = [shard for shard in split.meta.split("val") if shard.tokens]
        for shard, meta in zip(split.shards, metas, strict=True):
            offsets = np.load(split.directory / meta.offsets_file, allow_pickle=False)
            for first, end in pairwise(offsets.tolist()):
                text = tokenizer.decode(shard[first : end - 1])  # without the end-of-text id
                if left is not None:
                    text = cut_to_bytes(text, left)
                    left -= len(text.encode("utf-8"))
                if text:
                    yield Text(source, f"{meta.file}:{first}", text)
