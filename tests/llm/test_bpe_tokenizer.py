"""The encoder against `tokenizers` and tiktoken on tricky text, and its own promises."""

import random
from itertools import pairwise

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe
from tokenizers import models, pre_tokenizers

from configs.errors import UserError
from llm.bpe_tokenizer import Tokenizer
from llm.bpe_tokenizer_ascii import split_gpt2_ascii
from llm.bpe_tokenizer_files import CHAR_BYTES
from llm.bpe_tokenizer_merge import MergeTable, drop_overlaps
from llm.bpe_tokenizer_pattern import CUTTABLE, PATTERNS, Splitter
from llm.bpe_training_learn import BpeSettings, train_tokenizer
from tests.stories import make_stories

TRICKY = [
    "",
    " ",
    "family 👨‍👩‍👧‍👦 and flag 🏳️‍🌈, thumbs 👍🏽👍🏽",
    "中文分词没有空格，日本語のテキストも。한국어도 있습니다 १२३४",
    "e\u0301 versus é, Z\u0335\u0321\u034ealgo, x\u0301\u0302\u0303",
    "שלום עולם, مرحبا بالعالم 123 ١٢٣",
    "nul \x00\x00 bytes \x1c\x1d and \x7f\x80\x85\xa0 spaces\u2003\u3000here ",
    "trailing spaces   ",
    "   leading\n\n\n  and\r\n\r\nlines\t\t\tof   code  \n",
    "it's we'll I'VE they'd 'tis ''' don't's 'ſ can’t",
    "12345678 3.14159 1,000,000 ½ ⅷ ²³ x86_64",
    "a" * 300 + " " * 400 + "b" * 5 + "=" * 1000,
    "<|endoftext|> is text <|endoftext|>",
    'snake_case camelCase HTTPServer(foo->bar)[0] += "x\\n" // é\n\t\treturn;',
    "é" * 700 + "mixed ascii and ünïcödé words, sparse… then a long plain stretch of words " * 3,
]


def tricky_corpus() -> list[str]:
    return TRICKY + [story.text for story in make_stories(60, seed=3)]


@pytest.fixture(scope="module", params=sorted(PATTERNS))
def tokenizer(request):
    return train_tokenizer(tricky_corpus(), BpeSettings(900, request.param, special_tokens=("<|endoftext|>", "<|x|>")))


@pytest.fixture(scope="module")
def directory(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def reference(directory):
    loaded = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    loaded.encode_special_tokens = True  # special tokens written in text stay text, as with allowed_special="none"
    return loaded


def random_texts(count: int) -> list[str]:
    rng = random.Random(7)
    alphabet = "aab  \n\r\t'sltdmreLV.,-=1239éſß中あ👍\u0301\u200dש\x00\xa0"
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(count)]


def test_ids_match_tokenizers(tokenizer, reference):
    texts = TRICKY + random_texts(3000)
    assert tokenizer.encode_batch(texts) == [encoding.ids for encoding in reference.encode_batch(texts)]
    assert [tokenizer.encode(text) for text in texts[:200]] == tokenizer.encode_batch(texts[:200])


def test_ids_match_tiktoken_on_our_ranks(tokenizer, directory):
    ranks = load_tiktoken_bpe(str(directory / "ranks.tiktoken"))
    encoding = tiktoken.Encoding(
        "ours", pat_str=tokenizer.splitter.pattern, mergeable_ranks=ranks, special_tokens=tokenizer.special_tokens
    )
    for text in TRICKY + [story.text for story in make_stories(30, seed=9)]:
        assert tokenizer.encode(text) == encoding.encode_ordinary(text)
        assert tokenizer.encode(text, "all") == encoding.encode(text, allowed_special="all")


def test_transformers_encodes_identically(tokenizer, directory):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    by_file = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    by_directory = AutoTokenizer.from_pretrained(directory)
    assert by_directory.eos_token_id == tokenizer.eot_id
    for text in TRICKY:
        ids = tokenizer.encode(text, "all")
        assert by_file.encode(text, add_special_tokens=False) == ids
        assert by_directory.encode(text, add_special_tokens=False) == ids


def test_saved_tokenizer_loads_as_the_same(tokenizer, directory):
    loaded = Tokenizer.load(directory)
    assert (loaded.sha256, loaded.vocab_size, loaded.eot_id) == (tokenizer.sha256, 900, 898)
    assert loaded.special_tokens == {"<|endoftext|>": 898, "<|x|>": 899}
    assert loaded.token_bytes(loaded.encode("a")[0]) == b"a"


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_decode_inverts_encode(text):
    tokenizer = round_trip_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, "all")) == text


def round_trip_tokenizer(cache=[]) -> Tokenizer:  # noqa: B006
    if not cache:
        cache.append(train_tokenizer(tricky_corpus(), BpeSettings(500, "gpt4")))
    return cache[0]


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["a", "'l", "l", "'", " ", "  ", "\n", "\r\n", "é", "12", "中", "!", "Re", "\u3000"])
    ),
    cuts=st.sets(st.integers(0, 60)),
    pattern=st.sampled_from(sorted(CUTTABLE)),
)
def test_stream_gives_the_pieces_of_the_joined_text(pieces, cuts, pattern):
    text, splitter = "".join(pieces), Splitter(pattern)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    chunks = [text[a:b] for a, b in pairwise(bounds)]
    assert [piece for block in splitter.stream(chunks) for piece in block] == splitter.split_unicode(text)


@settings(max_examples=500, deadline=None)
@given(text=st.text(st.sampled_from("ab'sdlver  \n\t\r\x0b1.,!\x00\x1c\x7f"), min_size=2, max_size=40))
def test_arrays_split_ascii_as_the_pattern_does(text):
    assert split_gpt2_ascii(text) == Splitter("gpt2").split_unicode(text)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_long_texts_split_as_the_pattern_does(name):
    """Long enough for arrays; with stretches of other characters, with the mark, and with every pair of bytes."""
    splitter = Splitter(name)
    pairs = "".join(chr(a) + chr(b) for a in range(128) for b in range(128))
    words = " ".join(random_texts(300)) + "plain words, it's 'em' and 12 more " * 200
    for text in (
        pairs,
        pairs.replace("\x1e", ""),
        words,
        words.encode("ascii", "ignore").decode(),
        words + "é" + words,
    ):
        assert splitter.split(text) == splitter.split_unicode(text)


@pytest.mark.parametrize("pattern", sorted(CUTTABLE))
def test_stream_waits_for_the_end_of_white_space(pattern):
    """A newline after many spaces changes the piece that began before them."""
    splitter, head, tail = Splitter(pattern), "word  \n" + " " * 20, " " * 5 + "\n   next"
    assert [piece for block in splitter.stream([head, tail]) for piece in block] == splitter.split_unicode(head + tail)


def test_encode_iterable_equals_encode_at_any_border(tokenizer):
    text = "".join(TRICKY) + make_stories(1, seed=1)[0].text
    for size in (1, 2, 3, 7, 64, 1000):
        assert list(tokenizer.encode_iterable(text[i : i + size] for i in range(0, len(text), size))) == (
            tokenizer.encode(text)
        )


def test_encode_iterable_holds_little_of_an_endless_stream(tokenizer):
    def endless():
        while True:
            yield "some words, then more " * 10

    ids = tokenizer.encode_iterable(endless())
    assert [next(ids) for _ in range(1000)]


def test_long_texts_are_encoded_in_blocks(tokenizer, monkeypatch):
    text = "".join(TRICKY) * 3
    expected, most = tokenizer.encode(text), []
    monkeypatch.setattr("llm.bpe_tokenizer_pattern.BLOCK_CHARS", 200)
    encode_parts = tokenizer._slots.encode_parts
    monkeypatch.setattr(tokenizer._slots, "encode_parts", lambda p, cuts: most.append(len(p)) or encode_parts(p, cuts))
    assert tokenizer.encode_batch(["a b", text, "c"]) == [tokenizer.encode("a b"), expected, tokenizer.encode("c")]
    assert len(most) > 10 and max(most) < len(expected) / 2


def test_special_tokens_need_permission(tokenizer):
    text = "a<|endoftext|><|x|>b"
    eot, x = tokenizer.special_tokens["<|endoftext|>"], tokenizer.special_tokens["<|x|>"]
    plain = tokenizer.encode(text)
    assert eot not in plain and x not in plain
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    assert tokenizer.encode(text, "all") == [*a, eot, x, *b]
    assert tokenizer.encode(text, {"<|endoftext|>"}) == [*a, eot, *tokenizer.encode("<|x|>b")]
    assert tokenizer.encode(text, set()) == plain
    with pytest.raises(UserError, match=r"allowed_special '<.y.>'"):
        tokenizer.encode(text, {"<|y|>"})


def test_lone_surrogates_are_replaced_and_counted_or_refused(tokenizer, directory):
    text = "a\ud800b \udfff\udc00é"
    loaded = Tokenizer.load(directory)
    assert loaded.decode(loaded.encode(text)) == "a\ufffdb \ufffd\ufffdé"
    assert loaded.counts["replaced_characters"] == 3
    with pytest.raises(UserError, match="3 lone surrogates"):
        Tokenizer.load(directory, errors="strict").encode(text)


def test_decode_of_half_a_character_and_of_foreign_ids(tokenizer):
    ids = [tokenizer.model.byte_ids[byte] for byte in "é".encode()]
    assert tokenizer.decode(ids[:1]) == "\ufffd" and tokenizer.decode(ids) == "é"
    with pytest.raises(UnicodeDecodeError):
        tokenizer.decode(ids[:1], errors="strict")
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(UserError, match=f"token id {bad} is outside"):
            tokenizer.decode([0, bad])


def test_two_processes_encode_as_one_after_torch_has_used_threads(tokenizer, monkeypatch):
    import torch

    torch.ones(200, 200) @ torch.ones(200, 200)
    monkeypatch.setattr("llm.bpe_tokenizer.POOL_MIN_CHARS", 0)
    texts = [*TRICKY, "lone \ud800"]
    expected = [tokenizer.encode(text) for text in texts]
    before = tokenizer.counts["replaced_characters"]
    assert tokenizer.encode_batch(texts, num_processes=2) == expected
    assert tokenizer.counts["replaced_characters"] == before + 1


def reference_merge(piece: bytes, table: MergeTable) -> list[int]:
    """The definition: merge the lowest-ranked pair, the leftmost of equals, until there is none."""
    ids = [table.byte_id_list[byte] for byte in piece]
    while True:
        ranked = [(table.rank_of[pair], i) for i, pair in enumerate(pairwise(ids)) if pair in table.rank_of]
        if not ranked:
            return ids
        rank, place = min(ranked)
        ids[place : place + 2] = [table.merged_list[rank]]


def test_every_route_of_merging_follows_the_definition(tokenizer, monkeypatch):
    table = tokenizer._slots.merges
    rng = random.Random(2)
    pieces = [bytes(rng.choices(b"aaab the\xc3\xa9", k=rng.randint(1, 40))) for _ in range(400)]
    expected = [reference_merge(piece, table) for piece in pieces]
    assert table.merge_pieces(pieces) == expected  # matrices and the heap
    assert [table.merge_one(piece) for piece in pieces] == expected
    monkeypatch.setattr("llm.bpe_tokenizer_merge.SWEEP_MIN_TOKENS", 2)
    assert [table.merge_one(piece) for piece in pieces] == expected  # sweeps first


def test_drop_overlaps_takes_every_other_place_of_a_run():
    import numpy as np

    assert drop_overlaps(np.array([0, 1, 2, 5, 6, 9])).tolist() == [0, 2, 5, 9]


def test_memory_of_pieces_starts_anew_and_changes_nothing(tokenizer, monkeypatch):
    expected = [tokenizer.encode(text) for text in TRICKY]
    monkeypatch.setattr("llm.bpe_tokenizer_slots.MAX_SLOTS", 3)
    monkeypatch.setattr("llm.bpe_tokenizer_slots.MAX_PIECE_CHARS", 100)
    fresh = Tokenizer(tokenizer.content)
    assert [fresh.encode(text) for text in TRICKY] == expected
    assert fresh._slots.num_slots <= 3


def test_long_pieces_are_linear_enough(tokenizer, reference):
    letters = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=100_000))
    assert tokenizer.encode(letters) == reference.encode(letters).ids
    assert tokenizer.decode(tokenizer.encode(" " * 1_000_000)) == " " * 1_000_000


def make_foreign(pre_tokenizer, **options) -> tokenizers.Tokenizer:
    """A tokenizer of another maker, with its merges as `tokenizers` itself trains them."""
    foreign = tokenizers.Tokenizer(models.BPE(**options))
    foreign.pre_tokenizer = pre_tokenizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|endoftext|>"], initial_alphabet=sorted(CHAR_BYTES), show_progress=False
    )
    foreign.train_from_iterator(tricky_corpus(), trainer)
    foreign.encode_special_tokens = True
    return foreign


@pytest.mark.parametrize("pattern", [*sorted(CUTTABLE), r"\p{L}+|\s|[^\p{L}\s]+"])
@pytest.mark.parametrize("ignore_merges", [False, True])
def test_foreign_tokenizer_json_encodes_identically(pattern, ignore_merges):
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    foreign = make_foreign(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        ignore_merges=ignore_merges,
    )
    ours = Tokenizer(foreign.to_str().encode())
    for text in TRICKY + random_texts(200):
        assert ours.encode(text) == foreign.encode(text).ids


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_single_digits_before_byte_level_encode_identically(ignore_merges):
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    foreign = make_foreign(pre_tokenizers.Sequence([digits, byte_level]), ignore_merges=ignore_merges)
    ours = Tokenizer(foreign.to_str().encode())
    mixed = ["a 12b", "x  1", "  7 \n\n 8", "it's 9's", "²٣ 4th", "1\t\t2 ", "ab  c 3"]
    for text in mixed + TRICKY + random_texts(200):
        assert ours.encode(text) == foreign.encode(text).ids


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_bytes_that_a_vocabulary_lacks_are_left_out_and_counted(ignore_merges):
    import json

    value = json.loads(make_foreign(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str())
    value["model"]["ignore_merges"] = ignore_merges
    lacking = [chr(0x104), "z"]  # bytes 0x04 and z
    vocab = {token: index for token, index in value["model"]["vocab"].items() if not set(token) & set(lacking)}
    merges = [pair for pair in value["model"]["merges"] if "".join(pair) in vocab]
    with pytest.raises(UserError, match="bytes of ASCII"):
        Tokenizer(json.dumps(value | {"model": value["model"] | {"vocab": vocab, "merges": merges}}).encode())
    vocab |= {"z": value["model"]["vocab"]["z"]}
    content = json.dumps(value | {"model": value["model"] | {"vocab": vocab, "merges": merges}}).encode()
    ours, foreign = Tokenizer(content), tokenizers.Tokenizer.from_str(content.decode())
    texts = ["the\x04 \x04", "\x04", "a\x04\x04b zz", *["\x04" * n for n in range(1, 20)]]
    for text in texts:
        assert ours.encode(text) == foreign.encode(text).ids
    assert ours.encode_batch(texts) == [foreign.encode(text).ids for text in texts]
    assert ours.counts["dropped_bytes"] == 2 * sum(text.count("\x04") for text in texts)
    with pytest.raises(UserError, match="2 bytes that the vocabulary lacks"):
        Tokenizer(content, errors="strict").encode("the\x04 \x04")


def test_a_text_begins_as_the_files_post_processor_says(tokenizer):
    assert tokenizer.start_id == tokenizer.eot_id
    foreign = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    foreign.add_special_tokens(["<s>"])
    begin = foreign.token_to_id("<s>")
    template = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    foreign.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template])
    ours = Tokenizer(foreign.to_str().encode())
    assert [ours.start_id, *ours.encode("a b")] == foreign.encode("a b").ids
    assert ours.eot_id == tokenizer.eot_id


def test_nfc_normalizer_is_applied():
    foreign = make_foreign(pre_tokenizers.ByteLevel(add_prefix_space=False))
    foreign.normalizer = tokenizers.normalizers.NFC()
    ours = Tokenizer(foreign.to_str().encode())
    assert ours.encode("e\u0301 x") == foreign.encode("e\u0301 x").ids == ours.encode("é x")
    assert list(ours.encode_iterable(["e", "\u0301 x"])) == ours.encode("é x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["model"].update(type="WordPiece"), "only BPE"),
        (lambda v: v["model"]["vocab"].pop("Ġ"), "bytes of ASCII"),
        (lambda v: v["model"]["merges"].append(["a", "nonsense"]), "not in the vocabulary"),
        (lambda v: v.update(normalizer={"type": "Lowercase"}), "only NFC"),
        (lambda v: v.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer"),
        (
            lambda v: v.update(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Digits", "individual_digits": False}, {"type": "ByteLevel"}],
                }
            ),
            "single digits",
        ),
        (lambda v: v["model"]["vocab"].update({"語": 5000}), "byte-level characters"),
        (lambda v: v.pop("model"), "not a tokenizer.json"),
        (lambda v: v["model"]["vocab"].update(a=2**50), "token ids such as"),
        (lambda v: v["model"]["vocab"].update(a="1"), "token ids such as"),
        (lambda v: v["added_tokens"][0].pop("id"), "not a tokenizer.json"),
        (lambda v: v.update(pre_tokenizer=[1]), "not a tokenizer.json"),
    ],
)
def test_foreign_files_that_are_not_byte_level_bpe_are_refused(tokenizer, change, message):
    import json

    value = json.loads(tokenizer.content)
    change(value)
    with pytest.raises(UserError, match=message):
        Tokenizer(json.dumps(value).encode())


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"not a tokenizer.json"):
        Tokenizer.load(tmp_path)
