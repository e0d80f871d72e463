"""Tensor parallelism (Shoeybi et al. 2019): each rank of the tp axis holds columns and rows of every matrix.

A plan is a dict from module names ("blocks.*.attention.q_proj") to a style:

    column   weight (out, in) cut along out, bias too: reads every token, writes its own features
    kv       a column in as many parts as there are kv heads: with more ranks than heads, neighbours hold copies
    row      weight cut along in: its outputs are shares that are summed; the bias is added once, after the sum
    vocab    the embedding or the output layer, cut along the vocabulary, the last part padded
    heads    a norm over single heads: whole, but each rank sees only its heads, so its gradient is a share
    last     the last norm: under sequence parallelism what it writes is whole again

The model is not wrapped: parameters become shards under their names, and the seams of its layers (`matmul`, `project`,
`lookup`, `normalise`) get the crossings around what stood in them. So a bias, LoRA or a fused kernel stays.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError
from parallel.collectives import broadcast
from parallel.collectives_operators import along
from parallel.mesh import Mesh
from parallel.tensor_parallel_operators import Crossing, GatherColumns
from parallel.tensor_parallel_overlap import Chunks, Later, OverlappedColumns, OverlappedRow, check_plain
from parallel.tensor_parallel_placement import Placement, place

Plan = dict[str, str]
STYLES = ("column", "kv", "row", "vocab", "heads", "last")
WHOLE_FACTOR = {"column": "lora_a", "kv": "lora_a", "row": "lora_b"}  # of a layer's adapters (llm/lora)


@dataclass(frozen=True)
class TensorSettings:
    """How the model is cut; `kv_heads` limits the parts of "kv" layers.

    `chunks` above 1: tokens cross in as many pieces beside the products, which must be `plain` ones; `later` then takes
    what their weights' gradients need (tensor_parallel_overlap).
    """

    kv_heads: int
    sequence_parallel: bool = True
    chunks: int = 1
    plain: tuple[Callable, ...] = (torch.nn.functional.linear,)
    axis: str = "tp"
    later: Later | None = None

    def __post_init__(self) -> None:
        if self.chunks > 1 and not self.sequence_parallel:
            raise UserError(
                f"parallel.tp_chunks={self.chunks} cuts tokens that cross between ranks and needs "
                f"parallel.sequence_parallel=true; set it, or use parallel.tp_chunks=1"
            )


@dataclass
class TensorLayout:
    """What apply_tensor_parallel made of a model: each parameter's place, and how to undo the swapped seams."""

    mesh: Mesh
    axis: str
    placements: dict[str, Placement]
    crossing: Crossing
    settings: TensorSettings
    by_parameter: dict[int, Placement] = field(default_factory=dict)  # by id, of tied ones too
    seams: list[tuple[nn.Module, str, Any, Any]] = field(default_factory=list)  # module, name, before, after

    @property
    def rank(self) -> int:
        return self.mesh.rank_in(self.axis)

    def swap(self, module: nn.Module, name: str, seam: Any) -> None:
        self.seams.append((module, name, getattr(module, name), seam))
        setattr(module, name, seam)


def style_of(module_name: str, plan: Plan) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatchcase(module_name, pattern)), None)


def placements_of(
    shapes: Iterable[tuple[str, tuple[int, ...]]], plan: Plan, ranks: int, settings: TensorSettings
) -> dict[str, Placement]:
    """Each parameter's place by its name and full shape; UserError for what cannot be cut."""
    return {name: placement_of(name, shape, plan, ranks, settings) for name, shape in shapes}


def placement_of(name: str, shape: tuple[int, ...], plan: Plan, ranks: int, settings: TensorSettings) -> Placement:
    module, _, kind = name.rpartition(".")
    style = style_of(module, plan)
    if kind == WHOLE_FACTOR.get(style):
        return place(shape, ranks, None, 1, True, name)  # whole, and each rank's product with it is a share
    if style in ("column", "vocab"):
        return place(shape, ranks, 0, ranks, False, name)
    if style == "kv":
        return place(shape, ranks, 0, min(ranks, settings.kv_heads), True, name)
    if style == "row" and kind != "bias":
        return place(shape, ranks, 1, ranks, False, name)
    # Whole. What works on single heads, or on a stream cut by tokens, sees a share of what there is.
    return place(shape, ranks, None, 1, style == "heads" or settings.sequence_parallel, name)


def check_plan(model: nn.Module, plan: Plan) -> None:
    names = [name for name, _ in model.named_modules()]
    unknown = sorted(set(plan.values()) - set(STYLES))
    assert not unknown, f"styles {unknown} of the plan are not among {STYLES}"
    unused = [pattern for pattern in plan if not any(fnmatchcase(name, pattern) for name in names)]
    if unused:
        raise UserError(
            f"the tensor-parallel plan names {unused[0]!r}, which the model does not have; "
            f"its modules are such as {names[-1]!r}"
        )


def apply_tensor_parallel(model: nn.Module, plan: Plan, mesh: Mesh, settings: TensorSettings) -> TensorLayout:
    """Cut a model's parameters over the axis and put the crossings into its seams, in place.

    Weights are those of the axis' first rank; a model on the meta device stays there, with the shapes of its parts.
    """
    check_plan(model, plan)
    ranks = mesh.size(settings.axis)
    crossing = Crossing(along(mesh, settings.axis), ranks, settings.sequence_parallel, settings.chunks)
    shapes = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    layout = TensorLayout(mesh, settings.axis, placements_of(shapes, plan, ranks, settings), crossing, settings)
    cut_parameters(model, layout)
    for name, module in model.named_modules():
        style = style_of(name, plan)
        if style in ("column", "kv"):
            swap_column(model.get_submodule(name.rpartition(".")[0]), module, layout)
        elif style == "row":
            swap_row(module, layout)
        elif style == "vocab":
            swap_vocab(module, layout)
        elif style == "last" and settings.sequence_parallel:
            layout.swap(module, "normalise", GatheredNorm(module.normalise, crossing))
    return layout


@torch.no_grad()
def cut_parameters(model: nn.Module, layout: TensorLayout) -> None:
    """Replace every parameter that is not whole by this rank's part; tied ones stay tied."""
    parts: dict[int, nn.Parameter] = {}
    for name, param in list(model.named_parameters()):
        placement = layout.placements[name]
        if not param.is_meta:
            broadcast(param, layout.mesh, layout.axis)
        if placement.dim is None:
            layout.by_parameter[id(param)] = placement
            continue
        local = torch.empty(placement.local_shape, dtype=param.dtype, device="meta") if param.is_meta else None
        local = placement.slice(param.detach(), layout.rank) if local is None else local
        parts[id(param)] = nn.Parameter(local, requires_grad=param.requires_grad)
        layout.by_parameter[id(parts[id(param)])] = placement
    replace_parameters(model, parts)


def replace_parameters(model: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Put new parameters wherever a module has the old one of this id."""
    for module in model.modules():
        for attribute, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) in new:
                setattr(module, attribute, new[id(param)])


# What stands in a seam afterwards. Each calls what stood there before.


@dataclass(frozen=True)
class Column:
    """A Linear's matmul: x (B, T, C) -> this rank's features (B, T, out/tp)."""

    inner: Callable
    crossing: Crossing

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.inner(self.crossing.enter(x), weight, bias)


@dataclass(frozen=True)
class ColumnGroup:
    """Columns that read one input: it enters once."""

    inner: Callable
    crossing: Crossing

    def __call__(self, x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
        return self.inner(self.crossing.enter(x), layers)


@dataclass(frozen=True)
class Row:
    """A Linear's matmul: this rank's features (B, T, in/tp) -> what the stream gets, the bias added once."""

    inner: Callable
    crossing: Crossing

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.crossing.leave(self.inner(x, weight, None))
        return y if bias is None else y + bias.to(y.dtype)


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the vocabulary: first .. first + rows of `size`, the rest of its part is padding."""

    first: int
    rows: int
    placement: Placement
    rank: int
    crossing: Crossing

    @property
    def size(self) -> int:
        return self.placement.shape[0]


@dataclass(frozen=True)
class VocabLookup:
    """An embedding's lookup: tokens of other ranks give zeros, and the sum is every token's vector."""

    inner: Callable
    shard: VocabShard

    def __call__(self, token_ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        local = token_ids - self.shard.first
        own = (local >= 0) & (local < self.shard.rows)  # (B, T)
        x = self.inner(torch.where(own, local, 0), weight, dtype)  # (B, T, C)
        return self.shard.crossing.leave(torch.where(own[..., None], x, 0))


@dataclass(frozen=True)
class VocabOutput:
    """The output layer's matmul: states (B, T, C) -> all logits (B, T, V), for whoever asks for them.

    A loss reads `local_logits` instead, and never sees the others'.
    """

    inner: Callable
    shard: VocabShard

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None, "an output layer with a bias is not cut"
        logits = self.inner(self.states(x), weight, None)  # (B, T, V/tp)
        crossing = self.shard.crossing
        return GatherColumns.apply(logits, crossing.along, self.shard.rank)[..., : self.shard.size]  # (B, T, V)

    def states(self, x: Tensor) -> Tensor:
        """The states as this rank's rows read them; under sequence parallelism the last norm has gathered them."""
        return x if self.shard.crossing.sequence_parallel else self.shard.crossing.enter(x)

    def local_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """States (B, T, C) -> logits (B, T, rows) of this rank's tokens of the vocabulary, padding left out."""
        return self.inner(self.states(x), weight[: self.shard.rows], None)


@dataclass(frozen=True)
class GatheredNorm:
    """The last norm of a stream that is cut by tokens: what it writes is whole again."""

    inner: Callable
    crossing: Crossing

    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        normed, stream = self.inner(x, weight, eps, residual)
        return self.crossing.enter(normed), stream


def swap_column(parent: nn.Module, module: nn.Module, layout: TensorLayout) -> None:
    """Its own input enters, or once for all that read it where the parent projects them together."""
    if not hasattr(parent, "project"):
        layout.swap(module, "matmul", Column(module.matmul, layout.crossing))
    elif not isinstance(parent.project, ColumnGroup | OverlappedColumns):
        overlapped = layout.settings.chunks > 1
        group = overlapped_columns(layout) if overlapped else ColumnGroup(parent.project, layout.crossing)
        layout.swap(parent, "project", group)


def overlapped_columns(layout: TensorLayout) -> OverlappedColumns:
    return OverlappedColumns(chunks_of(layout), layout.settings.plain)


def chunks_of(layout: TensorLayout) -> Chunks:
    return Chunks(layout.mesh, layout.axis, layout.settings.chunks, layout.settings.later)


def swap_row(module: nn.Module, layout: TensorLayout) -> None:
    if layout.settings.chunks == 1:
        layout.swap(module, "matmul", Row(module.matmul, layout.crossing))
        return
    check_plain(module.matmul, layout.settings.plain)
    layout.swap(module, "matmul", OverlappedRow(chunks_of(layout)))


def swap_vocab(module: nn.Module, layout: TensorLayout) -> None:
    placement = layout.by_parameter[id(module.weight)]
    first, last = placement.span(layout.rank)
    shard = VocabShard(first, last - first, placement, layout.rank, layout.crossing)
    if hasattr(module, "lookup"):
        layout.swap(module, "lookup", VocabLookup(module.lookup, shard))
    else:
        layout.swap(module, "matmul", VocabOutput(module.matmul, shard))
