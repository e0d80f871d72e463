"""CUDA graphs under pipeline parallelism (kernels.cuda_graph with pp > 1): what they cannot hold, and what they fill.

Each operation of the schedule is one launch (parallel/pipeline_parallel_graph). What a stage does on the host would be
done once, at capture: no collectives within a stage, no loads of experts, no activation checkpointing's bookkeeping.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from configs.errors import UserError
from llm.args import TrainConfig
from llm.data_loader import Batch
from llm.training_graph import signature
from parallel.pipeline_parallel_backward import DeferredGradients
from parallel.pipeline_parallel_graph import BatchCopies, CudaCapture, GraphedStages


def check_pipeline_graph(config: TrainConfig, device_type: str = "cuda") -> None:
    """UserError for what the graphs of a pipeline's operations cannot hold."""
    parallel = config.parallel
    wrong = {
        f"device={device_type}": device_type != "cuda",
        f"parallel.tp={parallel.tp}": parallel.tp > 1,
        f"parallel.cp={parallel.cp}": parallel.cp > 1,
        f"parallel.zero={parallel.zero}": parallel.zero > 1,
        f"compile={config.compile}": config.compile != "none",
        f"moe.num_experts={config.model.moe.num_experts}": config.model.moe.num_experts > 0,
        f"parallel.activation_checkpointing={parallel.activation_checkpointing}": (
            parallel.activation_checkpointing != "none"
        ),
    }
    for setting, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(
                f"kernels.cuda_graph=true with parallel.pp={parallel.pp} cannot hold {setting}; "
                f"use kernels.cuda_graph=false"
            )


def make_pipeline_graphs(
    model: nn.Module,
    tied_copy: Tensor | None,
    deferred: DeferredGradients,
    boundary: Callable[[Any], Tensor],
    capture: Any = None,
) -> GraphedStages:
    """Graphs over this rank's stages; `tied_copy` is a table with a gradient that is no parameter."""

    def trained() -> Iterator[Tensor]:
        yield from (param for param in model.parameters() if param.requires_grad)
        if tied_copy is not None and tied_copy.requires_grad:
            yield tied_copy

    copies = BatchCopies(lambda batch: batch.map(Tensor.clone), fill_batch, signature)
    return GraphedStages(boundary, trained, deferred, copies, capture or CudaCapture())


def fill_batch(fixed: Batch, given: Batch) -> None:
    for name in ("token_ids", "targets", "doc_ids", "token_positions"):
        if getattr(fixed, name) is not None:
            getattr(fixed, name).copy_(getattr(given, name), non_blocking=True)
