"""Wrapping a model in FSDP: which parameter belongs to which unit, and shards made without the full model on a device.

A model on the meta device has shapes and no memory: `fill` then writes each shard on its own, so a model larger than
any device can be built. A model with weights gives every rank its rows of rank 0's, one parameter at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from configs.errors import UserError
from parallel.collectives import broadcast
from parallel.fsdp import Fsdp, FsdpSettings
from parallel.fsdp_layout import plan_unit
from parallel.fsdp_pipeline import PipelinedFsdp, StageUnits
from parallel.fsdp_units import FsdpUnit
from parallel.mesh import Mesh

Fill = Callable[[str, tuple[int, ...], int, Tensor], None]
Named = list[tuple[str, nn.Parameter]]


def apply_fsdp(
    model: nn.Module,
    mesh: Mesh,
    settings: FsdpSettings = FsdpSettings(),
    units: Iterable[nn.Module] = (),
    fill: Fill | None = None,
    stages: StageUnits | None = None,
) -> Fsdp:
    """Shard a model over the mesh; `units` are its blocks in the order of forward, everything else is the root unit.

    Afterwards each parameter is another object of the same name and full shape, whose memory is there only while it is
    used: build the optimizer then, and pass it through `shard_optimizer`. `fill(name, shape, start, flat)` writes
    elements start .. start + flat.numel() of a flattened parameter of a model on the meta device. On a pipeline rank
    `stages` says which of the units each of its stages runs.
    """
    modules = list(units)
    on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if on_meta:
        raise UserError(f"buffer {on_meta[0]} is on the meta device; compute it again before the model is sharded")
    if fill is None and any(param.is_meta for param in model.parameters()):
        raise UserError("the model is on the meta device; give apply_fsdp a `fill` that writes its initial weights")
    move_buffers(model, mesh.device)
    built = []
    root, *blocks = assign(model, modules)
    assert all(blocks), "a unit without parameters"
    for named in [root, *blocks] if root else blocks:  # of a pipeline rank everything may be in blocks
        built.append(build_unit(named, mesh, settings))
        write_shards(built[-1], dict(named), mesh, settings, fill)
        replace_parameters(model, dict(named), built[-1])
    if stages is not None:
        return PipelinedFsdp(model, built, modules, settings, stages)
    return Fsdp(model, built, modules, settings)


def assign(model: nn.Module, modules: list[nn.Module]) -> list[Named]:
    """Named parameters of the root and of each unit; one that several units share belongs to the root."""
    uses = Counter(id(param) for module in modules for param in module.parameters())
    inside = {id(submodule) for module in modules for submodule in module.modules()}
    outside = [submodule for submodule in model.modules() if id(submodule) not in inside]
    uses.update(id(param) for submodule in outside for param in submodule.parameters(recurse=False))
    parts = {id(submodule) for submodule in model.modules()}
    assert all(id(module) in parts for module in modules), "a unit that is no part of the model"
    names = {id(param): name for name, param in model.named_parameters()}
    owned = [[(names[id(param)], param) for param in module.parameters() if uses[id(param)] == 1] for module in modules]
    taken = {name for named in owned for name, _ in named}
    return [[(name, param) for name, param in model.named_parameters() if name not in taken], *owned]


def build_unit(named: Named, mesh: Mesh, settings: FsdpSettings) -> FsdpUnit:
    master = named[0][1].dtype
    for _, param in named[1:]:
        master = torch.promote_types(master, param.dtype)
    dtypes = [
        master if settings.param_dtype is None or settings.keep_dtype(name, param) else settings.param_dtype
        for name, param in named
    ]
    layout = plan_unit(named, dtypes, mesh.size(settings.shard_axis))
    return FsdpUnit(layout, mesh, settings.shard_axis, master)


@torch.no_grad()
def write_shards(
    unit: FsdpUnit, params: dict[str, nn.Parameter], mesh: Mesh, settings: FsdpSettings, fill: Fill | None
) -> None:
    """The initial values of a unit's shards: rows of rank 0's parameter, or what `fill` writes for a meta one."""
    for shard in unit.shards:
        param, flat = params[shard.name], shard.local.detach().view(-1)
        if param.is_meta:
            if flat.numel():
                fill(shard.name, shard.shape, shard.start, flat)
            continue
        full = param.detach().to(mesh.device)
        for axis in (settings.shard_axis, settings.replicate_axis):
            full = broadcast(full, mesh, axis)
        flat.copy_(full.reshape(-1)[shard.start : shard.start + flat.numel()])


def replace_parameters(model: nn.Module, old: dict[str, nn.Parameter], unit: FsdpUnit) -> None:
    """Put the unit's parameters wherever a module had the old ones; tied ones stay tied."""
    new = {id(old[shard.name]): param for shard, param in zip(unit.shards, unit.params, strict=True)}
    for module in model.modules():
        for attribute, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) in new:
                setattr(module, attribute, new[id(param)])


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)
