"""New weights into a model in place, by the names that the model has on a single device."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from configs.errors import UserError


@torch.no_grad()
def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the model's parameters, whose storage stays; a tied parameter may come under either name.

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
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise UserError(
                f"{name} has shape {tuple(tensor.shape)} and the model's is {tuple(own[name].shape)}; give weights of "
                f"this model"
            )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
