"""The document contract: round trips, streams cut off or mixed, and every malformed line refused by file and line."""

import gzip
import io
import json
from collections import Counter

import pytest
import zstandard

from configs.errors import UserError
from data_processing.document import (
    Document,
    decode_utf8,
    expand_paths,
    open_text,
    read_documents,
    write_documents,
)
from tests.stories import make_stories

TRICKY = [
    Document("a", "s", "plain"),
    Document("b", "s", "nul \0, LS \u2028 and PS \u2029, NEL \x85, \r\n\n", title="t", url="u", date="2024-01-01"),
    Document("c", "ß", "👩‍👩‍👧 शब्द עברית \ufffd", meta={"k": [1, {"x": None}], "y": 1.5}),
    Document("d", "s", ""),
]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_documents_round_trip(tmp_path, suffix):
    documents = TRICKY + make_stories(200, seed=1)
    assert write_documents(tmp_path / f"a.{suffix}", documents) == len(documents)
    assert list(read_documents(tmp_path)) == documents
    assert [p.name for p in tmp_path.iterdir()] == [f"a.{suffix}"], "nothing half written stays behind"


def test_compressed_files_match_the_standard_tools(tmp_path):
    """What we write others read; what others write, in several frames, we read."""
    plain, packed = tmp_path / "p.jsonl", tmp_path / "x"
    write_documents(plain, TRICKY)
    lines = plain.read_bytes()
    assert [json.loads(line)["text"] for line in lines.splitlines()] == [d.text for d in TRICKY]
    write_documents(packed / "1.jsonl.gz", TRICKY)
    write_documents(packed / "2.jsonl.zst", TRICKY)
    assert gzip.decompress((packed / "1.jsonl.gz").read_bytes()) == lines
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO((packed / "2.jsonl.zst").read_bytes()))
    assert reader.read() == lines
    (packed / "1.jsonl.gz").write_bytes(gzip.compress(lines) + gzip.compress(lines))
    (packed / "2.jsonl.zst").write_bytes(zstandard.compress(lines) + zstandard.compress(lines))
    assert list(read_documents(packed)) == TRICKY * 4


def test_gz_bytes_depend_on_the_documents_alone(tmp_path):
    for name in ("a", "b"):
        write_documents(tmp_path / name / f"{name}.jsonl.gz", TRICKY)
    packed = (tmp_path / "a/a.jsonl.gz").read_bytes()
    assert packed == (tmp_path / "b/b.jsonl.gz").read_bytes()
    assert packed[3:8] == bytes(5), "RFC 1952: no flags (so no file name), modification time 0"


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "not compressed"])
def test_broken_compression_is_refused(tmp_path, suffix, damage):
    path = tmp_path / f"a.{suffix}"
    write_documents(path, make_stories(500, seed=0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] if damage == "cut" else b"{}" * 100)
    with pytest.raises(UserError, match=rf"a\.{suffix} is cut off or broken"):
        list(read_documents(path))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"id": "1", "source": "s", "text": "cut', "not valid JSON"),
        (b"[1, 2]", "a list instead of a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"id": "1", "text": "x"}', "'source' is missing"),
        (b'{"id": 1, "source": "s", "text": "x"}', "'id' is a int"),
        (b'{"id": "1", "source": "s", "text": null}', "'text' is a NoneType"),
        (b'{"id": "1", "source": "s", "text": "x", "meta": []}', "'meta' is a list"),
        (b'{"id": "1", "source": "s", "text": "x", "lang": "en"}', "'lang' is unknown"),
        (b'{"id": "1", "source": "s", "text": "\xff"}', "byte 0xff is not UTF-8"),
        (b'{"id": "1", "source": "s", "text": "\\ud83d!"}', "lone surrogate"),
        (b'{"id": "1", "source": "s", "text": "x", "meta": {"a": ["\\udc00"]}}', "lone surrogate"),
        (b'{"id": "1", "source": "s", "text": "\xed\xa0\x80"}', "byte 0xed is not UTF-8"),
    ],
)
def test_a_malformed_line_is_refused_with_file_and_line(tmp_path, line, problem):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": "0", "source": "s", "text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=problem) as caught:
        list(read_documents(path))
    assert str(caught.value).startswith(f"{path}:3: ") and "\n" not in str(caught.value)


def test_replace_mends_and_counts_what_strict_refuses(tmp_path):
    path = tmp_path / "a.jsonl"
    genuine = "\ufffd".encode()
    path.write_bytes(b'{"id": "1", "source": "s", "text": "\xff' + genuine + b' \\ud83d \\ud83d\\ude00 \\\\ud800"}\n')
    counts = Counter()
    (document,) = read_documents(path, errors="replace", counts=counts)
    assert document.text == "\ufffd\ufffd \ufffd \U0001f600 \\ud800"
    assert counts == {"replaced_characters": 2}, "the U+FFFD that was in the file is not a replacement"


def test_decoding_in_pieces_matches_python(tmp_path):
    data = b"ok\nb\xc3\xa4d \xff\xfe\n\xe2\x82 tail"
    counts = Counter()
    assert decode_utf8(data, "f", 10, "replace", counts) == data.decode("utf-8", errors="replace")
    assert counts["replaced_characters"] == 3
    with pytest.raises(UserError, match=r"^f:11: byte 0xff"):
        decode_utf8(data, "f", 10, "strict")


def test_open_text_names_the_bad_line_and_drops_the_bom(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbfone\r\ntwo\n"))
    with open_text(path) as file:
        assert file.read() == "one\r\ntwo\n"
    path.write_bytes(gzip.compress(b"x\n" * 50_000 + b"\xff\n"))
    with pytest.raises(UserError, match=r":50001: byte 0xff"), open_text(path) as file:
        file.read()
    with open_text(path, errors="replace") as file:
        assert file.read().endswith("x\n\ufffd\n")


def test_expand_paths_file_directory_glob(tmp_path, monkeypatch):
    for name in [
        "b.jsonl",
        "sub/a.jsonl.zst",
        "c.jsonl.gz",
        "_dropped/x.jsonl",
        ".b.jsonl.1.tmp",
        "d.txt",
        "e[1].jsonl",
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(p.relative_to(tmp_path)) for p in expand_paths(tmp_path)]
    assert found == ["b.jsonl", "c.jsonl.gz", "e[1].jsonl", "sub/a.jsonl.zst"]
    assert expand_paths(tmp_path / "d.txt") == [tmp_path / "d.txt"]
    assert expand_paths(tmp_path / "e[1].jsonl") == [tmp_path / "e[1].jsonl"]
    assert [p.name for p in expand_paths(f"{tmp_path}/**/*.zst")] == ["a.jsonl.zst"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_paths("~/b.jsonl") == [tmp_path / "b.jsonl"]
    for missing in ("nowhere", "*.csv", "_dropped/y.jsonl"):
        with pytest.raises(UserError, match="matches no file"):
            expand_paths(tmp_path / missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no \.jsonl"):
        expand_paths(tmp_path / "empty")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.jsonl"
    write_documents(path, TRICKY)
    before = path.read_bytes()

    def failing():
        yield from TRICKY
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_documents(path, failing())
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_stories_are_seeded_and_distinct():
    stories = make_stories(500, seed=7)
    assert stories == make_stories(500, seed=7)
    assert len({s.text for s in stories}) == 500 and stories != make_stories(500, seed=8)
