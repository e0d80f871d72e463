"""Byte-level BPE: text to token ids and back. Training is llm/bpe_training.py, its files llm/bpe_tokenizer_files.py.

Text is cut into pieces by the split pattern and each piece is merged on its own. A dictionary gives every piece it has
seen a slot, and NumPy gathers the ids of the slots; only pieces not seen before are merged (bpe_tokenizer_merge).
Special tokens written in a text stay ordinary text unless the caller allows them. Bytes in, bytes out:
decode(encode(x)) is x for every text without lone surrogates (and in NFC, when a loaded tokenizer asks for it).
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from configs.errors import UserError, check_choice, check_positive
from configs.run_dir import write_bytes_atomic, write_json_atomic
from llm.bpe_tokenizer_files import END_OF_TEXT_NAMES, config_json, parse_tokenizer_json, tiktoken_ranks
from llm.bpe_tokenizer_merge import MergeTable
from llm.bpe_tokenizer_pattern import Splitter
from llm.bpe_tokenizer_pool import group_texts, ordered_map
from llm.bpe_tokenizer_slots import SlotTable

Allowed = set[str] | Literal["all", "none"]
SURROGATE = re.compile("[\ud800-\udfff]")
POOL_MIN_CHARS = 4_000_000  # below, starting processes costs more than they save


class Tokenizer:
    """A byte-level BPE tokenizer, made from the bytes of its tokenizer.json.

    errors="replace" turns lone surrogates into U+FFFD and counts them in counts["replaced_characters"];
    errors="strict" refuses them with UserError. Bytes that a foreign vocabulary lacks are left out likewise, as
    `tokenizers` does, and counted in counts["dropped_bytes"].
    """

    def __init__(self, content: bytes, errors: str = "replace", where: str = "tokenizer.json"):
        check_choice("errors", errors, ("strict", "replace"))
        self.content = content
        self.errors = errors
        self.counts: Counter = Counter()
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.model = parse_tokenizer_json(content, where)
        self.special_tokens: dict[str, int] = self.model.special_tokens
        self.vocab_size = len(self.model.token_bytes)
        self.splitter = Splitter(self.model.pattern)
        self._slots = SlotTable(self.model, MergeTable(self.model.byte_ids, self.model.merges))

    @classmethod
    def load(cls, directory: str | Path, errors: str = "replace") -> "Tokenizer":
        """Read `directory`/tokenizer.json (or the file itself); UserError when it is missing or not byte-level BPE."""
        path = Path(directory)
        path = path if path.is_file() else path / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} does not exist; make it with: python -m llm.bpe_training output={directory}")
        return cls(path.read_bytes(), errors, str(path))

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and ranks.tiktoken into `directory`, each atomically."""
        directory = Path(directory)
        write_bytes_atomic(directory / "ranks.tiktoken", tiktoken_ranks(self.model))
        write_json_atomic(directory / "tokenizer_config.json", config_json(self.eot))
        write_bytes_atomic(directory / "tokenizer.json", self.content)

    @property
    def eot(self) -> str:
        """The name of the special token that ends a text."""
        for name in END_OF_TEXT_NAMES:
            if name in self.special_tokens:
                return name
        raise UserError(f"no end-of-text token among {sorted(self.special_tokens)}; add one of {END_OF_TEXT_NAMES}")

    @property
    def eot_id(self) -> int:
        return self.special_tokens[self.eot]

    @property
    def start_id(self) -> int:
        """What stands before a document: its file's own beginning (LLaMA 3), else the end of the document before."""
        return self.eot_id if self.model.start_token is None else self.special_tokens[self.model.start_token]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a special token's are its name's."""
        self._check_ids(token_id, token_id)
        return self.model.token_bytes[token_id]

    def encode(self, text: str, allowed_special: Allowed = "none") -> list[int]:
        """Token ids of a text; special tokens in it become theirs only when named in `allowed_special` (or "all")."""
        return self.encode_array(text, allowed_special).tolist()

    def encode_array(self, text: str, allowed_special: Allowed = "none") -> np.ndarray:
        """As `encode`, as an int32 array: four bytes a token instead of a Python integer."""
        parts = [
            np.array([token], dtype=np.int32) if isinstance(token, int) else ids
            for token, segment in self._segments(self._clean(text), allowed_special)
            for ids in ([None] if token is not None else map(self._slots.encode_pieces, self.splitter.blocks(segment)))
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def encode_iterable(self, chunks: Iterable[str]) -> Iterator[int]:
        """The ids of the joined chunks, one by one, holding little more than a chunk; no special tokens."""
        cleaned = (self._clean(chunk) for chunk in chunks)
        if self.model.normalizer:  # composition may cross a border between chunks
            cleaned = iter([self._clean("".join(cleaned))])
        for pieces in self.splitter.stream(cleaned):
            yield from self._slots.encode_pieces(pieces).tolist()

    def encode_batch(self, texts: list[str], num_processes: int = 1) -> list[list[int]]:
        """`encode` of each text, over `num_processes` worker processes when there is enough text to pay for them."""
        check_positive(num_processes=num_processes)
        if num_processes == 1 or sum(map(len, texts)) < POOL_MIN_CHARS:
            groups = map(self.encode_group, group_texts(texts))
            return [ids.tolist() for arrays in groups for ids in arrays]
        worker = EncodeWorker(self.content, self.errors)
        results = []
        for arrays, counts in ordered_map(worker, group_texts(texts), num_processes):
            results += [ids.tolist() for ids in arrays]
            self.counts.update(counts)
        return results

    def encode_group(self, texts: list[str]) -> list[np.ndarray]:
        """The ids (int32) of each text, all together in memory: pieces new to any of them are merged as one batch.

        Among long texts each goes on its own, in blocks.
        """
        if any(map(self.splitter.is_long, texts)):
            return [self.encode_array(text) for text in texts]
        pieces, cuts = [], []
        for text in texts:
            pieces += self.splitter.split(self._clean(text))
            cuts.append(len(pieces))
        return self._slots.encode_parts(pieces, cuts[:-1])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that the tokens stand for; UserError for an id outside the vocabulary."""
        ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if ids:
            self._check_ids(min(ids), max(ids))
        token_bytes = self.model.token_bytes
        return b"".join([token_bytes[token_id] for token_id in ids])

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """The text of the tokens; bytes that are not UTF-8 (half a character) become U+FFFD, or raise if "strict"."""
        return self.decode_bytes(ids).decode("utf-8", errors)

    def _check_ids(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise UserError(f"token id {bad} is outside 0..{self.vocab_size - 1}; were the ids made by this tokenizer?")

    def _clean(self, text: str) -> str:
        """The text without lone surrogates, and in the normal form that the tokenizer asks for."""
        if self.model.missing_bytes:
            self._count_dropped(text)
        if text.isascii():
            return text
        text, replaced = SURROGATE.subn("\ufffd", text)
        if replaced and self.errors == "strict":
            raise UserError(f"the text holds {replaced} lone surrogates (not UTF-8); mend it or set errors=replace")
        if replaced:
            self.counts["replaced_characters"] += replaced
        return unicodedata.normalize(self.model.normalizer, text) if self.model.normalizer else text

    def _count_dropped(self, text: str) -> None:
        """Count, or refuse, the bytes of a text that the vocabulary has no token for and that encoding leaves out."""
        data = text.encode("utf-8", "surrogatepass")
        dropped = len(data) - len(data.translate(None, self.model.missing_bytes))
        if dropped and self.errors == "strict":
            raise UserError(f"the text holds {dropped} bytes that the vocabulary lacks; mend it or set errors=replace")
        if dropped:
            self.counts["dropped_bytes"] += dropped

    def _segments(self, text: str, allowed: Allowed) -> Iterator[tuple[int | None, str]]:
        """The text cut at its allowed special tokens: (None, ordinary text) and (id, "")."""
        if allowed == "none" or not allowed:
            yield None, text
            return
        names = set(self.special_tokens) if allowed == "all" else set(allowed)
        for unknown in sorted(names - set(self.special_tokens)):
            raise UserError(
                f"allowed_special {unknown!r} is no special token; use one of {sorted(self.special_tokens)}"
            )
        longest_first = sorted(names, key=len, reverse=True)
        done = 0
        for match in re.finditer("|".join(map(re.escape, longest_first)) or "(?!)", text):
            yield None, text[done : match.start()]
            yield self.special_tokens[match.group()], ""
            done = match.end()
        yield None, text[done:]


class EncodeWorker:
    """Encodes batches of texts in a worker process; the tokenizer is made there, on the first batch."""

    def __init__(self, content: bytes, errors: str):
        self.content, self.errors = content, errors
        self.tokenizer: Tokenizer | None = None

    def __call__(self, texts: list[str]) -> tuple[list[np.ndarray], Counter]:
        """The ids of each text, and what was counted on the way."""
        if self.tokenizer is None:
            self.tokenizer = Tokenizer(self.content, self.errors)
        self.tokenizer.counts.clear()
        return self.tokenizer.encode_group(texts), Counter(self.tokenizer.counts)
