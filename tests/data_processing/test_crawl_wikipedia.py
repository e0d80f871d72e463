"""Wikipedia's API, played by a local server: titles, categories with continuation and cycles, busy servers."""

import pytest

from configs.errors import UserError
from data_processing.crawl import CrawlConfig, Outside, crawl
from data_processing.crawl_wikipedia import WikipediaConfig, clean_extract
from data_processing.document import read_documents
from tests.crawl_server import FakeTime, WebServer, fetch_config, json_reply, resolver, serve

SENTENCE = "A tide is the rise and fall of sea level, caused by the Moon and, to a lesser degree, by the Sun. "


@pytest.fixture(scope="module")
def running():
    with serve() as server:
        yield server


class Wiki:
    """api.php over pages and categories; two members a listing page."""

    def __init__(self, web: WebServer):
        self.web, self.pages, self.categories, self.busy = web, {}, {}, 0
        web.routes.clear()
        web.asked.clear()
        web.routes["en.wiki.test/w/api.php"] = self.answer

    def answer(self, asked):
        query = asked.query
        assert query["action"] == "query" and query["formatversion"] == "2" and query["maxlag"] == "5"
        if self.busy:
            self.busy -= 1
            error = {"code": "maxlag", "info": "Waiting for 10.64.16.7: 6.1 seconds lagged.", "lag": 6.1}
            return json_reply({"error": error}, **{"Retry-After": "7"})
        return json_reply(self.members(query) if "list" in query else self.extract(query))

    def members(self, query) -> dict:
        name = query["list"]
        prefix = {"categorymembers": "cm", "allpages": "ap"}[name]
        titles = list(self.pages) if name == "allpages" else self.categories[query["cmtitle"]]
        start = int(query.get(f"{prefix}continue", "0|").split("|")[0])
        members = [
            {"pageid": 1, "ns": 14 if t.startswith("Category:") else 0, "title": t} for t in titles[start : start + 2]
        ]
        answer = {"batchcomplete": True, "query": {name: members}}
        if start + 2 < len(titles):
            answer["continue"] = {f"{prefix}continue": f"{start + 2}|x", "continue": "-||"}
        return answer

    def extract(self, query) -> dict:
        title = query["titles"]
        assert query["explaintext"] == "1" and query["redirects"] == "1"
        if title not in self.pages:
            return {"query": {"pages": [{"ns": 0, "title": title, "missing": True}]}}
        page = {"pageid": 100 + list(self.pages).index(title), "ns": 0, "title": title, "extract": self.pages[title]}
        page |= {
            "touched": "2024-05-06T07:08:09Z",
            "lastrevid": 77,
            "fullurl": f"https://en.wikipedia.org/wiki/{title}",
        }
        return {"batchcomplete": True, "query": {"pages": [page]}}

    def crawl(self, output, overrides=None, fake=None, **settings) -> dict:
        url = self.web.url("/w/api.php", "{language}.wiki.test")
        config = CrawlConfig(
            source="wikipedia",
            output=str(output),
            fetch=fetch_config(retries=2),
            wikipedia=WikipediaConfig(**{"url": url, "min_characters": 200} | settings),
            **overrides or {},
        )
        return crawl(config, Outside((fake or FakeTime()).clock, resolver))

    def titles_asked(self) -> list[str]:
        return [asked.query["titles"] for asked in self.web.asked if "titles" in asked.query]


@pytest.fixture
def wiki(running) -> Wiki:
    return Wiki(running)


def test_named_articles(wiki, tmp_path):
    wiki.pages = {
        "Tide": SENTENCE * 5 + "\n\n\n== Causes ==\n" + SENTENCE + "\n\n\n== See also ==\n\n\n",
        "Stub": "Short.",
    }
    stats = wiki.crawl(tmp_path, titles=["Tide", "Stub", "Nothing"])
    assert stats["outcomes"] == {"kept": 1, "missing": 1, "too_short": 1}
    (document,) = read_documents(tmp_path)
    assert document.text == (SENTENCE * 5).strip() + "\n\nCauses\n" + SENTENCE.strip()
    assert (document.id, document.title, document.date) == ("wikipedia:en:100", "Tide", "2024-05-06")
    assert document.url == "https://en.wikipedia.org/wiki/Tide" and document.meta["license"] == "CC BY-SA 4.0"
    wiki.web.asked.clear()
    wiki.crawl(tmp_path, titles=["Tide", "Stub", "Nothing"])
    assert not wiki.web.asked


def test_a_category_with_subcategories_pages_and_a_cycle(wiki, tmp_path):
    wiki.pages = {name: SENTENCE * 5 + name for name in "ABCDEFG"}
    wiki.categories = {
        "Category:Top": ["A", "Category:Sub", "B", "C", "Category:Empty"],
        "Category:Sub": ["C", "D", "Category:Top", "Category:Deep"],
        "Category:Empty": [],
        "Category:Deep": ["E"],
    }
    assert wiki.crawl(tmp_path, category="Top")["outcomes"] == {"kept": 4}
    assert wiki.titles_asked() == ["A", "B", "C", "D"], "C once, though it is in two categories"
    wiki.web.asked.clear()
    assert wiki.crawl(tmp_path / "deep", category="Category:Top", category_depth=2)["outcomes"] == {"kept": 5}
    assert wiki.titles_asked()[-1] == "E"
    listed = [asked.query["cmtitle"] for asked in wiki.web.asked if "cmtitle" in asked.query]
    assert listed.count("Category:Top") == 3, "three pages of it, once, though Sub leads back to it"


def test_all_pages_and_resume_in_the_middle_of_a_list(wiki, tmp_path):
    wiki.pages = {name: SENTENCE * 5 + name for name in "ABCDEFG"}
    wiki.crawl(tmp_path, all_pages=True, overrides={"max_documents": 3})
    wiki.web.asked.clear()
    assert wiki.crawl(tmp_path, all_pages=True)["outcomes"] == {"kept": 7}
    assert wiki.titles_asked() == ["D", "E", "F", "G"]
    listings = [asked.query.get("apcontinue") for asked in wiki.web.asked if "list" in asked.query]
    assert listings == ["2|x", "4|x", "6|x"]


def test_a_busy_server_is_asked_later(wiki, tmp_path):
    wiki.pages = {"Tide": SENTENCE * 5}
    wiki.busy = 2
    fake = FakeTime()
    assert wiki.crawl(tmp_path, titles=["Tide"], fake=fake)["documents"] == 1
    assert fake.now >= 1000 + 2 * 7
    wiki.busy = 99
    stats = wiki.crawl(tmp_path / "b", titles=["Tide"])
    assert stats["outcomes"] == {"api_busy": 1}
    wiki.busy = 0
    assert wiki.crawl(tmp_path / "b", titles=["Tide"], overrides={"retry_failed": True})["outcomes"] == {"kept": 1}
    wiki.busy = 99
    with pytest.raises(UserError, match=r"the listing cannot be had \(api_busy: maxlag\)"):
        wiki.crawl(tmp_path / "c", all_pages=True)


def test_headings_without_text_below_them_go():
    extract = "Intro.\n\n\n== Empty ==\n\n\n=== Also empty ===\n\n\n== Full ==\n\n=== Part ===\nText.\nMore."
    assert clean_extract(extract + "\n\n\n== Links ==\n") == "Intro.\n\nFull\n\nPart\nText.\nMore."
    assert clean_extract("== " + "= " * 500_000) and clean_extract("=" * 1_000_000)
    assert clean_extract("") == "" and clean_extract("a == b ==\n= c =") == "a == b ==\n= c ="


@pytest.mark.parametrize("settings", [{}, {"titles": ["A"], "category": "B"}])
def test_exactly_one_choice(wiki, tmp_path, settings):
    with pytest.raises(UserError, match="takes exactly one of"):
        wiki.crawl(tmp_path, **settings)


def test_the_language_is_no_way_to_another_host(wiki, tmp_path):
    with pytest.raises(UserError, match=r"wikipedia\.language='evil\.test/' is no language code"):
        wiki.crawl(tmp_path, titles=["A"], language="evil.test/")
