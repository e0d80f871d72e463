"""One polite GET: allowed host, robots.txt, pace, retries with back-off, gates on a streamed body, cache.

Everything that a crawl or an API source asks of the network goes through Fetcher. A hop of a redirect is a request
like any other and passes every check again. Each failure is a FetchError whose reason is counted.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from configs.errors import UserError, check_positive, missing_extra
from data_processing.crawl_address import AddressPolicy, AddressRefused, Resolver, resolve
from data_processing.crawl_pace import Clock, Pace, retry_after_s
from data_processing.crawl_page import FetchError, Page, PageCache
from data_processing.crawl_robots import ALLOW_ALL, FORBID_ALL, MAX_ROBOTS_BYTES, Rules, parse_robots
from data_processing.crawl_url import AllowedHosts, host_of, normalise_url, origin_of

PRODUCT = "mew-crawler"  # the name that robots.txt files may address
TRY_AGAIN = (408, 429, 500, 502, 503, 504)
REDIRECTS = (301, 302, 303, 307, 308)
CACHED = (200, 301, 308)
DAY_S = 86_400.0
ERROR_TEXT_BYTES = 300


@dataclass
class FetchConfig:
    """How requests are made; the defaults ask a host once a second."""

    contact: str = ""  # who runs the crawl, an e-mail address or a web page: sent with every request
    delay_s: float = 1.0  # between two requests to one host; robots.txt can only raise it
    timeout_s: float = 20.0  # for a connection, and for each wait for bytes
    page_timeout_s: float = 180.0  # for one whole response, however its bytes come
    retries: int = 4
    backoff_s: float = 2.0  # first wait; each further one is twice as long, and up to half is random
    max_wait_s: float = 600.0  # a host that asks for a longer wait (Retry-After, Crawl-delay) is left alone
    max_redirects: int = 5
    cache_days: float = 30.0  # after that a page is asked for again, if it has changed; 0 keeps no cache
    allow_addresses: list[str] = field(default_factory=list)  # networks beside the public Internet: 127.0.0.0/8

    def __post_init__(self):
        check_positive(timeout_s=self.timeout_s, page_timeout_s=self.page_timeout_s, max_wait_s=self.max_wait_s)
        for name in ("delay_s", "retries", "backoff_s", "max_redirects", "cache_days"):
            if getattr(self, name) < 0:
                raise UserError(f"fetch.{name}={getattr(self, name)} is negative; use 0 or more")

    def user_agent(self) -> str:
        """What the crawl calls itself. Raises UserError without a contact: the hosts must be able to complain."""
        contact = self.contact.strip()
        if not (contact.isascii() and contact.isprintable()) or not (
            "@" in contact or contact.startswith(("http://", "https://"))
        ):
            raise UserError(
                f"fetch.contact={contact!r} names nobody; add fetch.contact=you@example.org (or a web page)"
            )
        return f"{PRODUCT}/0.1 (+{contact if '@' not in contact else 'mailto:' + contact})"


@dataclass(frozen=True)
class Gate:
    """What a response must be to be read: kinds of content (prefixes; none is any) and a size."""

    content_types: tuple[str, ...] = ()
    max_bytes: int = 20_000_000
    obey_robots: bool = True
    cut: bool = False  # read max_bytes and stop, instead of refusing what is longer
    use_cache: bool = True
    byte_range: tuple[int, int] | None = None  # first and last byte, for parts of a file; never cached


API_GATE = Gate(("application/", "text/"), obey_robots=False)  # an API's address is an invitation by itself


class Fetcher:
    """Makes requests, one after the other or from several threads."""

    def __init__(
        self,
        config: FetchConfig,
        hosts: Iterable[str],
        cache: PageCache | None = None,
        clock: Clock | None = None,
        resolver: Resolver = resolve,
    ):
        try:
            from data_processing.crawl_transport import CheckedTransport, httpx
        except ImportError as error:
            raise missing_extra("httpx", "data") from error
        self.config, self.hosts, self.clock = config, AllowedHosts(hosts), clock or Clock()
        self.cache = cache if config.cache_days else None
        self.pace = Pace(config.delay_s, self.clock)
        self.transport = CheckedTransport(AddressPolicy(config.allow_addresses, resolver), config.timeout_s)
        self.transport_errors = (httpx.TransportError, httpx.DecodingError)
        self.timeout_error = httpx.TimeoutException
        self.headers = {"user-agent": config.user_agent(), "accept-encoding": "gzip, deflate", "accept": "*/*"}
        self._robots: dict[str, tuple[float, Rules]] = {}
        self._random = random.Random()

    def close(self) -> None:
        self.transport.close()

    def follow(self, url: str, gate: Gate) -> Page:
        """The page at the end of at most `max_redirects` redirects. Raises FetchError."""
        for _ in range(self.config.max_redirects + 1):
            page = self.fetch(url, gate)
            if not page.location:
                return page
            target = normalise_url(page.location, page.url, drop_parameters=())
            if target is None:
                raise FetchError("bad_redirect", page.location[:200])
            url = target
        raise FetchError("too_many_redirects", url)

    def fetch(self, url: str, gate: Gate) -> Page:
        """The page of a normalised URL, which may be a redirect (see Page.location). Raises FetchError."""
        host = host_of(url)
        if not self.hosts.allows(host):
            raise FetchError("host_not_allowed", host)
        if gate.obey_robots:
            rules = self.robots_rules(url)
            if not rules.allows(url):
                raise FetchError("robots_unreachable" if rules is FORBID_ALL else "robots", url)
        use_cache = self.cache is not None and gate.use_cache and gate.byte_range is None
        stored = self.cache.get(url) if use_cache else None
        if stored is not None and self._age_s(stored) < self.config.cache_days * DAY_S:
            self._check_head(stored.status, stored, gate)
            return stored
        page = self._try_often(url, gate, stored)
        if use_cache and page.status in CACHED and not gate.cut:
            self.cache.put(page)
        return page

    def _age_s(self, page: Page) -> float:
        return self.clock.wall_s() - page.fetched_s

    def _try_often(self, url: str, gate: Gate, stored: Page | None) -> Page:
        """Requests until one succeeds or fails for good; between two the pace holds the whole host."""
        host, last = host_of(url), FetchError("network")
        for attempt in range(self.config.retries + 1):
            self.pace.wait(host)
            try:
                return self._request(url, gate, stored)
            except TryAgain as again:
                last = again.error
                wait_s = again.wait_s
                if wait_s is None:
                    wait_s = self.config.backoff_s * 2**attempt * self._random.uniform(1.0, 1.5)
                if wait_s > self.config.max_wait_s:
                    raise FetchError("wait_too_long", f"{host} asks for {wait_s:.0f} s") from again
                self.pace.hold(host, wait_s)
        raise last

    def _request(self, url: str, gate: Gate, stored: Page | None) -> Page:
        """One request. Raises TryAgain for what may pass, FetchError for what will not."""
        headers = dict(self.headers)
        if stored is not None:
            for name, condition in (("etag", "if-none-match"), ("last-modified", "if-modified-since")):
                if name in stored.headers:
                    headers[condition] = stored.headers[name]
        if gate.byte_range is not None:
            headers |= {"range": "bytes={}-{}".format(*gate.byte_range), "accept-encoding": "identity"}
        try:
            response = self.transport.send(url, headers, self.config.page_timeout_s)
            try:
                return self._read(url, response, gate, stored)
            finally:
                response.close()
        except AddressRefused as error:
            raise FetchError("address_refused", str(error)) from error
        except self.timeout_error as error:
            raise TryAgain(FetchError("timeout", str(error) or type(error).__name__)) from error
        except self.transport_errors as error:
            raise TryAgain(FetchError("network", str(error) or type(error).__name__)) from error

    def _read(self, url: str, response: Any, gate: Gate, stored: Page | None) -> Page:
        """The page of an open response, its body read up to the gate."""
        status, headers = response.status_code, {name.lower(): value for name, value in response.headers.items()}
        page = Page(url, status, headers, b"", self.clock.wall_s())
        if status == 304 and stored is not None:
            return Page(url, stored.status, stored.headers, stored.body, page.fetched_s)
        if status in REDIRECTS and page.location:
            return page
        if status in TRY_AGAIN:
            wait_s = retry_after_s(headers.get("retry-after", ""), self.clock.wall_s())
            raise TryAgain(FetchError(f"http_{status}"), wait_s)
        if status != (206 if gate.byte_range else 200):
            text = next(response.iter_bytes(ERROR_TEXT_BYTES), b"").decode("utf-8", errors="replace")
            raise FetchError(f"http_{status}", " ".join(text.split()))
        self._check_head(status, page, gate)
        page.body = self._read_body(response, gate)
        return page

    def _check_head(self, status: int, page: Page, gate: Gate) -> None:
        """Refuse by the header alone, before a byte of the body is read."""
        if page.location:
            return
        kind, encoding = page.content_type, page.headers.get("content-encoding", "").lower()
        if gate.content_types and not kind.startswith(gate.content_types):
            raise FetchError("content_type", kind or "none")
        if encoding not in ("", "gzip", "x-gzip", "deflate", "identity"):
            raise FetchError("content_encoding", encoding)
        length = page.headers.get("content-length", "")
        if not gate.cut and length.isdigit() and int(length) > gate.max_bytes:
            raise FetchError("too_large", f"{length} bytes")

    def _read_body(self, response: Any, gate: Gate) -> bytes:
        """The body, decompressed as it comes; the bound is on what comes out, so that no small file explodes."""
        parts, size = [], 0
        for part in response.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > gate.max_bytes:
                if gate.cut:
                    return b"".join(parts)[: gate.max_bytes]
                raise FetchError("too_large", f"over {gate.max_bytes} bytes")
        return b"".join(parts)

    def robots_rules(self, url: str) -> Rules:
        """The rules of the URL's origin, asked for once a day; none that can be read forbid everything."""
        origin = origin_of(url)
        known = self._robots.get(origin)
        if known is not None and self.clock.wall_s() - known[0] < DAY_S:
            return known[1]
        rules = self._fetch_robots(origin)
        if rules.delay_s > self.config.max_wait_s:
            rules = FORBID_ALL
        self.pace.set_delay(host_of(url), rules.delay_s)
        self._robots[origin] = (self.clock.wall_s(), rules)
        return rules

    def _fetch_robots(self, origin: str) -> Rules:
        gate = Gate(max_bytes=MAX_ROBOTS_BYTES + 1, obey_robots=False, cut=True, use_cache=False)
        try:
            return parse_robots(self.follow(f"{origin}/robots.txt", gate).body, PRODUCT)
        except FetchError as error:
            # RFC 9309: a file that is not there allows all; one that cannot be had for other reasons forbids all.
            missing = error.reason.startswith("http_4") and error.reason not in ("http_408", "http_429")
            return ALLOW_ALL if missing or error.reason == "too_many_redirects" else FORBID_ALL


class TryAgain(Exception):
    """A failure that may pass; `wait_s` is what the host asked for."""

    def __init__(self, error: FetchError, wait_s: float | None = None):
        super().__init__(str(error))
        self.error, self.wait_s = error, wait_s
