"""Training against an exact recount, against `tokenizers`, and its bad inputs."""

import json
import random
import subprocess
import sys
from collections import Counter, deque
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers, trainers

from configs.errors import UserError
from configs.loader import compose_config
from data_processing.document import Document, write_documents
from llm import bpe_training
from llm.bpe_tokenizer import Tokenizer
from llm.bpe_tokenizer_files import BYTE_ORDER, bytes_to_chars
from llm.bpe_tokenizer_pattern import PATTERNS, Splitter
from llm.bpe_training_count import count_pieces
from llm.bpe_training_learn import BpeSettings, Vocabulary, learn_merges, train_tokenizer
from llm.bpe_training_merge import SEPARATOR, ArrayWords, LinkedWords
from llm.bpe_training_queue import PAIR_SHIFT, PairQueue
from tests.llm.test_bpe_tokenizer import tricky_corpus
from tests.stories import make_stories

ROOT = Path(__file__).resolve().parents[2]
RUNS = ["aaaa aaaaa aaaaaaa aa bababab abababa ababab", "xxxxx yxyxyxy zz zzz zzzz", "aab aabb abab aaabbb bbbaaa"]


def recount_merges(words: dict[str, int], num_tokens: int, tie_break: str) -> list[tuple[bytes, bytes]]:
    """The definition: count all pairs anew before every merge."""
    tokens = [bytes([byte]) for byte in BYTE_ORDER]
    ids = {token: number for number, token in enumerate(tokens)}
    rows = [([bytes([byte]) for byte in word.encode()], times) for word, times in words.items()]
    merges = []
    while len(ids) < num_tokens:
        counts = Counter()
        for row, times in rows:
            for pair in pairwise(row):
                counts[pair] += times
        if not counts:
            break
        if tie_break == "bytes":
            best = max(counts, key=lambda pair: (counts[pair], pair))
        else:
            best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
        merges.append(best)
        ids.setdefault(best[0] + best[1], len(ids))
        for row, _ in rows:
            place = 0
            while place < len(row) - 1:
                if (row[place], row[place + 1]) == best:
                    row[place : place + 2] = [best[0] + best[1]]
                place += 1
    return merges


def learned_merges(words: dict[str, int], num_tokens: int, tie_break: str) -> list[tuple[bytes, bytes]]:
    (vocabulary,) = deque(learn_merges(words, num_tokens, tie_break), maxlen=1)
    return [(vocabulary.token_bytes[a], vocabulary.token_bytes[b]) for a, b in vocabulary.merges]


@pytest.mark.parametrize("array_cells", [0, 1 << 40], ids=["arrays", "lists"])
@pytest.mark.parametrize("tie_break", ["bytes", "ids"])
@pytest.mark.parametrize(
    "texts", [RUNS, tricky_corpus()[:45], RUNS * 2 + tricky_corpus()[15:40]], ids=["runs", "tricky", "both"]
)
def test_merges_match_an_exact_recount(texts, tie_break, array_cells, monkeypatch):
    monkeypatch.setattr("llm.bpe_training_learn.ARRAY_MIN_CELLS", array_cells)
    monkeypatch.setattr("llm.bpe_training_learn.ARRAY_MERGES", 150)
    words = count_pieces(texts, "gpt2")
    assert learned_merges(words, 500, tie_break) == recount_merges(words, 500, tie_break)


def test_a_token_made_twice_keeps_its_first_id():
    vocabulary = Vocabulary()
    a, b, c = (vocabulary.ids[byte] for byte in (b"a", b"b", b"c"))
    ab, bc = vocabulary.add_merge(a, b), vocabulary.add_merge(b, c)
    assert vocabulary.add_merge(ab, c) == vocabulary.add_merge(a, bc) == 258
    assert len(vocabulary) == 259 and vocabulary.merges == [(a, b), (b, c), (ab, c), (a, bc)]


def test_a_pair_that_grows_above_the_open_count_comes_next():
    counts = {1: 5, 2: 5, 3: 4}
    queue = PairQueue(counts, lambda pair: pair)
    assert queue.pop() == 1
    counts[3] = 7
    queue.push(3, 7)
    assert [queue.pop(), counts.pop(1), counts.pop(3), queue.pop(), counts.pop(2), queue.pop()] == [3, 5, 7, 2, 5, None]


@pytest.mark.parametrize("kind", [ArrayWords, LinkedWords])
@pytest.mark.parametrize("seed", range(30))
def test_words_stay_exact_under_any_merges(kind, seed):
    """Random merges of random tokens, many of which make bytes that are a token already."""
    rng = random.Random(seed)
    names = ["a", "aa", "aaa", "aaaa"] if seed % 2 else ["a", "b", "aa", "ab", "ba", "aab", "aaa"]  # or runs alone
    ids = {token: number for number, token in enumerate(names)}
    rows = [([rng.choice(sorted(ids)) for _ in range(rng.randint(2, 12))], rng.randint(1, 5)) for _ in range(12)]
    cells = [SEPARATOR] + [cell for row, _ in rows for cell in [*(ids[token] for token in row), SEPARATOR]]
    weights = [0] + [times for row, times in rows for _ in range(len(row) + 1)]
    words = kind(np.array(cells, dtype=np.int32), np.array(weights))
    for _ in range(25):
        counts = Counter()
        for row, times in rows:
            for left, right in pairwise(row):
                counts[ids[left] << PAIR_SHIFT | ids[right]] += times
        assert {pair: count for pair, count in words.counts.items() if count} == counts
        if not counts:
            break
        names = list(ids)
        left, right = (names[number] for number in divmod(rng.choice(sorted(counts)), 1 << PAIR_SHIFT))
        new = ids.setdefault(left + right, len(ids))
        grown = words.merge(ids[left], ids[right], new)
        for row, _ in rows:
            place = 0
            while place < len(row) - 1:
                if (row[place], row[place + 1]) == (left, right):
                    row[place : place + 2] = [left + right]
                place += 1
        assert all(new in divmod(pair, 1 << PAIR_SHIFT) for pair in grown)


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_merges_match_tokenizers(pattern):
    texts = tricky_corpus() + [story.text for story in make_stories(200, seed=5)]
    reference = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    reference.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    reference.train_from_iterator(texts, trainer)
    expected = [tuple(pair) for pair in json.loads(reference.to_str())["model"]["merges"]]

    tokenizer = train_tokenizer(texts, BpeSettings(1201, pattern, tie_break="ids"))
    merges = [(tokenizer.token_bytes(a), tokenizer.token_bytes(b)) for a, b, _ in tokenizer.model.merges]
    assert [(bytes_to_chars(a), bytes_to_chars(b)) for a, b in merges] == expected
    for text in texts[:40]:
        assert tokenizer.encode(text.replace("<|", "")) == reference.encode(text.replace("<|", "")).ids


def test_counts_match_a_plain_count_of_the_pieces(monkeypatch):
    """In arrays (long texts), with NULs, with the array counter's mark, with stretches of other characters."""
    monkeypatch.setattr("llm.bpe_training_count.PENDING_KEYS", 500)
    long_text = " ".join(story.text for story in make_stories(20, seed=8))
    texts = [
        *tricky_corpus(),
        long_text,
        long_text + " \x00 a\x00",
        long_text + "\x1e x",
        f"é{long_text}“z” {long_text}中",
    ]
    texts += [f"\n\n{long_text}  \n", "".join(texts)]
    for pattern in PATTERNS:
        expected = Counter(piece for text in texts for piece in Splitter(pattern).split_unicode(text))
        assert count_pieces(texts, pattern) == expected
        assert count_pieces(texts, pattern, num_processes=2) == expected


def test_long_texts_are_counted_in_blocks(monkeypatch):
    monkeypatch.setattr("llm.bpe_tokenizer_pattern.BLOCK_CHARS", 100)
    text = " ".join(tricky_corpus())
    for pattern in PATTERNS:
        assert count_pieces([text], pattern) == Counter(
            part for piece in Splitter(pattern).split_unicode(text) for part in [piece[:4096], piece[4096:]] if part
        )


def test_a_piece_without_end_is_counted_in_parts():
    assert count_pieces(["x" * 10_000], "gpt2") == {"x" * 4096: 2, "x" * (10_000 - 2 * 4096): 1}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus" / "stories.jsonl.gz"
    write_documents(path, make_stories(30, seed=1))
    return path.parent


def make_config(corpus, output, *overrides):
    return compose_config(
        bpe_training.BpeTrainingConfig, "bpe_training", [f"corpus={corpus}", f"output={output}", *overrides]
    )


def test_script_writes_a_tokenizer_that_loads(corpus, tmp_path):
    made = bpe_training.body(make_config(corpus, tmp_path / "out", "vocab_size=400"))
    loaded = Tokenizer.load(tmp_path / "out")
    assert loaded.vocab_size == 400 and loaded.sha256 == made.sha256
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "ranks.tiktoken",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_pairs_running_out_is_a_warning_with_the_size(tmp_path, capsys):
    write_documents(tmp_path / "c.jsonl", [Document("1", "s", "hello hello")])
    made = bpe_training.body(make_config(tmp_path / "c.jsonl", tmp_path / "out", "vocab_size=5000"))
    assert made.vocab_size == 256 + 5 + 1  # he/ll.. four merges make hello, one more puts the space before it
    assert "the pairs ran out at 262 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["vocab_size=256"], "vocab_size=256 must be at least 257"),
        (["vocab_size=257", "special_tokens=['<|endoftext|>',a]"], "at least 258"),
        (["special_tokens=[a]"], r"lacks <\|endoftext\|>"),
        (["special_tokens=['<|endoftext|>','<|endoftext|>']"], "must be different"),
        (["pattern=gpt5"], "pattern='gpt5' is unknown"),
        (["tie_break=random"], "tie_break='random' is unknown"),
        (["num_processes=0"], "num_processes=0 must be positive"),
        (["vocabsize=300"], "vocabsize"),
    ],
)
def test_bad_settings_are_refused(corpus, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        make_config(corpus, tmp_path / "out", *overrides)


def test_smallest_vocabulary_is_the_bytes(corpus, tmp_path):
    tokenizer = bpe_training.body(make_config(corpus, tmp_path / "out", "vocab_size=257"))
    assert tokenizer.vocab_size == 257 and tokenizer.decode(tokenizer.encode("é中")) == "é中"
    assert len(tokenizer.encode("é中")) == 5


def test_empty_corpus_and_bad_bytes_end_the_script_with_one_line(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "latin.jsonl").write_bytes(b'{"id":"1","source":"s","text":"caf\xe9"}\n')
    for name, words in (
        ("empty.jsonl", "corpus is empty"),
        ("latin.jsonl", "is not UTF-8"),
        ("none", "matches no file"),
    ):
        command = [sys.executable, "-m", "llm.bpe_training", f"corpus={tmp_path / name}", f"output={tmp_path / 'out'}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "out").exists()


def test_bad_bytes_are_replaced_and_counted_when_asked(tmp_path, capsys):
    (tmp_path / "latin.jsonl").write_bytes(b'{"id":"1","source":"s","text":"caf\xe9 \\ud800 caf\xe9"}\n')
    tokenizer = bpe_training.body(
        make_config(tmp_path / "latin.jsonl", tmp_path / "o", "vocab_size=300", "errors=replace")
    )
    assert "warning: 3 characters were not UTF-8" in capsys.readouterr().out
    assert "\ufffd".encode() in tokenizer.model.token_bytes


def test_nul_bytes_and_special_names_are_text(tmp_path):
    text = "a\x00b\x00 <|endoftext|> " * 20
    tokenizer = train_tokenizer([text], BpeSettings(300))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eot_id not in tokenizer.encode(text)
