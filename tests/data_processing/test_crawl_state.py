"""The state of a crawl: exactly-once commits, shards cut back to the last one, another crawl refused."""

import json

import pytest

from configs.errors import UserError
from data_processing.crawl_state import KEPT, CrawlState, Item, Outcome
from data_processing.document import Document, read_documents


def done(key: str, text: str = "", reason: str = KEPT, **fields) -> Outcome:
    documents = [Document(key, "web", text)] if text else []
    return Outcome(Item(key, "a.test"), reason, documents=documents, **fields)


def open_state(path, identity=None, shard_bytes=10_000, **settings) -> CrawlState:
    state = CrawlState(path, shard_bytes)
    state.open(identity or {"source": "web", "seeds": ["x"]}, **settings)
    return state


def texts(path) -> list[str]:
    return [document.text for document in read_documents(path)]


def test_items_are_handed_out_by_depth_and_order_and_once(tmp_path):
    state = open_state(tmp_path)
    state.add([Item("p3", "a.test", 1), Item("p1", "a.test", 0), Item("p2", "b.test", 0), Item("p1", "a.test", 2)])
    assert state.pending_depth() == 0 and sorted(state.pending_hosts(0)) == ["a.test", "b.test"]
    assert state.next_item(0, "a.test") == Item("p1", "a.test", 0)
    found = [Item("p4", "a.test", 1), Item("p2", "b.test", 1), Item("p1", "a.test", 1)]
    state.commit([done("p1", "one", found=found)])
    assert state.next_item(0, "a.test") is None, "done, and found again"
    state.commit([done("p2", "two")])
    assert state.pending_depth() == 1
    assert state.next_item(1, "a.test").key == "p3"
    state.add([Item("deep", "a.test", 5), Item("deep", "a.test", 1)])
    state.commit([done("p3"), done("p4")])
    assert state.next_item(1, "a.test") == Item("deep", "a.test", 1), "found nearer to a seed"
    state.close()


def test_what_was_written_after_the_last_commit_is_cut_off(tmp_path):
    state = open_state(tmp_path)
    state.commit([done("p1", "one")], bookmark={"page": 2})
    state.log.append([Document("p2", "web", "two")])  # killed before the database's commit
    state.close()
    assert b"two" in (tmp_path / "_documents_00000.jsonl").read_bytes()
    state = open_state(tmp_path)
    assert state.bookmark == {"page": 2} and state.is_done("p1") and not state.is_done("p2")
    state.commit([done("p2", "two")])
    with pytest.raises(UserError, match="holds no"):
        texts(tmp_path)
    state.finish()
    state.close()
    assert texts(tmp_path) == ["one", "two"]


def test_a_failed_commit_leaves_nothing(tmp_path):
    state = open_state(tmp_path)
    with pytest.raises(TypeError):
        state.commit([done("p1", "one")], bookmark={1, 2})  # a set is no JSON
    assert not state.is_done("p1") and state.total("documents") == 0
    state.close()
    state = open_state(tmp_path)
    state.commit([done("p1", "again")])
    state.finish()
    state.close()
    assert texts(tmp_path) == ["again"]


def test_shards_are_named_when_full_and_a_kill_in_between_loses_nothing(tmp_path):
    state = open_state(tmp_path, shard_bytes=250)
    for number in range(3):
        state.commit([done(f"p{number}", "x" * 200)])
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        *("_documents_00003.jsonl", "documents_00000.jsonl", "documents_00001.jsonl", "documents_00002.jsonl")
    ]
    state.commit([done("p3", "y" * 10)])
    state.close()
    # Killed after the rename and before the database knew of it:
    (tmp_path / "_documents_00003.jsonl").rename(tmp_path / "documents_00003.jsonl")
    state = open_state(tmp_path, shard_bytes=250)
    state.commit([done("p4", "z")])
    state.finish()
    state.close()
    assert texts(tmp_path) == ["x" * 200] * 3 + ["y" * 10, "z"]
    assert not list(tmp_path.glob("_documents*"))


def test_a_shard_that_lost_its_end_is_refused(tmp_path):
    state = open_state(tmp_path)
    state.commit([done("p1", "one")])
    state.close()
    (tmp_path / "_documents_00000.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match=r"_documents_00000\.jsonl holds 0 bytes, \d+ were written; set overwrite=true"):
        open_state(tmp_path)


def test_another_crawl_other_documents_and_a_second_process_are_refused(tmp_path):
    state = open_state(tmp_path / "a")
    with pytest.raises(UserError, match=r"state\.sqlite cannot be used \(database is locked\); does another crawl run"):
        open_state(tmp_path / "a")
    state.commit([done("p1", "one")])
    state.close()
    with pytest.raises(UserError, match=r"holds another crawl \(other seeds\); choose another output or set overwrite"):
        open_state(tmp_path / "a", {"source": "web", "seeds": ["y"]})
    state = open_state(tmp_path / "a", {"source": "web", "seeds": ["y"]}, overwrite=True)
    assert state.counts() == {}
    state.close()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/documents_00000.jsonl").write_text("{}")
    with pytest.raises(UserError, match="holds other documents"):
        open_state(tmp_path / "b")
    (tmp_path / "c/_crawl").mkdir(parents=True)
    (tmp_path / "c/_crawl/state.sqlite").write_bytes(b"no database " * 100)
    with pytest.raises(UserError, match=r"state\.sqlite is broken \(.*\); set overwrite=true"):
        open_state(tmp_path / "c")


def test_counts_examples_and_retry(tmp_path):
    state = open_state(tmp_path)
    state.commit([done("p1", "one"), done("p2", reason="timeout", detail="20 s"), done("p3", reason="http_404")])
    state.add([Item("p4", "b.test")])
    assert state.counts() == {"kept": 1, "timeout": 1, "http_404": 1, "pending": 1}
    assert state.counts_by_host() == {"a.test": {"http_404": 1, "kept": 1, "timeout": 1}}
    assert state.examples("timeout", 3) == [{"key": "p2", "detail": "20 s"}]
    assert [row["key"] for row in state.outcomes()] == ["p1", "p2", "p3"]
    assert json.loads(json.dumps(list(state.outcomes())))[1]["detail"] == "20 s"
    assert state.retry(["timeout", "network"]) == 1
    assert state.counts()["pending"] == 2 and not state.is_done("p2")
    state.close()


def test_content_is_known_by_its_fingerprint(tmp_path):
    state = open_state(tmp_path)
    state.commit([done("p1", "one", fingerprint=b"f1")])
    assert state.key_with(b"f1") == "p1" and state.key_with(b"f2") is None
    state.close()
