"""What the engine puts into a model's seams, against the model's own functions."""

import torch

from llm.engine_weights import light_activate, light_normalise
from llm.transformer import normalise
from llm.transformer_layers import silu_times
from tests.tolerances import FP32_FORWARD

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def test_kernels_read_columns_of_a_joined_projection():
    """QK-norm reads heads of which another projection's columns follow each token's."""
    joined = torch.randn(3, 6 * 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight = torch.linspace(0.5, 2.0, 32, device=DEVICE)
    q, k = (x.view(1, 3, -1, 32) for x in joined.split([4 * 32, 2 * 32], dim=-1))
    for heads in (q, k):
        expected, _ = normalise(heads, weight, 1e-5, None)
        torch.testing.assert_close(light_normalise(heads, weight, 1e-5, None)[0], expected, **tolerance())
    gate, up = joined.chunk(2, dim=-1)
    torch.testing.assert_close(light_activate(gate, up), silu_times(gate, up), **tolerance())


def tolerance() -> dict[str, float]:
    return dict(atol=FP32_FORWARD, rtol=FP32_FORWARD)
