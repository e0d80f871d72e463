"""Rollouts through one interface: token ids in; ids, log-probs, kept mass and weight version of every token out.

Two engines answer it: ours (llm/engine, which has exactly these methods) and vLLM (alignment/rollout_vllm, an optional
extra that a run without it never imports). What an engine returns is checked here before anything is learned from it:
a stale weight or a missing log-prob would not stop training, only spoil it. log q of a token, the probability that it
was really drawn with, is log_prob - log(kept_mass): top-k, top-p and min-p leave only that share of the distribution.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from configs.errors import UserError, check_choice, check_positive
from llm.bpe_tokenizer import Tokenizer
from llm.engine import Engine, EngineConfig
from llm.engine_request import Completion, RequestParams
from llm.model_loading import choose_dtype
from llm.transformer import Transformer

ENGINES = ("ours", "vllm")


class RolloutEngine(Protocol):
    """What train_rl and evaluation ask of an engine; one process and one thread use it."""

    weight_version: int

    def generate(self, prompts: list[list[int]], params: list[RequestParams]) -> list[Completion]:
        """A completion for each prompt, in order. Equal (sampling.seed, index) draw alike in any batch."""

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights in place, by the names of Transformer.state_dict(); no prefix computed before is used."""

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; no request is running."""


@dataclass
class RolloutConfig:
    """Which engine writes completions, and what it may use."""

    engine: str = "ours"
    dtype: str = "auto"  # of the engine's own copy of the weights; auto: bfloat16 on a GPU, float32 on a CPU
    max_running: int = 256  # requests that the engine decodes at once
    batch_invariant: bool = False  # results that do not depend on the batch, at some cost
    cuda_graph: bool = True  # on a GPU
    memory_fraction: float = 0.3  # ours: of what is free on the GPU, for the cache; vllm: of the whole GPU, for all

    def __post_init__(self) -> None:
        check_choice("rollout.engine", self.engine, ENGINES)
        check_choice("rollout.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        check_positive(**{"rollout.max_running": self.max_running})
        if not 0.0 < self.memory_fraction < 1.0:
            raise UserError(f"rollout.memory_fraction={self.memory_fraction} must lie between 0 and 1; use 0.3")


def build_rollout_engine(
    config: RolloutConfig,
    source: Transformer,
    tokenizer: Tokenizer,
    device: torch.device,
    max_seq_len: int | None = None,
) -> RolloutEngine:
    """An engine with a copy of `source`'s weights as version 0; the trainer's own weights are never shared with it.

    `max_seq_len`: tokens of the longest prompt with its completion, for which the cache is made; None: the model's.
    A copy costs its bytes once and is what lets the engine go on with old weights while new ones are made.
    """
    if config.engine == "vllm":
        from alignment.rollout_vllm import VllmEngine

        return VllmEngine(source, tokenizer, config, max_seq_len)
    model = Transformer(source.config).to(device=device, dtype=choose_dtype(config.dtype, device)).eval()
    settings = EngineConfig(
        max_running=config.max_running,
        memory_fraction=config.memory_fraction,
        num_ids=tokenizer.vocab_size,
        max_seq_len=max_seq_len,
        batch_invariant=config.batch_invariant,
        cuda_graph=config.cuda_graph and device.type == "cuda",
    )
    engine = Engine(model, settings, tokenizer)
    engine.load_weights(source.state_dict(), version=0)
    return engine


def close_engine(engine: RolloutEngine) -> None:
    """End what an engine runs beside this process; ours runs nothing."""
    close = getattr(engine, "close", None)
    if close is not None:
        close()


def check_completions(completions: list[Completion], version: int, num_ids: int) -> None:
    """Raise RuntimeError unless every token has what learning needs and comes from the weights `version`.

    An empty completion is allowed: a prompt that fills the window has no room for one.
    """
    for row, one in enumerate(completions):
        count = len(one.token_ids)
        lengths = {len(values) for values in (one.log_probs, one.kept_masses, one.weight_versions)}
        if lengths != {count}:
            raise RuntimeError(f"completion {row} has {count} tokens but {sorted(lengths)} log-probs, masses, versions")
        stale = sorted(set(one.weight_versions) - {version})
        if stale:
            raise RuntimeError(f"completion {row} has tokens of weight versions {stale}, asked for version {version}")
        for token_id, log_prob, mass in zip(one.token_ids, one.log_probs, one.kept_masses, strict=True):
            if not (math.isfinite(log_prob) and log_prob <= 1e-4 and 0.0 < mass <= 1.0 + 1e-4):
                raise RuntimeError(f"completion {row}: token {token_id} has log-prob {log_prob} and kept mass {mass}")
            if not 0 <= token_id < num_ids:
                raise RuntimeError(f"completion {row}: token id {token_id} is none of the tokenizer's {num_ids}")


def sampler_log_probs(completion: Completion) -> list[float]:
    """log q of each token: under the distribution that it was drawn from, truncation included."""
    pairs = zip(completion.log_probs, completion.kept_masses, strict=True)
    return [log_prob - math.log(min(mass, 1.0)) for log_prob, mass in pairs]
