"""Pipeline parallelism of our Transformer: how it is cut into stages, what a stage runs, and what the step calls.

Pieces are the embedding, the blocks and the head (last norm, output layer and loss), each at its FLOPs a token. A rank
keeps one model object with the blocks of all its stages under their single-device names; a stage is a view of it.
Parameters of the model that belong to no module go with the head.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError
from llm.args import ModelConfig, TrainConfig
from llm.cost_model_counts import attention_flops_per_token, block_matrices, output_matrix
from llm.data_loader import Batch
from llm.loss import LossSums
from llm.parallelize_pipeline_graph import check_pipeline_graph, make_pipeline_graphs
from llm.transformer import Transformer
from llm.transformer_context import BlockContext, make_context
from llm.transformer_layers import Linear
from llm.transformer_linear import is_plain
from parallel.collectives import all_reduce_sum
from parallel.fsdp_pipeline import StageUnits
from parallel.mesh import Mesh
from parallel.pipeline_parallel import Keeper, PipelineRunner, PipelineSettings, StageFunction
from parallel.pipeline_parallel_backward import DeferredGradients
from parallel.pipeline_parallel_stages import split_by_cost
from parallel.pipeline_parallel_strategy import HeldBy, PipelineParallel, TiedTable
from parallel.pipeline_schedules import SPLIT_SCHEDULES, build_schedule
from parallel.pipeline_schedules_simulation import simulate

ENDS = ("embedding", "norm", "output")


def stage_costs(model: ModelConfig, seq_len: int) -> tuple[float, ...]:
    """FLOPs a token, forward, of the embedding, each block and the head; a look-up counts one a vector element."""
    block = sum(matrix.flops_per_token for matrix in block_matrices(model)) + attention_flops_per_token(model, seq_len)
    return (float(model.d_model), *[float(block)] * model.num_layers, float(output_matrix(model).flops_per_token))


def stage_pieces(model: ModelConfig, seq_len: int, stages: int) -> list[range]:
    """Each stage's pieces: 0 the embedding, 1 .. L the blocks, L + 1 the head. UserError where there are too few."""
    costs = stage_costs(model, seq_len)
    if stages > len(costs):
        raise UserError(
            f"parallel.pp x pp_chunks = {stages} stages need as many pieces, and num_layers={model.num_layers} with "
            f"embedding and head make {len(costs)}; use parallel.pp x pp_chunks <= {len(costs)}"
        )
    return split_by_cost(costs, stages)


def check_pipeline(config: TrainConfig) -> None:
    """UserError for what does not work together with parallel.pp > 1."""
    parallel = config.parallel
    build_schedule(parallel.pp_schedule, parallel.pp, 1, parallel.pp_chunks)
    if parallel.ep > 1:
        raise UserError(f"parallel.ep={parallel.ep} with parallel.pp={parallel.pp} is not implemented yet; use ep=1")
    if config.compile == "model":
        raise UserError(f"compile=model sees no whole model under parallel.pp={parallel.pp}; use compile=block")
    if parallel.pp_schedule in SPLIT_SCHEDULES and config.compile != "none":
        name = parallel.pp_schedule
        raise UserError(f"parallel.pp_schedule={name} puts weight gradients aside in Python; use compile=none")
    if config.kernels.cuda_graph:
        check_pipeline_graph(config)
    stage_pieces(config.model, config.data.seq_len, parallel.pp * parallel.pp_chunks)


@dataclass
class PipelineLayout:
    """A model cut for one rank of the pp axis: what its stages are, and where all the rest is."""

    model: Transformer
    mesh: Mesh
    settings: PipelineSettings
    pieces: dict[int, range]  # of this rank's stages
    held: dict[str, HeldBy]
    missing: dict[str, nn.Module]  # parts of the whole model that are other ranks', on the meta device
    missing_parameters: dict[str, nn.Parameter]
    tied: TiedTable | None
    boundary_dtype: tuple[torch.dtype, torch.dtype]  # without and under autocast
    deferred: DeferredGradients | None = None
    stream_cut: int = 1  # tp ranks over which sequence parallelism has cut the tokens between blocks
    graphed: bool = False  # operations are replayed as CUDA graphs

    def stage_model(self, stage: int) -> Transformer:
        """The model with the pieces of one stage only; modules are shared."""
        pieces, layers = self.pieces[stage], self.model.config.num_layers
        view = copy.copy(self.model)
        view._modules = dict(self.model._modules)
        names = [str(piece - 1) for piece in pieces if 1 <= piece <= layers]
        view._modules["blocks"] = nn.ModuleDict({name: self.model.blocks[name] for name in names})
        if 0 not in pieces:
            view._modules["embedding"] = None
        if layers + 1 not in pieces:
            view._modules["norm"] = view._modules["output"] = None
        return view

    def units(self) -> StageUnits:
        """Which of the model's blocks each stage runs, for ZeRO-2 and 3."""
        layers, names = self.model.config.num_layers, list(self.model.blocks)
        blocks = {
            stage: tuple(names.index(str(piece - 1)) for piece in pieces if 1 <= piece <= layers)
            for stage, pieces in self.pieces.items()
        }
        ends = (0, layers + 1)
        with_root = frozenset(stage for stage, pieces in self.pieces.items() if any(end in pieces for end in ends))
        return StageUnits(blocks, with_root, self.deferred is not None)

    @contextmanager
    def whole_model(self, parameters: dict[str, Tensor]) -> Iterator[None]:
        """Inside it the rank's model has every part, with these parameters where they are other ranks'."""
        model, before = self.model, dict(self.model._modules)
        blocks = {**model.blocks, **{n.removeprefix("blocks."): m for n, m in self.missing.items() if "." in n}}
        model._modules["blocks"] = nn.ModuleDict({name: blocks[name] for name in sorted(blocks, key=int)})
        for name in ENDS:
            if model._modules[name] is None:
                model._modules[name] = self.missing[name]
        for prefix, module in self.missing.items():
            fill_module(module, prefix, parameters)
        if self.tied is not None and self.tied.copy is None:
            model.output.weight = model.embedding.weight
        for name in self.missing_parameters:
            model._parameters[name] = nn.Parameter(parameters[name], requires_grad=False)
        try:
            yield
        finally:
            if self.tied is not None and self.tied.copy is None:
                del model.output.weight
            for name in self.missing_parameters:
                del model._parameters[name]
            model._modules.clear()
            model._modules.update(before)
            for module in self.missing.values():
                module.to("meta")


def fill_module(module: nn.Module, prefix: str, parameters: dict[str, Tensor]) -> None:
    """Give a module on the meta device its parameters by their names in the whole model."""
    for inner_name, inner in module.named_modules():
        for name in list(inner._parameters):
            full = ".".join(filter(None, (prefix, inner_name, name)))
            if inner._parameters[name] is not None and full in parameters:
                inner._parameters[name] = nn.Parameter(parameters[full], requires_grad=False)


def apply_pipeline(
    model: Transformer, config: TrainConfig, mesh: Mesh, deferred: DeferredGradients | None = None
) -> PipelineLayout | None:
    """Leave of the model what this rank's stages need, in place; None where the pp axis has one rank.

    `deferred` is what apply_deferral made.
    """
    if not mesh.is_active("pp"):
        return None
    check_pipeline(config)
    if config.kernels.cuda_graph:
        check_pipeline_graph(config, mesh.device.type)
    parallel, layers = config.parallel, config.model.num_layers
    settings = PipelineSettings(parallel.pp_schedule, parallel.pp_chunks)
    ranks, rank = mesh.size("pp"), mesh.rank_in("pp")
    pieces = stage_pieces(config.model, config.data.seq_len, ranks * parallel.pp_chunks)
    owner = {piece: stage % ranks for stage, part in enumerate(pieces) for piece in part}
    held = {
        name: HeldBy(tuple(param.shape), param.dtype, owner[piece_of(name, layers)], param.requires_grad)
        for name, param in model.named_parameters()
    }
    kept_dtype = model.embedding.weight.dtype
    boundary_dtype = (kept_dtype, model.embedding.stream_dtype or kept_dtype)
    tied = tie_over_ranks(model, mesh) if model.config.tie_embeddings else None
    missing: dict[str, nn.Module] = {}
    for name in [*ENDS, *(f"blocks.{layer}" for layer in range(layers))]:
        if owner[piece_of(name, layers)] != rank:
            missing[name] = take_out(model, name)
    alone = [name for name in model._parameters if owner[layers + 1] != rank]
    missing_parameters = {name: model._parameters.pop(name) for name in alone}
    own = {stage: part for stage, part in enumerate(pieces) if stage % ranks == rank}
    return PipelineLayout(
        model, mesh, settings, own, held, missing, missing_parameters, tied, boundary_dtype, deferred,
        parallel.tp if parallel.sequence_parallel else 1, config.kernels.cuda_graph,
    )  # fmt: skip


def piece_of(name: str, layers: int) -> int:
    """The piece of a module or parameter: 0 for the embedding, 1 .. L for the blocks, L + 1 for everything else."""
    if name.startswith("blocks."):
        return 1 + int(name.split(".")[1])
    return 0 if name.split(".")[0] == "embedding" else layers + 1


def take_out(model: Transformer, name: str) -> nn.Module:
    """Remove a module from the model; what comes back is its shape alone."""
    if name in ENDS:
        module, model._modules[name] = model._modules[name], None
    else:
        module = model.blocks.pop(name.removeprefix("blocks."))
    return module.to("meta")


def tie_over_ranks(model: Transformer, mesh: Mesh) -> TiedTable:
    """On the last rank the output layer gets a copy of the table that is no parameter; on others it has none."""
    table = model.embedding.weight
    del model.output.weight
    copied = None
    if mesh.rank_in("pp") == mesh.size("pp") - 1:
        copied = torch.zeros_like(table, device=mesh.device) if table.is_meta else table.detach().clone()
        model.output.weight = copied.requires_grad_(table.requires_grad)
    return TiedTable(mesh, "pp", table if mesh.rank_in("pp") == 0 else None, copied)


def apply_deferral(model: Transformer, config: TrainConfig, mesh: Mesh) -> DeferredGradients | None:
    """Weight gradients of linear layers wait for zero-bubble's W, the head's too unless its loss is fused with it.

    Under CUDA graphs they do with every schedule: the products then add to the gradients that are there. Applied before
    tensor parallelism, whose crossings then lie around the split products.
    """
    splits = config.parallel.pp_schedule in SPLIT_SCHEDULES
    if not mesh.is_active("pp") or not (splits or config.kernels.cuda_graph):
        return None
    deferred = DeferredGradients()
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not (name == "output" and config.kernels.uses("loss")):
            if not is_plain(module.matmul):
                raise UserError(
                    f"parallel.pp_schedule={config.parallel.pp_schedule} splits plain products, and that of {name} has "
                    f"been swapped (LoRA, FP8); use parallel.pp_schedule=1f1b and kernels.cuda_graph=false"
                )
            module.matmul = deferred.matmul
        elif hasattr(module, "project"):
            module.project = deferred.project
    return deferred


class Pipeline:
    """What a training step and a validation call in place of the model under parallel.pp > 1."""

    def __init__(
        self,
        layout: PipelineLayout,
        strategy: PipelineParallel,
        autocast_dtype: torch.dtype | None,
        context_of: Callable[..., BlockContext] = make_context,
        keeper: Keeper | None = None,
    ):
        self.layout, self.strategy, self.mesh = layout, strategy, layout.mesh
        self.autocast_dtype, self.context_of = autocast_dtype, context_of
        self.models = {stage: layout.stage_model(stage) for stage in layout.pieces}
        self.last_stage = layout.mesh.size("pp") * layout.settings.chunks - 1
        tied = None if layout.tied is None else layout.tied.copy
        graphs = make_pipeline_graphs(layout.model, tied, layout.deferred, self.boundary) if layout.graphed else None
        self.runner = PipelineRunner(self.boundary, self.mesh, layout.settings, layout.deferred, keeper, graphs)
        self.divisor = torch.ones((), dtype=torch.float64, device=self.mesh.device)  # where graphs can read it
        self.warned = False
        # NCCL connects a group in its first call, in which all ranks must take part; sends between two would hang.
        all_reduce_sum(torch.zeros((), device=self.mesh.device), self.mesh, "pp")

    @property
    def head_model(self) -> Transformer:
        """What computes the loss: the last stage, where this rank has it."""
        return self.models.get(self.last_stage, self.layout.model)

    def autocast(self) -> Any:
        enabled = self.autocast_dtype is not None
        return torch.autocast(self.mesh.device.type, self.autocast_dtype, enabled=enabled)

    def boundary(self, batch: Batch) -> Tensor:
        dtype = self.layout.boundary_dtype[self.autocast_dtype is not None]
        rows, tokens = batch.token_ids.shape
        shape = (rows, tokens // self.layout.stream_cut, self.layout.model.config.d_model)
        return torch.empty(shape, dtype=dtype, device=self.mesh.device)  # (B, T, C)

    def run_stage(self, stage: int, x: Tensor | None, batch: Batch) -> Tensor:
        """Hidden states (B, T, C); of the last stage logits."""
        ctx = self.context_of(batch.token_ids, batch.token_positions, batch.doc_ids)
        ctx.token_ids = batch.token_ids
        with self.autocast():
            return self.models[stage](batch.token_ids if stage == 0 else x, ctx)

    def stages(self, last: StageFunction) -> dict[int, StageFunction]:
        """What each stage of this rank runs; `last` the last one."""

        def stage_function(stage: int) -> StageFunction:
            if stage == self.last_stage:
                return last
            return lambda x, batch: (self.run_stage(stage, x, batch), None)

        return {stage: stage_function(stage) for stage in self.models}

    def accumulate_gradients(
        self, micro_batches: list[Batch], num_targets: int, forward_loss: Callable[[Batch, Tensor | None], LossSums]
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of a step's micro-batches; loss sums are 0 on ranks without the last stage.

        `forward_loss(batch, states)` runs the last stage, `head_model`, from the states (B, T, C) that it gets.
        """
        self.warn_if_short(len(micro_batches))
        self.strategy.begin_step()
        self.divisor.fill_(max(num_targets, 1))

        def last(x: Tensor | None, batch: Batch) -> tuple[Tensor, Any]:
            with self.autocast():
                sums = forward_loss(batch, x)
            return (sums.loss_sum + sums.z_loss_sum) / self.divisor, (
                sums.loss_sum.detach(), sums.z_loss_sum.detach(),
            )  # fmt: skip

        device = self.mesh.device
        results = self.runner.run(self.stages(last), [batch.to(device) for batch in micro_batches])
        # In one dtype, whatever that of the losses: ranks without the last stage know none.
        loss_sum, z_loss_sum = torch.zeros(2, device=device, dtype=torch.float64).unbind()
        for loss, z_loss in results:
            loss_sum, z_loss_sum = loss_sum + loss, z_loss_sum + z_loss
        return loss_sum, z_loss_sum

    def evaluate(self, batches: list[Batch], see: Callable[[Tensor, Batch], Any]) -> None:
        """On the rank with the last stage `see(logits, batch)` of each batch, logits (B, T, V); no gradients."""
        self.strategy.begin_step()

        def last(x: Tensor | None, batch: Batch) -> tuple[Tensor, Any]:
            return x, see(self.run_stage(self.last_stage, x, batch), batch)

        self.runner.run_forward(self.stages(last), [batch.to(self.mesh.device) for batch in batches])

    def warn_if_short(self, micro_batches: int) -> None:
        """Once: fewer micro-batches than stages leave ranks idle, and the schedule says for how long."""
        ranks, settings = self.mesh.size("pp"), self.layout.settings
        if micro_batches >= ranks or self.warned or not self.mesh.is_main:
            return
        self.warned = True
        bubble = simulate(build_schedule(settings.schedule, ranks, micro_batches, settings.chunks)).bubble
        print(
            f"a step's {micro_batches} micro-batches are fewer than parallel.pp={ranks}: ranks are predicted to idle "
            f"{bubble:.0%} of the time; lower micro_batch_size or raise global_batch_tokens"
        )


def pipeline_strategy(inner: Any, layout: PipelineLayout | None) -> Any:
    """The data strategy, which under pipeline parallelism has this rank's stages alone."""
    if layout is None:
        return inner
    if layout.tied is not None and layout.tied.table is not None:
        layout.tied.table = layout.model.embedding.weight  # ZeRO-2 and 3 have put another in its place
    return PipelineParallel(inner, layout.model, layout.mesh, layout.held, layout.tied, layout.whole_model)
