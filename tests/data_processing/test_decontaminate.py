"""decontaminate against a plain search for word n-grams, on evaluation items of every length."""

import json
import random

import pytest

from configs.errors import UserError
from data_processing.decontaminate import Decontaminate, DecontaminateConfig, files_digest
from data_processing.document import Document
from tests.data_processing.near_pairs import random_words

RNG = random.Random(11)
ITEMS = [{"question": " ".join(random_words(RNG, n)), "answer": str(n)} for n in (3, 8, 12, 13, 14, 40, 40)]


@pytest.fixture
def evaluation(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)))
    return path


def plain_hits(text: str, n: int = 13, shortest: int = 8) -> int:
    words, hits, known = text.lower().split(), 0, {}
    for item in ITEMS:
        for value in item.values():
            inside = value.split()
            length = n if len(inside) >= n else len(inside)
            if length >= shortest:
                known.setdefault(length, set()).update(
                    tuple(inside[i : i + length]) for i in range(len(inside) - length + 1)
                )
    for length, grams in known.items():
        hits += sum(tuple(words[i : i + length]) in grams for i in range(len(words) - length + 1))
    return hits


def make_documents() -> list[Document]:
    rng, made = random.Random(2), []
    for index in range(60):
        words = random_words(rng, 60)
        inside = rng.choice(ITEMS)["question"].split()
        start = rng.randint(0, max(len(inside) - 5, 0))
        words[20:20] = inside[start : start + rng.randint(5, 40)] if index % 3 else []
        made.append(Document(str(index), "s", " ".join(words).title()))
    return made


@pytest.mark.parametrize("min_hits", [1, 3])
def test_hits_match_a_plain_search(evaluation, min_hits):
    made = make_documents()
    stage = Decontaminate(DecontaminateConfig(files=[str(evaluation)], min_hits=min_hits))
    kept, dropped = stage.run(made)
    hits = {d.id: plain_hits(d.text) for d in made}
    assert [d.document.id for d in dropped] == [d.id for d in made if hits[d.id] >= min_hits]
    assert (
        all(d.detail.startswith(f"{hits[d.document.id]} n-grams") for d in dropped) and 2 < len(dropped) < 50 and kept
    )


def test_fields_and_files(evaluation, tmp_path):
    text = ITEMS[5]["question"]
    stage = Decontaminate(DecontaminateConfig(files=[str(tmp_path)], fields=["question"]))
    assert stage.run([Document("1", "s", f"He said: {text}!")])[1][0].reason == "contaminated"
    with pytest.raises(UserError, match="give no text"):
        Decontaminate(DecontaminateConfig(files=[str(evaluation)], fields=["solution"])).run([])
    with pytest.raises(UserError, match="matches no file"):
        Decontaminate(DecontaminateConfig(files=["nowhere.jsonl"])).run([])
    before = files_digest([str(evaluation)])
    evaluation.write_text(evaluation.read_text().replace("3", "4"))
    assert files_digest([str(evaluation)]) != before


def test_gsm8k_is_found_in_a_corpus_that_holds_it(shared_data):
    rows = [json.loads(line) for line in open(shared_data / "gsm8k/test.jsonl", encoding="utf-8")]
    stage = Decontaminate(DecontaminateConfig(files=[str(shared_data / "gsm8k/test.jsonl")]))
    documents = [Document(str(i), "s", f"Problem: {row['question']} Solution.") for i, row in enumerate(rows)]
    documents.append(Document("own", "s", "A text of our own that is in no evaluation set. " * 5))
    assert [d.id for d in stage.run(documents)[0]] == ["own"]
