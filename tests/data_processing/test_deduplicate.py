"""Exact deduplication against a brute-force set of texts, in blocks of any size, with a kill between any two."""

import random

import pytest

from data_processing.deduplicate import Deduplicate
from data_processing.document import Document


def random_documents(count: int, seed: int) -> list[Document]:
    """Short texts from a tiny alphabet: about half of them repeat."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices("aé\n", k=rng.randint(0, 6))) for _ in range(count)]
    return [Document(f"док-{index}", "s", text) for index, text in enumerate(texts)]


def brute_force(documents: list[Document]) -> tuple[list[str], list[tuple[str, str]]]:
    kept, dropped = [], []
    for document in documents:
        first = next((other for other in kept if other.text == document.text), None)
        if first is None:
            kept.append(document)
        else:
            dropped.append((document.id, f"same text as {first.id}"))
    return [d.id for d in kept], dropped


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("restart", [False, True], ids=["unbroken", "restarted"])
def test_deduplicate_matches_brute_force(block, restart):
    documents = random_documents(1000, seed=block)
    expected_kept, expected_dropped = brute_force(documents)
    stage, kept, dropped, journals = Deduplicate(), [], [], []
    for start in range(0, len(documents), block):
        if restart:
            stage = Deduplicate()
            for journal in journals:
                stage.replay_journal(journal)
        block_kept, block_dropped = stage.run(documents[start : start + block])
        journals.append(stage.take_journal())
        kept += [d.id for d in block_kept]
        dropped += [(d.document.id, d.detail) for d in block_dropped]
        assert {d.reason for d in block_dropped} <= {"exact_duplicate"}
    assert kept == expected_kept and dropped == expected_dropped
    assert 100 < len(kept) < 900, "the case has both kinds"
