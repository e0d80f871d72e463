"""robots.txt by RFC 9309 (its own examples among the cases), the pace of requests, Retry-After."""

import threading

import pytest

from data_processing.crawl_pace import Clock, Pace, Stopped, retry_after_s
from data_processing.crawl_robots import ALLOW_ALL, FORBID_ALL, MAX_ROBOTS_BYTES, matches, parse_robots

RFC_EXAMPLE = b"""
User-Agent: *
Disallow: *.gif$
Disallow: /example/
Allow: /publications/

User-Agent: foobot
Disallow:/
Allow:/example/page.html
Allow:/example/allowed.gif

User-Agent: barbot
User-Agent: bazbot
Disallow: /example/page.html

User-Agent: quxbot
"""


def allowed(content: bytes, path: str, product: str = "mew") -> bool:
    return parse_robots(content, product).allows("https://example.org" + path)


@pytest.mark.parametrize(
    ("product", "path", "wanted"),
    [
        ("mew", "/example/page.html", False),
        ("mew", "/publications/a", True),
        ("mew", "/other.gif", False),
        ("mew", "/other.gifx", True),
        ("foobot", "/example/page.html", True),
        ("foobot", "/example/other.html", False),
        ("FooBot", "/x", False),
        ("barbot", "/example/page.html", False),
        ("bazbot", "/example/page.html", False),
        ("bazbot", "/other.gif", True),
        ("quxbot", "/example/page.html", True),
    ],
)
def test_example_of_the_rfc(product, path, wanted):
    assert allowed(RFC_EXAMPLE, path, product) == wanted


def test_the_longest_rule_wins_and_allow_wins_a_tie():
    rules = b"User-agent: *\nDisallow: /a\nAllow: /a/b\nDisallow: /a/b/c\nAllow: /t\nDisallow: /t\n"
    assert [allowed(rules, path) for path in ("/a", "/a/b/x", "/a/b/c", "/t")] == [False, True, False, True]
    assert allowed(b"User-agent: *\nDisallow: /\n", "/robots.txt")


def test_groups_of_one_crawler_are_merged_and_versions_ignored():
    rules = (
        b"User-agent: mew/2.0\nDisallow: /one\n\nUser-agent: other\nDisallow: /\n\nUser-agent: mew\nDisallow: /two\n"
    )
    assert [allowed(rules, path) for path in ("/one", "/two", "/three")] == [False, False, True]


def test_escapes_comments_line_ends_and_rubbish():
    rules = (
        "\ufeffUSER-AGENT : * # all\rDisallow: /ü # no\r\nDisallow: /%7Ea\nNonsense\nSitemap: /x\nDisallow:\n".encode()
    )
    assert [allowed(rules, path) for path in ("/%C3%BC", "/~a", "/b")] == [False, False, True]
    assert allowed(bytes(range(256)) * 10, "/x")
    assert not allowed(b"User-agent: *\nDisallow: /*?print=\n", "/a?print=1")
    assert allowed(b"", "/x") and ALLOW_ALL.allows("https://a/b") and not FORBID_ALL.allows("https://a/b")


def test_crawl_delay():
    assert parse_robots(b"User-agent: *\nCrawl-delay: 2.5\nDisallow: /x", "mew").delay_s == 2.5
    assert parse_robots(b"User-agent: *\nCrawl-delay: -1e9", "mew").delay_s == 0


def test_a_huge_file_is_read_up_to_the_bound():
    head = b"User-agent: *\nDisallow: /head\n"
    rules = head + b"# padding\n" * (MAX_ROBOTS_BYTES // 10) + b"Disallow: /tail\n"
    assert not allowed(rules, "/head") and allowed(rules, "/tail")


def test_wildcards_cannot_run_away():
    assert not matches("/" + "*a" * 5000 + "b", "/" + "a" * 20000)
    assert matches("/a*b*c$", "/axxbyyc") and not matches("/a*b$", "/ab/")
    assert matches("/*.php$", "/x.php.php") and not matches("/a*a$", "/a")


def fake_clock(times: list[float]) -> Clock:
    def wait(event, seconds: float) -> None:
        times[0] += seconds

    return Clock(now_s=lambda: times[0], wall_s=lambda: 1_700_000_000 + times[0], wait=wait)


def test_pace_spaces_the_requests_of_each_host():
    times = [100.0]
    pace = Pace(2.0, fake_clock(times))
    seen = []
    for host in ("a", "b", "a", "b", "a"):
        pace.wait(host)
        seen.append(times[0])
    assert seen == [100, 100, 102, 102, 104]
    pace.hold("b", 60)
    pace.set_delay("a", 10)
    pace.wait("a")
    pace.wait("a")
    assert times[0] == 116
    pace.wait("b")
    assert times[0] == 164
    pace.set_delay("b", 0.1)
    pace.wait("b")
    assert times[0] == 166, "robots.txt may slow a crawl down, never speed it up"


def test_a_stopped_crawl_wakes_who_waits():
    pace = Pace(1000.0, Clock())
    pace.wait("a")
    thread = threading.Timer(0.05, pace.stopping.set)
    thread.start()
    with pytest.raises(Stopped):
        pace.wait("a")


def test_retry_after_in_seconds_and_as_a_date():
    wall = 1_700_000_000  # Tue, 14 Nov 2023 22:13:20 GMT
    assert retry_after_s("120", wall) == 120
    assert retry_after_s("Tue, 14 Nov 2023 22:14:20 GMT", wall) == 60
    assert retry_after_s("Tue, 14 Nov 2023 22:12:20 GMT", wall) == 0
    assert retry_after_s("soon", wall) is None and retry_after_s("-5", wall) is None
