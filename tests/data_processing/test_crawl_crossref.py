"""Crossref and Unpaywall, played by answers of their real shapes: full texts, cursors, the low-yield gate, resume."""

import pytest

from configs.errors import UserError
from data_processing.crawl import CrawlConfig, Outside, crawl
from data_processing.crawl_crossref import CrossrefConfig, CrossrefSource, has_check_digit, order_locations
from data_processing.crawl_state import CrawlState
from data_processing.document import Document, read_documents
from tests.crawl_server import (
    FakeTime,
    Reply,
    WebServer,
    fetch_config,
    html,
    json_reply,
    make_pdf,
    pdf,
    resolver,
    serve,
)

SENTENCE = "Sediment cores from the northern basin record a shift in grain size at the end of the last glaciation. "
ABSTRACT = (
    "<jats:title>Abstract</jats:title><jats:p>"
    + SENTENCE * 3
    + "We &amp; others find <jats:italic>x</jats:italic>.</jats:p>"
)
PAGES = [SENTENCE * 15, SENTENCE * 15]
ISSN = "1234-5679"


@pytest.fixture(scope="module")
def running():
    with serve() as server:
        yield server


class Journal:
    """Crossref, Unpaywall and a repository, played by the local server."""

    def __init__(self, web: WebServer):
        self.web, self.works, self.rows, self.lost_cursors = web, {}, 2, set()
        web.routes.clear()
        web.asked.clear()
        web.routes["api.crossref.test/works"] = self.list_works

    def add(self, doi: str, *locations: dict, issn: str = ISSN, oa: bool = True, **fields) -> None:
        work = {
            "DOI": doi.upper(),
            "type": "journal-article",
            "title": [f"Title of <i>{doi}</i>"],
            "container-title": ["Journal of Cores"],
            "ISSN": [issn],
            "issued": {"date-parts": [[2021, 5]]},
            "published": {"date-parts": [[2021, 5, 3]]},
            "license": [{"URL": "https://creativecommons.org/licenses/by/4.0/", "content-version": "vor"}],
            "abstract": ABSTRACT,
        } | fields
        self.works.setdefault(issn, []).append({key: value for key, value in work.items() if value is not None})
        if oa:
            record = {"doi": doi, "is_oa": bool(locations), "oa_locations": list(locations)}
            record["best_oa_location"] = locations[0] if locations else None
            self.web.routes[f"api.unpaywall.test/v2/{doi}"] = json_reply(record)

    def place(self, path: str, host_type: str = "repository", version: str = "acceptedVersion", **fields) -> dict:
        url = self.web.url(path, "repo.test" if host_type == "repository" else "publisher.test")
        return {"url": url, "url_for_pdf": url, "host_type": host_type, "version": version, "license": "cc-by"} | fields

    def list_works(self, asked) -> Reply:
        query = asked.query
        if query["cursor"] in self.lost_cursors:
            return json_reply({"status": "failed", "message-type": "validation-failure"}, 400)
        issn = query["filter"].split(",")[0].removeprefix("issn:")
        start = 0 if query["cursor"] == "*" else int(query["cursor"].split("==")[1])
        works = self.works.get(issn, [])
        items = works[start : start + self.rows]
        cursor = f"DnF1ZXJ5=={start + len(items)}"
        message = {"total-results": len(works), "items-per-page": self.rows, "items": items, "next-cursor": cursor}
        return json_reply({"status": "ok", "message-type": "work-list", "message-version": "1.0.0", "message": message})

    def crawl(self, output, overrides=None, fetch=None, **settings) -> dict:
        defaults = {"issns": [ISSN], "fulltext_hosts": ["repo.test", "publisher.test"], "rows": self.rows}
        defaults |= {"crossref_url": self.web.url("", "api.crossref.test"), "gate_papers": 100}
        defaults |= {"unpaywall_url": self.web.url("/v2", "api.unpaywall.test")}
        config = CrawlConfig(
            source="crossref",
            output=str(output),
            fetch=fetch_config(**{"backoff_s": 0.5, "retries": 1} | (fetch or {})),
            crossref=CrossrefConfig(**defaults | settings),
            **overrides or {},
        )
        return crawl(config, Outside(FakeTime().clock, resolver))

    def asked_paths(self, host: str) -> list[str]:
        return [a.path for a in self.web.asked if a.host == host and a.path != "/robots.txt"]


@pytest.fixture
def journal(running) -> Journal:
    return Journal(running)


def by_doi(output) -> dict[str, Document]:
    return {document.meta["doi"]: document for document in read_documents(output)}


def test_full_texts_come_from_repositories_first(journal, tmp_path):
    web = journal.web
    journal.add("10.1/a", journal.place("/pub.pdf", "publisher", "publishedVersion"), journal.place("/a.pdf"))
    web.routes |= {"repo.test/a.pdf": pdf(PAGES), "publisher.test/pub.pdf": pdf(PAGES)}
    stats = journal.crawl(tmp_path)
    assert stats["outcomes"] == {"kept": 1} and not journal.asked_paths("publisher.test")
    document = by_doi(tmp_path)["10.1/a"]
    assert "northern basin record a shift" in " ".join(document.text.split()) and len(document.text) > 2000
    assert (document.id, document.title, document.date) == ("crossref:10.1/a", "Title of 10.1/a", "2021-05-03")
    assert document.url == "https://doi.org/10.1/a"
    assert document.meta | {"pdf_url": ""} == {
        "doi": "10.1/a",
        "journal": "Journal of Cores",
        "issn": [ISSN],
        "license": "cc-by",
        "text_kind": "full_text",
        "pdf_url": "",
        "pdf_pages": 2,
    }
    listing = next(asked for asked in web.asked if asked.host == "api.crossref.test")
    assert listing.query["filter"] == f"issn:{ISSN},type:journal-article" and listing.query["rows"] == "2"
    assert listing.query["mailto"] == "test@example.org" and listing.query["cursor"] == "*"
    unpaywall = next(asked for asked in web.asked if asked.host == "api.unpaywall.test")
    assert unpaywall.query == {"email": "test@example.org"}
    assert not [asked for asked in web.asked if asked.path == "/robots.txt" and asked.host.startswith("api.")]


def test_locations_are_ordered_by_kind_and_version():
    def place(url, host_type, version, pdf=True):
        return {
            "url_for_pdf": url if pdf else None,
            "url_for_landing_page": url,
            "host_type": host_type,
            "version": version,
        }

    record = {
        "oa_locations": [
            place("p1", "publisher", "publishedVersion"),
            place("r3", "repository", None),
            place("r2", "repository", "submittedVersion"),
            place("landing", "repository", "acceptedVersion", pdf=False),
            place("r1", "repository", "publishedVersion"),
        ]
    }
    assert order_locations(record) == (["r1", "r2", "r3", "p1"], ["landing"])
    assert order_locations({"oa_locations": None}) == order_locations({}) == ([], [])


def test_what_is_served_as_a_pdf_is_checked_and_the_next_copy_tried(journal, tmp_path):
    whole = make_pdf(PAGES)
    bad = {
        "login": Reply(html("Please log in").body, headers={"Content-Type": "application/pdf"}),
        "landing": html("a landing page"),
        "cut": Reply(whole[: len(whole) // 2], headers={"Content-Type": "application/pdf"}),
        "one": pdf(PAGES[:1]),
        "scan": pdf(["", ""]),
        "broken": Reply(b"%PDF-1.7 nothing %%EOF", headers={"Content-Type": "application/pdf"}),
        "aborted": Reply(whole, headers={"Content-Type": "application/pdf"}, cut_at=500),
        "gone": Reply(status=404),
        "image": Reply(b"\xff\xd8\xff", headers={"Content-Type": "image/jpeg"}),
    }
    for name, reply in bad.items():
        journal.web.routes[f"repo.test/{name}.pdf"] = reply
        journal.add(f"10.1/{name}", journal.place(f"/{name}.pdf"))
    journal.web.routes["repo.test/good.pdf"] = pdf(PAGES)
    journal.add("10.1/second", journal.place("/login.pdf"), journal.place("/good.pdf"))
    assert journal.crawl(tmp_path)["outcomes"] == {"kept": 10}
    documents = by_doi(tmp_path)
    reasons = {
        name: documents[f"10.1/{name}"].meta["no_full_text"].partition(".pdf: ")[2].split(":")[0] for name in bad
    }
    assert reasons == {
        "login": "not_a_pdf",
        "landing": "not_a_pdf",
        "cut": "pdf_truncated",
        "one": "pdf_too_few_pages",
        "scan": "pdf_too_little_text",
        "broken": "pdf_unreadable",
        "aborted": "network",
        "gone": "http_404",
        "image": "content_type",
    }
    fallback = documents["10.1/cut"]
    assert fallback.meta["text_kind"] == "abstract" and fallback.text == (SENTENCE * 3).strip() + " We & others find x."
    assert documents["10.1/second"].meta["text_kind"] == "full_text"


def test_a_landing_page_names_its_pdf(journal, tmp_path):
    journal.web.routes |= {
        "repo.test/item/1": html("x", head='<meta name="citation_pdf_url" content="/item/1.pdf">'),
        "repo.test/item/1.pdf": Reply(status=302, headers={"Location": "/files/1"}),
        "repo.test/files/1": pdf(PAGES, "application/octet-stream"),
    }
    place = journal.place("", url_for_pdf=None, url_for_landing_page=journal.web.url("/item/1", "repo.test"))
    journal.add("10.1/l", place)
    journal.crawl(tmp_path)
    assert by_doi(tmp_path)["10.1/l"].meta["text_kind"] == "full_text"


def test_papers_without_text_and_hosts_that_may_not_be_asked(journal, tmp_path):
    journal.add("10.1/none", abstract=None)
    journal.add("10.1/short", abstract="Too short.")
    journal.add("10.1/unknown", oa=False)
    journal.web.routes["api.unpaywall.test/v2/10.1/unknown"] = json_reply({"HTTP_status_code": 404, "error": True}, 404)
    journal.add("10.1/elsewhere", {"url_for_pdf": "http://elsewhere.example/x.pdf", "host_type": "repository"})
    journal.add("10.1/robots", journal.place("/private/x.pdf"))
    journal.web.routes["repo.test/robots.txt"] = Reply(b"User-agent: *\nDisallow: /private/")
    stats = journal.crawl(tmp_path)
    assert stats["outcomes"] == {"kept": 3, "no_text": 2}
    assert stats["examples"]["no_text"][0] == {"key": "10.1/none", "detail": "no PDF is known"}
    documents = by_doi(tmp_path)
    assert "host_not_allowed: elsewhere.example" in documents["10.1/elsewhere"].meta["no_full_text"]
    assert "robots" in documents["10.1/robots"].meta["no_full_text"]
    assert documents["10.1/unknown"].meta["text_kind"] == "abstract"


def test_abstracts_alone_ask_for_nothing_else(journal, tmp_path):
    journal.add("10.1/a", journal.place("/a.pdf"))
    journal.crawl(tmp_path, full_text=False)
    assert {asked.host for asked in journal.web.asked} == {"api.crossref.test"}


def test_a_journal_that_yields_little_is_left(journal, tmp_path):
    for number in range(10):
        journal.add(f"10.1/{number}")
        journal.add(f"10.2/{number}", *([journal.place("/a.pdf")] if number % 2 else []), issn="2049-3630")
    journal.web.routes["repo.test/a.pdf"] = pdf(PAGES)
    stats = journal.crawl(tmp_path, issns=[ISSN, "2049-3630"], gate_papers=4, gate_share=0.3)
    assert stats["journals_left"] == {ISSN: "0 full texts in 4 papers"}
    assert sorted(by_doi(tmp_path)) == [f"10.1/{n}" for n in range(4)] + [f"10.2/{n}" for n in range(10)]


def test_a_stopped_crawl_goes_on_at_its_cursor_and_survives_a_lost_one(journal, tmp_path):
    for number in range(7):
        journal.add(f"10.1/{number}")
    assert journal.crawl(tmp_path, overrides={"max_documents": 3})["documents"] == 3
    journal.web.asked.clear()
    assert journal.crawl(tmp_path, overrides={"max_documents": 5})["documents"] == 5
    assert [asked.query["cursor"] for asked in journal.web.asked if "cursor" in asked.query] == [
        "DnF1ZXJ5==2",
        "DnF1ZXJ5==4",
    ]
    journal.web.asked.clear()
    journal.lost_cursors = {"DnF1ZXJ5==4"}
    with pytest.raises(UserError, match=r"source=crossref: the listing cannot be had \(http_400: "):
        journal.crawl(tmp_path)
    journal.lost_cursors = set()
    stats = journal.crawl(tmp_path)
    assert stats["outcomes"] == {"kept": 7} and len(by_doi(tmp_path)) == 7
    asked = journal.asked_paths("api.unpaywall.test")
    assert len(asked) == len(set(asked)) == 2, "what was done is not done again"


def test_crashes_between_and_within_commits_neither_lose_nor_double_a_paper(journal, tmp_path, monkeypatch):
    for number in range(7):
        journal.add(f"10.1/{number}", *([journal.place("/a.pdf")] if number % 2 else []))
    journal.web.routes["repo.test/a.pdf"] = pdf(PAGES)
    original, count = CrawlState._transaction, [0]

    def transaction(self, body):
        count[0] += 1
        if count[0] % 6 == 2:
            raise RuntimeError("crash before")
        result = original(self, body)
        if count[0] % 6 == 5:
            raise RuntimeError("crash after")
        return result

    monkeypatch.setattr(CrawlState, "_transaction", transaction)
    stats, crashes = None, 0
    while stats is None and crashes < 50:
        try:
            stats = journal.crawl(tmp_path)
        except RuntimeError:
            crashes += 1
    assert crashes > 3 and stats["outcomes"] == {"kept": 7}
    assert [document.meta["doi"] for document in read_documents(tmp_path)] == [f"10.1/{number}" for number in range(7)]
    asked = journal.asked_paths("api.unpaywall.test")
    assert len(asked) == len(set(asked)) == 7


def test_failures_of_unpaywall_can_be_tried_again(journal, tmp_path):
    journal.add("10.1/a", oa=False)
    journal.web.routes["api.unpaywall.test/v2/10.1/a"] = Reply(status=503)
    assert journal.crawl(tmp_path)["outcomes"] == {"unpaywall_http_503": 1}
    journal.web.routes["api.unpaywall.test/v2/10.1/a"] = json_reply({"doi": "10.1/a", "oa_locations": []})
    assert journal.crawl(tmp_path)["outcomes"] == {"unpaywall_http_503": 1}
    assert journal.crawl(tmp_path, overrides={"retry_failed": True})["outcomes"] == {"kept": 1}


@pytest.mark.parametrize("body", [b"<html>busy</html>", b"{}", b'{"message": {"items": [{}]}}', b"[" * 100_000])
def test_listings_that_are_none_stop_the_crawl_with_one_line(journal, tmp_path, body):
    journal.web.routes["api.crossref.test/works"] = Reply(body, headers={"Content-Type": "application/json"})
    with pytest.raises(
        UserError, match=r"source=crossref: the listing cannot be had \(bad_json.*the same command goes on"
    ):
        journal.crawl(tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"issns": []}, r"source=crossref has no journals; add crossref\.issns"),
        ({"issns": ["1234-5678"]}, "'1234-5678' is no ISSN"),
        ({"issns": ["12345679"]}, "'12345679' is no ISSN"),
    ],
)
def test_journals_that_make_no_sense_are_refused(settings, problem):
    with pytest.raises(UserError, match=problem):
        CrossrefSource(CrossrefConfig(**settings))


def test_more_settings_that_make_no_sense(journal, tmp_path):
    assert has_check_digit("2434-561X") and has_check_digit("0378-5955")
    with pytest.raises(UserError, match="rows=2000 is outside 1 to 1000"):
        CrossrefConfig(rows=2000)
    with pytest.raises(UserError, match="is no e-mail address, which Crossref and Unpaywall need"):
        journal.crawl(tmp_path, fetch={"contact": "https://example.org"})
