"""What every layout has to reproduce: a tiny model with awkward parameters, global batches, and the passes over them.

The batches have between 0 and T targets in a row, more in the first rows, so that ranks and micro-batches have unequal
shares. Parameters of 1, 7 and 13 elements do not divide by any degree; some get no gradient at all, or only from the
first row or only from the last one.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from llm.args import DataConfig, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from llm.data_loader import Batch
from llm.loss import IGNORE_INDEX
from llm.optimizer import OptimizerConfig
from llm.schedule import ScheduleConfig
from llm.transformer import Transformer
from llm.transformer_context import BlockContext
from llm.transformer_init import initialise
from tests import tolerances

VOCAB, T, ROWS = 61, 8, 24
FIRST_ROW_TOKEN, LAST_ROW_TOKEN = VOCAB - 1, VOCAB - 2


class ParityModel(Transformer):
    """A Transformer with parameters that are never, seldom or always used; names as any other's."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.never = nn.Parameter(torch.empty(7))
        self.only_first_row = nn.Parameter(torch.empty(13))
        self.only_last_row = nn.Parameter(torch.empty(5, 3))
        self.single = nn.Parameter(torch.empty(1))
        self.blocks["1"].register_parameter("idle", nn.Parameter(torch.empty(3, 2)))
        self.blocks["0"].attention.o_proj.bias = nn.Parameter(torch.empty(config.d_model))

    def hidden_states(self, x: Tensor, ctx: BlockContext | None = None) -> Tensor:
        states = super().hidden_states(x, ctx)
        if self.norm is None:  # a pipeline stage before the last
            return states
        ids = x if self.embedding is not None else ctx.token_ids
        gain = self.single  # (1,), or (B, T, 1) where one of the two tokens is there
        for token, param in ((FIRST_ROW_TOKEN, self.only_first_row), (LAST_ROW_TOKEN, self.only_last_row)):
            here = ids == token  # (B, T): a rank may hold some of a row's tokens only
            if bool(here.any()):
                gain = gain + here[..., None] * (0.1 * param.sum())
        return states * gain


@dataclass(frozen=True)
class Case:
    """One pass: what is trained for how many steps, and how near the layout must come to the reference."""

    name: str
    dtype: str = "float64"  # of the weights; "bfloat16" is float32 weights under autocast
    optimizer: str = "sgd"
    clip_norm: float | None = None
    steps: int = 3
    tie: bool = True
    eps: float = 1e-8  # adamw
    experts: bool = False  # in place of the dense feed-forward
    layers: int = 2
    gradient_error: float = tolerances.FP64
    parameter_error: float = tolerances.FP64
    norm_error: float = tolerances.FP64
    loss_error: float = tolerances.FP64

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    def train_config(self, parallel: ParallelConfig | None = None) -> TrainConfig:
        in_ring = parallel is not None and parallel.cp > 1 and parallel.cp_mode == "ring"
        attention = "eager" if in_ring else "sdpa"  # which has no logsumexp to join blocks by
        model = ModelConfig(
            vocab_size=VOCAB, max_seq_len=T, d_model=16, num_layers=self.layers, num_heads=4, num_kv_heads=2, d_ff=24,
            qkv_bias=True, qk_norm=True, tie_embeddings=self.tie, attention=attention,
            moe=MoeConfig(num_experts=3, experts_per_token=2, d_ff=10) if self.experts else MoeConfig(),
        )  # fmt: skip
        rates = {"sgd": 0.5, "adamw": 0.01, "muon": 0.02}
        optimizer = OptimizerConfig(
            name=self.optimizer, lr=rates[self.optimizer], clip_norm=self.clip_norm, eps=self.eps,
            weight_decay=0.0 if self.optimizer == "sgd" else 0.1,
        )  # fmt: skip
        return TrainConfig(
            name="parity", model=model, optimizer=optimizer, data=DataConfig(seq_len=T), max_steps=self.steps,
            schedule=ScheduleConfig(name="cosine", warmup_steps=2), parallel=parallel or ParallelConfig(),
            dtype="bfloat16" if self.dtype == "bfloat16" else "float32", global_batch_tokens=ROWS * T,
        )  # fmt: skip


FP32_ERRORS = {
    "gradient_error": tolerances.FP32_GRADIENT,
    "parameter_error": tolerances.FP32_GRADIENT,
    "norm_error": tolerances.FP32_GRADIENT,
    "loss_error": tolerances.FP32_GRADIENT,
}
BF16_ERRORS = {name: tolerances.BF16_GRADIENT for name in FP32_ERRORS}
SGD64 = Case("sgd in float64")
SGD64_UNTIED = Case("sgd in float64, untied", tie=False)
EXPERTS64 = Case("sgd in float64, experts", experts=True)
DEEP64 = Case("sgd in float64, six blocks", layers=6)
SGD32 = Case("sgd in float32", dtype="float32", **FP32_ERRORS)
ADAMW64 = Case("adamw with clipping", optimizer="adamw", clip_norm=0.3, steps=10, parameter_error=tolerances.FP64_ADAMW)
# An eps above the gradients' rounding: without it m / sqrt(v) would turn the sign of a rounding error into an update.
BF16 = Case("adamw under bfloat16", dtype="bfloat16", optimizer="adamw", clip_norm=0.3, eps=0.01, **BF16_ERRORS)
# In float64: its iteration rounds to bfloat16, and sums of float32 in another order would turn such a rounding over.
MUON = Case("muon with clipping", optimizer="muon", clip_norm=0.3, parameter_error=tolerances.FP64_ADAMW)
CASES = [SGD64, SGD64_UNTIED, EXPERTS64, SGD32, ADAMW64, BF16, MUON]


def make_model(case: Case, device: torch.device | str = "cpu") -> ParityModel:
    """The model with the weights that every layout starts from; vectors are not all alike."""
    model = ParityModel(case.train_config().model)
    initialise(model, seed=7)
    with torch.no_grad():
        for index, (name, param) in enumerate(model.named_parameters()):
            if param.ndim == 1:
                # A row's bias is of the size of the embedding's vectors, beside which all tokens would look alike.
                size = 0.03 if name.endswith("o_proj.bias") else 1.0
                param.add_(size * (torch.linspace(-0.2, 0.3, param.numel()) + 0.01 * index))
    return model.to(device, case.weight_dtype)


def global_batch(step: int) -> Batch:
    """All rows of one step; the same for every layout."""
    generator = torch.Generator().manual_seed(1000 + step)
    token_ids = torch.randint(0, LAST_ROW_TOKEN, (ROWS, T), generator=generator)
    token_ids[0, 0], token_ids[-1, 0] = FIRST_ROW_TOKEN, LAST_ROW_TOKEN
    targets = torch.randint(0, VOCAB, (ROWS, T), generator=generator)
    kept = torch.randint(0, T + 1, (ROWS,), generator=generator)
    kept = torch.where(torch.arange(ROWS) < ROWS // 3, T, kept.clamp(max=3))  # the last rows have 3 at most
    kept[0] = kept[-1] = 2
    kept[ROWS // 2] = 0
    targets[torch.arange(T) >= kept[:, None]] = IGNORE_INDEX
    return Batch(token_ids, targets, int((targets != IGNORE_INDEX).sum()))


def rows_of_batch(batch: Batch, rows: range) -> Batch:
    targets = batch.targets[rows.start : rows.stop]
    return Batch(batch.token_ids[rows.start : rows.stop], targets, int((targets != IGNORE_INDEX).sum()))


def cut(batch: Batch, rows: range, micro_batches: int) -> list[Batch]:
    """Some rows of a global batch as this many micro-batches, of equal size or nearly so."""
    bounds = [rows.start + len(rows) * index // micro_batches for index in range(micro_batches + 1)]
    return [rows_of_batch(batch, range(*pair)) for pair in pairwise(bounds)]


def micro_batches_of(batch: Batch, rows: range, accumulation: int | str, rank: int) -> list[Batch]:
    """A rank's part of a global batch; "uneven": rank 1 has none, since rank 0 takes its rows too, in four."""
    if accumulation != "uneven":
        return cut(batch, rows, accumulation)
    if rank == 0:
        return cut(batch, range(0, 2 * len(rows)), 4)
    return [] if rank == 1 else cut(batch, rows, min(rank, len(rows)))
