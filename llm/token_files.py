"""Token files: what llm.tokenize_corpus writes and llm.data_loader reads, with every check of that border.

A source directory holds real .npy files (uint16 when vocab_size <= 65,536, else uint32), `train_00000.npy`,
`val_00000.npy` and so on, an end-of-text id after each document; beside each shard its document starts
(`train_00000.offsets.npy`, int64, documents + 1 entries, the last being the number of tokens); and `meta.json`.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from configs.errors import UserError
from configs.run_dir import is_plain_file_name, read_json, write_json_atomic

FORMAT = "mew-tokens-1"
META_FILE = "meta.json"
SPLITS = ("train", "val")
CHUNK_TOKENS = 1 << 22
REMAKE = "make it again with python -m llm.tokenize_corpus"


@dataclass
class ShardMeta:
    """One shard: its files, and how much is in it. utf8_bytes counts the documents' text, end-of-text ids not."""

    file: str
    offsets_file: str
    split: str
    tokens: int
    documents: int
    utf8_bytes: int


@dataclass
class TokenMeta:
    """meta.json of one source."""

    source: str
    tokenizer_sha256: str
    vocab_size: int
    eot_id: int
    dtype: str
    shards: list[ShardMeta]

    def split(self, split: str) -> list[ShardMeta]:
        return [shard for shard in self.shards if shard.split == split]

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.split(split))

    def utf8_bytes(self, split: str) -> int:
        return sum(shard.utf8_bytes for shard in self.split(split))


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of the two dtypes that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_meta(directory: str | Path, meta: TokenMeta) -> None:
    """Write meta.json atomically; it comes last, so a directory that has one is whole."""
    write_json_atomic(Path(directory) / META_FILE, {"format": FORMAT} | asdict(meta))


def read_meta(directory: str | Path) -> TokenMeta:
    """Read and check a source's meta.json; UserError names what is wrong."""
    path = Path(directory) / META_FILE
    fields = read_json(path)
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT!r}; {REMAKE}")
    try:
        shards = [ShardMeta(**shard) for shard in fields.pop("shards")]
        meta = TokenMeta(shards=shards, **fields)
        check_types(meta)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} lacks or misspells a field ({error}); {REMAKE}") from error
    for name in (name for shard in shards for name in (shard.file, shard.offsets_file)):
        if not is_plain_file_name(name):
            raise UserError(f"{path} names the file {name!r}, which must be a plain file name; {REMAKE}")
    if meta.eot_id >= meta.vocab_size:
        raise UserError(f"{path}: eot_id={meta.eot_id} must be below vocab_size={meta.vocab_size}; {REMAKE}")
    if meta.dtype != token_dtype(meta.vocab_size).name:
        raise UserError(
            f"{path}: dtype={meta.dtype} must be {token_dtype(meta.vocab_size).name} "
            f"for vocab_size={meta.vocab_size}; {REMAKE}"
        )
    return meta


def check_types(meta: TokenMeta) -> None:
    """Raise TypeError for a field whose value cannot be meant."""
    shards = meta.shards
    numbers = [meta.vocab_size, meta.eot_id, *(n for s in shards for n in (s.tokens, s.documents, s.utf8_bytes))]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a count is not a whole number")
    if not isinstance(meta.tokenizer_sha256, str):
        raise TypeError(f"tokenizer_sha256={meta.tokenizer_sha256!r} is no text")
    unknown = [shard.split for shard in shards if shard.split not in SPLITS]
    if unknown:
        raise TypeError(f"split={unknown[0]!r} is none of {', '.join(SPLITS)}")


def check_tokenizer(directory: str | Path, meta: TokenMeta, expected_sha256: str) -> None:
    """Refuse tokens that another tokenizer made."""
    if meta.tokenizer_sha256 != expected_sha256:
        raise UserError(
            f"{directory} was made with the tokenizer {meta.tokenizer_sha256[:12]}, the config names "
            f"{expected_sha256[:12]}; point data.tokenizer at the right one or tokenise again"
        )


def open_shard(directory: str | Path, shard: ShardMeta, meta: TokenMeta) -> np.ndarray:
    """A shard's tokens, memory-mapped, after checking header, dtype, length and that every id is in range."""
    path = Path(directory) / shard.file
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(f"{path} is named in {META_FILE} but does not exist; {REMAKE}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); check the disk and its permissions, or {REMAKE}") from error
    except Exception as error:  # numpy parses the header as Python text, so a broken one raises almost anything
        raise UserError(f"{path} is no whole .npy file with a numpy header ({error}); {REMAKE}") from error
    if not isinstance(tokens, np.memmap):
        raise UserError(f"{path} is an archive of arrays, it must be one .npy array; {REMAKE}")
    if tokens.dtype != np.dtype(meta.dtype) or tokens.ndim != 1:
        raise UserError(f"{path} holds {tokens.dtype} of {tokens.ndim} dims, it must be flat {meta.dtype}; {REMAKE}")
    if len(tokens) != shard.tokens:
        raise UserError(f"{path} holds {len(tokens)} tokens, {META_FILE} says {shard.tokens}; {REMAKE}")
    for start in range(0, len(tokens), CHUNK_TOKENS):
        largest = int(tokens[start : start + CHUNK_TOKENS].max())
        if largest >= meta.vocab_size:
            raise UserError(f"{path} holds the id {largest}, ids must be below vocab_size={meta.vocab_size}; {REMAKE}")
    return tokens


class TokenSplit:
    """All shards of one split of one source; a window never crosses from one shard into the next.

    A window of seq_len inputs and their labels is seq_len + 1 tokens long.
    """

    def __init__(self, directory: str | Path, split: str, expected_tokenizer_sha256: str | None = None):
        self.directory = Path(directory)
        self.meta = read_meta(directory)
        if expected_tokenizer_sha256 is not None:
            check_tokenizer(directory, self.meta, expected_tokenizer_sha256)
        shards = self.meta.split(split)
        self.shards = [open_shard(directory, shard, self.meta) for shard in shards if shard.tokens]
        self.num_tokens = sum(len(shard) for shard in self.shards)
        self.utf8_bytes = self.meta.utf8_bytes(split)
        if not self.num_tokens:
            raise UserError(
                f"{directory} has no {split} tokens; tokenise more text, or raise val_fraction in llm.tokenize_corpus"
            )

    @staticmethod
    def has(directory: str | Path, split: str) -> bool:
        """Whether a source has any token of this split; a small one may have no validation document."""
        return read_meta(directory).tokens(split) > 0

    def starts(self, seq_len: int) -> np.ndarray:
        """Cumulative number of possible window starts by shard, (shards + 1,); UserError when there is none."""
        counts = [max(0, len(shard) - seq_len) for shard in self.shards]
        if not sum(counts):
            raise UserError(
                f"{self.directory}: no shard is as long as one window of seq_len + 1 = {seq_len + 1} tokens "
                f"(the longest has {max(len(shard) for shard in self.shards)}); "
                f"lower data.seq_len, add text, or give it the weight 0"
            )
        return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))

    def window(self, shard: int, start: int, seq_len: int) -> np.ndarray:
        """At most seq_len + 1 tokens of a shard from `start`, as int64."""
        return self.shards[shard][start : start + seq_len + 1].astype(np.int64)


def find_sources(tokens: str | Path) -> dict[str, Path]:
    """Source name -> directory, below a directory of sources or for one source directory itself."""
    tokens = Path(tokens)
    if (tokens / META_FILE).exists():
        return {tokens.name: tokens}
    found = {path.parent.name: path.parent for path in sorted(tokens.glob(f"*/{META_FILE}"))}
    if not found:
        raise UserError(f"data.tokens={tokens} holds no {META_FILE}; {REMAKE} output={tokens}")
    return found
