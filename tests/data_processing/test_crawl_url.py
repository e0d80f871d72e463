"""URLs in one spelling, allowed hosts, and addresses that are not public."""

import ipaddress
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UserError
from data_processing.crawl_address import AddressPolicy, AddressRefused, is_public
from data_processing.crawl_url import AllowedHosts, host_of, normalise_url, origin_of, url_key


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("HTTP://Example.ORG:80", "http://example.org/"),
        ("https://example.org:443/a/../b/./c#top", "https://example.org/b/c"),
        ("https://example.org:8443/%7euser/%c3%a9", "https://example.org:8443/~user/%C3%A9"),
        ("https://example.org/é?q=ü b", "https://example.org/%C3%A9?q=%C3%BC%20b"),
        ("https://bücher.example./", "https://xn--bcher-kva.example/"),
        ("https://example.org/a?utm_source=x&id=2&FBCLID=3", "https://example.org/a?id=2"),
        ("https://example.org/a?b=1&a=2", "https://example.org/a?b=1&a=2"),
        ("https://example.org/100%", "https://example.org/100%25"),
        ("https://example.org\\@evil.test/x", "https://example.org/@evil.test/x"),
        (" https://exa\nmple.org/\t ", "https://example.org/"),
        ("http://[::1]:80/", "http://[::1]/"),
        ("http://[2001:DB8:0::1]/", "http://[2001:db8::1]/"),
        ("https://example.org/a%2Fb/..", "https://example.org/"),
        ("https://example.org/../../etc/passwd", "https://example.org/etc/passwd"),
    ],
)
def test_spellings_of_one_url(url, wanted):
    assert normalise_url(url) == wanted
    assert normalise_url(wanted) == wanted


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/",
        "javascript:alert(1)",
        "mailto:a@example.org",
        "file:///etc/passwd",
        "https://user:secret@example.org/",
        "https://example.org@evil.test/",
        "https://example.org:99999/",
        "https://example.org:0/",
        "https:///path",
        "http://[::1/",
        "http://exa mple.org/",
        "http://a..b/",
        "https://example.org/" + "a" * 9000,
        "",
    ],
)
def test_what_is_no_url_to_fetch(url):
    assert normalise_url(url) is None


def test_links_are_resolved_against_their_page():
    base = "https://example.org/docs/page.html?x=1"
    assert normalise_url("../img/?a=1", base) == "https://example.org/img/?a=1"
    assert normalise_url("//other.test/x", base) == "https://other.test/x"
    assert normalise_url("?y=2", base) == "https://example.org/docs/page.html?y=2"
    assert normalise_url("#part", base) == base


@given(st.text(max_size=60))
def test_a_normalised_url_stays_and_httpx_reads_the_same_host(tail):
    url = normalise_url("http://example.org/" + tail)
    if url is not None:
        assert normalise_url(url) == url and url.isascii()
        assert httpx.URL(url).host == host_of(url) == "example.org"
        assert httpx.URL(url).raw_path.decode() == urlsplit(url)._replace(scheme="", netloc="").geturl()


def test_allowed_hosts():
    hosts = AllowedHosts(["example.org", "*.edu.test", "127.0.0.1"])
    assert hosts.allows("example.org") and hosts.allows("a.b.edu.test") and hosts.allows("edu.test")
    assert hosts.allows("127.0.0.1")
    for other in ("www.example.org", "notedu.test", "example.org.evil.test", "org", ""):
        assert not hosts.allows(other)
    assert AllowedHosts(["*"]).allows("anything.test")
    with pytest.raises(UserError, match=r"allowed host 'https://x' is no host name; use example\.org"):
        AllowedHosts(["https://x"])


def test_keys_and_origins():
    assert origin_of("https://example.org:8443/a") == "https://example.org:8443"
    key = url_key("https://example.org/../../etc/passwd\0")
    assert len(key) == 32 and key.isalnum() and key != url_key("https://example.org/")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1"),
    ],
)
def test_addresses_that_are_not_public_are_refused(address):
    assert not is_public(ipaddress.ip_address(address))
    policy = AddressPolicy(resolver=lambda host, port: ["93.184.215.14", address])
    with pytest.raises(AddressRefused, match=f"trap.test resolves to {address}, which is not public"):
        policy.checked_addresses("trap.test", 80)


def test_public_and_named_addresses_pass():
    for address in ("93.184.215.14", "2606:4700::1111", "64:ff9b::5db8:d70e"):
        assert is_public(ipaddress.ip_address(address))
    policy = AddressPolicy(["127.0.0.0/8"], lambda host, port: ["127.0.0.1"])
    assert policy.checked_addresses("localhost", 80) == ["127.0.0.1"]
    with pytest.raises(AddressRefused):
        AddressPolicy(["127.0.0.0/8"], lambda host, port: ["::1"]).checked_addresses("localhost", 80)
    with pytest.raises(UserError, match=r"allow_addresses: .*use networks such as 127\.0\.0\.0/8"):
        AddressPolicy(["localhost"])


def test_numbers_in_disguise_are_seen_after_resolving():
    """The system's resolver reads 2130706433 and 0x7f.1 as 127.0.0.1; the check comes after it."""
    for host in ("2130706433", "0x7f.1", "localhost"):
        with pytest.raises(AddressRefused):
            AddressPolicy().checked_addresses(host, 80)
