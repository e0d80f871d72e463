"""Turned queries and cached keys against kernel.rope's reference; what is not a token's place stays."""

import pytest
import torch

from kernel.rope import rope_reference
from kernel.rope_cache import RopeTables, rope_cache
from tests.tolerances import FP32_FORWARD

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("H", "K", "D"), [(4, 2, 32), (3, 1, 20)])
def test_rope_cache_matches_rope_and_a_copy(H, K, D):
    N, page_size = 5, 4
    joined = torch.randn(N, (H + 2 * K) * D, device=DEVICE)
    q, k, v = (x.view(N, -1, D) for x in joined.split([H * D, K * D, K * D], dim=-1))
    angles = torch.randn(30, D // 2, device=DEVICE)
    positions = torch.tensor([7, 0, 29, 7, 12], device=DEVICE)
    places = torch.tensor([9, 4, 23, 11, 0], device=DEVICE)
    pages = tuple(torch.full((6, page_size, K, D), 5.0, device=DEVICE) for _ in range(2))
    out = rope_cache(q, k, v, RopeTables(angles.cos(), angles.sin(), positions), pages, places)
    of_tokens = torch.cat((angles[positions], angles[positions]), dim=-1)[None, :, None]  # (1, N, 1, D)
    q_turned, k_turned = rope_reference(q[None], k[None], (of_tokens.cos(), of_tokens.sin()))
    torch.testing.assert_close(out, q_turned[0], atol=FP32_FORWARD, rtol=FP32_FORWARD)
    torch.testing.assert_close(pages[0].view(-1, K, D)[places], k_turned[0], atol=FP32_FORWARD, rtol=FP32_FORWARD)
    assert torch.equal(pages[1].view(-1, K, D)[places], v)
    others = [place for place in range(24) if place not in places.tolist()]
    assert all((x.view(-1, K, D)[others] == 5.0).all() for x in pages)
