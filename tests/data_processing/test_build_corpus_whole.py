"""build_corpus with all its stages: worker processes, near-duplicates, mix, held-out documents, kills, bad input."""

import gc
import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from rich.progress import Progress

from configs.errors import UserError
from data_processing import build_corpus as build_corpus_module
from data_processing import build_corpus_blocks, build_corpus_mix
from data_processing.build_corpus import build_corpus
from data_processing.document import Document, read_documents, read_json_objects, write_documents
from data_processing.find_document import find_document
from data_processing.shingles import shingle_sets
from data_processing.text_hash import in_share
from tests.data_processing.near_pairs import change_words, random_words
from tests.data_processing.pages import GENERATORS, make_pdf
from tests.data_processing.test_build_corpus import configure, counts_of, files_of
from tests.stories import make_stories

ROOT = Path(__file__).resolve().parents[2]
ALL = "stages=[normalise,quality_filter,mask_pii,decontaminate,deduplicate,deduplicate_lines,deduplicate_near,mix]"


@pytest.fixture
def raw(tmp_path) -> Path:
    """Stories of three sources, copies, near-duplicates, PII, evaluation text and a line that comes back."""
    rng, documents = random.Random(8), make_stories(40, seed=6)
    for number in range(30):
        words = random_words(rng, 200)
        documents.append(Document(f"near-{number}", "web", " ".join(words)))
        longer = [*change_words(rng, words, number % 3), "and", "more"]
        documents.append(Document(f"near-{number}-longer", "books", " ".join(longer)))
    documents += [Document(f"copy-{d.id}", "web", d.text) for d in documents[:10]]
    line = "Subscribe to our newsletter and never miss a story again."
    documents += [Document(f"line-{n}", "web", f"{line}\n{make_stories(1, seed=90 + n)[0].text}") for n in range(4)]
    documents.append(Document("pii", "books", make_stories(1, seed=70)[0].text + " Write to ann@example.org."))
    documents.append(Document("leak", "web", "He asked: " + " ".join(f"word{n}" for n in range(40)) + "?"))
    rng.shuffle(documents)
    write_documents(tmp_path / "raw/all.jsonl", documents)
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": " ".join(f"word{n}" for n in range(40))}))
    return tmp_path / "raw"


def settings(raw: Path, *more: str) -> list[str]:
    files = f"decontaminate.files=['{raw.parent / 'eval.jsonl'}']"
    return ["source=jsonl", f"path='{raw}'", "block_bytes=15000", ALL, files, "held_out_share=0.1", *more]


def test_every_stage_does_its_part_and_nothing_is_lost(raw, tmp_path):
    output = tmp_path / "c"
    stats = build_corpus(configure(output, *settings(raw)))
    dropped = {name: part["total"]["dropped"] for name, part in stats["stages"].items() if part["total"]["dropped"]}
    assert dropped["decontaminate"] == {"contaminated": 1} and dropped["deduplicate"] == {"exact_duplicate": 10}
    assert dropped["deduplicate_near"] == {"near_duplicate": 30}
    assert stats["stages"]["mask_pii"]["counts"] == {"EMAIL_ADDRESS": 1}
    assert stats["stages"]["deduplicate_lines"]["counts"]["lines_removed"] >= 3
    kept, held = list(read_documents(output)), list(read_documents(output / "_held_out"))
    gone = list(read_documents(output / "_dropped"))
    assert sorted(d.id for d in kept + held + gone) == sorted(d.id for d in read_documents(raw))
    assert sum("newsletter" in d.text for d in kept + held) == 1
    assert all(d.id.endswith("-longer") for d in kept + held if d.id.startswith("near-")), "the longer one stays"
    assert all(in_share(d.text, 0.1) for d in held) and not any(in_share(d.text, 0.1) for d in kept) and held
    assert stats["held_out"]["documents"] == len(held) and stats["documents"] == len(kept)
    previous = None
    for part in stats["stages"].values():
        total = part["total"]
        assert total["documents_in"] == total["documents_out"] + sum(total["dropped"].values())
        assert previous in (None, total["documents_in"])
        previous = total["documents_out"]
    assert not (output / "_work").exists() and stats == json.loads((output / "stats.json").read_text())
    page = (output / "report.html").read_text(encoding="utf-8")
    shown = ("In mask_pii: EMAIL_ADDRESS: 1.", "<h2>Mix</h2>", f"and {len(held)} held out", "by the clock")
    assert all(text in page for text in shown)
    (found,) = find_document(output, "leak")
    assert (found["place"], found["stage"], found["reason"]) == ("dropped", "decontaminate", "contaminated")


def test_workers_give_the_same_files_and_counts(raw, tmp_path):
    alone = build_corpus(configure(tmp_path / "one", *settings(raw)))
    pool = build_corpus(configure(tmp_path / "two", *settings(raw, "workers=2")))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") and counts_of(alone) == counts_of(pool)
    assert build_corpus(configure(tmp_path / "two", *settings(raw)))["workers"] == 2, "found complete"


@pytest.mark.parametrize("verify", ["estimate", "none"])
def test_other_comparisons_of_candidates(raw, tmp_path, verify):
    stats = build_corpus(configure(tmp_path / "c", *settings(raw, f"deduplicate_near.verify={verify}")))
    found = stats["stages"]["deduplicate_near"]["total"]["dropped"]["near_duplicate"]
    # The true similarity finds 30. Estimates of some of these lie below the threshold; without a comparison every pair
    # that agrees in a band counts, whatever its similarity.
    assert 25 <= found <= 30 if verify == "estimate" else 30 <= found <= 45


@pytest.mark.slow
@pytest.mark.dist
def test_ray_gives_the_same_documents(raw, tmp_path):
    pytest.importorskip("ray", reason="needs pip install -e '.[ray]'")
    alone = build_corpus(configure(tmp_path / "one", *settings(raw)))
    ray = build_corpus(configure(tmp_path / "ray", *settings(raw, "engine=ray", "workers=2")))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "ray") and counts_of(alone) == counts_of(ray)


def test_a_crash_at_any_write_resumes_to_equal_files(raw, tmp_path, monkeypatch):
    """It dies after 3 writes (in the blocks), and again after 4 more and so on, to the last write of all."""
    reference = build_corpus(configure(tmp_path / "whole", *settings(raw)))
    for writes in range(3, 100, 5):
        with monkeypatch.context() as patch:
            left = [writes]
            for name in ("write_documents", "write_json_atomic"):
                patch.setattr(build_corpus_blocks, name, _dying(getattr(build_corpus_blocks, name), left))
            try:
                stats = build_corpus(configure(tmp_path / "killed", *settings(raw)))
            except KeyboardInterrupt:
                assert not (tmp_path / "killed/stats.json").exists()
                continue
        break
    assert writes > 15, "it died in the blocks and after them"
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole") and counts_of(stats) == counts_of(reference)


def _dying(write, left: list[int]):
    def dying_write(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return write(*arguments)

    return dying_write


def test_html_pdf_and_quarantine_come_through(tmp_path):
    rng = random.Random(2)
    for name, generator in GENERATORS.items():
        (tmp_path / f"web/{name}").mkdir(parents=True)
        for number in range(4):
            (tmp_path / f"web/{name}/{number}.html").write_text(generator(rng).html)
    (tmp_path / "web/copy.html").write_bytes((tmp_path / "web/blog/1.html").read_bytes())
    (tmp_path / "web/picture.html").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(500))
    output = tmp_path / "c"
    stats = build_corpus(configure(output, "source=html", f"path='{tmp_path}/web'", "workers=2", "block_bytes=20000"))
    assert stats["documents"] == 20 and stats["source_counts"] == {"duplicate_file": 1}
    assert stats["stages"]["html_process"]["total"]["dropped"] == {"binary": 1}
    assert "pdf_process" not in stats["stages"]
    (refused,) = [row for _, row in read_json_objects(output / "_dropped/quarantine.jsonl.gz")]
    assert refused["reason"] == "duplicate_file" and list(find_document(output, refused["where"]))
    (tmp_path / "a.pdf").write_bytes(
        make_pdf([[f"Line {n} of a document about stones and rivers." for n in range(30)]])
    )
    stats = build_corpus(configure(tmp_path / "p", "source=pdf", f"path='{tmp_path}/a.pdf'"))
    (document,) = read_documents(tmp_path / "p")
    assert document.meta["pages"] == 1 and stats["stages"]["pdf_process"]["total"]["documents_out"] == 1


def test_broken_lines_do_not_stop_a_build_and_survive_a_resume(tmp_path, monkeypatch):
    lines = [json.dumps({"text": story.text}) for story in make_stories(30, seed=3)]
    lines[3:3], lines[20:20] = ["{broken"], ['{"text": 1}']
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "[]"]))
    arguments = ["source=jsonl", f"path='{tmp_path}/a.jsonl'", "block_bytes=4000"]
    with monkeypatch.context() as patch:
        patch.setattr(build_corpus_blocks, "write_json_atomic", _dying(build_corpus_blocks.write_json_atomic, [4]))
        with pytest.raises(KeyboardInterrupt):
            build_corpus(configure(tmp_path / "c", *arguments))
    assert not (tmp_path / "c/_dropped/quarantine.jsonl.gz").exists()
    stats = build_corpus(configure(tmp_path / "c", *arguments))
    assert stats["documents"] == 30 and stats["source_counts"] == {"invalid_json": 2, "no_text": 1}
    rows = [row for _, row in read_json_objects(tmp_path / "c/_dropped/quarantine.jsonl.gz")]
    assert [row["data"] for row in rows] == ["{broken", '{"text": 1}', "[]"]


def test_documents_of_every_script_and_size_pass_all_stages(tmp_path):
    """CJK without spaces, right-to-left, emoji, fewer words than a shingle, and one line of many megabytes."""
    texts = {
        "cjk": "天地玄黃宇宙洪荒日月盈昃辰宿列張寒來暑往秋收冬藏閏餘成歲律呂調陽雲騰致雨露結為霜。" * 5,
        "arabic": "قال القبطان إن النهر سيرتفع مرة أخرى قبل حلول المساء وهذا ما حدث فعلا. " * 3,
        "hebrew": "רב החובל אמר שהנהר יעלה שוב לפני הערב וכך אכן קרה באותו יום. " * 3,
        "emoji": "The day was good 😀 and the night was better 🌙 said the family 👩‍👩‍👧"
        " to all of us who were here today and yesterday.",
        "short": "x" * 120,
        "long": "word " * 400_000,
    }
    documents = [Document(name, "s", text) for name, text in texts.items()]
    documents.append(Document("cjk-copy", "s", texts["cjk"] + "完。"))
    write_documents(tmp_path / "a.jsonl", documents)
    off = ["quality_filter.max_run_share=0", "quality_filter.max_one_character_share=0"]
    stages = "stages=[normalise,quality_filter,mask_pii,deduplicate,deduplicate_paragraphs,deduplicate_near,mix]"
    stats = build_corpus(configure(tmp_path / "c", "source=jsonl", f"path='{tmp_path}/a.jsonl'", stages, *off))
    kept = {d.id: d.text for d in read_documents(tmp_path / "c")}
    assert set(kept) == {*texts, "cjk-copy"} - {"cjk"}, "the longer of the two stays"
    assert kept["emoji"] == texts["emoji"] and kept["hebrew"] == texts["hebrew"].strip()
    assert stats["stages"]["deduplicate_near"]["total"]["dropped"] == {"near_duplicate": 1}
    assert shingle_sets([texts["short"]], 5)[0].size == 1


def _peak_of_a_build(folder: Path, documents: int, trace: bool = True) -> int:
    """Bytes at the peak of one build of texts of 1,900 bytes, in blocks of 50; 0 for one that is not traced."""
    rng, path = random.Random(documents), folder / f"{documents}.jsonl"
    write_documents(path, (Document(str(n), "s", " ".join(random_words(rng, 300))) for n in range(documents)))
    stages = "stages=[normalise,quality_filter,deduplicate,deduplicate_near,mix]"
    given = ["source=jsonl", f"path='{path}'", "block_bytes=95000", "examples_per_reason=1", stages]
    config = configure(folder / f"c{documents}", *given)
    gc.collect()
    gc.freeze()  # composing leaves cycles, and a collector that counts all modules' objects would keep them long
    if trace:
        tracemalloc.start()
    try:
        build_corpus(config)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def test_the_drivers_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    """900 more documents of 1,900 bytes may cost what deduplication remembers of them, not their texts.

    Nothing here runs beside the build: no progress bar, whose thread allocates when it likes, and no workers.
    """
    monkeypatch.setattr(build_corpus_mix, "FLUSH_BYTES", 20_000)
    monkeypatch.setattr(build_corpus_module, "make_progress", lambda: Progress(disable=True))
    _peak_of_a_build(tmp_path, 50, trace=False)  # imports, and tables that stay
    few, many = _peak_of_a_build(tmp_path, 100), _peak_of_a_build(tmp_path, 1000)
    assert many - few < 900 * 1024, f"{(many - few) / 900:.0f} bytes a document"


def test_seconds_are_parts_of_the_wall_time(raw, tmp_path):
    seconds = build_corpus(configure(tmp_path / "c", *settings(raw)))["seconds"]
    parts = {name: seconds[name] for name in ("read", "wait", "stages", "write")}
    assert all(value > 0 for value in parts.values())
    assert sum(parts.values()) <= seconds["wall"] * 1.001


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["stages=[mix]", "+mix.weights.nowhere=1"], "mix.weights has 'nowhere'"),
        (["stages=[normalise,harmful_detect]"], "harmful_detect.models is empty"),
        (["stages=[decontaminate]"], r"decontaminate.files=\[\] .* give no text"),
        (["stages=[quality_classifier]", "quality_classifier.model=/nowhere"], "model.bin does not exist"),
        (["workers=0"], "workers=0 must be positive"),
        (["engine=spark"], "engine='spark' is unknown"),
        (["held_out_share=1.0"], "held_out_share=1.0 is out of range"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_stages_lack_is_one_line(raw, tmp_path, overrides, problem, workers):
    given = ["source=jsonl", f"path='{raw}'", f"workers={workers}", *overrides]
    with pytest.raises(UserError, match=problem) as caught:
        build_corpus(configure(tmp_path / "c", *given))
    assert "\n" not in str(caught.value)


def test_find_document_as_a_script(raw, tmp_path):
    build_corpus(configure(tmp_path / "c", *settings(raw)))
    command = [sys.executable, "-m", "data_processing.find_document", str(tmp_path / "c")]
    found = subprocess.run([*command, "leak"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and json.loads(found.stdout)["reason"] == "contaminated"
    assert subprocess.run([*command, "nobody"], cwd=ROOT, capture_output=True).returncode == 1
    lost = subprocess.run([*command[:-1], str(tmp_path), "x"], cwd=ROOT, capture_output=True, text=True)
    assert lost.returncode == 2 and lost.stderr.startswith("error: ") and lost.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "overrides", "problem"),
    [
        (
            "resiliparse",
            ["source=html", "path='{}/a.html'"],
            r"resiliparse is not installed; run: pip install -e '\.\[data\]'",
        ),
        ("fastwarc", ["source=warc", "path='{}/a.warc'"], "fastwarc is not installed"),
        ("pypdfium2", ["source=pdf", "path='{}/a.pdf'"], "pypdfium2 is not installed"),
        ("pyarrow", ["source=parquet", "path='{}/a.parquet'"], "pyarrow is not installed"),
        ("datasketch", ["source=text", "path='{}/a.txt'", "stages=[deduplicate_near]"], "datasketch is not installed"),
        (
            "ray",
            ["source=text", "path='{}/a.txt'", "engine=ray"],
            r"ray is not installed; run: pip install -e '\.\[ray\]'",
        ),
    ],
)
def test_a_missing_package_is_one_line_with_its_command(tmp_path, monkeypatch, package, overrides, problem):
    for name, data in {"html": b"<p>x", "warc": b"", "pdf": make_pdf([["x"]]), "parquet": b"", "txt": b"text"}.items():
        (tmp_path / f"a.{name}").write_bytes(data)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=problem) as caught:
        build_corpus(configure(tmp_path / "c", *(override.format(tmp_path) for override in overrides)))
    assert "\n" not in str(caught.value)
