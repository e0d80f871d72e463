"""Substack's archive and posts, played by a local server."""

import pytest

from configs.errors import UserError
from data_processing.crawl import CrawlConfig, Outside, crawl
from data_processing.crawl_substack import SubstackConfig
from data_processing.document import read_documents
from tests.crawl_server import FakeTime, Reply, WebServer, fetch_config, json_reply, resolver, serve

SENTENCE = "Every harbour has one crane that nobody remembers being built and that everybody is a little afraid of. "


@pytest.fixture(scope="module")
def running():
    with serve() as server:
        yield server


@pytest.fixture
def web(running) -> WebServer:
    running.routes.clear()
    running.asked.clear()
    return running


def publication(web: WebServer, host: str, slugs: list[str], paid: tuple[str, ...] = ()) -> None:
    posts = [
        {
            "id": index,
            "slug": slug,
            "title": f"On {slug}",
            "audience": "only_paid" if slug in paid else "everyone",
            "post_date": "2023-04-05T06:07:08.000Z",
            "type": "newsletter",
            "canonical_url": f"https://{host}/p/{slug}",
            "body_html": None,
            "truncated_body_text": SENTENCE[:40],
        }
        for index, slug in enumerate(slugs)
    ]

    def archive(asked):
        start, rows = int(asked.query["offset"]), int(asked.query["limit"])
        assert asked.query["sort"] == "new"
        return json_reply(posts[start : start + rows])

    web.routes[f"{host}/api/v1/archive"] = archive
    for post in posts:
        items = "<ul><li>first crane</li><li>second crane</li></ul>"
        body = f"<p>{SENTENCE * 4}</p><h2>Cranes &amp; boats</h2>{items}<p>{SENTENCE}</p>"
        record = post | {"body_html": body, "subtitle": "a subtitle"}
        web.routes[f"{host}/api/v1/posts/{post['slug']}"] = json_reply(record)


def run(web: WebServer, output, overrides=None, hosts=("one.test",), **settings) -> dict:
    publications = [web.url("", host) for host in hosts]
    config = CrawlConfig(
        source="substack",
        output=str(output),
        fetch=fetch_config(retries=1),
        substack=SubstackConfig(**{"publications": publications, "rows": 2} | settings),
        **overrides or {},
    )
    return crawl(config, Outside(FakeTime().clock, resolver))


def test_public_posts_of_two_publications(web, tmp_path):
    publication(web, "one.test", ["a", "b", "c"], paid=("b",))
    publication(web, "two.test", ["a"])
    web.routes["one.test/api/v1/posts/c"] = json_reply({"error": "gone"}, 404)
    stats = run(web, tmp_path, hosts=("one.test", "two.test"))
    assert stats["outcomes"] == {"kept": 2, "http_404": 1, "not_public": 1}
    first, second = read_documents(tmp_path)
    assert first.id == "substack:one.test/a" and second.id == "substack:two.test/a"
    text = " ".join(first.text.split())
    assert text.startswith(SENTENCE.strip()) and "Cranes & boats" in text and "second crane" in text
    assert (first.title, first.url, first.date) == ("On a", "https://one.test/p/a", "2023-04-05")
    assert first.meta == {"post_id": 0, "subtitle": "a subtitle", "type": "newsletter"}
    assert "/api/v1/posts/b" not in web.paths(), "a post for payers is not even asked for"


def test_lone_surrogates_become_replacement_characters(web, tmp_path):
    publication(web, "one.test", ["a"])
    route = web.routes["one.test/api/v1/posts/a"]
    route.body = route.body.replace(b"On a", b"On \\ud83d a").replace(b"nobody", b"no\\udc00body")
    assert run(web, tmp_path)["outcomes"] == {"kept": 1}
    (document,) = read_documents(tmp_path)
    assert document.title == "On \ufffd a" and "no\ufffdbody" in document.text


def test_resume_in_the_middle_of_an_archive(web, tmp_path):
    publication(web, "one.test", [f"p{n}" for n in range(5)])
    run(web, tmp_path, overrides={"max_documents": 3})
    web.asked.clear()
    assert run(web, tmp_path)["outcomes"] == {"kept": 5}
    assert [path for path in web.paths() if "/posts/" in path] == ["/api/v1/posts/p3", "/api/v1/posts/p4"]


def test_robots_txt_is_heeded(web, tmp_path):
    publication(web, "one.test", ["a"])
    web.routes["one.test/robots.txt"] = Reply(b"User-agent: *\nDisallow: /api/\n")
    with pytest.raises(UserError, match=r"source=substack \(one\.test\): the listing cannot be had \(robots: "):
        run(web, tmp_path)


def test_names_become_addresses():
    (address,) = SubstackConfig(publications=["astralcodexten"]).addresses()
    assert address.url == "https://astralcodexten.substack.com/api/v1" and address.host == "astralcodexten.substack.com"
    with pytest.raises(UserError, match=r"source=substack has no publications"):
        SubstackConfig().addresses()
