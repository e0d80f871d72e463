"""A policy that can already do a little: a tiny model, fine-tuned in seconds so that some of its answers are right."""

import atexit
import random
import shutil
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from torch.nn import functional as F

from alignment.dataset import DatasetConfig, load_problems
from alignment.r1_prompt import PromptConfig, encode_examples, prompt_format
from alignment.train_rl_config import TrainRlConfig
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

MAX_TOKENS = 64
SFT_STEPS = 240


@cache
def rl_start() -> Path:
    """The directory of a run with one checkpoint, made once a process."""
    root = Path(tempfile.mkdtemp(prefix="mew_rl_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    problems = load_problems(DatasetConfig(level="one_digit_sums", split="train", size=400))
    texts = [f"User: {p.question}\nAssistant: <think> {p.solution} </think> <answer> {p.answer}" for p in problems]
    documents = [Document(id=str(i), source="sums", text=text) for i, text in enumerate(texts)]
    write_documents(root / "corpus" / "documents_00000.jsonl", documents)
    bpe_training.body(bpe_training.BpeTrainingConfig(str(root / "corpus"), str(root / "tokenizer"), vocab_size=420))
    tokenizer = Tokenizer.load(root / "tokenizer")
    model = small_model(tokenizer)
    fine_tune(model, tokenizer, problems)
    state = {"config": {"model": asdict(model.config)}}
    pieces = held_pieces(model, build_optimizer(model.named_parameters(), OptimizerConfig())).pieces()
    save_checkpoint(root / "start" / "checkpoints", 1, pieces, state, root / "tokenizer")
    return root / "start"


def small_model(tokenizer: Tokenizer, seed: int = 0) -> Transformer:
    shape = dict(d_model=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, d_ff=96, max_seq_len=MAX_TOKENS)
    model = Transformer(ModelConfig(**shape).with_vocab_of(tokenizer.vocab_size))
    initialise(model, seed)
    return model


def fine_tune(model: Transformer, tokenizer: Tokenizer, problems: list) -> None:
    """A few steps on worked solutions, in batches padded on the right."""
    fmt = prompt_format(PromptConfig("r1_short"), tokenizer)
    examples, _ = encode_examples(problems, fmt, tokenizer, MAX_TOKENS)
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=1e-2), random.Random(0)
    for _ in range(SFT_STEPS):
        rows = [torch.tensor(one.token_ids) for one in rng.sample(examples, 16)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)  # (B, T)
        logits = model(ids[:, :-1].clamp(min=0))
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()


def rl_config(runs_dir: Path, *overrides: str, start: str | None = None) -> TrainRlConfig:
    """train_rl from that start (or another process's), small enough for a test."""
    data = "{source: arithmetic, level: one_digit_sums, split: %s, size: %d, seed: 1}"
    return compose_config(
        TrainRlConfig,
        "train_rl",
        [
            "name=rl", f"runs_dir={runs_dir}", f"init_from={start or rl_start()}", "device=cpu", "num_batches=3",
            "prompts_per_batch=4", "group_size=4", "max_new_tokens=24", "optimizer.lr=0.002", "evaluate_every=100",
            f"train_data=[{data % ('train', 40)}]", f"held_out_data={data % ('held_out', 8)}",
            "prompt.template=r1_short", *overrides,
        ],
    )  # fmt: skip
