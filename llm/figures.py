"""Every figure of the docs from run directories, in one command, each as png and pdf.

    python -m llm.figures run=runs/figures output=docs/images
    python -m llm.figures run=runs/x 'only=[training_curves,attention_heads]' output=/tmp/images

docs/evaluation.md says how the runs were made. A figure whose runs or tokens are not there is left out, and the end
says which and why; named in `only`, it is an error. figures.json beside them holds for each the numbers and
where they are from.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import yaml
from matplotlib.figure import Figure
from omegaconf import DictConfig

from configs.errors import UserError, check_choice
from configs.loader import CONFIG_DIR, load_config, run_script, start_script
from configs.run_dir import read_json, write_json_atomic
from configs.version import git_commit
from llm.args import ModelConfig
from llm.engine import Engine, EngineConfig, RequestParams
from llm.evaluation_attention import attention_maps
from llm.evaluation_context import Targets, losses_by_context
from llm.evaluation_windows import ScoreConfig, TextScorer, sum_by_source
from llm.figures_inside import draw_attention, draw_embeddings
from llm.figures_material import FiguresConfig, Material
from llm.figures_positions import draw_context, draw_rope
from llm.figures_scaling import draw_scaling
from llm.figures_standing import STANDING
from llm.figures_style import save
from llm.figures_text import draw_bits, draw_sample, sample_tokens, xz_bits_per_byte
from llm.figures_training import draw_cache, draw_corpus, draw_training
from llm.sampling import SamplingConfig
from llm.scaling_laws_fit import fit
from llm.scaling_laws_points import expand_runs, read_points

Drawn = tuple[Figure, dict[str, Any]]  # a figure and the numbers in it


def training_curves(material: Material) -> Drawn:
    last = {name: material.run.column(name)[1][-1].item() for name in ("val_loss", "val_bits_per_byte")}
    return draw_training(material.run), last


def corpus_composition(material: Material) -> Drawn:
    metas = material.metas
    numbers = {name: {"bytes": m.utf8_bytes("train"), "tokens": m.tokens("train")} for name, m in metas.items()}
    return draw_corpus(metas), numbers


def kv_cache(material: Material) -> Drawn:
    shapes = {}
    for name in material.config.shapes:
        path = Path(CONFIG_DIR) / "model" / f"{name}.yaml"
        if not path.exists():
            raise UserError(f"shapes: {name} has no file {path}; name files of configs/model")
        shapes[name] = load_config(ModelConfig, yaml.safe_load(path.read_text(encoding="utf-8")))
    twins = material.twins()
    numbers = {twin.run.name: {"cache_bytes_per_token": twin.cache_bytes, "num_kv_heads": twin.model.num_kv_heads,
                               "val_loss": twin.run.column("val_loss")[1][-1].item()} for twin in twins}  # fmt: skip
    return draw_cache(shapes, twins), numbers


def rope(material: Material) -> Drawn:
    return draw_rope(material.model_config, material.seq_len), {}


def bits_per_byte(material: Material) -> Drawn:
    loaded, seq_len = material.loaded, material.seq_len
    scorer = TextScorer(
        loaded.model, loaded.tokenizer, ScoreConfig(seq_len, seq_len // 2, 16, material.autocast_dtype), loaded.device
    )  # fmt: skip
    scores, xz = sum_by_source(scorer.score(material.texts)), xz_bits_per_byte(material.texts)
    numbers = {name: {"model": score.bits_per_byte, "xz": xz[name], "bytes": score.num_bytes}
               for name, score in scores.items()}  # fmt: skip
    return draw_bits(material.runs, scores, xz), numbers


def context_utilisation(material: Material) -> Drawn:
    loaded, config, seq_len = material.loaded, material.config, material.seq_len
    eot = loaded.tokenizer.eot_id
    rows = [np.array([eot, *loaded.tokenizer.encode(text.text)]) for text in material.texts]
    targets = Targets.draw(rows, seq_len, config.context_targets, config.seed)
    by_context = losses_by_context(loaded.model, targets, 64, material.autocast_dtype)
    longest = loaded.model.config.max_seq_len
    beyond = material.loss_by_position(longest) if longest > seq_len else []
    figure = draw_context(material.loss_by_position(seq_len), beyond, seq_len, by_context)
    return figure, {"by_context": [asdict(entry) for entry in by_context], "beyond": beyond}


def attention_heads(material: Material) -> Drawn:
    loaded = material.loaded
    ids = [loaded.tokenizer.eot_id, *loaded.tokenizer.encode(material.config.text)]
    maps = attention_maps(loaded.model, torch.tensor([ids], device=loaded.device))[0]  # (L, H, T, T)
    pieces = [loaded.tokenizer.decode([i]) for i in ids]
    return draw_attention(maps, pieces, list(range(len(maps)))), {"text": material.config.text}


def embedding_map(material: Material) -> Drawn:
    tokenizer = material.loaded.tokenizer
    table = material.loaded.model.embedding.weight.detach()[: tokenizer.vocab_size]
    return draw_embeddings(table, tokenizer), {}


def confidence_sample(material: Material) -> Drawn:
    config, loaded = material.config, material.loaded
    engine = Engine(
        loaded.model, EngineConfig(max_running=1, num_ids=loaded.tokenizer.vocab_size, fuse=False), loaded.tokenizer
    )  # fmt: skip
    sampling = SamplingConfig(temperature=config.temperature, seed=config.seed)
    params = RequestParams(sampling, config.new_tokens, stop_ids=(loaded.tokenizer.eot_id,), top_log_probs=3)
    tokens = sample_tokens(engine, loaded.tokenizer, config.prompt, params)
    title = f"{material.run.name}, temperature {config.temperature}: the prompt is bold, each token on its probability"
    return draw_sample(config.prompt, tokens, title), {"text": config.prompt + "".join(t.text for t in tokens)}


def scaling_laws(material: Material) -> Drawn:
    config = material.config
    found = fit(read_points(expand_runs(config.scaling), config.scaling_min_tokens))
    return draw_scaling(found), {"law": asdict(found.law), "points": len(found.points)}


FIGURES: dict[str, Callable[[Material], Drawn]] = {
    figure.__name__: figure
    for figure in (
        training_curves, corpus_composition, kv_cache, rope, bits_per_byte, context_utilisation, attention_heads,
        embedding_map, confidence_sample, scaling_laws,
    )
}  # fmt: skip


def draw(name: str, material: Material, stem: Path) -> tuple[list[Path], dict[str, Any]]:
    """Write one figure; its files and the numbers in it."""
    if name in STANDING:
        return STANDING[name](stem), {}
    figure, numbers = FIGURES[name](material)
    return save(figure, stem), numbers


def settings_of(name: str, config: FiguresConfig) -> dict[str, Any]:
    """What of the config a reader needs to draw a figure of runs again; one that stands alone needs nothing."""
    left = ("run", "output", "only", "device")
    return {} if name in STANDING else {key: value for key, value in asdict(config).items() if key not in left}


def draw_all(config: FiguresConfig) -> dict[str, str]:
    """Draw and write; returns the names of figures that were left out, each with the reason."""
    for name in config.only:
        check_choice("only", name, (*FIGURES, *STANDING))
    material, left_out = Material(config), {}
    path = Path(config.output) / "figures.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in config.only or (*FIGURES, *STANDING):
        try:
            written, numbers = draw(name, material, path.with_name(name))
        except UserError as error:
            if config.only:
                raise
            left_out[name] = str(error)
            continue
        print(*written, flush=True)
        known = read_json(path) if path.exists() else {}
        source = {"run": config.run, "commit": git_commit(), "settings": settings_of(name, config)}
        write_json_atomic(path, known | {name: source | {"numbers": numbers}})
    for name, reason in left_out.items():
        print(f"left out {name}: {reason}")
    return left_out


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="figures")
def main(config: DictConfig) -> None:
    run_script(draw_all, FiguresConfig, config)


if __name__ == "__main__":
    start_script(main, FiguresConfig, "figures")
