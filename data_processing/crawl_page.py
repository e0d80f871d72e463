"""What a fetch gives back: a page, or the reason why there is none. And the cache that keeps pages on disk.

A page of the cache is one file named by the hash of its URL, so that nothing of a URL ever becomes a path. A killed
crawl finds its last responses there and asks no host a second time.
"""

import gzip
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from data_processing.crawl_url import url_key


class FetchError(Exception):
    """No page: `reason` is a word that is counted (http_404, robots, timeout, ...), `detail` this case's value."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(slots=True)
class Page:
    """A response: header names in lower case, the body decompressed, `fetched_s` in seconds since 1970."""

    url: str
    status: int
    headers: dict[str, str]
    body: bytes
    fetched_s: float

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").split(";", 1)[0].strip().lower()

    @property
    def charset(self) -> str:
        """The encoding that the Content-Type header declares, "" when it names none."""
        for parameter in self.headers.get("content-type", "").split(";")[1:]:
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "charset":
                return value.strip().strip("\"'").lower()
        return ""

    @property
    def date(self) -> str:
        """The day of the fetch, 2026-11-29."""
        return datetime.fromtimestamp(self.fetched_s, UTC).date().isoformat()

    @property
    def location(self) -> str:
        """Where a redirect points, "" when the page is none."""
        return self.headers.get("location", "") if 300 <= self.status < 400 else ""


class PageCache:
    """Pages by URL below one directory: <first two digits>/<hash>.page.gz, a line of JSON and then the body."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def path_of(self, url: str) -> Path:
        key = url_key(url)
        return self.directory / key[:2] / f"{key}.page.gz"

    def get(self, url: str) -> Page | None:
        """The stored page, None when there is none (or its file is broken: it is fetched anew)."""
        try:
            head, _, body = gzip.decompress(self.path_of(url).read_bytes()).partition(b"\n")
            page = Page(body=body, **json.loads(head))
        except (FileNotFoundError, EOFError, OSError, ValueError, TypeError):
            return None
        return page if page.url == url else None  # two URLs with one hash do not get each other's page

    def put(self, page: Page) -> None:
        head = {"url": page.url, "status": page.status, "headers": page.headers, "fetched_s": page.fetched_s}
        content = json.dumps(head).encode("utf-8") + b"\n" + page.body
        path = self.path_of(page.url)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        # Renamed whole, so that a kill leaves no half of it, but not synced: what a power cut breaks is fetched anew,
        # and three waits for the disk a page are saved.
        partial.write_bytes(gzip.compress(content, compresslevel=6, mtime=0))
        os.replace(partial, path)
