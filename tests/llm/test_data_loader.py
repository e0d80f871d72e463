"""A batch is a function of (seed, index); every window once an epoch; every validation label counted once."""

from collections import Counter

import numpy as np
import pytest
import torch

from configs.errors import UserError
from llm.data_loader import BatchLoader, LoaderConfig, ValidationSet, make_batch, open_sources, source_weights
from llm.data_loader_order import MIX_BLOCK, EpochOrder
from llm.token_files import TokenSplit
from tests.llm.token_corpus import write_source

ORDERS = ["random", "epoch"]


def numbered(length: int, first: int = 1) -> np.ndarray:
    """Tokens that tell where they are from: first, first + 1, ..."""
    return np.arange(first, first + length)


@pytest.fixture
def tokens(tmp_path):
    write_source(tmp_path / "a", {"train": [numbered(101), numbered(61, 201)], "val": [numbered(23)]}, vocab_size=1000)
    write_source(tmp_path / "b", {"train": [numbered(81, 401)], "val": [numbered(10, 401)]}, vocab_size=1000)
    return tmp_path


def make_loader(tokens, weights=(), **changes) -> BatchLoader:
    sources = open_sources(tokens, "train")
    config = LoaderConfig(**(dict(seq_len=10, num_sequences=8, seed=3) | changes))
    return BatchLoader(list(sources.values()), source_weights(sources, dict(weights)), config)


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_depends_on_seed_and_index_only(tokens, order):
    first, second = make_loader(tokens, order=order), make_loader(tokens, order=order)
    expected = [second.global_batch(index).token_ids for index in range(5)]
    for index in (4, 0, 3, 3):  # any order, any number of times
        assert torch.equal(first.global_batch(index).token_ids, expected[index])
    other = make_loader(tokens, order=order, seed=4)
    assert not torch.equal(other.global_batch(0).token_ids, expected[0])
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_and_micro_batches_slice_one_global_batch(tokens, order):
    loader = make_loader(tokens, order=order)
    whole = loader.global_batch(2).token_ids
    slices = [
        batch.token_ids for rows in (range(0, 4), range(4, 8)) for batch in loader.micro_batches(2, rows, 2)
    ]  # fmt: skip
    assert [len(piece) for piece in slices] == [2, 2, 2, 2]
    assert torch.equal(torch.cat(slices), whole)
    ahead = loader.micro_batches(3, range(4, 8), 4)  # this one was read ahead
    assert torch.equal(ahead[0].token_ids, make_loader(tokens, order=order).global_batch(3).token_ids[4:])
    loader.close()


@pytest.mark.parametrize("order", ORDERS)
def test_targets_are_the_next_tokens(tokens, order):
    batch = make_loader(tokens, order=order).global_batch(0)
    assert torch.equal(batch.targets, batch.token_ids + 1)  # the tokens are numbered
    assert batch.num_targets == batch.targets.numel()


def test_random_windows_cover_every_start_evenly(tokens):
    loader = make_loader(tokens, weights={"a": 1.0, "b": 0.0}, num_sequences=2000)
    starts = Counter(loader.global_batch(0).token_ids[:, 0].tolist())
    possible = set(range(1, 92)) | set(range(201, 252))  # 91 + 51 starts of windows of 11 tokens
    assert set(starts) <= possible and len(starts) > 0.95 * len(possible)
    mean = 2000 / len(possible)
    chi_squared = sum((starts[start] - mean) ** 2 / mean for start in possible)
    assert chi_squared < 2 * len(possible)  # its mean is 141, its deviation 17


def test_weights_set_the_share_of_each_source(tokens):
    for order in ORDERS:
        loader = make_loader(tokens, weights={"a": 1.0, "b": 3.0}, order=order, num_sequences=MIX_BLOCK)
        share = (loader.global_batch(0).token_ids[:, 0] > 400).float().mean().item()
        assert share == pytest.approx(0.75, abs=0.0 if order == "epoch" else 0.03)


def test_an_epoch_has_each_window_once_and_the_next_another_order(tokens):
    loader = make_loader(tokens, weights={"a": 1.0, "b": 0.0}, order="epoch", num_sequences=16)
    # Windows of 10 labels: 10 in 101 tokens, 6 in 61.
    expected = sorted([1 + 10 * i for i in range(10)] + [201 + 10 * i for i in range(6)])
    first, second = (loader.global_batch(epoch).token_ids[:, 0].tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == expected
    assert first != second and first != expected


def test_the_mixture_of_an_epoch_has_no_gap(tokens):
    sources = list(open_sources(tokens, "train").values())
    order = EpochOrder(sources, [0.3, 0.7], 10, seed=0)
    for source, weight in enumerate([0.3, 0.7]):
        numbers = []
        for block in range(3):
            chosen, number = order.mix(block)
            numbers += number[chosen == source].tolist()
        assert sorted(numbers) == list(range(len(numbers)))
        assert len(numbers) == pytest.approx(3 * MIX_BLOCK * weight, abs=1)


@pytest.mark.parametrize("num_sources", [1, 70, 150])
def test_many_sources_of_equal_weight_still_mix(tokens, num_sources):
    source = TokenSplit(tokens / "a", "train")
    order = EpochOrder([source] * num_sources, [1 / num_sources] * num_sources, 10, seed=0)
    counts = np.zeros(num_sources)
    for block in range(20):
        counts += np.bincount(order.mix(block)[0], minlength=num_sources)
    # Each but the heaviest has had its share rounded down; that one has what is left.
    share = 20 * order.block_size / num_sources
    assert counts.sum() == 20 * order.block_size and np.all(np.abs(counts[1:] - share) <= 1)


@pytest.mark.parametrize("order", ORDERS)
def test_a_source_of_weight_0_may_be_too_short(tokens, order):
    write_source(tokens / "c", {"train": [numbered(5)]}, vocab_size=1000)
    with pytest.raises(UserError, match="give it the weight 0"):
        make_loader(tokens, order=order)
    batch = make_loader(tokens, weights={"a": 0.0, "b": 1.0, "c": 0.0}, order=order).global_batch(0)
    assert batch.token_ids.min() > 400


def test_a_negative_seed_is_refused(tokens):
    with pytest.raises(UserError, match="seed=-1"):
        make_loader(tokens, seed=-1)


def test_a_fault_of_reading_ahead_reaches_the_caller(tokens):
    loader = make_loader(tokens)
    loader.micro_batches(0, range(8), 8)
    loader.next[1].result()
    loader.sources = []
    loader.micro_batches(1, range(8), 8)  # was read before the fault
    with pytest.raises(IndexError):
        loader.micro_batches(2, range(8), 8)
    loader.close()


@pytest.mark.gpu
def test_pinned_batches_reach_the_gpu_unchanged(tokens):
    plain, pinned = (
        make_loader(tokens, document_masking=True),
        make_loader(tokens, document_masking=True, pin_memory=True),
    )
    expected, found = (loader.micro_batches(0, range(8), 8)[0] for loader in (plain, pinned))
    assert found.token_ids.is_pinned() and not expected.token_ids.is_pinned()
    on_gpu = found.to(torch.device("cuda"))
    for name in ("token_ids", "targets", "doc_ids", "token_positions"):
        assert torch.equal(getattr(on_gpu, name).cpu(), getattr(expected, name))


def test_documents_begin_at_their_end_of_text_token():
    window = np.array([[5, 6, 0, 7, 8, 0, 0, 9]])
    batch = make_batch(window, eot_id=0)
    assert batch.doc_ids.tolist() == [[0, 0, 1, 1, 1, 2, 3]]
    assert batch.token_positions.tolist() == [[0, 1, 0, 1, 2, 0, 0]]
    assert batch.targets.tolist() == [[6, 0, 7, 8, 0, 0, 9]]
    assert make_batch(window, eot_id=None).doc_ids is None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_counts_each_label_once(tokens, world_size):
    sources = list(open_sources(tokens, "val").values())
    validation = ValidationSet(sources, seq_len=10, max_tokens=10_000)
    seen = Counter()
    for rank in range(world_size):
        for batch in validation.batches(2, rank, world_size):
            assert batch.token_ids.shape == batch.targets.shape and batch.token_ids.shape[1] == 10
            labels = batch.targets[batch.targets != -100]
            assert batch.num_targets == len(labels)
            seen.update(labels.tolist())
    assert seen == Counter([*range(2, 24), *range(402, 411)])  # all but the first token of each shard
    assert validation.bytes_per_token == pytest.approx(4 * (23 + 10) / (22 + 9))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_rank_validates_as_many_batches(tokens, world_size):
    validation = ValidationSet(list(open_sources(tokens, "val").values()), seq_len=10, max_tokens=10_000)
    counts = [len(list(validation.batches(1, rank, world_size))) for rank in range(world_size)]
    assert counts == [-(-len(validation.windows) // world_size)] * world_size


def test_limited_validation_is_spread_and_repeats(tokens):
    sources = list(open_sources(tokens, "val").values())
    validation = ValidationSet(sources, seq_len=5, max_tokens=20)
    assert len(validation.windows) == 4
    again = ValidationSet(sources, seq_len=5, max_tokens=20)
    assert validation.windows == again.windows and len({source for source, _, _ in validation.windows}) == 2


def test_wrong_weights_are_refused(tokens):
    sources = {"a": TokenSplit(tokens / "a", "train"), "b": TokenSplit(tokens / "b", "train")}
    for weights in ({"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": -1.0, "b": 1.0}, {"a": 0.0, "b": 0.0}):
        with pytest.raises(UserError, match="the sources are"):
            source_weights(sources, weights)
    assert source_weights(sources, {}) == pytest.approx([162 / 243, 81 / 243])


def test_a_source_without_validation_documents_is_left_out_of_validation(tokens):
    write_source(tokens / "c", {"train": [numbered(50)]}, vocab_size=1000)
    assert list(open_sources(tokens, "val")) == ["a", "b"]
    assert list(open_sources(tokens, "train")) == ["a", "b", "c"]
