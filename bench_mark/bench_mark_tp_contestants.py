"""The contestants of bench_mark_tp: a stack of blocks cut by ours, by DTensor's plan, and as one rank's part alone.

All ranks see the same tokens. DTensor's styles take torch's Linear only, so its blocks get those, over the same
weights; its norms stay plain tensors, as in ours, which spares it their dispatch. "alone" is the
whole stack on every rank. "bare" has the shapes of one rank's part and sends nothing: what a step would take if
crossings were free.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from llm.args import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.parallelize_tensor import apply_tensor
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_layers import Linear
from parallel.collectives import all_reduce_sum
from parallel.mesh import Mesh

VARIANTS = ("alone", "bare", "tp", "tp+sp", "tp+sp 2 chunks", "tp+sp 4 chunks", "dtensor", "dtensor+sp")
CHUNKS = {"tp+sp 2 chunks": 2, "tp+sp 4 chunks": 4}


@dataclass
class Setup:
    """What every contestant computes."""

    model: ModelConfig
    batch: int
    seq_len: int
    mesh: Mesh
    dtype: str
    compile: bool

    @cached_property
    def initial(self) -> Transformer:
        """The weights that all start from, drawn on the device; the vocabulary plays no part."""
        return draw(self.model, self.mesh.device)

    @cached_property
    def initial_part(self) -> Transformer:
        return draw(part_of(self.model, self.mesh.size("tp")), self.mesh.device)

    def parallel(self, name: str) -> ParallelConfig:
        if name == "alone":
            return ParallelConfig()
        return ParallelConfig(tp=self.mesh.size("tp"), sequence_parallel="+sp" in name, tp_chunks=CHUNKS.get(name, 1))

    def config(self, name: str) -> TrainConfig:
        tokens = self.batch * self.seq_len
        return TrainConfig(
            name="bench_mark_tp", model=self.model, data=DataConfig(seq_len=self.seq_len), dtype=self.dtype,
            parallel=self.parallel(name), micro_batch_size=self.batch, global_batch_tokens=tokens,
        )  # fmt: skip


@dataclass
class Contestant:
    """`step` runs forward and backward of the blocks and returns the sum of squares of what they put out."""

    name: str
    step: Callable[[], Tensor]
    seconds: list[float] = field(default_factory=list)
    comm: list[list[dict]] = field(default_factory=list)
    results: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # of its blocks, and the tokens that go in
    peak_bytes: float = 0.0


def build(name: str, setup: Setup) -> Contestant:
    mesh = setup.mesh
    model = copy.deepcopy(setup.initial_part if name == "bare" else setup.initial).to(mesh.device)
    if name.startswith("dtensor"):
        cut_by_dtensor(model, setup, "+sp" in name)
    elif name not in ("alone", "bare"):
        apply_tensor(model, setup.config(name), mesh)
    blocks = model.blocks
    if setup.compile:
        for block in blocks.values():
            block.compile()
    by_tokens = "+sp" in name
    x, ctx = inputs(setup, model)
    if by_tokens:
        x = own_tokens(x, name, mesh, CHUNKS.get(name, 1))
    autocast = torch.autocast(mesh.device.type, torch.bfloat16, enabled=setup.dtype == "bfloat16")

    def step() -> Tensor:
        leaf = x.detach().requires_grad_()
        with autocast:
            y = leaf
            for block in blocks.values():
                y = block(y, ctx)
        total = y.float().square().sum()
        total.backward()
        for param in blocks.parameters():
            param.grad = None
        return total.detach()

    def whole_step() -> Tensor:
        total = step()
        return all_reduce_sum(total.clone(), mesh, "tp") if by_tokens else total

    contestant = Contestant(name, step, weights=[*blocks.parameters(), x])
    contestant.results.append(whole_step().item())
    return contestant


@torch.no_grad()
def draw(model: ModelConfig, device: torch.device) -> Transformer:
    """A Transformer with small random weights, equal on all ranks; drawing a billion by name would take a CPU long."""
    with torch.device(device):
        made = Transformer(replace(model, vocab_size=64))
    generator = torch.Generator(device).manual_seed(1)
    for param in made.parameters():
        if param.ndim > 1:
            param.normal_(std=0.02, generator=generator)
        else:
            param.fill_(1.0)
    return made


def part_of(model: ModelConfig, ranks: int) -> ModelConfig:
    """The shape of one rank's blocks."""
    return replace(
        model, num_heads=model.num_heads // ranks, num_kv_heads=max(1, model.num_kv_heads // ranks),
        d_ff=model.d_ff // ranks,
    )  # fmt: skip


def inputs(setup: Setup, model: Transformer):
    """Random vectors (B, T, C), the same on every rank, and their context."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(setup.batch, setup.seq_len, setup.model.d_model, generator=generator).to(setup.mesh.device)
    ctx = make_context(torch.zeros(setup.batch, setup.seq_len, dtype=torch.int64, device=setup.mesh.device))
    ctx.rope = model.rope(ctx.token_positions)
    return x, ctx


def own_tokens(x: Tensor, name: str, mesh: Mesh, chunks: int) -> Tensor:
    """This rank's tokens: flattened rows of every chunk for ours, a run of T for DTensor."""
    B, T, C = x.shape
    rank, ranks = mesh.rank_in("tp"), mesh.size("tp")
    if name.startswith("dtensor"):
        return x.chunk(ranks, dim=1)[rank].contiguous()
    return x.view(chunks, ranks, -1, C)[:, rank].reshape(B, T // ranks, C)


def cut_by_dtensor(model: nn.Module, setup: Setup, by_tokens: bool) -> None:
    """torch.distributed.tensor.parallel over the same axis, in place."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = DeviceMesh(setup.mesh.device.type, setup.mesh.axes["tp"].ranks)
    stream = Shard(1) if by_tokens else Replicate()
    plan = {name: ColwiseParallel() for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj")}
    plan |= {"ffn.gate_proj": ColwiseParallel(), "ffn.up_proj": ColwiseParallel()}
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in ("attention.o_proj", "ffn.down_proj")}
    enter = {"input_layouts": (stream, None), "desired_input_layouts": (Replicate(), None)}
    plan["attention"] = PrepareModuleInput(**enter, use_local_output=False)
    plan["ffn"] = PrepareModuleInput(
        input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    for block in model.blocks.values():
        use_torch_linear(block)
        parallelize_module(block, mesh, plan)


def use_torch_linear(block: nn.Module) -> None:
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                out_features, in_features = child.weight.shape
                linear = nn.Linear(in_features, out_features, bias=child.bias is not None, device="meta")
                linear.weight, linear.bias = child.weight, child.bias
                setattr(module, name, linear)
