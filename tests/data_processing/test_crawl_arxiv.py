"""arXiv by Atom and OAI-PMH, played by a local server: papers, deleted records, expired tokens, resume."""

import pytest

from configs.errors import UserError
from data_processing.crawl import CrawlConfig, Outside, crawl
from data_processing.crawl_arxiv import ArxivConfig, ArxivSource
from data_processing.document import read_documents
from tests.crawl_server import FakeTime, Reply, WebServer, fetch_config, html, pdf, resolver, serve

SENTENCE = "We study how a small network learns to count, and why it forgets the numbers it has not seen for long. "
PAGES = [SENTENCE * 12, SENTENCE * 12]
XML = {"Content-Type": "application/atom+xml; charset=UTF-8"}

FEED = """<?xml version="1.0" encoding="UTF-8"?>
<feed xmlns="http://www.w3.org/2005/Atom">
  <link href="http://arxiv.org/api/query?search_query=cat:cs.CL" rel="self" type="application/atom+xml"/>
  <title type="html">ArXiv Query: search_query=cat:cs.CL&amp;id_list=&amp;start=0&amp;max_results=2</title>
  <opensearch:totalResults xmlns:opensearch="http://a9.com/-/spec/opensearch/1.1/">{total}</opensearch:totalResults>
  <opensearch:startIndex xmlns:opensearch="http://a9.com/-/spec/opensearch/1.1/">{start}</opensearch:startIndex>
  {entries}
</feed>"""
ENTRY = """<entry>
    <id>http://arxiv.org/abs/{id}v2</id>
    <updated>2021-02-03T18:00:00Z</updated><published>2021-01-01T18:30:00Z</published>
    <title>Counting in
  Small Networks {id}</title>
    <summary>  {summary}
</summary>
    <author><name>A. Author</name></author>
    <arxiv:doi xmlns:arxiv="http://arxiv.org/schemas/atom">10.1/{id}</arxiv:doi>
    <link href="http://arxiv.org/abs/{id}v2" rel="alternate" type="text/html"/>
    <link title="pdf" href="http://arxiv.org/pdf/{id}v2" rel="related" type="application/pdf"/>
    <arxiv:primary_category xmlns:arxiv="http://arxiv.org/schemas/atom" term="cs.CL" scheme="http://arxiv.org/schemas/atom"/>
    <category term="cs.CL" scheme="http://arxiv.org/schemas/atom"/><category term="cs.LG" scheme="http://arxiv.org/schemas/atom"/>
  </entry>"""
OAI = """<?xml version="1.0" encoding="UTF-8"?>
<OAI-PMH xmlns="http://www.openarchives.org/OAI/2.0/" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">
<responseDate>2024-01-31T00:00:00Z</responseDate><request verb="ListRecords">http://oai.test/oai</request>
{body}
</OAI-PMH>"""
RECORD = """<record><header><identifier>oai:arXiv.org:{id}</identifier><datestamp>2024-01-02</datestamp>
<setSpec>cs</setSpec></header>
<metadata><arXiv xmlns="http://arxiv.org/OAI/arXiv/"><id>{id}</id><created>2023-12-30</created>
<authors><author><keyname>Author</keyname><forenames>A.</forenames></author></authors>
<title>Forgetting
  numbers {id}</title><categories>cs.CL cs.LG</categories><license>http://creativecommons.org/licenses/by/4.0/</license>
<abstract>  {summary}</abstract></arXiv></metadata></record>"""
DELETED = """<record><header status="deleted"><identifier>oai:arXiv.org:0001</identifier></header></record>"""


@pytest.fixture(scope="module")
def running():
    with serve() as server:
        yield server


@pytest.fixture
def web(running) -> WebServer:
    running.routes.clear()
    running.asked.clear()
    return running


def run(web: WebServer, output, overrides=None, fake=None, **settings) -> dict:
    defaults = {"rows": 2, "fulltext_hosts": [], "atom_url": web.url("/api", "export.test")}
    defaults |= {"oai_url": web.url("/oai", "oai.test"), "pdf_url": web.url("/pdf", "export.test")}
    config = CrawlConfig(
        source="arxiv",
        output=str(output),
        fetch=fetch_config(retries=1),
        arxiv=ArxivConfig(**defaults | settings),
        **overrides or {},
    )
    return crawl(config, Outside((fake or FakeTime()).clock, resolver))


def search(number: int, empty_at: list[int] | None = None):
    """The Atom API over `number` papers; a start in `empty_at` gives an empty page once."""
    empty_at = empty_at or []

    def route(asked) -> Reply:
        start, rows = int(asked.query["start"]), int(asked.query["max_results"])
        if start in empty_at:
            empty_at.remove(start)
            rows = 0
        ids = [f"2101.{n:05d}" for n in range(start, min(number, start + rows))]
        entries = "".join(ENTRY.format(id=name, summary=SENTENCE * 3) for name in ids)
        return Reply(FEED.format(total=number, start=start, entries=entries).encode(), headers=XML)

    return route


def add_pdfs(web: WebServer, ids: list[str]) -> None:
    web.routes |= {f"/pdf/{name}": pdf(PAGES) for name in ids}


def test_a_search_gives_full_texts_page_after_page(web, tmp_path):
    web.routes["export.test/api/query"] = search(5, empty_at=[2])
    add_pdfs(web, [f"2101.{n:05d}" for n in (0, 1, 2, 4)])
    fake = FakeTime()
    stats = run(web, tmp_path, query="cat:cs.CL", fake=fake)
    assert stats["outcomes"] == {"kept": 5}
    documents = {document.id: document for document in read_documents(tmp_path)}
    first = documents["arxiv:2101.00000"]
    assert first.title == "Counting in Small Networks 2101.00000" and first.date == "2021-01-01"
    assert first.url == "https://arxiv.org/abs/2101.00000" and "learns to count" in " ".join(first.text.split())
    assert first.meta["categories"] == ["cs.CL", "cs.LG"] and first.meta["doi"] == "10.1/2101.00000"
    missing = documents["arxiv:2101.00003"]
    assert missing.meta["text_kind"] == "abstract" and missing.text == (SENTENCE * 3).strip()
    asked = [asked.query for asked in web.asked if asked.path.startswith("/api/query")]
    assert [query["start"] for query in asked] == ["0", "2", "2", "4"]
    assert asked[0]["search_query"] == "cat:cs.CL" and asked[0]["sortBy"] == "submittedDate"
    assert fake.now - 1000 >= 3 * 3.0, "three seconds between the API's requests"


def test_a_search_goes_on_where_it_stopped(web, tmp_path):
    web.routes["export.test/api/query"] = search(5)
    add_pdfs(web, [f"2101.{n:05d}" for n in range(5)])
    run(web, tmp_path, query="cat:cs.CL", overrides={"max_documents": 3})
    web.asked.clear()
    assert run(web, tmp_path, query="cat:cs.CL")["outcomes"] == {"kept": 5}
    assert sorted(path for path in web.paths() if path.startswith("/pdf/")) == ["/pdf/2101.00003", "/pdf/2101.00004"]
    web.asked.clear()
    run(web, tmp_path, query="cat:cs.CL")
    assert len(web.asked) == 1, "at the end: one look whether there is more"


def test_an_error_of_the_search_is_the_users(web, tmp_path):
    entry = ENTRY.format(id="x", summary="incorrect id format").replace("/abs/xv2", "/api/errors#incorrect_id_format")
    web.routes["export.test/api/query"] = Reply(FEED.format(total=1, start=0, entries=entry).encode(), headers=XML)
    with pytest.raises(UserError, match=r"arxiv\.query='cat:': incorrect id format"):
        run(web, tmp_path, query="cat:")


def oai_pages(*pages: str, lost: tuple[str, ...] = ()):
    """ListRecords: page n is reached by token tn."""

    def route(asked) -> Reply:
        token = asked.query.get("resumptionToken", "")
        if token in lost:
            return Reply(OAI.format(body='<error code="badResumptionToken">expired</error>').encode(), headers=XML)
        assert not token or set(asked.query) == {"verb", "resumptionToken"}, "a token stands alone"
        index = int(token[1:]) if token else 0
        size = 'completeListSize="4" cursor="0"'
        last = index + 1 == len(pages)
        following = f"<resumptionToken {size}/>" if last else f"<resumptionToken {size}>t{index + 1}</resumptionToken>"
        return Reply(OAI.format(body=f"<ListRecords>{pages[index]}{following}</ListRecords>").encode(), headers=XML)

    return route


def record(name: str) -> str:
    return RECORD.format(id=name, summary=SENTENCE * 3)


def test_a_set_is_harvested_by_oai(web, tmp_path):
    busy = Reply(status=503, headers={"Retry-After": "30"})
    pages = oai_pages(record("2312.00001") + DELETED, record("2312.00002") + record("cs/0001001"))
    first = []

    def route(asked) -> Reply:
        if not first:
            first.append(1)
            return busy
        return pages(asked)

    web.routes["oai.test/oai"] = route
    add_pdfs(web, ["2312.00001", "cs/0001001"])
    fake = FakeTime()
    stats = run(web, tmp_path, set="cs", from_date="2024-01-01", fake=fake)
    assert stats["outcomes"] == {"kept": 3} and fake.now >= 1030
    documents = {document.id: document for document in read_documents(tmp_path)}
    assert documents["arxiv:cs/0001001"].meta["text_kind"] == "full_text"
    second = documents["arxiv:2312.00002"]
    assert (second.title, second.date, second.text) == (
        "Forgetting numbers 2312.00002",
        "2023-12-30",
        (SENTENCE * 3).strip(),
    )
    assert second.meta["license"].endswith("/by/4.0/") and second.meta["categories"] == ["cs.CL", "cs.LG"]
    asked = [asked.query for asked in web.asked if asked.host == "oai.test"]
    assert asked[1] == {"verb": "ListRecords", "metadataPrefix": "arXiv", "set": "cs", "from": "2024-01-01"}
    web.asked.clear()
    run(web, tmp_path, set="cs", from_date="2024-01-01")
    assert not web.asked, "a list that has ended is not asked for again"


def test_an_expired_token_starts_the_list_anew_and_does_nothing_twice(web, tmp_path):
    pages = [record("2312.00001"), record("2312.00002"), record("2312.00003")]
    web.routes["oai.test/oai"] = oai_pages(*pages)
    run(web, tmp_path, set="cs", overrides={"max_documents": 2})
    lost = []

    def route(asked) -> Reply:
        """The token of the second page fails once, as one from an earlier day does."""
        first_time = asked.query.get("resumptionToken") == "t1" and not lost
        lost.extend([1] if first_time else [])
        return oai_pages(*pages, lost=("t1",) if first_time else ())(asked)

    web.routes["oai.test/oai"] = route
    web.asked.clear()
    assert run(web, tmp_path, set="cs")["outcomes"] == {"kept": 3} and lost
    assert [path for path in web.paths() if path.startswith("/pdf/")] == ["/pdf/2312.00003"]
    web.routes["oai.test/oai"] = oai_pages(*pages, lost=("t1",))
    with pytest.raises(UserError, match=r"source=arxiv: the listing cannot be had \(oai_error: badResumptionToken\)"):
        run(web, tmp_path, set="cs", overrides={"overwrite": True})


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"<html><body>down for maintenance</body></html>", "bad_xml: html instead of OAI-PMH"),
        (b"<OAI-PMH><cut", "bad_xml"),
        (b'<!DOCTYPE x [<!ENTITY a "aaaa">]><x>&a;</x>', "has a DOCTYPE"),
        (OAI.format(body='<error code="cannotDisseminateFormat">x</error>').encode(), "oai_error: cannotDisseminate"),
    ],
)
def test_lists_that_are_none(web, tmp_path, body, problem):
    web.routes["oai.test/oai"] = Reply(body, headers={"Content-Type": "text/xml"})
    with pytest.raises(UserError, match=problem):
        run(web, tmp_path, set="cs")


def test_no_records_are_no_error(web, tmp_path):
    web.routes["oai.test/oai"] = Reply(OAI.format(body='<error code="noRecordsMatch"/>').encode(), headers=XML)
    assert run(web, tmp_path, set="cs")["documents"] == 0


def test_html_in_place_of_a_pdf_leaves_the_abstract(web, tmp_path):
    web.routes["export.test/api/query"] = search(1)
    web.routes["/pdf/2101.00000"] = html("PDF unavailable")
    run(web, tmp_path, query="cat:cs.CL")
    (document,) = read_documents(tmp_path)
    assert document.meta["no_full_text"].endswith("not_a_pdf: HTML")


@pytest.mark.parametrize("settings", [{}, {"query": "a", "set": "b"}])
def test_query_or_set(settings):
    with pytest.raises(UserError, match="give one of the two"):
        ArxivSource(ArxivConfig(**settings))
