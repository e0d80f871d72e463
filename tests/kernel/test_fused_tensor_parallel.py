"""All fused kernels on the parts of a model cut over two ranks beside the plain operations, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from llm.args import KernelsConfig, ParallelConfig
from llm.parallelize import make_forward_loss, parallelize
from llm.transformer_kernels import make_loss
from tests.parallel.test_tensor_parallel import config_of, run, whole_model
from tests.parity.cases import global_batch
from tests.tolerances import FP32_GRADIENT

pytest.importorskip("triton")


def plain_and_fused_gradients(mesh, parallel):
    """Full gradients of one step with the plain and with the fused kernels, and both losses."""
    found = []
    for kernels in (KernelsConfig(), KernelsConfig(fused=True, optimizer=False, loss_chunk_mb=1)):
        config = replace(config_of(parallel), kernels=kernels, z_loss=0.01)
        parts = parallelize(whole_model(dtype=torch.float32), config, mesh)
        forward_loss = make_forward_loss(parts.model, make_loss(kernels, config.z_loss), "none")
        parts.strategy.begin_micro_batch(last=True)
        sums = forward_loss(global_batch(0))
        (sums.loss_sum + sums.z_loss_sum).backward()
        parts.strategy.finish_gradients()
        found.append((sums.loss_sum.detach(), parts.strategy.full_gradients()))
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("by_tokens", "chunks"), [(True, 1), (False, 1), (True, 2)])
def test_the_fused_kernels_of_parts_match_the_plain_operations(by_tokens, chunks):
    for (plain, wanted), (fused, got) in run(
        plain_and_fused_gradients, ParallelConfig(tp=2, sequence_parallel=by_tokens, tp_chunks=chunks)
    ):
        assert torch.isclose(fused, plain, rtol=FP32_GRADIENT)
        for name, gradient in wanted.items():
            assert (got[name] - gradient).abs().max() <= FP32_GRADIENT * gradient.abs().max(), name
