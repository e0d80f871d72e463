"""EarthArXiv by OAI-PMH (Dublin Core and a landing page) and by OSF's API, played by a local server."""

import pytest

from configs.errors import UserError
from data_processing.crawl import CrawlConfig, Outside, crawl
from data_processing.crawl_eartharxiv import EarthArxivConfig
from data_processing.document import read_documents
from tests.crawl_server import FakeTime, Reply, WebServer, fetch_config, html, json_reply, pdf, resolver, serve

SENTENCE = "Streams carry the signature of storms for longer than the storms themselves are remembered by anyone. "
PAGES = [SENTENCE * 12, SENTENCE * 12]
DUBLIN_CORE = """<?xml version="1.0" encoding="UTF-8"?>
<OAI-PMH xmlns="http://www.openarchives.org/OAI/2.0/"><responseDate>2024-01-31T00:00:00Z</responseDate>
<ListRecords><record><header><identifier>oai:eartharxiv.test:id:1001</identifier><datestamp>2021-01-01</datestamp></header>
<metadata><oai_dc:dc xmlns:oai_dc="http://www.openarchives.org/OAI/2.0/oai_dc/" xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:title>Storms in streams</dc:title><dc:creator>A. Author</dc:creator><dc:description>short</dc:description>
<dc:description>{abstract}</dc:description><dc:date>2021-03-04T10:00:00Z</dc:date><dc:type>Preprint</dc:type>
<dc:subject>Hydrology</dc:subject><dc:subject>Geology</dc:subject><dc:rights>CC BY 4.0</dc:rights>
<dc:identifier>10.31223/X5ABCD</dc:identifier><dc:identifier>{page}</dc:identifier>
</oai_dc:dc></metadata></record></ListRecords></OAI-PMH>"""


@pytest.fixture(scope="module")
def running():
    with serve() as server:
        yield server


@pytest.fixture
def web(running) -> WebServer:
    running.routes.clear()
    running.asked.clear()
    return running


def run(web: WebServer, output, overrides=None, **settings) -> dict:
    defaults = {"rows": 2, "fulltext_hosts": ["*.test"], "oai_url": web.url("/api/oai", "eartharxiv.test")}
    config = CrawlConfig(
        source="eartharxiv",
        output=str(output),
        fetch=fetch_config(retries=0),
        eartharxiv=EarthArxivConfig(**defaults | {"osf_url": web.url("/v2", "api.osf.test")} | settings),
        **overrides or {},
    )
    return crawl(config, Outside(FakeTime().clock, resolver))


def test_dublin_core_names_the_download(web, tmp_path):
    place = web.url("/repository/object/1001/download/2002/", "eartharxiv.test")
    listing = DUBLIN_CORE.format(abstract=SENTENCE * 3, page=place).encode()
    web.routes |= {
        "eartharxiv.test/api/oai": Reply(listing, headers={"Content-Type": "text/xml"}),
        "eartharxiv.test/repository/object/1001/download/2002/": pdf(PAGES),
    }
    assert run(web, tmp_path)["outcomes"] == {"kept": 1}
    (document,) = read_documents(tmp_path)
    assert document.meta["text_kind"] == "full_text" and document.url == "https://doi.org/10.31223/X5ABCD"


def test_dublin_core_leads_to_the_pdf_by_the_landing_page(web, tmp_path):
    page = web.url("/repository/view/1001/", "eartharxiv.test")
    head = '<meta name="citation_pdf_url" content="/repository/object/1001/download/2002/">'
    listing = DUBLIN_CORE.format(abstract=SENTENCE * 3, page=page).encode()
    web.routes |= {
        "eartharxiv.test/api/oai": Reply(listing, headers={"Content-Type": "text/xml"}),
        "eartharxiv.test/repository/view/1001/": html("landing", head=head),
        "eartharxiv.test/repository/object/1001/download/2002/": pdf(PAGES),
    }
    assert run(web, tmp_path)["outcomes"] == {"kept": 1}
    (document,) = read_documents(tmp_path)
    assert "Streams carry the signature" in " ".join(document.text.split()) and document.url == page
    assert (document.title, document.date) == ("Storms in streams", "2021-03-04")
    assert document.id == "eartharxiv:oai:eartharxiv.test:id:1001"
    assert document.meta["doi"] == "10.31223/X5ABCD" and document.meta["subjects"] == ["Hydrology", "Geology"]
    assert document.meta["text_kind"] == "full_text" and document.meta["license"] == "CC BY 4.0"
    asked = next(asked for asked in web.asked if asked.path.startswith("/api/oai"))
    assert asked.query == {"verb": "ListRecords", "metadataPrefix": "oai_dc"}


def test_without_a_pdf_the_longest_description_stays(web, tmp_path):
    page = web.url("/repository/view/1001/", "eartharxiv.test")
    listing = DUBLIN_CORE.format(abstract=SENTENCE * 3, page=page).encode()
    web.routes["eartharxiv.test/api/oai"] = Reply(listing, headers={"Content-Type": "text/xml"})
    web.routes["eartharxiv.test/repository/view/1001/"] = html("a page that names no PDF")
    run(web, tmp_path)
    (document,) = read_documents(tmp_path)
    assert document.text == (SENTENCE * 3).strip() and "names no PDF" in document.meta["no_full_text"]


def osf(web: WebServer, number: int) -> None:
    """OSF's API over `number` preprints, two a page; the file of each lies behind two redirects' worth of hosts."""

    def entry(index: int) -> dict:
        href = web.url(f"/v2/files/file{index}/", "api.osf.test")
        return {
            "id": f"pre{index}_v1",
            "type": "preprints",
            "attributes": {
                "title": f"Preprint {index}",
                "description": SENTENCE * 3,
                "date_published": "2019-07-08T12:00:00.000000",
                "is_published": True,
                "tags": ["floods"],
            },
            "relationships": {"primary_file": {"links": {"related": {"href": href, "meta": {}}}}},
            "links": {
                "html": f"https://osf.io/preprints/eartharxiv/pre{index}_v1/",
                "preprint_doi": f"https://doi.org/10.31223/osf.io/pre{index}",
            },
        }

    def listing(asked) -> Reply:
        page, size = int(asked.query["page"]), int(asked.query["page[size]"])
        assert asked.query["filter[provider]"] == "eartharxiv"
        data = [entry(index) for index in range((page - 1) * size, min(number, page * size))]
        following = web.url(f"/v2/preprints/?page={page + 1}", "api.osf.test") if page * size < number else None
        return json_reply({"data": data, "links": {"next": following, "prev": None, "meta": {"total": number}}})

    web.routes["api.osf.test/v2/preprints/"] = listing
    for index in range(number):
        download = web.url(f"/download/file{index}/", "osf.test")
        web.routes[f"api.osf.test/v2/files/file{index}/"] = json_reply({"data": {"links": {"download": download}}})
        place = web.url(f"/v1/file{index}", "files.osf.test")
        web.routes[f"osf.test/download/file{index}/"] = Reply(status=302, headers={"Location": place})
        web.routes[f"files.osf.test/v1/file{index}"] = pdf(PAGES, "application/octet-stream")


def test_osf_names_the_files(web, tmp_path):
    osf(web, 5)
    web.routes["api.osf.test/v2/files/file3/"] = json_reply({"errors": [{"detail": "gone"}]}, 410)
    assert run(web, tmp_path, via="osf", overrides={"max_documents": 3})["documents"] == 3
    web.asked.clear()
    assert run(web, tmp_path, via="osf")["outcomes"] == {"kept": 5}
    assert "/v2/files/file2/" not in web.paths() and "/v2/files/file4/" in web.paths()
    kinds = {document.id: document.meta["text_kind"] for document in read_documents(tmp_path)}
    assert kinds == {f"eartharxiv:pre{n}_v1": "abstract" if n == 3 else "full_text" for n in range(5)}
    document = next(read_documents(tmp_path))
    assert (document.title, document.date) == ("Preprint 0", "2019-07-08")
    assert document.meta["doi"] == "10.31223/osf.io/pre0" and document.meta["subjects"] == ["floods"]
    web.asked.clear()
    run(web, tmp_path, via="osf")
    assert not web.asked, "a finished list is not asked for again"


def test_choices_and_broken_lists(web, tmp_path):
    with pytest.raises(UserError, match=r"eartharxiv\.via='ftp' is unknown; use one of oai, osf"):
        EarthArxivConfig(via="ftp")
    web.routes["api.osf.test/v2/preprints/"] = json_reply({"errors": [{"detail": "not found"}]})
    with pytest.raises(UserError, match=r"source=eartharxiv: the listing cannot be had \(bad_json: no data\)"):
        run(web, tmp_path, via="osf")
