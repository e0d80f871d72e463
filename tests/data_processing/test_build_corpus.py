"""build_corpus end to end: counts that add up, a kill anywhere, equal files after a resume, and every refusal."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.loader import compose_config
from data_processing import build_corpus_blocks
from data_processing.build_corpus import BuildCorpusConfig, build_corpus, cut_blocks
from data_processing.document import Document, read_documents, write_documents
from tests.stories import make_stories

ROOT = Path(__file__).resolve().parents[2]


def configure(output: Path, *overrides: str) -> BuildCorpusConfig:
    return compose_config(BuildCorpusConfig, "build_corpus", [f"output='{output}'", *overrides])


@pytest.fixture
def messy(tmp_path) -> Path:
    """Stories of two sources with repeats, blanks and dumps among them, as JSONL."""
    stories = make_stories(60, seed=4)
    for index, story in enumerate(stories):
        story.source = "odd" if index % 3 else "even"
    extra = [Document(f"copy-{s.id}", s.source, s.text + "  \r\n") for s in stories[::4]]
    extra += [
        Document("blank", "odd", " \x00\n"),
        Document("short", "even", "Hi."),
        Document("dump", "odd", "1 2 3 " * 99),
    ]
    path = tmp_path / "raw/messy.jsonl"
    write_documents(path, [d for pair in zip(stories, extra, strict=False) for d in pair] + stories[len(extra) :])
    return path


def files_of(output: Path) -> dict[str, bytes]:
    """Every file of a corpus but the two that hold times."""
    paths = [p for p in output.rglob("*") if p.is_file() and p.name not in ("stats.json", "report.html")]
    return {str(p.relative_to(output)): p.read_bytes() for p in paths}


def counts_of(stats: dict) -> dict:
    stages = {name: (part["sources"], part["total"]) for name, part in stats["stages"].items()}
    return {"stages": stages} | {
        name: stats[name] for name in ("documents", "bytes", "shards", "documents_read", "examples")
    }


def test_counts_add_up_and_nothing_is_lost(messy, tmp_path):
    output = tmp_path / "corpus"
    stats = build_corpus(configure(output, "source=jsonl", f"path='{messy}'", "block_bytes=5000"))
    raw, kept = list(read_documents(messy)), list(read_documents(output))
    dropped = list(read_documents(output / "_dropped"))
    assert sorted(d.id for d in kept + dropped) == sorted(d.id for d in raw), "each document is in one place"
    assert len({d.text for d in kept}) == len(kept) == stats["documents"] == 60
    reasons = Counter((d.meta["dropped"]["stage"], d.meta["dropped"]["reason"]) for d in dropped)
    assert reasons == {
        ("normalise", "empty"): 1,
        ("quality_filter", "too_short"): 1,
        ("quality_filter", "few_letters"): 1,
        ("deduplicate", "exact_duplicate"): 15,
    }
    previous = Counter(d.source for d in raw)
    for name, part in stats["stages"].items():
        assert {source: counts["documents_in"] for source, counts in part["sources"].items()} == previous
        for counts in [*part["sources"].values(), part["total"]]:
            assert counts["documents_in"] == counts["documents_out"] + sum(counts["dropped"].values())
        assert {(name, r): n for r, n in part["total"]["dropped"].items()} == {
            k: v for k, v in reasons.items() if k[0] == name
        }
        previous = Counter({source: counts["documents_out"] for source, counts in part["sources"].items()})
    assert previous == Counter(d.source for d in kept)
    assert stats["bytes"] == sum(len(d.text.encode()) for d in kept)
    assert stats == json.loads((output / "stats.json").read_text())
    assert len(stats["shards"]) > 3 and not (output / "_work").exists()


def test_the_block_size_changes_the_files_but_not_the_corpus(messy, tmp_path):
    results = []
    for block_bytes in (1000, 5000, 10**9):
        output = tmp_path / str(block_bytes)
        build_corpus(
            configure(output, "source=jsonl", f"path='{messy}'", f"block_bytes={block_bytes}", "compression=zst")
        )
        results.append(list(read_documents(output)))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 4, 7])
def test_a_crash_at_any_write_resumes_to_equal_files(messy, tmp_path, monkeypatch, writes):
    """The process dies after its n-th write, and its successor after n more; the third ends as an unbroken run does."""
    settings = ["source=jsonl", f"path='{messy}'", "block_bytes=16000", "compression=gz"]
    reference = build_corpus(configure(tmp_path / "whole", *settings))
    resumed = tmp_path / "resumed"
    for _ in range(2):
        with monkeypatch.context() as patch:
            left = [writes]
            for name in ("write_documents", "write_bytes_atomic", "write_json_atomic"):
                patch.setattr(build_corpus_blocks, name, _dying(getattr(build_corpus_blocks, name), left))
            with pytest.raises(KeyboardInterrupt):
                build_corpus(configure(resumed, *settings))
        resumed.mkdir(exist_ok=True)
        (resumed / ".documents_00000.jsonl.gz.1.tmp").write_bytes(b"half a shard of a killed process")
    stats = build_corpus(configure(resumed, *settings))
    assert files_of(resumed) == files_of(tmp_path / "whole")
    assert counts_of(stats) == counts_of(reference)


def _dying(write, left: list[int]):
    def dying_write(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return write(*arguments)

    return dying_write


def test_sigkill_in_the_middle_and_resume_gives_equal_files(tmp_path):
    raw = tmp_path / "raw.jsonl"
    stories = make_stories(500, seed=9)
    write_documents(raw, stories + stories[::2])
    settings = ["source=jsonl", f"path='{raw}'", "block_bytes=7000"]
    reference = build_corpus(configure(tmp_path / "whole", *settings))
    output = tmp_path / "killed"
    command = [sys.executable, "-m", "data_processing.build_corpus", f"output='{output}'", *settings]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (output / "_work/block_00005.json").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was killed while it worked"
    assert not (output / "stats.json").exists()
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert files_of(output) == files_of(tmp_path / "whole")
    assert counts_of(json.loads((output / "stats.json").read_text())) == counts_of(reference)


def test_a_finished_corpus_is_found_and_another_is_not_overwritten(messy, tmp_path):
    output = tmp_path / "corpus"
    settings = ["source=jsonl", f"path='{messy}'"]
    stats = build_corpus(configure(output, *settings))
    stamp = os.stat(output / "documents_00000.jsonl").st_mtime_ns
    assert build_corpus(configure(output, *settings)) == stats
    assert os.stat(output / "documents_00000.jsonl").st_mtime_ns == stamp
    with pytest.raises(UserError, match=r"holds another corpus \(other quality_filter\); .*overwrite=true"):
        build_corpus(configure(output, *settings, "quality_filter.min_characters=400"))
    with open(messy, "ab") as file:
        file.write(b'{"id": "z", "source": "odd", "text": "' + b"A new sentence. " * 20 + b'"}\n')
    with pytest.raises(UserError, match=r"holds another corpus \(other input\)"):
        build_corpus(configure(output, *settings))
    (output / "notes.txt").write_text("mine")
    assert build_corpus(configure(output, *settings, "overwrite=true"))["documents"] == 61
    assert (output / "notes.txt").read_text() == "mine"


def test_an_empty_corpus_is_refused_and_says_which_stage_dropped_what(tmp_path):
    raw, output = tmp_path / "raw.jsonl", tmp_path / "corpus"
    write_documents(raw, [Document("1", "s", " "), Document("2", "s", "short"), Document("3", "s", "short")])
    settings = ["source=jsonl", f"path='{raw}'"]
    for _ in range(2):  # the second try is not taken for a finished corpus
        with pytest.raises(UserError) as caught:
            build_corpus(configure(output, *settings))
        assert str(caught.value).startswith(
            "the corpus is empty: 3 documents in, normalise dropped 1 (empty 1), quality_filter dropped 2 (too_short 2)"
        )
    assert len(list(read_documents(output / "_dropped"))) == 3
    assert build_corpus(configure(output, *settings, "quality_filter.min_characters=0"))["documents"] == 1
    raw.write_text("\n")
    with pytest.raises(UserError, match="the source gave no document"):
        build_corpus(configure(tmp_path / "none", *settings))


def test_bad_characters_are_replaced_and_counted_by_config(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff" + make_stories(1, seed=1)[0].text.encode() + b"\x00\xed\xa0\x80 end")
    settings = ["source=text", f"path='{tmp_path}/a.txt'"]
    with pytest.raises(UserError, match=r"a\.txt:1: byte 0xff is not UTF-8"):
        build_corpus(configure(tmp_path / "strict", *settings))
    stats = build_corpus(configure(tmp_path / "replace", *settings, "errors=replace"))
    assert stats["source_counts"] == {"replaced_characters": 4}
    (document,) = read_documents(tmp_path / "replace")
    assert document.text.endswith("\ufffd\ufffd\ufffd end") and "\x00" not in document.text


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["source=text"], "source=text needs a path"),
        (["source=text", "path=nowhere/*.txt"], "matches no file"),
        (["stages=[normalise,translate]"], "stages='translate' is unknown"),
        (["compression=rar"], "compression='rar' is unknown"),
        (["block_bytes=0"], "block_bytes=0 must be positive"),
        (["+typo=1"], "typo"),
        (["max_documents=many"], "max_documents"),
        (["normalise.unicode_form=NFX"], "unicode_form='NFX' is unknown"),
    ],
)
def test_wrong_settings_are_one_line(tmp_path, overrides, problem):
    with pytest.raises(UserError, match=problem) as caught:
        build_corpus(configure(tmp_path / "c", *overrides))
    assert "\n" not in str(caught.value)


def test_the_script_exits_with_2_and_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "data_processing.build_corpus",
        "source=text",
        f"output={tmp_path}/c",
        "path=nowhere",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: path='nowhere' matches no file") and result.stderr.count("\n") == 1


def test_blocks_are_cut_by_bytes():
    documents = [Document(str(i), "s", "é" * 10) for i in range(7)]
    assert [len(block) for block in cut_blocks(iter(documents), 60)] == [3, 3, 1]
    assert list(cut_blocks(iter([]), 60)) == []


class _Tags(HTMLParser):
    """Collects the open tags and the visible text of a page."""

    VOID = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.stack, self.data, self.seen = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.data.append(data)


def test_the_report_is_balanced_escaped_and_complete(tmp_path):
    raw = tmp_path / "raw.jsonl"
    evil = "<script>alert(1)</script> &amp;"
    write_documents(raw, [*make_stories(5, seed=0), Document(evil, evil, "<b>1</b> 2 3 " * 40)])
    settings = ["source=jsonl", f"path='{raw}'", "normalise.unescape_html=false"]
    build_corpus(configure(tmp_path / "c", *settings))
    page = _Tags()
    page.feed((tmp_path / "c/report.html").read_text(encoding="utf-8"))
    assert page.stack == [] and not page.seen & {"script", "b", "img", "link"}
    text = " ".join(page.data)
    assert evil in text and "few_letters 1" in text and "of 6 documents read" in text
