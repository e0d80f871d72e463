"""Breadth-first crawls of a local web: order, budgets, duplicates, redirects, marks of pages, hosts that fail."""

import gzip
import json
import threading

import pytest

from configs.errors import UserError
from data_processing import crawl_extract
from data_processing.crawl import CrawlConfig, Outside, crawl
from data_processing.crawl_links import MAX_LINKS, read_links
from data_processing.crawl_page import Page
from data_processing.crawl_web import WebConfig
from data_processing.document import Document, read_documents
from tests.crawl_server import FakeTime, Reply, WebServer, fetch_config, html, resolver, serve

PROSE = "The lighthouse keeper counted the boats each evening and wrote their names into a book of blue paper. "


@pytest.fixture(scope="module")
def running():
    with serve() as server:
        yield server


@pytest.fixture
def web(running) -> WebServer:
    running.routes.clear()
    running.asked.clear()
    return running


def page(number: int, *links: str, head: str = "", marks: str = "") -> Reply:
    anchors = " ".join(f'<a href="{link}" {marks}>to {link}</a>' for link in links)
    return html(
        f"<main><h1>Page {number}</h1><p>{PROSE * 5} Number {number}.</p></main><p>{anchors}</p>", f"P{number}", head
    )


def run(web: WebServer, tmp_path, seeds=("/",), fetch=None, overrides=None, **settings) -> dict:
    """A crawl of the local web into tmp_path."""
    seeds = [seed if "://" in seed else web.url(seed) for seed in seeds]
    config = CrawlConfig(
        output=str(tmp_path),
        fetch=fetch_config(**{"backoff_s": 0.5} | (fetch or {})),
        web=WebConfig(**{"seeds": seeds} | settings),
        **overrides or {},
    )
    return crawl(config, Outside(FakeTime().clock, resolver))


def documents_in(path) -> dict[str, Document]:
    return {document.url: document for document in read_documents(path)}


def short_paths(web: WebServer) -> list[str]:
    return web.paths()


def test_pages_come_breadth_first_and_each_once(web, tmp_path):
    web.routes |= {
        "/": page(0, "/a", "/b#x", "b", "/a?utm_source=y"),
        "/a": page(1, "/a/deep", "/", "/b"),
        "/b": page(2, "/c", "mailto:x@y.z", "https://elsewhere.example/"),
        "/a/deep": page(3, "/too-deep"),
        "/c": page(4, "/a/deep"),
    }
    stats = run(web, tmp_path, max_depth=2)
    assert short_paths(web) == ["/", "/a", "/b", "/a/deep", "/c"]
    assert stats["outcomes"] == {"kept": 5} and stats["documents"] == 5
    documents = documents_in(tmp_path)
    first = documents[web.url("/a")]
    assert " ".join(first.text.split()).startswith(f"Page 1 {PROSE * 5}".strip()) and "Number 1." in first.text
    assert (first.title, first.source, first.id) == ("P1", "web", web.url("/a"))
    assert first.meta["depth"] == 1 and first.meta["content_type"] == "text/html"
    assert json.loads((tmp_path / "stats.json").read_text()) == stats
    with gzip.open(tmp_path / "_crawl/outcomes.jsonl.gz", "rt") as file:
        assert [json.loads(line)["key"] for line in file] == [web.url(path) for path in short_paths(web)]


def test_a_finished_crawl_asks_nothing_and_a_larger_budget_goes_on(web, tmp_path):
    web.routes |= {"/": page(0, *(f"/{n}" for n in range(1, 8)))} | {f"/{n}": page(n) for n in range(1, 8)}
    stats = run(web, tmp_path, max_pages=3)
    assert stats["documents"] == 3 and stats["outcomes"]["pending"] == 5
    again = run(web, tmp_path, max_pages=3)
    assert again["outcomes"] == stats["outcomes"] and short_paths(web) == ["/", "/1", "/2"]
    assert run(web, tmp_path, overrides={"max_documents": 5})["documents"] == 5
    assert run(web, tmp_path, max_pages=100)["outcomes"] == {"kept": 8}
    assert short_paths(web) == ["/"] + [f"/{n}" for n in range(1, 8)]
    assert len(documents_in(tmp_path)) == 8


def test_robots_and_allowed_hosts_bound_the_crawl(web, tmp_path):
    web.routes |= {
        "a.test/robots.txt": Reply(b"User-agent: *\nDisallow: /private\n"),
        "a.test/": page(0, "/private/x", web.url("/", "b.test"), web.url("/", "c.test")),
        "b.test/": page(1),
        "c.test/": page(2),
    }
    stats = run(web, tmp_path, allowed_hosts=["a.test", "b.test"])
    assert stats["outcomes"] == {"kept": 2, "robots": 1}
    assert {asked.host for asked in web.asked} == {"a.test", "b.test"} and "/private/x" not in web.paths()
    assert stats["hosts"]["a.test"] == {"kept": 1, "robots": 1}


def test_redirects_are_items_of_their_own(web, tmp_path):
    def to(place: str) -> Reply:
        return Reply(status=301, headers={"Location": place})

    web.routes |= {
        "/": page(0, "/old1", "/old2", "/out", "/loop", "/chain0"),
        "/old1": to("/new"),
        "/old2": to("/new?utm_source=z"),
        "/new": page(1),
        "/out": to("http://evil.example/"),
        "/loop": to("/loop"),
    }
    web.routes |= {f"/chain{n}": to(f"/chain{n + 1}") for n in range(20)}
    stats = run(web, tmp_path, max_depth=1, fetch={"cache_days": 0.0})
    assert stats["outcomes"] == {"redirect": 8, "kept": 2, "redirect_outside": 1, "too_many_redirects": 1}
    assert len(web.paths()) == len(set(web.paths())) and "/chain6" not in web.paths()


def test_pages_that_do_not_want_to_be_kept_or_followed(web, tmp_path):
    follow_no = Reply(page(4, "/d").body, headers={"Content-Type": "text/html", "X-Robots-Tag": "nofollow"})
    web.routes |= {
        "/": page(0, "/noindex", "/nofollow", "/header"),
        "/noindex": page(1, "/a", head='<META NAME="Robots" content="NOINDEX">'),
        "/nofollow": page(2, "/b", head='<meta name="robots" content="none">'),
        "/header": follow_no,
        "/a": page(5, "/c", marks='rel="external nofollow"'),
    }
    stats = run(web, tmp_path)
    assert short_paths(web) == ["/", "/noindex", "/nofollow", "/header", "/a"]
    assert stats["outcomes"] == {"kept": 3, "noindex": 2}


def test_the_same_content_is_kept_once_and_a_trap_ends(web, tmp_path):
    """Every address below /trap/ gives one page with a relative link: followed, it would never end."""
    body = page(1, "deeper/").body
    web.routes |= {"/": page(0, "/trap/", "/copy"), "/copy": Reply(body, headers={"Content-Type": "text/html"})}
    for depth in range(9):
        web.routes["/trap/" + "deeper/" * depth] = Reply(body, headers={"Content-Type": "text/html"})
    stats = run(web, tmp_path, max_depth=8)
    assert stats["outcomes"] == {"kept": 2, "duplicate_content": 2}
    assert stats["examples"]["duplicate_content"][0]["detail"] == web.url("/trap/")


def test_what_is_no_text_is_counted_by_its_reason(web, tmp_path):
    kind = {"Content-Type": "text/html"}
    web.routes |= {
        "/": page(0, "/png", "/zip", "/empty", "/fakepdf", "/text", "/404", "/big", "/nul"),
        "/png": Reply(b"\x89PNG\r\n\x1a\n" + bytes(500), headers=kind),
        "/zip": Reply(b"PK", headers={"Content-Type": "application/zip"}),
        "/empty": Reply(b"<html><body></body></html>", headers=kind),
        "/fakepdf": Reply(page(3).body, headers={"Content-Type": "application/pdf"}),
        "/text": Reply("naïve".encode("latin-1") * 50, headers={"Content-Type": "text/plain; charset=latin-1"}),
        "/big": Reply(b"x" * 300_000, headers=kind),
        "/nul": Reply(bytes(1000), headers=kind),
    }
    stats = run(web, tmp_path, max_page_bytes=200_000)
    assert stats["outcomes"] == {
        "kept": 2, "binary": 2, "content_type": 1, "empty_text": 1, "not_a_pdf": 1, "http_404": 1, "too_large": 1
    }  # fmt: skip
    assert documents_in(tmp_path)[web.url("/text")].text.startswith("naïvenaïve")


def test_encodings_and_broken_pages(web, tmp_path):
    japanese = "灯台守は毎晩、船の数を数えて青い本に名前を書いた。" * 30
    head = "<html><head><title>灯台</title></head><body><p>"
    web.routes |= {
        "/": page(0, "/sjis", "/deep", "/cut"),
        "/sjis": Reply((head + japanese).encode("shift_jis"), headers={"Content-Type": "text/html; charset=shift_jis"}),
        "/deep": Reply(b"<div>" * 10_000 + PROSE.encode() * 9, headers={"Content-Type": "text/html"}),
        "/cut": Reply(b"<p>" + PROSE.encode() * 9 + b"<a href='/lost", headers={"Content-Type": "text/html"}),
    }
    stats = run(web, tmp_path)
    assert stats["outcomes"] == {"kept": 4}
    documents = documents_in(tmp_path)
    assert "船の数を数えて青い本" in documents[web.url("/sjis")].text and documents[web.url("/sjis")].title == "灯台"
    assert all(PROSE.strip() in " ".join(documents[web.url(path)].text.split()) for path in ("/deep", "/cut"))


def test_a_host_that_only_fails_is_given_up_and_tried_again_on_demand(web, tmp_path):
    bad = [web.url(f"/{n}", "b.test") for n in range(6)]
    web.routes |= {"a.test/": page(0, *bad, "/fine"), "a.test/fine": page(1)}
    web.routes |= {f"b.test/{n}": Reply(status=503) for n in range(6)}
    settings = {"allowed_hosts": ["a.test", "b.test"], "host_failures": 2, "fetch": {"retries": 1}}
    stats = run(web, tmp_path, **settings)
    assert stats["outcomes"] == {"host_given_up": 4, "kept": 2, "http_503": 2}
    assert len([asked for asked in web.asked if asked.host == "b.test" and asked.path != "/robots.txt"]) == 4
    web.routes |= {f"b.test/{n}": page(10 + n) for n in range(6)}
    assert run(web, tmp_path, **settings)["outcomes"] == stats["outcomes"], "not of itself"
    assert run(web, tmp_path, overrides={"retry_failed": True}, **settings)["outcomes"] == {"kept": 8}


def test_hosts_are_asked_at_once_and_each_one_page_at_a_time(web, tmp_path):
    """Two pages of different hosts wait for each other in the server; two of one host would be seen together."""
    meeting, open_now, most = threading.Barrier(2), {"a.test": 0, "b.test": 0}, {"a.test": 0, "b.test": 0}

    def route(asked):
        open_now[asked.host] += 1
        most[asked.host] = max(most[asked.host], open_now[asked.host])
        meeting.wait(timeout=20)
        open_now[asked.host] -= 1
        return page(int(asked.path[1:] or 0) + 50 * (asked.host == "b.test"), *(f"/{n}" for n in range(1, 9)))

    web.routes |= {"/": route} | {f"/{n}": route for n in range(1, 9)}
    stats = run(web, tmp_path, seeds=(web.url("/"), web.url("/", "b.test")), fetch={"delay_s": 0.0})
    assert stats["outcomes"] == {"kept": 18} and most == {"a.test": 1, "b.test": 1}


def test_a_page_that_a_parser_stumbles_over_costs_that_page_alone(web, tmp_path, monkeypatch):
    original = crawl_extract.extract_html

    def stumble(body, *arguments):
        if b"Number 1." in body:
            raise KeyError("unforeseen")
        return original(body, *arguments)

    monkeypatch.setattr(crawl_extract, "extract_html", stumble)
    web.routes |= {"/": page(0, "/1", "/2"), "/1": page(1, "/3"), "/2": page(2), "/3": page(3)}
    stats = run(web, tmp_path)
    assert stats["outcomes"] == {"kept": 3, "extraction_failed": 1}
    assert stats["examples"]["extraction_failed"][0]["detail"] == "KeyError: 'unforeseen'"


def test_links_of_a_page():
    body = b"""<html><head><base href="/docs/"><meta name="citation_pdf_url" content="/paper.pdf"></head><body>
    <a href="one">1</a><a href=" TWO ">2</a><a href="one#again">1</a><area href="three"><a>no</a>
    <a href="javascript:void(0)">j</a><a href="four" rel="nofollow">4</a><a href="">self</a></body></html>"""
    links = read_links(Page("https://a.test/x/y", 200, {"content-type": "text/html"}, body, 0.0))
    assert links.urls == [f"https://a.test/docs/{name}" for name in ("one", "TWO", "three", "")]
    assert links.pdf_url == "https://a.test/paper.pdf" and links.index and links.follow
    marked = read_links(Page("https://a.test/", 200, {"x-robots-tag": "otherbot: noindex"}, b"<p>x", 0.0))
    assert marked.index and marked.follow


def test_an_index_of_thousands_of_links_and_pages_too_deep_for_a_parser():
    """With a look-up per link that starts anew, as resiliparse's collections make it, this page takes minutes."""
    kind = {"content-type": "text/html"}
    body = ("<ul>" + "".join(f'<li><a href="/{n}">x</a>' for n in range(2 * MAX_LINKS))).encode()
    links = read_links(Page("https://a.test/", 200, kind, body, 0.0))
    assert links.urls == [f"https://a.test/{n}" for n in range(MAX_LINKS)]
    deep = b"<div>" * 10_000 + b"""<A class=y HREF="/x?a=1&amp;b=2">x</a><a href=/y rel='nofollow'><a href='/z'><a <a"""
    deep += b'<meta name="robots" content="noindex"><base href="/down/">'
    links = read_links(Page("https://a.test/", 200, kind, deep, 0.0))
    assert links.urls == ["https://a.test/x?a=1&b=2", "https://a.test/z"] and not links.index
    assert read_links(Page("https://a.test/", 200, kind, b"<a " * 500_000 + b"<a x='" * 500_000, 0.0)).urls == []
    assert read_links(Page("https://a.test/", 200, kind, b"", 0.0)).urls == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, r"source=web has no seeds; add web\.seeds"),
        ({"seeds": ["example"]}, r"seed 'example' is no http\(s\) URL"),
        (
            {"seeds": ["http://a.test"], "allowed_hosts": ["http://a.test"]},
            "allowed host 'http://a.test' is no host name",
        ),
        ({"max_depth": -1}, r"web\.max_depth=-1 is negative"),
        ({"concurrency": 0}, "concurrency=0 must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, settings, problem):
    with pytest.raises(UserError, match=problem):
        crawl(CrawlConfig(output=str(tmp_path / "x"), fetch=fetch_config(), web=WebConfig(**settings)))
    assert not (tmp_path / "x").exists()


def test_the_loopback_is_not_crawled_without_leave(web, tmp_path):
    stats = run(web, tmp_path, fetch={"allow_addresses": []})
    assert stats["outcomes"] == {"robots_unreachable": 1} and not web.asked
