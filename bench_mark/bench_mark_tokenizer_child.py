"""One measurement of bench_mark_tokenizer, in a process of its own so that its peak memory is its own.

    python -m bench_mark.bench_mark_tokenizer_child task=train engine=ours corpus=x.jsonl directory=/tmp/t

Prints one JSON line. The process is bound to one core; the caller sets RAYON_NUM_THREADS=1 for the Rust engines.
"""

import hashlib
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.errors import missing_extra
from configs.loader import load_config
from data_processing.document import read_documents
from llm.bpe_tokenizer import Tokenizer
from llm.bpe_tokenizer_pattern import PATTERNS
from llm.bpe_training_learn import BpeSettings, train_tokenizer

WARM_ROUNDS = 3


@dataclass
class ChildConfig:
    """What to measure."""

    task: str
    engine: str
    corpus: str
    directory: str
    vocab_size: int = 32_000
    pattern: str = "gpt2"


def read_texts(config: ChildConfig) -> Iterator[str]:
    return (document.text for document in read_documents(config.corpus))


def hash_of(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def train_ours(config: ChildConfig, tie_break: str) -> str:
    settings = BpeSettings(config.vocab_size, config.pattern, tie_break)
    tokenizer = train_tokenizer(read_texts(config), settings)
    if tie_break == "ids":
        tokenizer.save(config.directory)
    return hash_of([list(pair) for pair in json.loads(tokenizer.content)["model"]["merges"]])


def train_tokenizers(config: ChildConfig) -> str:
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise missing_extra("tokenizers", "bench") from error
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS[config.pattern]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=config.pattern == "gpt2")
    steps = [byte_level] if config.pattern == "gpt2" else [split, byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=config.vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(read_texts(config), trainer)
    return hash_of(json.loads(tokenizer.to_str())["model"]["merges"])


def train_rustbpe(config: ChildConfig) -> str:
    try:
        import rustbpe
    except ImportError as error:
        raise missing_extra("rustbpe", "bench") from error
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(read_texts(config), config.vocab_size - 1, pattern=PATTERNS[config.pattern])
    return hash_of(tokenizer.vocab_size)


TRAINERS: dict[str, Callable[[ChildConfig], str]] = {
    "ours, tie_break=ids": lambda config: train_ours(config, "ids"),
    "ours, tie_break=bytes": lambda config: train_ours(config, "bytes"),
    "tokenizers": train_tokenizers,
    "rustbpe": train_rustbpe,
}


def load_ours(directory: str) -> Callable[[list[str]], list[list[int]]]:
    return Tokenizer.load(directory).encode_batch


def load_tokenizers(directory: str) -> Callable[[list[str]], list[list[int]]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
    tokenizer.encode_special_tokens = True
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def load_tiktoken(directory: str) -> Callable[[list[str]], list[list[int]]]:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ours = Tokenizer.load(directory)
    ranks = load_tiktoken_bpe(f"{directory}/ranks.tiktoken")
    encoding = tiktoken.Encoding(
        "bench", pat_str=ours.splitter.pattern, mergeable_ranks=ranks, special_tokens=ours.special_tokens
    )
    return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=1)


ENCODERS = {"ours": load_ours, "tokenizers": load_tokenizers, "tiktoken": load_tiktoken}


def measure_training(config: ChildConfig) -> dict[str, Any]:
    start, cpu_start = time.perf_counter(), time.process_time()
    merges = TRAINERS[config.engine](config)
    return {"time_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu_start, "merges": merges}


def measure_encoding(config: ChildConfig) -> dict[str, Any]:
    texts = list(read_texts(config))
    size = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    encode = ENCODERS[config.engine](config.directory)
    times = []  # of this process on the core: what a clock would show on an idle machine
    for _ in range(1 + WARM_ROUNDS):
        start = time.process_time()
        ids = encode(texts)
        times.append(time.process_time() - start)
    warm = sorted(times[1:])[WARM_ROUNDS // 2]
    return {"cold_mb_s": size / times[0], "warm_mb_s": size / warm, "ids": hash_of(ids), "tokens": sum(map(len, ids))}


def measure_hard_texts(config: ChildConfig) -> dict[str, Any]:
    encode = ENCODERS[config.engine](config.directory)
    letters = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=100_000))
    found = {}
    for name, text in (("spaces_1e6_s", " " * 1_000_000), ("letters_1e5_s", letters)):
        start = time.process_time()
        encode([text])
        found[name] = time.process_time() - start
    return found


TASKS = {"train": measure_training, "encode": measure_encoding, "hard": measure_hard_texts}


def main() -> None:
    config = load_config(ChildConfig, OmegaConf.from_dotlist(sys.argv[1:]))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    Path(config.directory).mkdir(parents=True, exist_ok=True)
    result = TASKS[config.task](config)
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


if __name__ == "__main__":
    main()
