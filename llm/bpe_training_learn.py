"""The training loop of byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909), on bytes as in GPT-2.

Count the pieces of the corpus, then merge the most frequent pair of neighbouring tokens until the vocabulary is full.
The counts are exact at every step, so the merges are those of a full recount after each one, whatever the number of
processes. Ties go to the lexicographically greatest pair of byte strings, or to the smallest pair of ids as in
`tokenizers`. When two merges make the same bytes the token keeps its first id, also as there.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from configs.errors import UserError, check_choice, check_positive
from llm.bpe_tokenizer import Tokenizer
from llm.bpe_tokenizer_files import BYTE_ORDER, END_OF_TEXT, tokenizer_json
from llm.bpe_tokenizer_pattern import PATTERNS
from llm.bpe_training_count import count_pieces
from llm.bpe_training_merge import ArrayWords, LinkedWords, lay_out_words
from llm.bpe_training_queue import PAIR_MASK, PAIR_SHIFT, PairQueue, lexicographic_key

ARRAY_MERGES = 1000
ARRAY_MIN_CELLS = 100_000  # in fewer cells a pair has too few places for NumPy


@dataclass
class BpeSettings:
    """What a tokenizer is to be; vocab_size counts the 256 bytes, the merges and the special tokens."""

    vocab_size: int
    pattern: str = "gpt2"
    tie_break: str = "bytes"
    special_tokens: tuple[str, ...] = (END_OF_TEXT,)
    num_processes: int = 1

    def __post_init__(self) -> None:
        check_choice("pattern", self.pattern, tuple(PATTERNS))
        check_choice("tie_break", self.tie_break, ("bytes", "ids"))
        check_positive(num_processes=self.num_processes)
        self.special_tokens = tuple(self.special_tokens)
        if END_OF_TEXT not in self.special_tokens:
            raise UserError(f"special_tokens={list(self.special_tokens)} lacks {END_OF_TEXT}; add it")
        if len(set(self.special_tokens)) < len(self.special_tokens) or "" in self.special_tokens:
            raise UserError(
                f"special_tokens={list(self.special_tokens)} must be different and not empty; mend the list"
            )
        least = 256 + len(self.special_tokens)
        if self.vocab_size < least:
            raise UserError(
                f"vocab_size={self.vocab_size} must be at least {least} (256 bytes and {len(self.special_tokens)}"
                f" special tokens); use a larger one"
            )
        if self.vocab_size > PAIR_MASK:
            raise UserError(f"vocab_size={self.vocab_size} must be at most {PAIR_MASK}; use a smaller one")


class Vocabulary:
    """Tokens and merges as they are learned; ids 0 to 255 are the bytes in GPT-2's order."""

    def __init__(self):
        self.token_bytes = [bytes([byte]) for byte in BYTE_ORDER]
        self.ids = {token: index for index, token in enumerate(self.token_bytes)}
        self.merges: list[tuple[int, int]] = []
        self.keys = [lexicographic_key(token) for token in self.token_bytes]

    def __len__(self) -> int:
        return len(self.token_bytes)

    def add_merge(self, left: int, right: int) -> int:
        """The id of the merged token: a new one unless its bytes are a token already."""
        self.merges.append((left, right))
        token = self.token_bytes[left] + self.token_bytes[right]
        new = self.ids.setdefault(token, len(self.token_bytes))
        if new == len(self.token_bytes):
            self.token_bytes.append(token)
            self.keys.append(lexicographic_key(token))
        return new

    def order(self, tie_break: str) -> Callable[[int], str | int]:
        """The key by which pairs of equal count are sorted; the lowest is merged first."""
        keys = self.keys
        if tie_break == "bytes":
            return lambda pair: keys[pair >> PAIR_SHIFT] + keys[pair & PAIR_MASK]
        return lambda pair: pair


def learn_merges(words: dict[str, int], num_tokens: int, tie_break: str) -> Iterator[Vocabulary]:
    """Learn merges from counted words; yields the growing vocabulary after each, until it has `num_tokens` tokens.

    It ends earlier when no pair is left.
    """
    vocabulary = Vocabulary()
    byte_ids = [vocabulary.ids[bytes([byte])] for byte in range(256)]
    tokens, weights = lay_out_words(words, byte_ids)
    if len(tokens) >= ARRAY_MIN_CELLS:
        arrays = ArrayWords(tokens, weights)
        yield from _merge_until(vocabulary, arrays, min(num_tokens, 256 + ARRAY_MERGES), tie_break)
        tokens, weights = arrays.tokens, arrays.weights
        del arrays
    yield from _merge_until(vocabulary, LinkedWords(tokens, weights), num_tokens, tie_break)


def _merge_until(
    vocabulary: Vocabulary, words: ArrayWords | LinkedWords, num_tokens: int, tie_break: str
) -> Iterator[Vocabulary]:
    counts = words.counts
    queue = PairQueue(counts, vocabulary.order(tie_break))
    while len(vocabulary) < num_tokens:
        pair = queue.pop()
        if pair is None:
            return
        left, right = pair >> PAIR_SHIFT, pair & PAIR_MASK
        for grown in words.merge(left, right, vocabulary.add_merge(left, right)):
            if counts[grown] > 0:
                queue.push(grown, counts[grown])
        yield vocabulary


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """A million lists of places make no cycles, but the collector would walk them all again and again: a fifth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def train_tokenizer(
    texts: Iterable[str], settings: BpeSettings, on_merge: Callable[[int], None] | None = None
) -> Tokenizer:
    """A tokenizer trained on texts; `on_merge(vocabulary size)` is called after each merge.

    It has fewer than settings.vocab_size tokens when the pairs run out. Raises UserError when there is no text.
    """
    words = count_pieces(texts, settings.pattern, settings.num_processes)
    if not words:
        raise UserError("the corpus is empty: training needs at least one document with text; check corpus=")
    vocabulary = Vocabulary()
    num_tokens = settings.vocab_size - len(settings.special_tokens)
    with garbage_collection_paused():
        for vocabulary in learn_merges(words, num_tokens, settings.tie_break):
            if on_merge:
                on_merge(len(vocabulary))
    content = tokenizer_json(vocabulary.token_bytes, vocabulary.merges, settings.pattern, list(settings.special_tokens))
    return Tokenizer(content)
