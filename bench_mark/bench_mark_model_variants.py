"""The contestants of the model benchmark: our step in its variants, and the plain loop.

A variant says how our step is compiled and which kernels it runs: everything else, the weights' and states' dtypes
included, is the same as in the plain loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from bench_mark.bench_mark_model_plain import PlainModel, plain_optimizer
from llm.args import DataConfig, KernelsConfig, TrainConfig
from llm.cost_model import Workload
from llm.data_loader import Batch
from llm.metrics_memory import held_tensors
from llm.parallelize import make_forward_loss, parallelize
from llm.schedule import ScheduleConfig
from llm.training_step import TrainingStep
from llm.transformer import Transformer
from llm.transformer_init import initialise
from llm.transformer_kernels import make_loss
from parallel.mesh import Mesh

ALPHABET, SUCCESSORS = 1024, 32  # tokens that the made-up language uses, and likely next ones: its loss nears ln 32


@dataclass(frozen=True)
class Variant:
    """One way to run our step."""

    compile: str = "none"
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    attention: str = "sdpa"
    nudge: bool = False  # begin a rounding away, to see what rounding alone does to the losses


FUSED = KernelsConfig(fused=True)
GRAPH = KernelsConfig(fused=True, cuda_graph=True)
# Between matrix products the compiler fuses by itself: here it keeps what lies in the blocks.
OUTSIDE = KernelsConfig(loss=True, optimizer=True)
VARIANTS = {
    "eager": Variant(),
    "compiled": Variant("model"),
    "attention": Variant("model", attention="triton"),
    "fused": Variant("none", FUSED, "triton"),
    "fused-graph": Variant("none", GRAPH, "triton"),
    "fused-graph-nudged": Variant("none", GRAPH, "triton", nudge=True),
    "fused-sdpa-graph": Variant("none", GRAPH, "sdpa"),
    "fused-compiled": Variant("model", FUSED, "triton"),
    "fused-compiled-graph": Variant("model", GRAPH, "triton"),
    "fused-bf16-graph": Variant("none", replace(GRAPH, stream="bfloat16"), "triton"),
    "mixed": Variant("model", OUTSIDE, "triton"),
    "mixed-bf16-graph": Variant("model", replace(OUTSIDE, cuda_graph=True, stream="bfloat16"), "triton"),
    "mixed-graph": Variant("model", replace(OUTSIDE, cuda_graph=True), "triton"),
}


@dataclass
class Contestant:
    """A training step that can be taken again and again, and what it was seen to need."""

    name: str
    step: Callable[[], Tensor]  # takes one optimizer step, returns the loss
    tensors: Callable[[], list[Tensor]]  # what it holds between steps
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def make_tokens(steps: int, micro_batch_size: int, seq_len: int, vocab_size: int) -> Tensor:
    """Windows (steps, B, T + 1) of a made-up language: after each token one of SUCCESSORS, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    letters = min(ALPHABET, vocab_size)
    table = torch.randint(letters, (letters, SUCCESSORS), generator=generator)
    tokens = torch.empty(steps * micro_batch_size, seq_len + 1, dtype=torch.int64)
    tokens[:, 0] = torch.randint(letters, (len(tokens),), generator=generator)
    choices = torch.randint(SUCCESSORS, tokens.shape, generator=generator)
    for position in range(seq_len):
        tokens[:, position + 1] = table[tokens[:, position], choices[:, position]]
    ids = torch.randperm(vocab_size, generator=generator)[:letters]  # anywhere in the vocabulary
    return ids[tokens].view(steps, micro_batch_size, seq_len + 1)


def workload_of_variant(work: Workload, variant: Variant) -> Workload:
    """What the cost model needs to know of a variant."""
    model = replace(work.model, attention=variant.attention)
    return replace(work, model=model, compile=variant.compile, kernels=variant.kernels)


def train_config(work: Workload, variant: Variant) -> TrainConfig:
    """One micro-batch a step at a constant rate, clipped at norm 1; the plain loop does the same."""
    config = TrainConfig(
        name="benchmark", dtype=work.dtype, model=replace(work.model, attention=variant.attention),
        micro_batch_size=work.micro_batch_size, global_batch_tokens=work.tokens,
        data=DataConfig(seq_len=work.seq_len), schedule=ScheduleConfig(name="constant", warmup_steps=0),
        kernels=variant.kernels,
    )  # fmt: skip
    return replace(config, compile=variant.compile)


def our_contestant(name: str, work: Workload, mesh: Mesh, tokens: Tensor) -> Contestant:
    """The step of llm.training on windows (steps, B, T + 1), one after the other."""
    config = train_config(work, VARIANTS[name])
    model = Transformer(config.model)
    initialise(model, seed=0)
    if VARIANTS[name].nudge:
        model.embedding.weight.data.mul_(1 + 2.0**-20)
    model.to(mesh.device)
    parts = parallelize(model, config, mesh)
    forward_loss = make_forward_loss(model, make_loss(config.kernels, z_loss=0.0), parts.compile)
    training_step = TrainingStep(config, mesh, parts, forward_loss)
    windows = iter(tokens)

    def step() -> Tensor:
        window = next(windows).to(mesh.device, non_blocking=True)
        batch = Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous(), work.tokens)
        result = training_step.run(0, [batch])
        return result.loss_sum / result.num_targets

    return Contestant(name, step, lambda: held_tensors(model, parts.optimizer))


def plain_contestant(work: Workload, mesh: Mesh, tokens: Tensor) -> Contestant:
    """The plain loop from the same weights on the same windows; on a GPU model and loss are compiled as a whole."""
    ours = Transformer(work.model)
    initialise(ours, seed=0)
    model = PlainModel(work.model, work.seq_len)
    model.copy_weights(ours)
    model.to(mesh.device)
    rates = train_config(work, Variant()).optimizer
    optimizer = plain_optimizer(model, rates.lr, rates.weight_decay, (rates.beta1, rates.beta2))

    def mean_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    forward = torch.compile(mean_loss) if work.compile != "none" else mean_loss
    windows = iter(tokens)

    def step() -> Tensor:
        window = next(windows).to(mesh.device, non_blocking=True)
        inputs, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=work.dtype == "bfloat16"):
            loss = forward(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), rates.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contestant("plain torch", step, lambda: held_tensors(model, optimizer))
