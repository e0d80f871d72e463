"""The crawl script: killed and run again, its command line, and what build_corpus makes of its documents."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data_processing.build_corpus import BuildCorpusConfig, build_corpus
from data_processing.crawl import CrawlConfig, Outside, crawl
from data_processing.crawl_state import CrawlState
from data_processing.crawl_web import WebConfig
from data_processing.document import read_documents
from tests.crawl_server import FakeTime, WebServer, fetch_config, html, resolver, serve

ROOT = Path(__file__).resolve().parents[2]
PROSE = "The lighthouse keeper counted the boats each evening and wrote their names into a book of blue paper. "
PAGES = 15


@pytest.fixture(scope="module")
def running():
    with serve() as server:
        yield server


@pytest.fixture
def web(running) -> WebServer:
    """A tree of pages: n links to 2n+1 and 2n+2, and to two that exist already."""
    running.routes.clear()
    running.asked.clear()
    for number in range(PAGES):
        links = [f"/{n}" for n in (2 * number + 1, 2 * number + 2, 0, number // 2) if n < PAGES]
        anchors = " ".join(f'<a href="{link}">x</a>' for link in links)
        running.routes[f"/{number}"] = html(f"<p>{PROSE * 5} Number {number}.</p>{anchors}", f"Page {number}")
    return running


class Crash(BaseException):
    """A kill, as far as one process can play it: nothing of ours catches it."""


def crawl_until_crash(web: WebServer, output: Path, shard_bytes: int = 3000) -> dict | None:
    config = CrawlConfig(
        output=str(output),
        shard_bytes=shard_bytes,
        fetch=fetch_config(delay_s=0.0),
        web=WebConfig(seeds=[web.url("/0")], max_depth=9),
    )
    try:
        return crawl(config, Outside(FakeTime().clock, resolver))
    except Crash:
        return None


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_at_any_commit_neither_loses_nor_doubles_a_page(web, tmp_path, monkeypatch, moment):
    """Every third transaction of each run fails; the pages, their order and their shards are those of one calm run."""
    crawl_until_crash(web, tmp_path / "calm")
    calm = [(d.id, d.text) for d in read_documents(tmp_path / "calm")]
    web.asked.clear()
    original, count = CrawlState._transaction, Counter()

    def transaction(self, body):
        count["all"] += 1
        if moment == "before" and count["all"] % 3 == 0:
            raise Crash
        result = original(self, body)
        if moment == "after" and count["all"] % 3 == 0:
            raise Crash
        return result

    monkeypatch.setattr(CrawlState, "_transaction", transaction)
    runs = 1
    while crawl_until_crash(web, tmp_path / "killed") is None:
        runs += 1
        assert runs < 100
    assert runs > 5
    assert [(d.id, d.text) for d in read_documents(tmp_path / "killed")] == calm and len(calm) == PAGES
    assert Counter(web.paths()) == Counter(f"/{n}" for n in range(PAGES)), "the cache answers what was not committed"
    names = [path.name for path in sorted((tmp_path / "killed").glob("*.jsonl"))]
    assert names == [path.name for path in sorted((tmp_path / "calm").glob("*.jsonl"))] and len(names) > 2


def command(web: WebServer, output: Path, *overrides: str) -> list[str]:
    settings = ["fetch.contact=test@example.org", "fetch.allow_addresses=[127.0.0.0/8]", "fetch.delay_s=0.01"]
    seed = f"web.seeds=[http://127.0.0.1:{web.port}/0]"
    return [
        sys.executable,
        "-m",
        "data_processing.crawl",
        f"output={output}",
        seed,
        "web.max_depth=9",
        *settings,
        *overrides,
    ]


def test_a_killed_script_goes_on_by_the_same_command(web, tmp_path):
    """SIGKILL while a page is on its way, twice; the third run ends. A page is asked for again only if it was open."""
    processes: list[subprocess.Popen] = []
    kill_at = {4: 0, 9: 1}

    def deadly(path: str):
        reply = web.routes[path]

        def route(asked):
            number = len(set(web.paths()))
            if kill_at.get(number) == len(processes) - 1:
                os.kill(processes[-1].pid, signal.SIGKILL)
            return reply

        return route

    web.routes |= {path: deadly(path) for path in list(web.routes)}
    codes = []
    for _ in range(3):
        processes.append(
            subprocess.Popen(command(web, tmp_path), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        output, errors = processes[-1].communicate(timeout=120)
        codes.append(processes[-1].returncode)
    assert codes == [-9, -9, 0], errors.decode()
    assert f"{PAGES} documents".encode() in output
    documents = list(read_documents(tmp_path))
    assert len(documents) == len({document.id for document in documents}) == PAGES
    asked = Counter(web.paths())
    assert set(asked) == {f"/{n}" for n in range(PAGES)} and sum(asked.values()) <= PAGES + 2


def test_the_command_line_names_what_is_wrong(web, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        line = [sys.executable, "-m", "data_processing.crawl", f"output={tmp_path}", *arguments]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    done = run("source=wikipedia", "fetch.contact=test@example.org")
    assert done.returncode == 2 and done.stderr.startswith("error: source=wikipedia takes exactly one of")
    assert not list(tmp_path.iterdir())


def test_build_corpus_reads_what_a_crawl_wrote(web, tmp_path):
    crawl_until_crash(web, tmp_path / "crawl")
    stats = build_corpus(
        BuildCorpusConfig(output=str(tmp_path / "corpus"), source="jsonl", path=str(tmp_path / "crawl"))
    )
    assert stats["stages"]["normalise"]["total"]["documents_in"] == stats["documents"] == PAGES
    (document, *_) = read_documents(tmp_path / "corpus")
    assert document.url == web.url("/0") and document.source == "web" and document.meta["depth"] == 0
