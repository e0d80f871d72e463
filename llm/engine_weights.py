"""A model's weights in the engine: laid out for decoding, and replaced in place by newer ones.

Decoding reads every weight for a handful of tokens, so few and large products are best: the weights that read one input
become parts of one matrix. The parameters keep their names, shapes and values and are views of it, so an optimizer or
load_weights that writes them writes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.errors import UserError
from llm.transformer import MultiHeadAttention, RmsNorm, Transformer, TransformerBlock, normalise
from llm.transformer_kernels import fused_activate, fused_normalise
from llm.transformer_layers import Linear, SwiGlu, project_each, silu_times
from parallel.tensor_parallel import ColumnGroup, TensorLayout


@dataclass(frozen=True)
class JoinedProjection:
    """The seam `project`: one product for all layers that read x (..., in); outputs are its columns.

    Where gradients are asked for, the layers are called one by one: the parameters are theirs. So are they where
    somebody has given a layer other storage (model.to, load_state_dict(assign=True)): the matrix is then out of date.
    """

    weight: Tensor  # (sum of outs, in)
    bias: Tensor | None
    sizes: list[int]

    def __call__(self, x: Tensor, layers: Sequence[Linear]) -> Sequence[Tensor]:
        if torch.is_grad_enabled() or not self.holds(layers):
            return project_each(x, layers)
        return F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)

    def holds(self, layers: Sequence[Linear]) -> bool:
        """Whether the layers' weights still are rows of the matrix; they move together, so the first one tells."""
        return layers[0].weight.data_ptr() == self.weight.data_ptr()


@torch.no_grad()
def fuse_model(model: Transformer) -> None:
    """Join projections and put in the norms and kernels of the device; nothing changes where that is done already."""
    on_gpu = model.output.weight.device.type == "cuda"
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            join(module, (module.q_proj, module.k_proj, module.v_proj))
        if isinstance(module, SwiGlu):
            join(module, (module.gate_proj, module.up_proj))
            if on_gpu and module.activate is silu_times:
                module.activate = light_activate
        if isinstance(module, RmsNorm) and module.normalise is normalise:
            module.normalise = light_normalise if on_gpu else torch_normalise
        if isinstance(module, TransformerBlock) and on_gpu:
            module.defers_sum = True  # the next norm adds as it reads


def join(module: nn.Module, layers: Sequence[Linear]) -> None:
    """Make the layers' weights views of one matrix; layers whose product was swapped (LoRA, FP8) stay as they are."""
    group = module.project if isinstance(module.project, ColumnGroup) else None
    inner = module.project if group is None else group.inner
    stale = isinstance(inner, JoinedProjection) and not inner.holds(layers)
    if not (inner is project_each or stale) or any(layer.matmul is not F.linear for layer in layers):
        return
    weight = torch.cat([layer.weight for layer in layers])  # (sum of outs, in)
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    sizes = [layer.weight.shape[0] for layer in layers]
    for index, layer in enumerate(layers):
        layer.weight.data = weight.split(sizes)[index]
        if bias is not None:
            layer.bias.data = bias.split(sizes)[index]
    joined = JoinedProjection(weight, bias, sizes)
    module.project = joined if group is None else replace(group, inner=joined)


def light_normalise(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The seam `normalise` by our kernel, without the checks and the node of autograd that cost the host 50 us."""
    if torch.is_grad_enabled():
        return fused_normalise(x, weight, eps, residual)
    from kernel.operator_inputs import is_rows
    from kernel.rms_norm_kernels import run_forward

    if not is_rows(x):  # heads of a joined projection: other columns lie between two tokens
        x = x.contiguous()
    return run_forward(x, residual, weight, eps, x.dtype)[:2]


def light_activate(gate: Tensor, up: Tensor) -> Tensor:
    """The seam `activate`, likewise."""
    if torch.is_grad_enabled():
        return fused_activate(gate, up)
    from kernel.swiglu import run_forward

    return run_forward(gate, up)


def torch_normalise(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The seam `normalise` in few operations: on a CPU F.rms_norm is eight of them."""
    stream = x if residual is None else residual + x
    if stream.dtype != torch.float32:
        return F.rms_norm(stream, weight.shape, weight, eps), stream
    norm = torch.linalg.vector_norm(stream, dim=-1, keepdim=True)
    return stream * torch.rsqrt(norm * norm * (1 / stream.shape[-1]) + eps) * weight, stream


@torch.no_grad()
def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor], layout: TensorLayout | None = None) -> None:
    """Copy `tensors` into the model's parameters, whose storage stays; a tied parameter may come under either name.

    With `layout`, the model is cut by tensor parallelism; the tensors are whole and each rank takes its parts.
    Raises UserError, before anything is copied, for names that are missing or unknown and for other shapes.
    """
    own = model.state_dict(keep_vars=True)
    unknown = sorted(tensors.keys() - own.keys())
    if unknown:
        raise UserError(f"the model has no parameter {unknown[0]!r}; give the names of its state_dict()")
    given = {id(own[name]) for name in tensors}
    missing = [name for name, parameter in own.items() if id(parameter) not in given]
    if missing:
        raise UserError(f"{missing[0]!r} is missing among the new weights; give all {len(own)} tensors")
    places = {} if layout is None else layout.by_parameter
    for name, tensor in tensors.items():
        place = places.get(id(own[name]))
        shape = tuple(own[name].shape) if place is None else tuple(place.shape)
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{name} has shape {tuple(tensor.shape)} and the model's is {shape}; give weights of this model"
            )
    for name, tensor in tensors.items():
        place = places.get(id(own[name]))
        own[name].copy_(tensor if place is None else place.slice(tensor, layout.rank))
