"""What fine-tuning learns from: the checkpoint's shape and tokenizer, and problems as packed sequences."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from alignment.dataset import check_disjoint, load_problems
from alignment.packing_loader import PackedLoader, PackedValidation, PackingConfig
from alignment.problem import Problem
from alignment.r1_prompt import Example, PromptFormat, completion_text, encode_examples, load_prompt_format
from alignment.sft_config import SftConfig
from configs.errors import UserError
from configs.loader import load_config
from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.training_setup import weights_path
from parallel.mesh import Mesh
from parallel.sharded_checkpoint import open_checkpoint


@dataclass
class SftData:
    """Examples and problems of a run; `dropped`: training problems whose sequence exceeds data.seq_len."""

    tokenizer: Tokenizer
    fmt: PromptFormat
    train: list[Example]
    held_out: list[Example]
    problems: list[Problem]  # held out, to be answered
    dropped: int
    bytes_per_token: float  # of held-out responses


def with_checkpoint(config: SftConfig) -> SftConfig:
    """The config with the model's shape and the tokenizer of init_from filled in, where they are not given."""
    model, data = config.model, config.data
    if config.init_from is not None:
        path = weights_path(config.init_from)
        if model is None:
            model = load_config(ModelConfig, open_checkpoint(path)[1]["config"]["model"])
        if not data.tokenizer:
            data = replace(data, tokenizer=str(path))
    if config.attention is not None:
        model = replace(model, attention=config.attention)
    return replace(config, model=model, data=data)


def load_sft_data(config: SftConfig) -> SftData:
    """Read and encode everything that a resolved config names; UserError for what cannot be trained on."""
    tokenizer = Tokenizer.load(config.data.tokenizer)
    fmt = load_prompt_format(config.prompt, tokenizer, config.data.tokenizer)
    problems = [problem for data in config.train_data for problem in load_problems(data)]
    held_out = load_problems(config.held_out_data)
    check_disjoint(problems, held_out)
    # A row of T places holds T + 1 tokens: the last one is a target only.
    train, dropped = encode_examples(problems, fmt, tokenizer, config.data.seq_len + 1)
    validated, _ = encode_examples(held_out, fmt, tokenizer, config.data.seq_len + 1)
    text_bytes = sum(len(completion_text(problem, fmt).encode()) for problem in held_out)
    tokens = sum(len(tokenizer.encode(completion_text(problem, fmt))) + 1 for problem in held_out)
    return SftData(tokenizer, fmt, train, validated, held_out, dropped, text_bytes / tokens)


def packing_of(config: SftConfig, pin_memory: bool = False) -> PackingConfig:
    rows = config.global_batch_tokens // config.data.seq_len
    return PackingConfig(config.data.seq_len, rows, config.seed, config.packing, config.pack_window, pin_memory)


def with_steps(config: SftConfig, data: SftData) -> SftConfig:
    """The config whose max_steps are what `epochs` asks for."""
    if config.epochs is None:
        return config
    packing = packing_of(config)
    if packing.num_sequences < 1:
        raise UserError(
            f"global_batch_tokens={config.global_batch_tokens} must hold a row of data.seq_len={config.data.seq_len}"
        )
    rows = PackedLoader(data.train, packing).rows_per_epoch()
    return replace(config, max_steps=max(1, ceil(config.epochs * rows / packing.num_sequences)))


def open_sft_data(
    data: SftData, config: SftConfig, tokenizer: Tokenizer, mesh: Mesh
) -> tuple[PackedLoader, PackedValidation]:
    """What llm.training_setup.Task.open_data asks for; says on rank 0 what packing makes of the examples."""
    packing = packing_of(config, mesh.device.type == "cuda")
    loader = PackedLoader(data.train, packing)
    if mesh.is_main:
        facts = packing_facts(data, loader)
        left_out = f", {data.dropped} left out that exceed data.seq_len={packing.seq_len}" if data.dropped else ""
        print(
            f"{facts['examples']:,} examples in {facts['rows_per_epoch']:,} rows of {packing.seq_len} tokens, "
            f"{100 * facts['filled']:.1f}% of them filled (packing={packing.packing}){left_out}"
        )
    return loader, PackedValidation(data.held_out, packing, data.bytes_per_token)


def packing_facts(data: SftData, loader: PackedLoader) -> dict[str, Any]:
    """What an epoch is, for the terminal and report.json."""
    return {
        "examples": len(data.train),
        "examples_left_out": data.dropped,
        "rows_per_epoch": loader.rows_per_epoch(),
        "filled": loader.density(),
    }
