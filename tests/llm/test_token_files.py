"""Every way in which a token directory can be wrong is refused with one line; a right one is read as written."""

import json
import random

import numpy as np
import pytest

from configs.errors import UserError
from llm.token_files import TokenSplit, find_sources, read_meta, token_dtype
from tests.llm.token_corpus import SHA, write_source


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "books", {"train": [np.arange(50), np.arange(20)], "val": [np.arange(30)]})


def edit_meta(source, **changes):
    path = source / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_shard(source, **changes):
    path = source / "meta.json"
    meta = json.loads(path.read_text())
    meta["shards"][0] |= changes
    path.write_text(json.dumps(meta))


def test_a_split_is_read_as_written(source):
    split = TokenSplit(source, "train", SHA)
    assert split.num_tokens == 70 and split.utf8_bytes == 280
    assert split.window(1, 5, 8).tolist() == list(range(5, 14))
    # Starts of windows of 10 + 1 tokens: 40 in 50 tokens, 10 in 20.
    assert split.starts(10).tolist() == [0, 40, 50]
    assert isinstance(split.shards[0], np.memmap)


def test_dtype_holds_every_id():
    assert token_dtype(65_536) == np.uint16 and token_dtype(65_537) == np.uint32


def test_a_file_without_header_is_refused(source):
    (source / "train_00000.npy").write_bytes(np.arange(50, dtype=np.uint16).tobytes())
    with pytest.raises(UserError, match="numpy header"):
        TokenSplit(source, "train")


def test_a_pickle_is_refused(source):
    np.save(source / "train_00000.npy", np.array([{"a": 1}] * 50, dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="numpy header"):
        TokenSplit(source, "train")


def test_a_truncated_file_is_refused(source):
    path = source / "train_00000.npy"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"train_00000.npy"):
        TokenSplit(source, "train")


def test_another_dtype_is_refused(source):
    np.save(source / "train_00000.npy", np.arange(50, dtype=np.int64))
    with pytest.raises(UserError, match="int64"):
        TokenSplit(source, "train")


def test_another_length_is_refused(source):
    np.save(source / "train_00000.npy", np.arange(51, dtype=np.uint16))
    with pytest.raises(UserError, match="51 tokens"):
        TokenSplit(source, "train")


def test_ids_out_of_range_are_refused(source):
    np.save(source / "train_00000.npy", np.array([5] * 49 + [100], dtype=np.uint16))
    with pytest.raises(UserError, match="the id 100"):
        TokenSplit(source, "train")


def test_another_tokenizer_is_refused(source):
    with pytest.raises(UserError, match="was made with the tokenizer 000000000000"):
        TokenSplit(source, "train", "f" * 64)


def test_a_window_that_fits_nowhere_is_refused(source):
    with pytest.raises(UserError, match=r"lower data\.seq_len"):
        TokenSplit(source, "train").starts(50)
    assert TokenSplit(source, "train").starts(49).tolist() == [0, 1, 1]


def test_a_missing_split_is_refused(tmp_path):
    source = write_source(tmp_path / "books", {"train": [np.arange(50)]})
    with pytest.raises(UserError, match="no val tokens"):
        TokenSplit(source, "val")


def test_no_broken_header_escapes_as_a_traceback(source):
    path = source / "train_00000.npy"
    good, rng = path.read_bytes(), random.Random(0)
    for _ in range(500):
        broken = bytearray(good)
        for _ in range(3):
            broken[rng.randrange(128)] = rng.randrange(256)  # the header
        path.write_bytes(broken)
        try:
            assert TokenSplit(source, "train").num_tokens == 70
        except UserError as error:
            assert "train_00000.npy" in str(error)


def test_an_archive_is_refused(source):
    with open(source / "train_00000.npy", "wb") as file:
        np.savez(file, np.arange(50, dtype=np.uint16))
    with pytest.raises(UserError, match=r"one \.npy array"):
        TokenSplit(source, "train")


@pytest.mark.parametrize("name", ["../secret.npy", "/etc/passwd", "a/b.npy", "..", ""])
def test_a_file_name_that_leaves_the_directory_is_refused(source, name):
    edit_shard(source, file=name)
    with pytest.raises(UserError, match="plain file name"):
        read_meta(source)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"dtype": "uint32"},
        {"vocab_size": "100"},
        {"eot_id": 100},
        {"tokenizer_sha256": 5},
        {"shards": [{"file": "x"}]},
    ],
)
def test_a_broken_meta_is_refused(source, changes):
    edit_meta(source, **changes)
    with pytest.raises(UserError, match=r"meta\.json"):
        read_meta(source)


def test_an_unknown_split_is_refused(source):
    edit_shard(source, split="test")
    with pytest.raises(UserError, match="split='test'"):
        read_meta(source)


def test_sources_are_found_below_a_directory_or_in_it(source):
    assert list(find_sources(source.parent)) == ["books"] == list(find_sources(source))
    with pytest.raises(UserError, match=r"holds no meta\.json"):
        find_sources(source.parent / "nowhere")
