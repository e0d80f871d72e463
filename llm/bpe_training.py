"""Script: train a byte-level BPE tokenizer on a corpus of documents.

    python -m llm.bpe_training corpus=data/mine/corpus vocab_size=8192 output=data/mine/tokenizer

Reads the corpus once as a stream, counts its pieces (num_processes workers) and learns the merges on one core. The
three files are written at the end, tokenizer.json last; a killed run leaves what was there before and is run again.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from configs.errors import check_choice
from configs.loader import CONFIG_DIR, run_script, start_script
from data_processing.document import expand_paths, read_documents
from llm.bpe_tokenizer import Tokenizer
from llm.bpe_tokenizer_files import END_OF_TEXT
from llm.bpe_training_learn import BpeSettings, train_tokenizer


@dataclass
class BpeTrainingConfig:
    """configs/bpe_training.yaml."""

    corpus: str
    output: str
    vocab_size: int = 8192
    pattern: str = "gpt2"
    tie_break: str = "bytes"
    special_tokens: list[str] = field(default_factory=lambda: [END_OF_TEXT])
    num_processes: int = 1
    errors: str = "strict"

    def __post_init__(self) -> None:
        check_choice("errors", self.errors, ("strict", "replace"))
        self.settings()

    def settings(self) -> BpeSettings:
        return BpeSettings(
            self.vocab_size, self.pattern, self.tie_break, tuple(self.special_tokens), self.num_processes
        )


def read_texts(config: BpeTrainingConfig, counts: Counter, progress: Progress) -> Iterator[str]:
    """The corpus's texts, counted into counts["documents"] and ["characters"]."""
    task = progress.add_task("counting pieces", total=None, note="")
    for document in read_documents(expand_paths(config.corpus), config.errors, counts):
        counts["documents"] += 1
        counts["characters"] += len(document.text)
        if counts["documents"] % 64 == 0:
            progress.update(task, note=f"{counts['characters'] / 1e6:.1f} M characters")
        yield document.text
    progress.update(task, total=1, completed=1, note=f"{counts['characters'] / 1e6:.1f} M characters")


def body(config: BpeTrainingConfig) -> Tokenizer:
    """Train, save and report; returns the tokenizer."""
    start, counts = time.perf_counter(), Counter()
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
    with Progress(*columns) as progress:
        texts = read_texts(config, counts, progress)
        task = progress.add_task("merging pairs", total=config.vocab_size, note="")

        def show(size: int) -> None:
            if size % 100 == 0:
                progress.update(task, completed=size, note=f"{size} tokens")

        tokenizer = train_tokenizer(texts, config.settings(), show)
        progress.update(task, completed=config.vocab_size, note=f"{tokenizer.vocab_size} tokens")
    tokenizer.save(config.output)
    if tokenizer.vocab_size < config.vocab_size:
        print(
            f"warning: vocab_size={config.vocab_size} was not reached: the pairs ran out at {tokenizer.vocab_size}"
            " tokens; use more text or a smaller vocab_size"
        )
    if counts["replaced_characters"]:
        print(f"warning: {counts['replaced_characters']} characters were not UTF-8 and became U+FFFD")
    print(
        f"{Path(config.output) / 'tokenizer.json'}: {tokenizer.vocab_size} tokens from {counts['documents']} documents,"
        f" {counts['characters'] / 1e6:.1f} M characters, {time.perf_counter() - start:.1f} s"
    )
    return tokenizer


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="bpe_training")
def main(config: DictConfig) -> None:
    run_script(body, BpeTrainingConfig, config)


if __name__ == "__main__":
    start_script(main, BpeTrainingConfig, "bpe_training")
