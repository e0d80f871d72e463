"""Breadth-first over the pages of allowed hosts: all of one depth before the next, one request a host at a time.

The levels are strict, so that a page's depth is the shortest way from a seed and the page budget goes to what is near.
Several hosts are fetched at once by threads; the state, the links and the text belong to the main thread.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import perf_counter

from configs.errors import UserError, check_positive
from data_processing.crawl_extract import HTML_TYPES, extract_document, guarded
from data_processing.crawl_fetch import Fetcher, Gate
from data_processing.crawl_links import PageLinks, read_links
from data_processing.crawl_page import FetchError, Page
from data_processing.crawl_state import KEPT, CrawlState, Item, Outcome
from data_processing.crawl_url import TRACKING_PARAMETERS, host_of, normalise_url
from data_processing.pdf_process import is_pdf

PAGE_TYPES = (*HTML_TYPES, "text/plain", "application/pdf")
UNASKED = ("robots", "robots_unreachable", "host_not_allowed", "host_given_up")  # outcomes that cost no page request
FAILURES = ("network", "timeout", "wait_too_long", "http_500", "http_502", "http_503", "http_504", "http_429")


@dataclass
class WebConfig:
    """Where a crawl begins and how far it goes."""

    seeds: list[str] = field(default_factory=list)
    allowed_hosts: list[str] = field(default_factory=list)  # example.org, *.example.org; empty: the seeds' hosts
    max_depth: int = 3  # links from a seed; 0 fetches the seeds alone
    max_pages: int = 1000  # pages asked for, redirects and failures among them
    max_page_bytes: int = 20_000_000
    concurrency: int = 8  # hosts asked at once
    host_failures: int = 5  # in a row, each after its retries: then the host is given up
    drop_parameters: list[str] = field(default_factory=lambda: list(TRACKING_PARAMETERS))

    def __post_init__(self):
        check_positive(
            max_pages=self.max_pages,
            max_page_bytes=self.max_page_bytes,
            concurrency=self.concurrency,
            host_failures=self.host_failures,
        )
        if self.max_depth < 0:
            raise UserError(f"web.max_depth={self.max_depth} is negative; use 0 for the seeds alone")

    def seed_urls(self) -> list[str]:
        """The seeds in their one spelling. Raises UserError when there are none, or for one that is no URL."""
        if not self.seeds:
            raise UserError("source=web has no seeds; add web.seeds=[https://example.org/]")
        urls = [normalise_url(seed, drop_parameters=self.drop_parameters) for seed in self.seeds]
        if None in urls:
            raise UserError(f"seed {self.seeds[urls.index(None)]!r} is no http(s) URL; use https://example.org/page")
        return urls

    def hosts(self) -> list[str]:
        return self.allowed_hosts or list(dict.fromkeys(host_of(url) for url in self.seed_urls()))


class WebCrawl:
    """One crawl: `run` goes on until nothing is pending within the depth, or a budget is spent."""

    def __init__(self, config: WebConfig, fetcher: Fetcher, state: CrawlState, max_documents: int = 0):
        self.config, self.fetcher, self.state = config, fetcher, state
        self.gate = Gate(PAGE_TYPES, config.max_page_bytes)
        counts = state.counts()
        self.pages = sum(counts.values()) - sum(counts.get(name, 0) for name in (*UNASKED, "pending"))
        self.documents_left = max_documents - state.total("documents") if max_documents else float("inf")
        self._failures: dict[str, int] = {}

    def run(self, on_commit: Callable[[Outcome], None] = lambda outcome: None) -> None:
        self.state.add(Item(url, host_of(url)) for url in self.config.seed_urls())
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            try:
                while self._within_budget(0) and (depth := self.state.pending_depth()) is not None:
                    self._crawl_level(pool, depth, on_commit)
            finally:
                self.fetcher.pace.stopping.set()

    def _within_budget(self, running: int) -> bool:
        return self.pages + running < self.config.max_pages and self.documents_left > running

    def _crawl_level(self, pool: ThreadPoolExecutor, depth: int, on_commit: Callable[[Outcome], None]) -> None:
        """Fetch what is pending at one depth, redirects into it included."""
        free = deque(self.state.pending_hosts(depth))
        running: dict[Future, Item] = {}
        last = perf_counter()
        while True:
            while free and len(running) < self.config.concurrency and self._within_budget(len(running)):
                item = self.state.next_item(depth, free.popleft())
                if item is not None:
                    running[pool.submit(self._fetch, item)] = item
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                item = running.pop(future)
                outcome = self.judge(item, future.result())
                now = perf_counter()
                self.state.commit([outcome], seconds=now - last)
                last = now
                self._count(outcome)
                on_commit(outcome)
                busy = {other.host for other in running.values()}
                for host in (item.host, *(found.host for found in outcome.found if found.depth == depth)):
                    if host not in busy and host not in free:
                        free.append(host)

    def _fetch(self, item: Item) -> Page | FetchError:
        """In a thread of the pool: the page, or why there is none."""
        if self._failures.get(item.host, 0) >= self.config.host_failures:
            return FetchError("host_given_up", f"{self.config.host_failures} failures in a row")
        try:
            return self.fetcher.fetch(item.key, self.gate)
        except FetchError as error:
            return error

    def _count(self, outcome: Outcome) -> None:
        host = outcome.item.host
        self.pages += outcome.reason not in UNASKED
        self.documents_left -= len(outcome.documents)
        if outcome.reason in FAILURES:
            self._failures[host] = self._failures.get(host, 0) + 1
        elif outcome.reason not in UNASKED:
            self._failures[host] = 0

    def judge(self, item: Item, page: Page | FetchError) -> Outcome:
        """What becomes of an item: its document and links, or the reason why it has none."""
        if isinstance(page, FetchError):
            return Outcome(item, page.reason, page.detail)
        if page.location:
            return self._redirect(item, page)
        fingerprint = hashlib.blake2b(page.body, digest_size=16).digest()
        first = self.state.key_with(fingerprint)
        if first is not None:
            # Not followed either: relative links of one page under ever new addresses never end.
            return Outcome(item, "duplicate_content", first)
        links, found = PageLinks(), []
        try:
            if page.content_type in HTML_TYPES and not is_pdf(page.body):
                links = guarded(read_links, page, tuple(self.config.drop_parameters))
            if links.follow and item.depth < self.config.max_depth:
                found = self._found(item, links)
            if not links.index:
                return Outcome(item, "noindex", "", [], fingerprint, found)
            document = guarded(extract_document, page, "web", {"depth": item.depth})
        except FetchError as error:
            return Outcome(item, error.reason, error.detail, [], fingerprint, found)
        return Outcome(item, KEPT, "", [document], fingerprint, found)

    def _found(self, item: Item, links: PageLinks) -> list[Item]:
        """The links within the allowed hosts, one step further from the seeds."""
        hosts = self.fetcher.hosts
        return [Item(url, host_of(url), item.depth + 1) for url in links.urls if hosts.allows(host_of(url))]

    def _redirect(self, item: Item, page: Page) -> Outcome:
        """The target becomes an item of the same depth, so that it passes every check and is fetched once."""
        target = normalise_url(page.location, page.url, self.config.drop_parameters)
        if target is None:
            return Outcome(item, "bad_redirect", page.location[:200])
        if not self.fetcher.hosts.allows(host_of(target)):
            return Outcome(item, "redirect_outside", target)
        if item.hops >= self.fetcher.config.max_redirects:
            return Outcome(item, "too_many_redirects", target)
        return Outcome(item, "redirect", target, found=[Item(target, host_of(target), item.depth, item.hops + 1)])
