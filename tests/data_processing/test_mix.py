"""The mix: shares, capped epochs, copies that add up, and a shuffle that is a permutation and repeats itself."""

import random
from collections import Counter

import numpy as np
import pytest

from configs.errors import UserError
from data_processing.build_corpus_mix import MixStep
from data_processing.document import Document, write_documents
from data_processing.mix import CopyCounter, MixConfig, Shuffler, plan_mix

AVAILABLE = {"web": 8000, "books": 2000, "code": 400}


def test_shares_by_weight_and_capped_epochs():
    shares = plan_mix(MixConfig(weights={"web": 1, "books": 2, "code": 1}, tokens=2000), AVAILABLE, 4.0)
    assert {name: share.budget_tokens for name, share in shares.items()} == {"web": 500, "books": 1000, "code": 500}
    assert {name: share.epochs for name, share in shares.items()} == {"web": 0.25, "books": 2.0, "code": 4.0}
    assert [name for name, share in shares.items() if share.capped] == ["code"], "five epochs were asked for"
    natural = plan_mix(MixConfig(), AVAILABLE, 4.0)
    assert all(abs(share.epochs - 1) < 1e-12 for share in natural.values())
    half = plan_mix(MixConfig(weights={"web": 3}), AVAILABLE, 4.0)
    assert half["books"].epochs == 0 and half["web"].epochs == 1.3
    with pytest.raises(UserError, match=r"mix\.weights has 'wiki'; the sources are books, code, web"):
        plan_mix(MixConfig(weights={"wiki": 1}), AVAILABLE, 4.0)


@pytest.mark.parametrize("epochs", [0.0, 0.1, 0.5, 1.0, 2.5, 3.99])
def test_copies_add_up_to_one_document(epochs):
    rng = random.Random(1)
    sizes = [rng.randint(1, 500) for _ in range(400)]
    shares = plan_mix(MixConfig(weights={"s": 1}, tokens=1), {"s": sum(sizes)}, 1.0)
    shares["s"].epochs = epochs
    counter = CopyCounter(shares)
    copies = [counter.copies("s", size) for size in sizes]
    assert abs(sum(c * s for c, s in zip(copies, sizes, strict=True)) - epochs * sum(sizes)) <= max(sizes)
    if epochs >= 1 and float(epochs).is_integer():
        assert set(copies) == {int(epochs)}


def deal(tmp_path, config: MixConfig, block_bytes: int = 3000):
    rng, files, documents = random.Random(3), [], []
    for number in range(4):
        block = [Document(f"{number}-{i}", rng.choice("abc"), "x" * rng.randint(20, 200)) for i in range(50)]
        documents += block
        files.append(tmp_path / f"in_{number}.jsonl")
        write_documents(files[-1], block)
    available = Counter()
    for document in documents:
        available[document.source] += len(document.text)
    shares = plan_mix(config, dict(available), 4.0)
    step = MixStep(config, shares, block_bytes, tmp_path)
    split = list(step.deal(files, sum(available.values())))
    assert [d for all_, _, _ in split for d in all_] == documents
    return documents, split, [d for _, block in step.blocks() for d in block], shares


def test_a_shuffle_is_a_permutation_that_repeats_itself(tmp_path):
    documents, _, mixed, _ = deal(tmp_path, MixConfig(seed=5))
    assert sorted(d.id for d in mixed) == sorted(d.id for d in documents)
    assert mixed == deal(tmp_path, MixConfig(seed=5))[2] != deal(tmp_path, MixConfig(seed=6))[2]
    blocks = np.array([int(d.id.split("-")[0]) for d in mixed])
    assert len(set(blocks[:25].tolist())) == 4, "the input's blocks are mixed"
    assert deal(tmp_path, MixConfig(shuffle=False))[2] == documents


def test_repeats_have_ids_of_their_own_and_the_unsampled_are_named(tmp_path):
    config = MixConfig(weights={"a": 1, "b": 1}, tokens=4000)
    documents, split, mixed, shares = deal(tmp_path, config)
    dropped = [item for _, _, items in split for item in items]
    assert {item.reason for item in dropped} == {"not_sampled"}
    assert {d.id for d in documents if d.source == "c"} <= {item.document.id for item in dropped}
    assert len({d.id for d in mixed}) == len(mixed) and any(d.id.endswith("#2") for d in mixed)
    for source in "ab":
        size = sum(len(d.text) for d in mixed if d.source == source) / 4.0
        assert abs(size - shares[source].epochs * shares[source].available_tokens) <= 50


def test_order_is_a_permutation():
    order = Shuffler(MixConfig(), 3).order(1, 100)
    assert sorted(order.tolist()) == list(range(100)) and order.tolist() != list(range(100))
