"""Compare two checkpoints by bits per byte of the same text, source by source, with paired bootstrap intervals.

    python -m llm.evaluating_compare first=runs/a second=runs/b text=data/x/held_out
    python -m llm.evaluating_compare first=runs/a/checkpoints/step_00000500 second=runs/a text='"books/*.txt"'

Tokenizers and windows may differ. The table is printed, and written as JSON to `output` where it is given.
"""

from dataclasses import asdict, dataclass
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.run_dir import write_json_atomic
from configs.version import git_commit
from llm.evaluation_compare import BootstrapConfig, Comparison, compare, pair_units
from llm.evaluation_load import load_named
from llm.evaluation_text import Text, read_texts
from llm.evaluation_windows import ScoreConfig, ScoredText, TextScorer
from parallel.mesh import choose_device


@dataclass
class CompareConfig:
    """Everything that `python -m llm.evaluating_compare` takes."""

    first: str = "???"  # a run directory (its newest checkpoint) or a checkpoint's directory
    second: str = "???"
    text: str = "???"  # text files or JSONL: a file, a directory or a quoted glob
    text_key: str = "text"  # of JSONL lines
    max_bytes: int | None = None  # of each source; null: all
    seq_len: int | None = None  # null: each model's own, as in training
    stride: int | None = None  # null: half of seq_len
    batch_size: int = 16
    samples: int = 10_000  # draws of the bootstrap
    confidence: float = 0.95
    unit: str = "auto"  # what is drawn: document, block (4,096 bytes), or documents where a source has 20 of them
    seed: int = 1337
    device: str = "auto"
    dtype: str = "auto"
    output: str | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("batch_size", "max_bytes", "stride", "seq_len")}
        check_positive(**{name: value for name, value in given.items() if value is not None})
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        if self.first == self.second:
            raise UserError(f"first and second are both {self.first}; name two checkpoints")
        self.bootstrap()

    def bootstrap(self) -> BootstrapConfig:
        return BootstrapConfig(self.samples, self.confidence, self.unit, self.seed)


def run_comparison(config: CompareConfig) -> list[Comparison]:
    """Score the text with one model after the other, and print who predicts which source better."""
    texts = list(read_texts(config.text, config.text_key, config.max_bytes))
    scores = [score(config, where, texts) for where in (config.first, config.second)]
    lines = compare(pair_units(*scores, config.unit), config.bootstrap())
    print_comparison(config, lines)
    if config.output is not None:
        write_json_atomic(config.output, document(config, lines))
    return lines


def score(config: CompareConfig, where: str, texts: list[Text]) -> list[ScoredText]:
    """All texts' losses under one checkpoint; its model is let go before the next one is loaded."""
    loaded = load_named(where, choose_device(config.device, local_rank=0))
    seq_len = loaded.check_seq_len(config.seq_len)
    stride = config.stride or max(1, seq_len // 2)
    scoring = ScoreConfig(seq_len, stride, config.batch_size, loaded.autocast_dtype(config.dtype))
    scorer = TextScorer(loaded.model, loaded.tokenizer, scoring, loaded.device)
    return list(scorer.score(track(texts, description=f"{where}")))


def document(config: CompareConfig, lines: list[Comparison]) -> dict[str, Any]:
    rows = [asdict(line) | {"better": line.better} for line in lines]
    return {"commit": git_commit(), "config": asdict(config), "sources": rows}


def print_comparison(config: CompareConfig, lines: list[Comparison]) -> None:
    title = f"bits per byte: first {config.first}, second {config.second}"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1))
    table.add_column("source", no_wrap=True)
    for name in ("first", "second", "difference", f"{config.confidence:.0%} interval", "units", "better"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        interval = "too few units" if line.low is None else f"{line.low:+.3f} to {line.high:+.3f}"
        kind = {"document": "docs", "block": "blocks"}.get(line.unit, "both")
        table.add_row(line.source, f"{line.first:.4f}", f"{line.second:.4f}", f"{line.difference:+.4f}", interval,
                      f"{line.num_units:,} {kind}", line.better)  # fmt: skip
    Console().print(table)


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="evaluating_compare")
def main(config: DictConfig) -> None:
    run_script(run_comparison, CompareConfig, config)


if __name__ == "__main__":
    start_script(main, CompareConfig, "evaluating_compare")
