"""Single requests against a local server: gates, retries, redirects, robots.txt, addresses, cache."""

import gzip
import json
import time

import pytest

from configs.errors import UserError
from data_processing.crawl_fetch import FetchConfig, Fetcher, Gate
from data_processing.crawl_page import FetchError, Page, PageCache
from tests.crawl_server import FakeTime, Reply, WebServer, fetch_config, html, resolver, serve

HTML_GATE = Gate(("text/html",), max_bytes=50_000)


@pytest.fixture(scope="module")
def running():
    with serve() as server:
        yield server


@pytest.fixture
def web(running) -> WebServer:
    running.routes.clear()
    running.asked.clear()
    return running


def make_fetcher(cache=None, hosts=("*.test",), resolve=resolver, **settings) -> tuple[Fetcher, FakeTime]:
    fake = FakeTime()
    return Fetcher(fetch_config(**settings), hosts, cache, fake.clock, resolve), fake


def reason_of(fetcher: Fetcher, url: str, gate: Gate = HTML_GATE) -> str:
    with pytest.raises(FetchError) as caught:
        fetcher.follow(url, gate)
    return caught.value.reason


def test_a_page_comes_with_its_headers_and_the_crawler_names_itself(web):
    web.routes["/x"] = html("<p>hällo")
    fetcher, _ = make_fetcher()
    page = fetcher.fetch(web.url("/x?q=1"), HTML_GATE)
    assert page.status == 200 and "hällo" in page.body.decode() and page.date == "2023-11-14"
    assert (page.content_type, page.charset) == ("text/html", "utf-8")
    assert [asked.path for asked in web.asked] == ["/robots.txt", "/x?q=1"]
    assert all(
        asked.headers["user-agent"] == "mew-crawler/0.1 (+mailto:test@example.org)"
        and asked.headers["host"] == f"a.test:{web.port}"
        and "cookie" not in asked.headers
        for asked in web.asked
    )


def test_cookies_are_not_kept(web):
    reply = html("<p>one")
    reply.headers["Set-Cookie"] = "session=1; Path=/"
    web.routes |= {"/one": reply, "/two": html("two")}
    fetcher, _ = make_fetcher()
    fetcher.fetch(web.url("/one"), HTML_GATE)
    fetcher.fetch(web.url("/two"), HTML_GATE)
    assert "cookie" not in web.asked[-1].headers


def test_429_and_500_are_tried_again_after_the_right_wait(web):
    web.routes["/busy"] = [Reply(status=429, headers={"Retry-After": "120"}), Reply(status=503), html("<p>there")]
    fetcher, fake = make_fetcher(delay_s=1.0, backoff_s=2.0)
    assert b"there" in fetcher.fetch(web.url("/busy"), HTML_GATE).body
    assert len(web.paths()) == 3
    assert sum(fake.slept[:-1]) == pytest.approx(1 + 120), (
        "the delay after robots.txt, then the wait that was asked for"
    )
    assert 4 <= fake.slept[-1] <= 6, "the second failure's back-off, half of it random"


def test_retry_after_as_a_date_holds_the_whole_host(web):
    date = "Tue, 14 Nov 2023 22:40:00 GMT"  # 1,700,001,600 s; the fake clock begins at 1,700,001,000
    web.routes |= {"/busy": [Reply(status=503, headers={"Retry-After": date}), html("ok")], "/b": html("b")}
    fetcher, fake = make_fetcher(delay_s=0.0)
    fetcher.fetch(web.url("/busy"), HTML_GATE)
    assert fake.now == pytest.approx(1600)


def test_what_never_works_ends_after_the_retries(web):
    web.routes |= {"/500": Reply(status=500), "/404": Reply(b"gone\n away", 404), "/wait": Reply(status=429)}
    web.routes["/wait"].headers["Retry-After"] = "86400"
    fetcher, fake = make_fetcher(retries=2)
    assert reason_of(fetcher, web.url("/500")) == "http_500"
    assert web.paths() == ["/500"] * 3
    with pytest.raises(FetchError, match="http_404: gone away"):
        fetcher.fetch(web.url("/404"), HTML_GATE)
    assert reason_of(fetcher, web.url("/wait")) == "wait_too_long"
    assert web.paths()[3:] == ["/404", "/wait"] and fake.now < 1100


def test_a_cut_body_and_a_slow_body_are_given_up(web):
    web.routes["/cut"] = Reply(b"x" * 1000, headers={"Content-Type": "text/html"}, cut_at=500)
    web.routes["/slow"] = Reply(b"x" * 1000, headers={"Content-Type": "text/html"}, drip_s=0.02)
    fetcher, _ = make_fetcher(retries=1, page_timeout_s=0.3)
    assert reason_of(fetcher, web.url("/cut")) == "network"
    assert web.paths() == ["/cut"] * 2
    started = time.monotonic()
    assert reason_of(fetcher, web.url("/slow")) == "timeout"
    assert time.monotonic() - started < 10, "twenty seconds of drip, twice, when only each read had its timeout"


def test_a_host_that_cannot_be_reached(web):
    def nowhere(host, port):
        raise OSError("Name or service not known")

    fetcher, _ = make_fetcher(resolve=nowhere, retries=1)
    gate = Gate(obey_robots=False)
    with pytest.raises(FetchError, match=r"network: a\.test does not resolve \(Name or service not known\)"):
        fetcher.fetch("http://a.test/", gate)
    fetcher, _ = make_fetcher(retries=1)
    assert reason_of(fetcher, "http://a.test:9/", gate) == "network"


def test_gates_by_kind_and_size(web):
    web.routes |= {
        "/image": Reply(b"\x89PNG", headers={"Content-Type": "image/png"}),
        "/none": Reply(b"?"),
        "/announced": Reply(b"x" * 60_000, headers={"Content-Type": "text/html"}),
        "/bomb": Reply(
            gzip.compress(b"x" * 5_000_000), headers={"Content-Type": "text/html", "Content-Encoding": "gzip"}
        ),
        "/br": Reply(b"??", headers={"Content-Type": "text/html", "Content-Encoding": "br"}),
        "/bad": Reply(b"no gzip", headers={"Content-Type": "text/html", "Content-Encoding": "gzip"}),
    }
    fetcher, _ = make_fetcher(retries=0)
    reasons = {path: reason_of(fetcher, web.url(path)) for path in web.routes}
    assert reasons == {
        "/image": "content_type",
        "/none": "content_type",
        "/announced": "too_large",
        "/bomb": "too_large",
        "/br": "content_encoding",
        "/bad": "network",
    }
    with pytest.raises(FetchError, match="too_large: 60000 bytes"):  # by the header alone
        fetcher.fetch(web.url("/announced"), HTML_GATE)
    assert len(fetcher.fetch(web.url("/bomb"), Gate(max_bytes=6_000_000)).body) == 5_000_000


def test_redirects_are_followed_hop_by_hop(web):
    def to(place: str) -> Reply:
        return Reply(status=302, headers={"Location": place})

    web.routes |= {"/1": to("2"), "/2": to(web.url("/3", "b.test")), "b.test/3": html("end")}
    web.routes |= {"/loop": to("/loop"), "/file": to("file:///etc/passwd"), "/out": to("http://evil.example/")}
    fetcher, _ = make_fetcher()
    page = fetcher.follow(web.url("/1"), HTML_GATE)
    assert page.url == web.url("/3", "b.test") and b"end" in page.body
    assert [asked.host for asked in web.asked if asked.path == "/robots.txt"] == ["a.test", "b.test"]
    assert reason_of(fetcher, web.url("/loop")) == "too_many_redirects"
    assert web.paths().count("/loop") == 6
    assert reason_of(fetcher, web.url("/file")) == "bad_redirect"
    assert reason_of(fetcher, web.url("/out")) == "host_not_allowed"


def test_private_addresses_are_refused_at_the_start_and_behind_a_redirect(web):
    web.routes["/in"] = Reply(status=302, headers={"Location": f"http://inner.test:{web.port}/secret"})
    web.routes["inner.test/secret"] = html("secret")
    names = {"a.test": "127.0.0.1", "inner.test": "127.0.0.2"}
    fetcher, _ = make_fetcher(resolve=lambda host, port: [names[host]], allow_addresses=["127.0.0.1/32"])
    gate = Gate(obey_robots=False)
    with pytest.raises(FetchError, match=r"address_refused: inner\.test resolves to 127\.0\.0\.2, which is not public"):
        fetcher.follow(web.url("/in"), gate)
    assert [asked.path for asked in web.asked] == ["/in"]
    fetcher, _ = make_fetcher(allow_addresses=[])
    assert reason_of(fetcher, web.url("/in"), gate) == "address_refused"
    assert len(web.asked) == 1


def test_the_connection_goes_to_the_address_that_was_checked(web):
    """A name that changes between two look-ups: there is one look-up a connection, and its answer is what is used."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    fetcher, _ = make_fetcher(resolve=lambda host, port: answers.pop(0))
    web.routes["/x"] = html("x")
    fetcher.fetch(web.url("/x"), Gate(obey_robots=False))
    assert answers == [["10.0.0.1"]] and len(web.asked) == 1
    fetcher.close()
    assert reason_of(fetcher, web.url("/x", "b.test"), Gate(obey_robots=False)) == "address_refused"


def test_hosts_that_are_not_allowed_are_never_asked(web):
    def must_not_resolve(host, port):
        raise AssertionError(f"{host} was resolved")

    fetcher, _ = make_fetcher(hosts=["b.test"], resolve=must_not_resolve)
    assert reason_of(fetcher, web.url("/x")) == "host_not_allowed"


def test_robots_txt_is_read_once_and_obeyed(web):
    rules = b"User-agent: mew-crawler\nDisallow: /private\nCrawl-delay: 7\n\nUser-agent: *\nDisallow: /\n"
    web.routes |= {"/robots.txt": Reply(rules), "/open": html("open"), "/private/x": html("no")}
    fetcher, fake = make_fetcher(delay_s=1.0)
    for _ in range(3):
        fetcher.fetch(web.url("/open"), HTML_GATE)
        assert reason_of(fetcher, web.url("/private/x")) == "robots"
    assert [asked.path for asked in web.asked] == ["/robots.txt"] + ["/open"] * 3
    assert fake.now == 1000 + 1 + 7 + 7


def test_robots_txt_that_cannot_be_had(web):
    web.routes |= {"/x": html("x"), "/robots.txt": Reply(status=403)}
    fetcher, _ = make_fetcher()
    assert fetcher.fetch(web.url("/x"), HTML_GATE).status == 200, "a refusal counts as absent"
    for answer in (Reply(status=500), Reply(status=302, headers={"Location": "http://evil.example/robots.txt"})):
        web.routes["/robots.txt"] = answer
        fetcher, _ = make_fetcher(retries=1)
        assert reason_of(fetcher, web.url("/x")) == "robots_unreachable"
    web.routes["/robots.txt"] = Reply(b"User-agent: *\nCrawl-delay: 100000\n")
    fetcher, _ = make_fetcher()
    assert reason_of(fetcher, web.url("/x")) == "robots_unreachable"
    web.routes |= {
        "/robots.txt": Reply(status=301, headers={"Location": "/r2"}),
        "/r2": Reply(b"User-agent: *\nDisallow: /x"),
    }
    fetcher, _ = make_fetcher()
    assert reason_of(fetcher, web.url("/x")) == "robots"


def test_cache_answers_and_old_pages_are_asked_for_again(web, tmp_path):
    page = html("<p>first")
    page.headers |= {"ETag": '"v1"', "Last-Modified": "Tue, 14 Nov 2023 00:00:00 GMT"}
    web.routes["/x"] = page
    cache = PageCache(tmp_path)
    gate = Gate(("text/html",), obey_robots=False)
    fetcher, fake = make_fetcher(cache, cache_days=10.0)
    first = fetcher.fetch(web.url("/x"), gate)
    assert fetcher.fetch(web.url("/x"), gate) == first and len(web.asked) == 1
    fake.now += 11 * 86_400
    web.routes["/x"] = Reply(status=304)
    again = fetcher.fetch(web.url("/x"), gate)
    assert again.body == first.body and again.status == 200 and again.fetched_s > first.fetched_s
    assert web.asked[-1].headers["if-none-match"] == '"v1"'
    assert web.asked[-1].headers["if-modified-since"] == "Tue, 14 Nov 2023 00:00:00 GMT"
    assert fetcher.fetch(web.url("/x"), gate) == again and len(web.asked) == 2
    assert reason_of(fetcher, web.url("/x"), Gate(("application/pdf",), obey_robots=False)) == "content_type"


def test_cache_files_are_named_by_hash_and_a_broken_one_is_fetched_anew(web, tmp_path):
    cache = PageCache(tmp_path / "cache")
    web.routes["/..%2F..%2Fetc/passwd"] = html("x")
    url = web.url("/..%2F..%2Fetc/passwd")
    fetcher, _ = make_fetcher(cache)
    fetcher.fetch(url, HTML_GATE)
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file == cache.path_of(url) and file.name.removesuffix(".page.gz").isalnum()
    file.write_bytes(file.read_bytes()[:-20])
    assert cache.get(url) is None
    fetcher.fetch(url, HTML_GATE)
    assert web.paths() == ["/..%2F..%2Fetc/passwd"] * 2
    other = Page("http://a.test/other", 200, {}, b"", 0.0)
    file.write_bytes(
        gzip.compress(json.dumps({"url": other.url, "status": 200, "headers": {}, "fetched_s": 0}).encode())
    )
    assert cache.get(url) is None, "the page of another URL"


def test_parts_of_a_file(web):
    def part(asked):
        first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
        return Reply(bytes(range(256))[first : last + 1], 206, {"Content-Type": "application/octet-stream"})

    web.routes |= {"/file": part, "/whole": Reply(bytes(256))}
    fetcher, _ = make_fetcher()
    gate = Gate(obey_robots=False, byte_range=(10, 19))
    assert fetcher.fetch(web.url("/file"), gate).body == bytes(range(10, 20))
    assert reason_of(fetcher, web.url("/whole"), gate) == "http_200", "a server that ignores the range"


@pytest.mark.parametrize("contact", ["", "nobody", "jürgen@example.org"])
def test_nobody_crawls_without_a_name(contact):
    with pytest.raises(UserError, match=r"fetch\.contact=.* names nobody; add fetch\.contact=you@example\.org"):
        FetchConfig(contact=contact).user_agent()
    assert FetchConfig(contact="https://example.org/bot").user_agent() == "mew-crawler/0.1 (+https://example.org/bot)"


def test_settings_that_make_no_sense():
    with pytest.raises(UserError, match=r"fetch\.retries=-1 is negative"):
        FetchConfig(retries=-1)
    with pytest.raises(UserError, match="timeout_s=0 must be positive"):
        FetchConfig(timeout_s=0)
