"""AdamW (Loshchilov & Hutter 2019) over many tensors in one launch, with float32 states and the clip factor folded in.

The kernel reads where the tensors lie from a table on the device. What does not move (parameters, states, how the
tensors are cut into blocks) is uploaded once; the gradients' addresses only when they have changed. Each element is
read once and written once: 28 bytes of it in float32, of which clipping by a pass of its own would add 8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from configs.errors import UserError
from kernel.operator_inputs import check_tensors

BLOCK, TAIL = 2048, 512  # elements a program, and at a time at a tensor's end
WARPS = 8
MAX_TABLES = 64  # more sets than this mean that tensors move: then nothing is worth keeping
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
Moments = Sequence[Tensor]


@dataclass(frozen=True)
class AdamWRates:
    """The numbers of one update; step counts the parameters' own updates, this one included."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


@triton.jit
def update_block(
    param_ptr, gradient_ptr, m_ptr, v_ptr, size, scale,
    decay, grow1, beta2, grow2, rate, eps, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the first `size` elements from these addresses on, or without a mask all of BLOCK."""
    offsets = tl.arange(0, BLOCK)
    inside = (offsets < size) if MASKED else None
    g = tl.load(gradient_ptr + offsets, mask=inside).to(tl.float32) * scale
    m = tl.load(m_ptr + offsets, mask=inside)
    v = tl.load(v_ptr + offsets, mask=inside)
    w = tl.load(param_ptr + offsets, mask=inside).to(tl.float32)
    m += grow1 * (g - m)
    v = beta2 * v + grow2 * g * g
    w = decay * w - rate * m / (tl.sqrt(v) + eps)
    tl.store(m_ptr + offsets, m, mask=inside)
    tl.store(v_ptr + offsets, v, mask=inside)
    tl.store(param_ptr + offsets, w.to(param_ptr.dtype.element_ty), mask=inside)


@triton.jit
def adamw_kernel(
    addresses_ptr, sizes_ptr, tensor_of_ptr, first_of_ptr, scale_ptr, count,
    decay, grow1, beta2, grow2, rate, eps,
    HAS_SCALE: tl.constexpr, ALIGNED: tl.constexpr, PARAM: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """A program updates one block of one tensor; addresses (4, count) int64: parameter, gradient, exp_avg, exp_avg_sq.

    m += (1 - beta1)(g - m); v = beta2 v + (1 - beta2) g^2; w = decay w - rate m / (sqrt(v) + eps), where decay is
    1 - lr weight_decay and both bias corrections are in rate and eps; grow1 and grow2 are 1 - beta1 and 1 - beta2, made
    by the host, since in float32 that difference would lose three digits.
    """
    tensor = tl.load(tensor_of_ptr + tl.program_id(0))
    first = tl.load(first_of_ptr + tl.program_id(0))  # int64
    left = tl.load(sizes_ptr + tensor) - first
    param_ptr = tl.load(addresses_ptr + tensor).to(tl.pointer_type(PARAM)) + first
    gradient_ptr = tl.load(addresses_ptr + count + tensor).to(tl.pointer_type(GRADIENT)) + first
    m_ptr = tl.load(addresses_ptr + 2 * count + tensor).to(tl.pointer_type(tl.float32)) + first
    v_ptr = tl.load(addresses_ptr + 3 * count + tensor).to(tl.pointer_type(tl.float32)) + first
    if ALIGNED:  # the host has looked at the addresses, and blocks begin at multiples of BLOCK
        param_ptr, gradient_ptr = tl.multiple_of(param_ptr, 16), tl.multiple_of(gradient_ptr, 16)
        m_ptr, v_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16)
    if HAS_SCALE:
        scale = tl.load(scale_ptr)
        if scale != scale:  # not a number: the caller's way to say, on the device, that nothing is to be updated
            left = tl.zeros((), tl.int64)
    else:
        scale = 1.0
    # A mask whose bound is known to nobody would keep loads to one element, so whole blocks go without one.
    if left >= BLOCK:
        update_block(
            param_ptr, gradient_ptr, m_ptr, v_ptr, left, scale, decay, grow1, beta2, grow2, rate, eps, False, BLOCK
        )  # fmt: skip
    else:
        for start in range(0, left, TAIL):  # in small pieces, whose addresses take few registers
            update_block(
                param_ptr + start, gradient_ptr + start, m_ptr + start, v_ptr + start, left - start, scale,
                decay, grow1, beta2, grow2, rate, eps, True, TAIL,
            )  # fmt: skip


def adamw_reference(tensors: Sequence[Tensor], rates: AdamWRates, scale: Tensor | None = None) -> None:
    """The same update in place of one (parameter, gradient, exp_avg, exp_avg_sq) in plain PyTorch."""
    param, gradient, m, v = tensors
    gradient = gradient.to(m.dtype) * (1.0 if scale is None else scale)
    m.lerp_(gradient, 1 - rates.beta1)
    v.mul_(rates.beta2).addcmul_(gradient, gradient, value=1 - rates.beta2)
    correction = math.sqrt(1 - rates.beta2**rates.step)
    update = m / (v.sqrt() + rates.eps * correction) * (rates.lr * correction / (1 - rates.beta1**rates.step))
    param.copy_(param.to(m.dtype) * (1 - rates.lr * rates.weight_decay) - update)


@dataclass
class Table:
    """Where a set of tensors lies: addresses (4, count), sizes, and each block's tensor and first element."""

    addresses: Tensor
    sizes: Tensor
    tensor_of: Tensor
    first_of: Tensor
    gradients: list[int]  # the addresses of the gradients that the table holds
    aligned: bool


@dataclass
class FusedAdamW:
    """Keeps the tables of the sets of tensors it has updated, so that a step is a launch and nothing else."""

    tables: dict[tuple[int, ...], Table] = field(default_factory=dict)

    def update(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: tuple[Moments, Moments],
        rates: AdamWRates,
        scale: Tensor | None = None,
    ) -> None:
        """One update in place of parameters by gradients times `scale`, a float32 scalar on the device; nan: no update.

        Parameters share one dtype, gradients one dtype; moments (exp_avg, exp_avg_sq) are float32; all contiguous.
        Raises UserError for tensors that the kernel does not take.
        """
        key = tuple(place for tensors in (params, *moments) for x in tensors for place in (x.data_ptr(), x.numel()))
        table = self.tables.get(key)
        addresses = [gradient.data_ptr() for gradient in gradients]
        if table is None or table.gradients != addresses:
            check_update(params, gradients, moments, scale)
            if len(self.tables) >= MAX_TABLES:
                self.tables.clear()
            table = self.tables[key] = build_table(params, gradients, moments, table)
        correction = math.sqrt(1 - rates.beta2**rates.step)
        numbers = (1 - rates.lr * rates.weight_decay, 1 - rates.beta1, rates.beta2, 1 - rates.beta2)
        numbers += (rates.lr * correction / (1 - rates.beta1**rates.step), rates.eps * correction)
        adamw_kernel[(table.tensor_of.numel(),)](
            table.addresses, table.sizes, table.tensor_of, table.first_of,
            table.addresses if scale is None else scale, len(params), *numbers,
            HAS_SCALE=scale is not None, ALIGNED=table.aligned, PARAM=KINDS[params[0].dtype],
            GRADIENT=KINDS[gradients[0].dtype], BLOCK=BLOCK, TAIL=TAIL, num_warps=WARPS,
        )  # fmt: skip


def build_table(
    params: Sequence[Tensor], gradients: Sequence[Tensor], moments: tuple[Moments, Moments], old: Table | None
) -> Table:
    """A new table, or with `old` the same with the gradients' addresses replaced."""
    device = params[0].device
    rows = [[tensor.data_ptr() for tensor in tensors] for tensors in (params, gradients, *moments)]
    aligned = all(address % 16 == 0 for row in rows for address in row)
    addresses = upload(rows, torch.int64, device)
    if old is not None:
        return Table(addresses, old.sizes, old.tensor_of, old.first_of, rows[1], aligned)
    sizes = [param.numel() for param in params]
    blocks = [(index, first) for index, size in enumerate(sizes) for first in range(0, size, BLOCK)]
    tensor_of, first_of = ([block[i] for block in blocks] for i in (0, 1))
    return Table(
        addresses, upload(sizes, torch.int64, device), upload(tensor_of, torch.int32, device),
        upload(first_of, torch.int64, device), rows[1], aligned,
    )  # fmt: skip


def upload(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """To the device without waiting for it; the pinned copy is kept by its allocator until it has been read."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def check_update(
    params: Sequence[Tensor], gradients: Sequence[Tensor], moments: tuple[Moments, Moments], scale: Tensor | None
) -> None:
    if not params or not len(params) == len(gradients) == len(moments[0]) == len(moments[1]):
        counts = f"{len(params)}, {len(gradients)}, {len(moments[0])}, {len(moments[1])}"
        raise UserError(f"adamw: {counts} parameters, gradients, exp_avg, exp_avg_sq must be as many, at least one")
    for row in zip(params, gradients, *moments, strict=True):
        names = dict(zip(("param", "gradient", "exp_avg", "exp_avg_sq"), row, strict=True))
        check_tensors("adamw", adamw_kernel, **names, scale=scale)
        if len({tensor.shape for tensor in row}) > 1:
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in names.items())
            raise UserError(f"adamw: {shapes} must have one shape; rebuild the optimizer's state")
        for name, tensor in names.items():
            if not tensor.is_contiguous():
                raise UserError(f"adamw: {name} with strides {tensor.stride()} must be contiguous; call .contiguous()")
        kinds, expected = (row[0].dtype, row[1].dtype), (params[0].dtype, gradients[0].dtype)
        if kinds != expected:
            raise UserError(f"adamw: parameter and gradient of {kinds} beside {expected}; update each by its own call")
        if row[2].dtype != torch.float32 or row[3].dtype != torch.float32:
            raise UserError(f"adamw: states of {row[2].dtype} and {row[3].dtype} must be float32; convert them")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
        raise UserError(f"adamw: scale {tuple(scale.shape)} of {scale.dtype} must be one float32 number; convert it")
