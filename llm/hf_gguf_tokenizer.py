"""tokenizer.json, tokenizer_config.json and the chat template out of a GGUF file's metadata.

A GGUF file names the split into pieces by a word (tokenizer.ggml.pre) in place of the expression; the words known here
are those of the families that we import. Only byte-level BPE ("gpt2") is read.
"""

import json
from typing import Any

from configs.errors import UserError
from llm.bpe_tokenizer_pattern import PATTERNS, QWEN2
from llm.hf_gguf_file import GgufFile

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split_by(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, BYTE_LEVEL | {"use_regex": False}]


PRE_TOKENIZERS = {
    "gpt-2": [BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
    "llama-bpe": split_by(PATTERNS["gpt4"]),
    "qwen2": split_by(QWEN2),
}
NFC_FAMILIES = ("qwen2",)  # GGUF does not say so; their tokenizer.json does
WHOLE_WORDS_FIRST = ("llama-bpe",)  # ignore_merges, likewise


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """The files of a tokenizer directory by name; UserError for one that is not byte-level BPE."""
    metadata = file.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise UserError(f"{file.path} has a tokenizer of type {kind!r}; only byte-level BPE ('gpt2') is read")
    if pre not in PRE_TOKENIZERS:
        raise UserError(
            f"{file.path} splits text by tokenizer.ggml.pre={pre!r}, which is not known; "
            f"use one of {', '.join(PRE_TOKENIZERS)}"
        )
    tokens, types, merges = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges"))
    if not (are_all(tokens, str) and are_all(types, int) and are_all(merges, str)):
        raise UserError(f"{file.path} lacks tokenizer.ggml.tokens, token_type or merges; fetch it again")
    if len(types) != len(tokens):
        raise UserError(f"{file.path} has {len(tokens)} tokens and {len(types)} token types; fetch it again")
    ids = special_ids(file, len(tokens))
    begin = ids.get("bos") if metadata.get("tokenizer.ggml.add_bos_token") else None
    return {
        "tokenizer.json": encode_json(tokenizer_json(tokens, types, merges, pre, begin)),
        "tokenizer_config.json": encode_json(tokenizer_config(ids, tokens)),
        "generation_config.json": encode_json({f"{name}_token_id": ids[name] for name in ids if name != "unk"}),
    } | template_file(metadata)


def are_all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def special_ids(file: GgufFile, vocab_size: int) -> dict[str, int]:
    """The ids of bos, eos, pad and unk, of those that the file names."""
    ids = {}
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < vocab_size:
            raise UserError(
                f"{file.path} has tokenizer.ggml.{key}_token_id={value!r}, which is none of its {vocab_size} tokens; "
                f"fetch it again"
            )
        ids[name] = value
    return ids


def encode_json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8")


def tokenizer_json(
    tokens: list[str], types: list[int], merges: list[str], pre: str, bos_id: int | None
) -> dict[str, Any]:
    steps = PRE_TOKENIZERS[pre]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": token} | flags | {"special": kind == CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in NFC_FAMILIES else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "post_processor": put_before(tokens[bos_id], bos_id) if bos_id is not None else None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in WHOLE_WORDS_FIRST,
            "vocab": {token: i for i, token in enumerate(tokens) if types[i] != UNUSED},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def put_before(token: str, token_id: int) -> dict[str, Any]:
    """The post-processor that begins a text with one special token."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def tokenizer_config(ids: dict[str, int], tokens: list[str]) -> dict[str, Any]:
    names = {f"{name}_token": tokens[index] for name, index in ids.items()}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | names


def template_file(metadata: dict[str, Any]) -> dict[str, bytes]:
    template = metadata.get("tokenizer.chat_template")
    return {"chat_template.jinja": template.encode("utf-8")} if isinstance(template, str) else {}
