"""Look inside a checkpoint: neighbours in its embedding table, its principal components, and what each head looks at.

    python -m llm.evaluating_inside run=runs/x 'words=[" the"," one"," function"]' text="The cat sat on the mat."

Printed, and written to the run's inside/ (or `output`): inside.json, the embedding map and the attention maps of every
head as png and pdf.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from configs.errors import UserError, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.report_samples import printable
from configs.run_dir import write_json_atomic
from llm.evaluation_attention import HeadScores, attention_maps, score_heads
from llm.evaluation_embeddings import nearest, principal_components
from llm.evaluation_load import Loaded, load_for_evaluation
from llm.figures_inside import draw_attention, draw_embeddings
from llm.figures_style import save
from parallel.mesh import choose_device

TEXT = "The function returns the first of the values that are given, or the value that it was given first."
WORDS = [" the", " one", " is", " not", " return", ".", "ing"]


@dataclass
class InsideConfig:
    """Everything that `python -m llm.evaluating_inside` takes."""

    run: str | None = None  # a run directory: its newest whole checkpoint
    checkpoint: str | None = None  # or one checkpoint's directory
    text: str = TEXT  # whose attention is drawn
    words: list[str] = field(default_factory=lambda: list(WORDS))  # whose neighbours are listed; one token each
    neighbours: int = 8
    layers: list[int] = field(default_factory=list)  # drawn; empty: all, or eight spread over more
    device: str = "auto"
    output: str | None = None

    def __post_init__(self) -> None:
        check_positive(neighbours=self.neighbours)
        if not self.text:
            raise UserError("text is empty; give a sentence whose attention is to be drawn")


def look_inside(config: InsideConfig) -> dict[str, Any]:
    """Print and record; returns what inside.json holds."""
    loaded = load_for_evaluation(config.run, config.checkpoint, choose_device(config.device, local_rank=0))
    tokenizer, model = loaded.tokenizer, loaded.model
    token_ids = encode_text(config.text, loaded)
    table = model.embedding.weight.detach()[: tokenizer.vocab_size]  # (V, C), without padding ids
    words = {word: tokenizer.encode(word) for word in config.words}
    near = nearest(table, [ids[0] for ids in words.values()], config.neighbours) if words else []
    components = principal_components(table, 2)
    scores = score_heads(model, token_ids, tokenizer.vocab_size)
    print_neighbours(dict(zip(words, near, strict=True)), loaded)
    print_heads(scores)
    found = {
        "checkpoint": loaded.path.name,
        "neighbours": {
            word: [[tokenizer.decode([i]), round(cosine, 4)] for i, cosine in row]
            for word, row in zip(words, near, strict=True)
        },
        "variance_shares": components.shares,
        "heads": {name: values.tolist() for name, values in vars(scores).items()},
    }
    directory = output_directory(config, loaded)
    if directory is not None:
        write_json_atomic(directory / "inside.json", found)
        save(draw_embeddings(table, tokenizer), directory / "embedding_map")
        layers = chosen_layers(config.layers, model.config.num_layers)
        maps = attention_maps(model, token_ids)[0, layers]  # (layers, H, T, T)
        pieces = [tokenizer.decode([i]) for i in token_ids[0].tolist()]
        save(draw_attention(maps, pieces, layers), directory / "attention_heads")
        print(f"written: {directory}")
    return found


def encode_text(text: str, loaded: Loaded) -> torch.Tensor:
    """The text's tokens after end-of-text, (1, T); UserError when they are too many or too few."""
    ids = [loaded.tokenizer.eot_id, *loaded.tokenizer.encode(text)]
    longest = loaded.model.config.max_seq_len
    if not 3 <= len(ids) <= longest:
        raise UserError(f"text has {len(ids) - 1} tokens; it must have 2 to {longest - 1}")
    return torch.tensor([ids], device=loaded.device)


def chosen_layers(layers: list[int], num_layers: int) -> list[int]:
    """The layers to draw; UserError for one that is not there."""
    wrong = [layer for layer in layers if not 0 <= layer < num_layers]
    if wrong:
        raise UserError(f"layers={layers}: layer {wrong[0]} is not in 0..{num_layers - 1}")
    count = min(num_layers, 8)
    return layers or [round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)]


def output_directory(config: InsideConfig, loaded: Loaded) -> Path | None:
    if config.output is not None:
        return Path(config.output)
    return loaded.run_dir / "inside" if loaded.run_dir is not None else None


def print_neighbours(rows: dict[str, list[tuple[int, float]]], loaded: Loaded) -> None:
    table = Table(title="nearest tokens by cosine", title_justify="left")
    table.add_column("token")
    table.add_column("neighbours")
    for word, row in rows.items():
        near = "  ".join(f"{printable(repr(loaded.tokenizer.decode([i])))} {cosine:.2f}" for i, cosine in row)
        pieces = loaded.tokenizer.encode(word)
        note = "" if len(pieces) == 1 else f" (first of {len(pieces)} tokens)"
        table.add_row(printable(repr(word)) + note, near)
    Console().print(table)


def print_heads(scores: HeadScores) -> None:
    table = Table(title="what each head looks at", title_justify="left")
    for name in ("layer.head", *vars(scores)):
        table.add_column(name, justify="right")
    L, H = scores.first.shape
    for layer in range(L):
        for head in range(H):
            numbers = [f"{values[layer, head].item():.2f}" for values in vars(scores).values()]
            table.add_row(f"{layer}.{head}", *numbers)
    Console().print(table)


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="evaluating_inside")
def main(config: DictConfig) -> None:
    run_script(look_inside, InsideConfig, config)


if __name__ == "__main__":
    start_script(main, InsideConfig, "evaluating_inside")
