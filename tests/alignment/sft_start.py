"""A base model of a few thousand parameters in a checkpoint, and a config that fine-tunes it in milliseconds a step."""

from dataclasses import asdict
from pathlib import Path

from alignment.dataset import DatasetConfig, load_problems
from alignment.r1_prompt import PromptConfig, completion_text, prompt_format
from alignment.sft_config import SftConfig
from configs.loader import compose_config
from data_processing.document import Document, write_documents
from llm import bpe_training
from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.checkpoint import save_checkpoint
from llm.checkpoint_pieces import held_pieces
from llm.optimizer import OptimizerConfig, build_optimizer
from llm.transformer import Transformer
from llm.transformer_init import initialise


def write_base_run(root: Path) -> Path:
    """A run directory with one checkpoint of a fresh model, whose tokenizer knows the words of the problems."""
    problems = load_problems(DatasetConfig(level="one_digit_sums", size=300))
    documents = [Document(id=p.id, source="sums", text=f"User: {p.question} {p.solution}") for p in problems]
    write_documents(root / "corpus" / "documents_00000.jsonl", documents)
    bpe_training.body(bpe_training.BpeTrainingConfig(str(root / "corpus"), str(root / "tokenizer"), vocab_size=320))
    tokenizer = Tokenizer.load(root / "tokenizer")
    shape = ModelConfig(d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48, max_seq_len=128)
    model = Transformer(shape.with_vocab_of(tokenizer.vocab_size))
    initialise(model, seed=0)
    pieces = held_pieces(model, build_optimizer(model.named_parameters(), OptimizerConfig())).pieces()
    state = {"config": {"model": asdict(model.config)}}
    save_checkpoint(root / "base" / "checkpoints", 1, pieces, state, root / "tokenizer")
    # What the problems' texts are in this tokenizer's tokens; a row of the config below holds several.
    fmt = prompt_format(PromptConfig("r1_short"), tokenizer)
    assert max(len(tokenizer.encode(completion_text(problem, fmt))) for problem in problems) < 64
    return root / "base"


def sft_overrides(base: Path, runs_dir: Path) -> list[str]:
    data = "{source: arithmetic, level: one_digit_sums, split: %s, size: %d, seed: 1}"
    return [
        "name=sft", f"runs_dir={runs_dir}", f"init_from={base}", "device=cpu", "max_steps=6", "micro_batch_size=2",
        "global_batch_tokens=512", "data.seq_len=128", "log_every=1", "validate_every=3", "optimizer.lr=0.01",
        "schedule.warmup_steps=2", f"train_data=[{data % ('train', 40)}]", f"held_out_data={data % ('held_out', 6)}",
        "prompt.template=r1_short", "generation.max_new_tokens=8", "pack_window=16",
    ]  # fmt: skip


def sft_config(base: Path, runs_dir: Path, *changes: str) -> SftConfig:
    return compose_config(SftConfig, "sft", [*sft_overrides(base, runs_dir), *changes])
