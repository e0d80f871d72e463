"""Evaluate a trained model: validation loss, perplexity, bits per byte, and the loss by position in the window.

    python -m llm.evaluating run=runs/quickstart
    python -m llm.evaluating checkpoint=runs/quickstart/checkpoints/step_00001000 tokens=data/other/tokens

Bits per byte do not depend on the tokenizer, so models with different vocabularies can be compared by them. The result
is printed and written to the run's evaluation.json.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script
from configs.run_dir import write_json_atomic
from llm.data_loader import ValidationSet, open_sources
from llm.evaluation import Evaluation, evaluate
from llm.model_loading import choose_dtype, load_model, resolve_checkpoint
from parallel.mesh import choose_device


@dataclass
class EvaluateConfig:
    """Everything that `python -m llm.evaluating` takes."""

    run: str | None = None  # a run directory: its newest whole checkpoint
    checkpoint: str | None = None  # or one checkpoint's directory
    tokens: str | None = None  # null: the validation split of the tokens that the model was trained on
    max_tokens: int | None = None  # null: all of the validation split
    batch_size: int = 16
    seq_len: int | None = None  # null: as in training
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size, max_tokens=self.max_tokens or 1, seq_len=self.seq_len or 1)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))


def run_evaluation(config: EvaluateConfig) -> Evaluation:
    """Evaluate one checkpoint, print the figures, and write evaluation.json into its run."""
    path = resolve_checkpoint(config.run, config.checkpoint)
    device = choose_device(config.device, local_rank=0)
    dtype = choose_dtype(config.dtype, device)
    model, tokenizer, state = load_model(path, device)  # float32 weights, as in training's own validation
    data = state["config"]["data"]
    seq_len = config.seq_len or data["seq_len"]
    if seq_len > model.config.max_seq_len:
        raise UserError(f"seq_len={seq_len} must not exceed the model's max_seq_len={model.config.max_seq_len}")
    sources = list(open_sources(config.tokens or data["tokens"], "val", tokenizer.sha256).values())
    num_tokens = sum(source.num_tokens for source in sources)
    validation = ValidationSet(sources, seq_len, config.max_tokens or num_tokens + seq_len, data["document_masking"])
    steps = -(-len(validation.windows) // config.batch_size)
    batches = track(validation.batches(config.batch_size), description="evaluating", total=steps)
    autocast_dtype = dtype if dtype == torch.bfloat16 else None
    result = evaluate(model, batches, seq_len, validation.bytes_per_token, device, autocast_dtype)
    print_evaluation(result, path)
    run_dir = Path(config.run) if config.run is not None else path.resolve().parent.parent
    if (run_dir / "config.yaml").exists():
        write_json_atomic(run_dir / "evaluation.json", {"checkpoint": path.name, "seq_len": seq_len} | asdict(result))
    return result


def print_evaluation(result: Evaluation, path: Path) -> None:
    console = Console()
    table = Table(title="loss by position in the window", title_justify="left")
    for name in ("positions", "loss (nats)", "tokens"):
        table.add_column(name, justify="right")
    for bucket in result.loss_by_position:
        span = f"{bucket['first']}-{bucket['last']}"
        table.add_row(span, f"{bucket['loss']:.4f}", f"{bucket['num_tokens']:,}")
    console.print(table)
    console.print(
        f"{path.name}: loss {result.loss:.4f} nats, perplexity {result.perplexity:.2f}, "
        f"bits per byte {result.bits_per_byte:.4f}, over {result.num_tokens:,} tokens",
        highlight=False,
        soft_wrap=True,
    )


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="evaluating")
def main(config: DictConfig) -> None:
    run_script(run_evaluation, EvaluateConfig, config)


if __name__ == "__main__":
    main()
