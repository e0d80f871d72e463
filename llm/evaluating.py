"""Evaluate a trained model: loss, perplexity, bits per byte, and the loss by position in the window.

    python -m llm.evaluating run=runs/quickstart
    python -m llm.evaluating checkpoint=runs/quickstart/checkpoints/step_00001000 tokens=data/other/tokens
    python -m llm.evaluating run=runs/quickstart text='"books/*.txt"' stride=64

Without `text` it reads token files, by default the validation split that training saw. With it any text files or JSONL
are scored by a sliding window, exactly to the byte and by source. Bits per byte do not depend on the tokenizer, so
models with different vocabularies can be compared by them (llm/evaluating_compare.py). The result is printed and
written to the run's evaluation.json or evaluation_text.json, or to `output`.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.run_dir import write_json_atomic
from llm.data_loader import ValidationSet, open_sources
from llm.evaluation import Evaluation, evaluate
from llm.evaluation_load import Loaded, load_for_evaluation
from llm.evaluation_text import read_texts
from llm.evaluation_windows import ScoreConfig, SourceScore, TextScorer, add, sum_by_source
from parallel.mesh import choose_device


@dataclass
class EvaluateConfig:
    """Everything that `python -m llm.evaluating` takes."""

    run: str | None = None  # a run directory: its newest whole checkpoint
    checkpoint: str | None = None  # or one checkpoint's directory
    tokens: str | None = None  # null: the validation split of the tokens that the model was trained on
    max_tokens: int | None = None  # null: all of the validation split
    text: str | None = None  # in place of tokens: text files or JSONL, as a file, a directory or a quoted glob
    text_key: str = "text"  # of JSONL lines
    max_bytes: int | None = None  # of each source of `text`; null: all
    stride: int | None = None  # tokens from one window to the next; null: seq_len / 2
    batch_size: int = 16
    seq_len: int | None = None  # null: as in training
    device: str = "auto"
    dtype: str = "auto"
    output: str | None = None  # null: evaluation.json or evaluation_text.json of the run

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("batch_size", "max_tokens", "max_bytes", "stride", "seq_len")}
        check_positive(**{name: value for name, value in given.items() if value is not None})
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        if self.text is not None and self.tokens is not None:
            raise UserError("text and tokens exclude each other; give one of them")


@dataclass
class TextEvaluation:
    """What a text's evaluation found: all sources together, each of them, and PositionLoss fields."""

    total: SourceScore
    sources: list[SourceScore]
    loss_by_position: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        sources = [source.to_json() for source in self.sources]
        return self.total.to_json() | {"sources": sources, "loss_by_position": self.loss_by_position}


def run_evaluation(config: EvaluateConfig) -> Evaluation | TextEvaluation:
    """Evaluate one checkpoint, print the figures, and write them into its run."""
    loaded = load_for_evaluation(config.run, config.checkpoint, choose_device(config.device, local_rank=0))
    seq_len = loaded.check_seq_len(config.seq_len)
    run = evaluate_tokens if config.text is None else evaluate_text
    result = run(config, loaded, seq_len)
    name = "evaluation.json" if config.text is None else "evaluation_text.json"
    path = loaded.run_dir / name if loaded.run_dir is not None else None
    path = Path(config.output) if config.output is not None else path
    if path is not None:
        found = asdict(result) if isinstance(result, Evaluation) else result.to_json()
        write_json_atomic(path, {"checkpoint": loaded.path.name, "seq_len": seq_len} | found)
    return result


def evaluate_tokens(config: EvaluateConfig, loaded: Loaded, seq_len: int) -> Evaluation:
    """The validation split of token files, in the windows of training's own validation."""
    data = loaded.state["config"]["data"]
    sources = list(open_sources(config.tokens or data["tokens"], "val", loaded.tokenizer.sha256).values())
    num_tokens = sum(source.num_tokens for source in sources)
    validation = ValidationSet(sources, seq_len, config.max_tokens or num_tokens + seq_len, data["document_masking"])
    steps = -(-len(validation.windows) // config.batch_size)
    batches = track(validation.batches(config.batch_size), description="evaluating", total=steps)
    autocast_dtype = loaded.autocast_dtype(config.dtype)
    result = evaluate(loaded.model, batches, seq_len, validation.bytes_per_token, loaded.device, autocast_dtype)
    print_positions(result.loss_by_position)
    say(
        f"{loaded.path.name}: loss {result.loss:.4f} nats, perplexity {result.perplexity:.2f}, "
        f"bits per byte {result.bits_per_byte:.4f}, over {result.num_tokens:,} tokens"
    )
    return result


def evaluate_text(config: EvaluateConfig, loaded: Loaded, seq_len: int) -> TextEvaluation:
    """Text files or JSONL by a sliding window, source by source."""
    stride = config.stride or max(1, seq_len // 2)
    scoring = ScoreConfig(seq_len, stride, config.batch_size, loaded.autocast_dtype(config.dtype))
    scorer = TextScorer(loaded.model, loaded.tokenizer, scoring, loaded.device)
    texts = track(read_texts(config.text, config.text_key, config.max_bytes), description="evaluating")
    sources = list(sum_by_source(scorer.score(texts)).values())
    total = replace(sources[0], source="all")
    for source in sources[1:]:
        total = add(total, source)
    result = TextEvaluation(total, sources, scorer.sums.result(total.num_bytes / total.num_tokens).loss_by_position)
    print_positions(result.loss_by_position)
    print_sources([*sources, total])
    say(
        f"{loaded.path.name}: bits per byte {total.bits_per_byte:.4f} over {total.num_bytes:,} bytes "
        f"in {total.num_tokens:,} tokens, windows of {seq_len} every {stride}"
    )
    return result


def print_positions(loss_by_position: list[dict[str, Any]]) -> None:
    table = Table(title="loss by position in the window", title_justify="left")
    for name in ("positions", "loss (nats)", "tokens"):
        table.add_column(name, justify="right")
    for bucket in loss_by_position:
        span = f"{bucket['first']}-{bucket['last']}"
        table.add_row(span, f"{bucket['loss']:.4f}", f"{bucket['num_tokens']:,}")
    Console().print(table)


def print_sources(sources: Iterable[SourceScore]) -> None:
    table = Table(title="by source", title_justify="left")
    table.add_column("source")
    for name in ("documents", "bytes", "tokens", "perplexity", "bits per byte"):
        table.add_column(name, justify="right")
    for one in sources:
        counts = [f"{number:,}" for number in (one.documents, one.num_bytes, one.num_tokens)]
        table.add_row(one.source, *counts, f"{one.perplexity:.2f}", f"{one.bits_per_byte:.4f}")
    Console().print(table)


def say(line: str) -> None:
    Console().print(line, highlight=False, soft_wrap=True)


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="evaluating")
def main(config: DictConfig) -> None:
    run_script(run_evaluation, EvaluateConfig, config)


if __name__ == "__main__":
    start_script(main, EvaluateConfig, "evaluating")
