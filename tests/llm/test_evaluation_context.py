"""Loss by length of context, on a model whose gain from context is known."""

import math

import numpy as np
import pytest
from torch import nn

from configs.errors import UserError
from llm.evaluation_context import Targets, context_lengths, losses_by_context


class SeesBack(nn.Module):
    """Sure of the target when it sees at least `need` tokens, else uniform over 16; the target is the token + 1."""

    def __init__(self, need: int):
        super().__init__()
        self.need = need
        self.embedding = nn.Embedding(16, 16)

    def hidden_states(self, token_ids, ctx):
        assert ctx.token_positions[0, 0] == 0
        one_hot = nn.functional.one_hot((token_ids + 1) % 16, 16).float()  # (B, T, 16)
        return one_hot * (1e4 if token_ids.shape[1] >= self.need else 0.0)

    def output(self, hidden):
        return hidden


def counting_rows(lengths):
    return [np.arange(start, start + length) % 16 for start, length in enumerate(lengths)]


def test_the_gain_lies_where_the_model_begins_to_see():
    targets = Targets.draw(counting_rows([40, 12, 33]), context=10, count=50)
    found = losses_by_context(SeesBack(4), targets, batch_size=7)
    assert [entry.context for entry in found] == [1, 2, 4, 8, 10]
    expected = [math.log(16), math.log(16), 0.0, 0.0, 0.0]
    assert [entry.loss for entry in found] == pytest.approx(expected, abs=1e-6)
    assert [entry.gain for entry in found] == pytest.approx([0, 0, math.log(16), 0, 0], abs=1e-6)
    assert found[2].spread == pytest.approx(0.0, abs=1e-6), "all targets gain alike"


def test_the_spread_of_a_gain_is_the_standard_error_of_its_mean():
    rows = np.array([[7, 1, 2], [7, 1, 9]])  # given two tokens the model is sure, and wrong in the second row
    before, after = losses_by_context(SeesBack(2), Targets(rows), batch_size=2)
    gains = np.array([math.log(16), math.log(16) - 1e4])
    assert (before.spread, after.gain) == (0.0, pytest.approx(gains.mean()))
    assert after.spread == pytest.approx(gains.std(ddof=1) / math.sqrt(2))


def test_targets_have_their_context_in_their_own_row_and_are_chosen_once():
    rows = [np.arange(100, 108), np.arange(200, 206), np.arange(300, 303)]
    targets = Targets.draw(rows, context=4, count=100)
    assert sorted(row[-1] for row in targets.rows.tolist()) == [104, 105, 106, 107, 204, 205]
    assert all(np.diff(row).tolist() == [1] * 4 for row in targets.rows)
    assert len(Targets.draw(rows, 4, 3).rows) == 3
    with pytest.raises(UserError, match="no text has 10 tokens"):
        Targets.draw(rows, context=9, count=1)


def test_lengths_are_powers_of_two_and_the_longest():
    assert context_lengths(1) == [1] and context_lengths(8) == [1, 2, 4, 8] and context_lengths(9) == [1, 2, 4, 8, 9]
