"""Token files against the tokenizer itself, whatever the processes, shards and kills."""

import hashlib
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from configs.errors import UserError
from configs.loader import compose_config
from data_processing.document import Document, write_documents
from llm import tokenize_corpus
from llm.bpe_training_learn import BpeSettings, train_tokenizer
from llm.token_files import TokenSplit, read_meta
from llm.tokenize_corpus_shards import PROGRESS_FILE, ShardWriter, npy_header, source_directory
from tests.stories import make_stories

ROOT = Path(__file__).resolve().parents[2]
ODD = "../..//odd source\n"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A corpus of two files and two sources, one with a dangerous name, and a tokenizer."""
    path = tmp_path_factory.mktemp("tokenize")
    stories = make_stories(400, seed=4)
    for number, story in enumerate(stories):
        story.source = ODD if number % 5 == 0 else "stories"
    stories[7].text += "<|endoftext|> inside, \x00 and é"
    write_documents(path / "corpus" / "a.jsonl", stories[:250])
    write_documents(path / "corpus" / "b.jsonl.gz", stories[250:])
    tokenizer = train_tokenizer([story.text for story in stories], BpeSettings(600))
    tokenizer.save(path / "tokenizer")
    return path, stories, tokenizer


def make_config(path, output, *overrides):
    places = [f"corpus={path / 'corpus'}", f"tokenizer={path / 'tokenizer'}", f"output={output}"]
    return compose_config(tokenize_corpus.TokenizeCorpusConfig, "tokenize_corpus", [*places, *overrides])


def hashes(output) -> dict[str, str]:
    """Every visible file below output and its hash."""
    files = [path for path in sorted(Path(output).rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def whole(workplace, tmp_path_factory):
    """The output of one unbroken run."""
    output = tmp_path_factory.mktemp("whole")
    tokenize_corpus.body(make_config(workplace[0], output, "val_fraction=0.1", "shard_tokens=9000"))
    return output


def test_shards_hold_every_document_once_and_in_order(workplace, whole):
    _, stories, tokenizer = workplace
    expected = defaultdict(list)
    for story in stories:
        digest = hashlib.blake2b(f"{story.source}\0{story.id}".encode(), digest_size=8).digest()
        split = "val" if int.from_bytes(digest, "big") < 0.1 * 2**64 else "train"
        expected[story.source, split].append(story)
    assert len(expected) == 4
    for (source, split), documents in expected.items():
        directory = whole / source_directory(source)
        meta = read_meta(directory)
        assert (meta.source, meta.tokenizer_sha256, meta.vocab_size) == (source, tokenizer.sha256, 600)
        assert (meta.eot_id, meta.dtype) == (tokenizer.eot_id, "uint16")
        found, size = [], 0
        for shard in meta.split(split):
            tokens, offsets = np.load(directory / shard.file), np.load(directory / shard.offsets_file)
            assert tokens.dtype == np.uint16 and offsets.dtype == np.int64
            assert len(tokens) == shard.tokens == offsets[-1] and len(offsets) == shard.documents + 1
            found += [tokens[a:b].tolist() for a, b in pairwise(offsets)]
            size += shard.utf8_bytes
        assert found == [[*tokenizer.encode(document.text), tokenizer.eot_id] for document in documents]
        assert size == sum(len(document.text.encode()) for document in documents)
    assert len(read_meta(whole / "stories").split("train")) > 2
    assert all(shard.tokens >= 9000 for shard in read_meta(whole / "stories").split("train")[:-1])


def test_the_reader_of_training_takes_them(whole, workplace):
    split = TokenSplit(whole / "stories", "train", workplace[2].sha256)
    assert split.num_tokens == read_meta(whole / "stories").tokens("train")


def test_source_names_stay_inside_the_output(whole):
    names = sorted(path.name for path in whole.iterdir() if path.is_dir())
    assert len(names) == 2 and names[1] == "stories" and names[0].startswith("odd_source-")
    directories = {source_directory(name) for name in ["../x", "..", ".", "a/b", "a b", ".hidden", ""]}
    assert len(directories) == 7 and all("/" not in name and not name.startswith(".") for name in directories)


def test_processes_and_batches_change_nothing(workplace, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("llm.tokenize_corpus.BATCH_CHARS", 3000)
    tokenize_corpus.body(
        make_config(workplace[0], tmp_path / "o", "val_fraction=0.1", "shard_tokens=9000", "num_processes=2")
    )
    assert hashes(tmp_path / "o") == hashes(whole)


@pytest.mark.parametrize("documents", [1, 90, 230, 399])
def test_a_run_broken_anywhere_goes_on_to_identical_bytes(workplace, whole, tmp_path, monkeypatch, documents):
    """Broken in `append`, after progress was saved and more was written: what is beyond must be cut back."""
    config = make_config(workplace[0], tmp_path / "o", "val_fraction=0.1", "shard_tokens=9000", "save_every_s=0")
    monkeypatch.setattr("llm.tokenize_corpus.BATCH_CHARS", 30_000)
    left, append = iter(range(documents)), ShardWriter.append

    def append_then_break(self, *arguments):
        append(self, *arguments)
        if next(left, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "append", append_then_break)
        with pytest.raises(KeyboardInterrupt):
            tokenize_corpus.body(config)
    assert not list((tmp_path / "o").glob("*/meta.json"))
    tokenize_corpus.body(config)
    assert hashes(tmp_path / "o") == hashes(whole)
    assert not list((tmp_path / "o").rglob("*.part"))


def test_a_run_broken_while_finishing_goes_on(workplace, whole, tmp_path, monkeypatch):
    """The shards have their final names by then, but progress still calls them open."""
    config = make_config(workplace[0], tmp_path / "o", "val_fraction=0.1", "shard_tokens=9000", "save_every_s=0")

    def break_off(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("llm.tokenize_corpus_shards.write_meta", break_off)
        tokenize_corpus.body(config)
    tokenize_corpus.body(config)
    assert hashes(tmp_path / "o") == hashes(whole)


def test_sigkill_and_resume_gives_identical_bytes(workplace, tmp_path):
    path, stories, _ = workplace
    many = [Document(f"{i}-{s.id}", s.source, s.text) for i in range(25) for s in stories]
    write_documents(tmp_path / "many.jsonl", many)
    arguments = [f"corpus={tmp_path / 'many.jsonl'}", f"tokenizer={path / 'tokenizer'}", "shard_tokens=200000"]
    arguments += ["num_processes=2", "save_every_s=0"]
    command = [sys.executable, "-m", "llm.tokenize_corpus", *arguments]
    output = tmp_path / "killed"
    process = subprocess.Popen([*command, f"output={output}"], cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (output / PROGRESS_FILE).exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not list(output.glob("*/meta.json"))
    resumed = subprocess.run([*command, f"output={output}"], cwd=ROOT, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    config = compose_config(
        tokenize_corpus.TokenizeCorpusConfig, "tokenize_corpus", [*arguments[:3], f"output={tmp_path / 'whole'}"]
    )
    tokenize_corpus.body(config)
    assert hashes(output) == hashes(tmp_path / "whole")


def test_a_finished_output_is_left_alone_or_made_anew(workplace, tmp_path, capsys):
    output = tmp_path / "o"
    tokenize_corpus.body(make_config(workplace[0], output))
    before = hashes(output)
    (output / "notes.txt").write_text("mine")
    tokenize_corpus.body(make_config(workplace[0], output))
    assert "complete already" in capsys.readouterr().out
    for change in ("val_fraction=0.5", "shard_tokens=5"):
        with pytest.raises(UserError, match=f"another {change.split('=')[0]}"):
            tokenize_corpus.body(make_config(workplace[0], output, change))
    assert hashes(output) == {**before, "notes.txt": hashlib.sha256(b"mine").hexdigest()}
    tokenize_corpus.body(make_config(workplace[0], output, "val_fraction=0.5", "overwrite=true"))
    assert (output / "notes.txt").exists() and hashes(output) != before
    (output / PROGRESS_FILE).unlink()
    with pytest.raises(UserError, match="holds token files already"):
        tokenize_corpus.body(make_config(workplace[0], output))


def test_val_documents_takes_so_many_of_each_source(workplace, tmp_path):
    metas = tokenize_corpus.body(make_config(workplace[0], tmp_path / "o", "val_documents=7"))
    assert {sum(shard.documents for shard in meta.split("val")) for meta in metas.values()} == {7}


def test_a_large_vocabulary_is_stored_in_uint32(workplace, tmp_path):
    writer = ShardWriter(tmp_path, {"tokenizer_sha256": "x"}, 70_000, 69_999, 1000)
    writer.append("s", "train", np.array([68_000, 69_999], dtype=np.uint32), 3)
    writer.finish()
    assert np.load(tmp_path / "s" / "train_00000.npy").tolist() == [68_000, 69_999]
    assert read_meta(tmp_path / "s").dtype == "uint32"


def test_headers_match_numpy_for_any_length():
    for length in (0, 1, 10**6, 10**12):
        header = npy_header(np.dtype(np.uint16), length)
        assert len(header) == 128 and str(length).encode() in header


def test_what_stands_out_is_said(workplace, tmp_path, capsys):
    tokenize_corpus.body(make_config(workplace[0], tmp_path / "o", "val_fraction=0"))
    out = capsys.readouterr().out
    assert "1 names such as <|endoftext|> stand in documents and stay text" in out
    assert "source stories has no validation document" in out


def test_bad_bytes_are_refused_or_replaced(workplace, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_bytes(b'{"id":"1","source":"s","text":"caf\xe9"}\n')
    config = make_config(workplace[0], tmp_path / "o", f"corpus={tmp_path / 'bad.jsonl'}")
    with pytest.raises(UserError, match="is not UTF-8"):
        tokenize_corpus.body(config)
    config = make_config(workplace[0], tmp_path / "p", f"corpus={tmp_path / 'bad.jsonl'}", "errors=replace")
    tokenize_corpus.body(config)
    assert "1 characters were not UTF-8" in capsys.readouterr().out
    tokens = np.load(tmp_path / "p" / "s" / "train_00000.npy")
    assert workplace[2].decode(tokens[:-1]) == "caf\ufffd"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("val_fraction=1", "val_fraction=1.0 must be from 0"),
        ("shard_tokens=0", "shard_tokens=0 must be positive"),
        ("val_documents=-1", "must not be negative"),
        ("errors=ignore", "errors='ignore' is unknown"),
        ("shards=3", "shards"),
    ],
)
def test_bad_settings_are_refused(workplace, tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        make_config(workplace[0], tmp_path / "o", override)


def test_empty_corpus_and_missing_tokenizer_are_refused(workplace, tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="corpus is empty"):
        tokenize_corpus.body(make_config(workplace[0], tmp_path / "o", f"corpus={tmp_path / 'empty.jsonl'}"))
    with pytest.raises(UserError, match=r"tokenizer.json does not exist"):
        tokenize_corpus.body(make_config(workplace[0], tmp_path / "o", f"tokenizer={tmp_path}"))


def test_a_cut_part_file_is_refused(tmp_path):
    writer = ShardWriter(tmp_path / "n", {"tokenizer_sha256": "x"}, 600, 599, 1000)
    writer.append("s", "train", np.arange(50), 3)
    writer.save()
    part = tmp_path / "n" / "s" / ".train_00000.npy.part"
    part.write_bytes(part.read_bytes()[:150])
    with pytest.raises(UserError, match="shorter than progress says"):
        ShardWriter(tmp_path / "n", {"tokenizer_sha256": "x"}, 600, 599, 1000)
