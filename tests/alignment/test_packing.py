"""Packed rows against the examples one by one: which tokens, which loss, which gradients; and how full the rows are."""

import random

import pytest
import torch

from alignment.packing import best_fit, density, pack, places_of
from alignment.packing_loader import PackedLoader, PackedValidation, PackingConfig
from alignment.r1_prompt import Example
from configs.errors import UserError
from llm.args import ModelConfig
from llm.data_loader import IGNORED
from llm.loss import CrossEntropyLoss
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise
from tests.tolerances import FP32_GRADIENT, FP64

VOCAB, CAPACITY = 41, 24


def make_examples(count=17, seed=0, longest=CAPACITY + 1):
    """Examples of unequal length with unequal shares of response tokens."""
    rng = random.Random(seed)
    examples = []
    for _ in range(count):
        length = rng.randint(2, longest)
        prompt = rng.randint(1, length - 1)
        ids = [rng.randrange(VOCAB) for _ in range(length)]
        examples.append(Example(ids, [0] * prompt + [1] * (length - prompt)))
    return examples


def test_bins_hold_every_example_once_within_the_capacity():
    rng = random.Random(1)
    lengths = [rng.randint(1, 100) for _ in range(500)]
    bins = best_fit(lengths, 100)
    assert sorted(index for one in bins for index in one) == list(range(500))
    assert all(sum(lengths[index] for index in one) <= 100 for one in bins)


def slow_best_fit(lengths, capacity):
    """The definition: longest first, each into the bin with the least room that still holds it."""
    rooms, bins = [], []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [b for b in range(len(bins)) if rooms[b] >= lengths[index]]
        if fitting:
            chosen = min(fitting, key=lambda b: rooms[b])
        else:
            chosen = len(bins)
            bins.append([])
            rooms.append(capacity)
        bins[chosen].append(index)
        rooms[chosen] -= lengths[index]
    return rooms


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_matches_its_definition(seed):
    """Ties between equally full bins may fall otherwise; the rooms that are left are the same."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 64) for _ in range(300)]
    bins = best_fit(lengths, 64)
    assert sorted(64 - sum(lengths[i] for i in one) for one in bins) == sorted(slow_best_fit(lengths, 64))


def test_an_example_that_fits_no_row_is_named():
    with pytest.raises(UserError, match=r"example 1 takes 9 tokens .*data.seq_len=8"):
        best_fit([3, 9, 2], 8)
    assert best_fit([], 8) == [] and density([], [], 8) == 0.0


def test_a_row_holds_ids_targets_documents_and_positions():
    examples = [Example([5, 6, 7, 8], [0, 0, 1, 1]), Example([1, 2, 3], [0, 1, 1])]
    batch = pack(examples, [[0, 1], []], 8)
    assert batch.token_ids[0].tolist() == [5, 6, 7, 1, 2, 0, 0, 0]
    assert batch.targets[0].tolist() == [IGNORED, 7, 8, 2, 3, IGNORED, IGNORED, IGNORED]
    assert batch.doc_ids[0].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert batch.token_positions[0].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert batch.num_targets == 4 and (batch.targets[1] == IGNORED).all()


@pytest.fixture(scope="module", params=["sdpa", "eager", "mock"])
def model(request):
    config = ModelConfig(
        vocab_size=VOCAB, max_seq_len=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48,
        attention=request.param,
    )  # fmt: skip
    made = Transformer(config)
    initialise(made, seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)  # so that what an example saw of another would be seen
    return made.double() if request.param != "mock" else made


def loss_of(model, batch):
    logits = model(batch.token_ids, make_context(batch.token_ids, batch.token_positions, batch.doc_ids))
    return CrossEntropyLoss()(logits, batch.targets).loss_sum


def alone(model, example):
    """One example in a row of its own, without documents or padding."""
    ids = torch.tensor([example.token_ids])
    targets = torch.where(torch.tensor([example.response_mask[1:]], dtype=torch.bool), ids[:, 1:], IGNORED)
    return CrossEntropyLoss()(model(ids[:, :-1]), targets).loss_sum


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_packed_and_padded_loss_and_gradients_match_separate_examples(model, packing):
    examples, parameters = make_examples(), list(model.parameters())
    lengths = [places_of(example) for example in examples]
    bins = best_fit(lengths, CAPACITY) if packing == "best_fit" else [[i] for i in range(len(examples))]
    batch = pack(examples, bins, CAPACITY)
    loss, wanted = loss_of(model, batch), sum(alone(model, example) for example in examples)
    exact = loss.dtype == torch.float64
    torch.testing.assert_close(loss, wanted, rtol=FP64 if exact else FP32_GRADIENT, atol=0.0)
    gradients = torch.autograd.grad(loss / batch.num_targets, parameters)
    for one, other in zip(gradients, torch.autograd.grad(wanted / batch.num_targets, parameters), strict=True):
        tolerance = (1e-9 if exact else FP32_GRADIENT) * other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


def test_without_documents_packed_examples_would_see_each_other(model):
    examples = make_examples()
    batch = pack(examples, best_fit([places_of(example) for example in examples], CAPACITY), CAPACITY)
    honest = loss_of(model, batch)
    batch.doc_ids = None
    assert (loss_of(model, batch) - honest).abs() > 1e-3 * honest


def loader(seed=0, packing="best_fit", window=7, examples=None):
    config = PackingConfig(CAPACITY, num_sequences=4, seed=seed, packing=packing, window=window)
    return PackedLoader(examples or make_examples(), config)


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_an_epoch_holds_every_example_once_and_the_next_one_in_another_order(packing):
    made = loader(packing=packing)
    first, second = made.epoch(0), made.epoch(1)
    for rows in (first, second):
        assert sorted(index for row in rows for index in row) == list(range(17))
    assert first != second and loader(seed=1, packing=packing).epoch(0) != first


def test_a_batch_is_a_function_of_its_index_and_ranks_slice_it():
    """Far ahead without what lies before, twice, and in shares."""
    whole = loader().micro_batches(40, range(4), 4)[0]
    assert torch.equal(loader().micro_batches(40, range(4), 4)[0].token_ids, whole.token_ids)
    made = loader()
    made.micro_batches(90, range(4), 4)  # another epoch in between
    shares = [made.micro_batches(40, range(2 * rank, 2 * rank + 2), 1) for rank in (0, 1)]
    rows = torch.cat([batch.token_ids for share in shares for batch in share])
    assert len(shares[0]) == 2 and torch.equal(rows, whole.token_ids)


def test_rows_of_all_epochs_follow_one_another():
    made = loader()
    per_epoch = [len(made.epoch(number)) for number in range(4)]
    rows = [made.row(number) for number in range(sum(per_epoch))]
    assert rows == [row for number in range(4) for row in made.epoch(number)]


def test_validation_shares_hold_every_example_once_and_ranks_have_as_many_batches():
    examples = make_examples(count=9, longest=CAPACITY)
    made = PackedValidation(examples, PackingConfig(CAPACITY, 4, 0), bytes_per_token=3.0)
    shares = [list(made.batches(2, rank, 3)) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    targets = sum(batch.num_targets for share in shares for batch in share)
    assert targets == sum(example.num_response_tokens for example in examples)


def test_no_example_and_no_window_are_refused():
    with pytest.raises(UserError, match="train_data"):
        PackedLoader([], PackingConfig(CAPACITY, 4, 0))
    with pytest.raises(UserError, match="pack_window"):
        PackingConfig(CAPACITY, 4, 0, window=0)
    with pytest.raises(UserError, match="best_fit"):
        PackingConfig(CAPACITY, 4, 0, packing="first_fit")


def test_rows_of_gsm8k_are_nearly_full(shared_data):
    """The issue's bound: what packing gains is at least 0.95 of padded tokens over real ones."""
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:4000]
    lengths = [len(line.encode()) // 4 for line in lines]  # about four bytes a token
    bins = best_fit(lengths, 1024)
    assert density(lengths, bins, 1024) > 0.95
