"""A tokenizer's files: Hugging Face's tokenizer.json (the tokenizer itself), tokenizer_config.json, ranks.tiktoken.

tokenizer.json alone is read back. `parse_tokenizer_json` takes any byte-level BPE file with a split pattern that the
`regex` package knows (GPT-2, Llama 3, Qwen and their like) and refuses what it would encode differently.
"""

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from configs.errors import UserError
from llm.bpe_tokenizer_pattern import PATTERNS, SMOLLM

END_OF_TEXT = "<|endoftext|>"
MAX_UNUSED_IDS = 1 << 16  # a vocabulary may leave some ids out, not as many as a file cares to name
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>")


@dataclass
class BpeModel:
    """What defines a byte-level BPE tokenizer: `token_bytes[id]` (b"" for an unused id), merges as triples of ids."""

    token_bytes: list[bytes]
    merges: list[tuple[int, int, int]]  # left, right, merged, in rank order
    pattern: str
    special_tokens: dict[str, int]
    normalizer: str | None = None  # "NFC" or None
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges say
    byte_ids: list[int] = field(default_factory=list)  # the id of each byte; -1: the vocabulary lacks it
    start_token: str | None = None  # what the file's post-processor puts before a text, such as <|begin_of_text|>
    missing_bytes: bytes = b""  # these: SmolLM's has no token for 21 bytes that its training text did not hold


def byte_to_char() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself when printable in Latin-1, else U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_CHARS = byte_to_char()
CHAR_BYTES = {char: byte for byte, char in enumerate(BYTE_CHARS)}
# The bytes in the order of their stand-ins: ids 0 to 255 of a new tokenizer, as GPT-2 and `tokenizers` number them.
BYTE_ORDER = sorted(range(256), key=lambda byte: BYTE_CHARS[byte])


def bytes_to_chars(token: bytes) -> str:
    return "".join([BYTE_CHARS[byte] for byte in token])


def tokenizer_json(
    token_bytes: list[bytes], merges: list[tuple[int, int]], pattern: str, special_tokens: list[str]
) -> bytes:
    """The file of a new tokenizer: `merges` are pairs of ids of `token_bytes`; special tokens get the ids behind."""
    chars = [bytes_to_chars(token) for token in token_bytes]
    vocab = {name: index for index, name in enumerate([*chars, *special_tokens])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated", "invert": False}
    value = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[name], "content": name} | flags for name in special_tokens],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True}
        if pattern == "gpt2"
        else {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[chars[left], chars[right]] for left, right in merges],
        },
    }
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8")


def config_json(eot: str) -> dict[str, Any]:
    """tokenizer_config.json, which AutoTokenizer.from_pretrained asks for."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eot,
        "eos_token": eot,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }


def tiktoken_ranks(model: BpeModel) -> bytes:
    """tiktoken's file of ranks: base64 of a token's bytes and its id, a line each; special tokens are not in it."""
    special_ids = set(model.special_tokens.values())
    lines = [
        base64.b64encode(token) + b" %d\n" % index
        for index, token in enumerate(model.token_bytes)
        if token and index not in special_ids
    ]
    return b"".join(lines)


def parse_tokenizer_json(content: bytes, where: str) -> BpeModel:
    """Read a byte-level BPE tokenizer.json; UserError, opening with `where`, when it is not one."""
    try:
        return _parse(json.loads(content), where)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError(f"{where} is not a tokenizer.json ({error!r}); make it with llm.bpe_training") from error


def _parse(value: dict[str, Any], where: str) -> BpeModel:
    model = value["model"]
    vocab, merges = model["vocab"], model["merges"]
    kind = model.get("type", "BPE")
    _require(kind == "BPE" and isinstance(vocab, dict), where, f"model type {kind!r}", "only BPE is read")
    for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        _require(not model.get(name), where, f"model.{name}={model.get(name)!r}", "byte-level BPE has none")
    printable = all(BYTE_CHARS[byte] in vocab for byte in range(0x20, 0x7F))
    _require(printable, where, "a vocabulary without the bytes of ASCII", "byte-level BPE has them")
    added = {token["content"]: token["id"] for token in value.get("added_tokens") or []}
    token_bytes = [b""] * _vocab_size([*vocab.values(), *added.values()], where)
    for token, index in vocab.items():
        if token not in added:
            token_bytes[index] = _chars_to_bytes(token, where)
    for token, index in added.items():
        token_bytes[index] = token.encode("utf-8")
    return BpeModel(
        token_bytes,
        _parse_merges(merges, vocab, where),
        _parse_pattern(value.get("pre_tokenizer"), where),
        added,
        _parse_normalizer(value.get("normalizer"), where),
        bool(model.get("ignore_merges")),
        [vocab.get(char, -1) for char in BYTE_CHARS],
        _parse_start(value.get("post_processor"), added),
        bytes([byte for byte in range(256) if BYTE_CHARS[byte] not in vocab]),
    )


def _vocab_size(ids: list[int], where: str) -> int:
    """One more than the largest id, when it lies near the number of tokens: memory follows it."""
    allowed = range(2 * len(ids) + MAX_UNUSED_IDS)
    foreign = [index for index in ids if type(index) is not int or index not in allowed]
    _require(not foreign, where, f"token ids such as {foreign[:1]}", f"ids are numbers below {len(allowed)} here")
    return 1 + max(ids)


def _require(condition: bool, where: str, what: str, rule: str) -> None:
    if not condition:
        raise UserError(f"{where} has {what}: {rule}; use a byte-level BPE tokenizer such as GPT-2's or Llama 3's")


def _chars_to_bytes(token: str, where: str) -> bytes:
    try:
        return bytes([CHAR_BYTES[char] for char in token])
    except KeyError as error:
        raise UserError(
            f"{where}: token {token!r} is not in byte-level characters; use a byte-level BPE tokenizer"
        ) from error


def _parse_merges(merges: list, vocab: dict[str, int], where: str) -> list[tuple[int, int, int]]:
    triples = []
    for number, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        try:
            left, right = pair
            triples.append((vocab[left], vocab[right], vocab[left + right]))
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{where}: merge {number} {merge!r} names a token that is not in the vocabulary; fetch the file again"
            ) from error
    return triples


def _parse_pattern(pre_tokenizer: dict | None, where: str) -> str:
    """The split pattern of a ByteLevel pre-tokenizer, or of a Split or single Digits followed by one."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    kinds = [step.get("type") for step in steps]
    read = (["ByteLevel"], ["Split", "ByteLevel"], ["Digits", "ByteLevel"])
    _require(kinds in read, where, f"pre-tokenizer {kinds}", "not read here")
    byte_level = steps[-1]
    _require(not byte_level.get("add_prefix_space"), where, "add_prefix_space=true", "decoding would not give the text")
    if len(steps) == 1:
        _require(byte_level.get("use_regex", True), where, "no split pattern", "one is needed")
        return PATTERNS["gpt2"]
    split = steps[0]
    if kinds[0] == "Digits":
        single = split.get("individual_digits") and byte_level.get("use_regex", True)
        _require(bool(single), where, "Digits in groups, or without GPT-2's pattern", "only single digits are read")
        return SMOLLM
    _require(
        split.get("behavior") == "Isolated" and not split.get("invert") and "Regex" in split["pattern"],
        where,
        f"Split {split.get('behavior')!r}",
        "only an isolated regular expression is read",
    )
    _require(not byte_level.get("use_regex", True), where, "two split patterns", "one is read")
    return split["pattern"]["Regex"]


def _parse_normalizer(normalizer: dict | None, where: str) -> str | None:
    kind = normalizer.get("type") if normalizer else None
    _require(kind in (None, "NFC"), where, f"normalizer {kind!r}", "only NFC is read")
    return kind


def _parse_start(processor: dict | None, special: dict[str, int]) -> str | None:
    """The special token that a TemplateProcessing, alone or in a sequence, puts before a text."""
    for step in (processor or {}).get("processors") or [processor or {}]:
        if step.get("type") == "TemplateProcessing" and step.get("single"):
            name = step["single"][0].get("SpecialToken", {}).get("id")
            return name if name in special else None
    return None
