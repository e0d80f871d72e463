"""What the pictures of attention and of the embedding table show, read back from the axes."""

import numpy as np
import torch

from llm.bpe_tokenizer import Tokenizer
from llm.evaluation_embeddings import principal_components
from llm.figures_inside import KINDS, draw_attention, draw_embeddings, token_kind
from tests.tolerances import FP32_FORWARD


def test_each_head_stands_at_its_layer_with_a_tokens_row_as_a_row():
    maps = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).tril()
    figure = draw_attention(maps, ["<eot>", "a", " b", "\n", "$"], layers=[1, 4])
    assert len(figure.axes) == 6
    for place, axes in enumerate(figure.axes):
        row, head = divmod(place, 3)
        assert axes.get_title(loc="left") == f"layer {[1, 4][row]}, head {head}"
        np.testing.assert_allclose(axes.images[0].get_array(), maps[row, head].sqrt(), rtol=FP32_FORWARD)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["<eot>", "a", "\u2423b", "\u21b5", r"\$"]
    assert not figure.axes[1].get_yticklabels(), "only the first head of a layer is labelled"


def test_tokens_lie_along_the_first_component_by_their_kind(tiny_corpus):
    tokenizer = Tokenizer.load(tiny_corpus.tokenizer)
    table = torch.randn(tokenizer.vocab_size, 8, generator=torch.Generator().manual_seed(1))
    table[:, 3] *= 5  # the first component is an axis that the second is not
    (axes,) = draw_embeddings(table, tokenizer).axes
    expected = principal_components(table, 2).coordinates.numpy()
    kinds = [token_kind(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    assert len(axes.collections) == len(KINDS)
    for kind, dots in zip(KINDS, axes.collections, strict=True):
        rows = [i for i, own in enumerate(kinds) if own == kind]
        assert dots.get_label() == f"{kind} ({len(rows)})"
        np.testing.assert_allclose(np.asarray(dots.get_offsets()), expected[rows], rtol=FP32_FORWARD)
    named = {text.get_text(): text.xy for text in axes.texts}
    assert named and all(np.abs(expected - np.array(place)).sum(1).min() < FP32_FORWARD for place in named.values())
