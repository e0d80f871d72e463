"""Posts of Substack publications that anyone may read: the archive lists them, each post's record holds its HTML.

The API is the one that the site's own pages use; it is not documented, so robots.txt is heeded here, unlike with APIs
that invite programs. Posts for paying readers are counted and left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from configs.errors import UserError
from data_processing.crawl_api import (
    API_GATE,
    LISTING_GATE,
    ApiAddress,
    ApiContext,
    Batch,
    dig,
    dig_text,
    fetch_api,
    listing_failed,
    parse_json,
)
from data_processing.crawl_extract import extract_fragment, guarded
from data_processing.crawl_page import FetchError
from data_processing.crawl_state import KEPT, Item, Outcome
from data_processing.document import Document


@dataclass
class SubstackConfig:
    """Which publications: names ("astralcodexten"), or web addresses of those with a domain of their own."""

    publications: list[str] = field(default_factory=list)
    rows: int = 12  # posts an archive page; the site itself asks for 12
    min_characters: int = 500

    def addresses(self) -> list[ApiAddress]:
        """The publications' APIs. Raises UserError when there are none."""
        if not self.publications:
            raise UserError("source=substack has no publications; add substack.publications=[name]")
        bases = [name if "://" in name else f"https://{name}.substack.com" for name in self.publications]
        return [ApiAddress(base.rstrip("/") + "/api/v1") for base in bases]


@dataclass
class SubstackSource:
    """Publications one after the other, newest posts first. Bookmark: publication and offset in its archive."""

    config: SubstackConfig
    name: str = "substack"

    def __post_init__(self):
        self.addresses = self.config.addresses()

    def hosts(self) -> list[str]:
        return [address.host for address in self.addresses]

    def batches(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        mark = bookmark or {"publication": 0, "offset": 0}
        while mark["publication"] < len(self.addresses):
            posts = self._archive(context, mark)
            for post in posts:
                outcome = self._post(context, self.addresses[mark["publication"]], post)
                if outcome is not None:
                    yield Batch([outcome], mark)
            if posts:
                mark = mark | {"offset": mark["offset"] + len(posts)}
            else:
                mark = {"publication": mark["publication"] + 1, "offset": 0}
            yield Batch([], mark)

    def _archive(self, context: ApiContext, mark: dict[str, int]) -> list[Any]:
        parameters = {"sort": "new", "search": "", "offset": mark["offset"], "limit": self.config.rows}
        address, gate = self.addresses[mark["publication"]], replace(LISTING_GATE, obey_robots=True)
        try:
            posts = parse_json(fetch_api(context.fetcher, address, "archive", parameters, gate))
            if not isinstance(posts, list):
                raise FetchError("bad_json", "the archive is no list")
        except FetchError as error:
            raise listing_failed(f"{self.name} ({address.host})", error) from error
        return posts

    def _post(self, context: ApiContext, address: ApiAddress, post: Any) -> Outcome | None:
        """The outcome of one listed post; None when it has no name or is done."""
        slug = dig_text(post, "slug")
        item = Item(f"{address.host}/{slug}", address.host)
        if not slug or context.is_done(item.key):
            return None
        if dig_text(post, "audience") != "everyone":
            return Outcome(item, "not_public", dig_text(post, "audience"))
        gate = replace(API_GATE, obey_robots=True)
        try:
            record = parse_json(fetch_api(context.fetcher, address, f"posts/{quote(slug, safe='')}", {}, gate))
            text = guarded(extract_fragment, dig_text(record, "body_html"))
        except FetchError as error:
            return Outcome(item, error.reason, error.detail)
        if len(text) < self.config.min_characters:
            return Outcome(item, "too_short", f"{len(text)} characters")
        meta = {
            "post_id": dig(record, "id"),
            "subtitle": dig_text(record, "subtitle"),
            "type": dig_text(record, "type"),
        }
        title, url, date = (dig_text(record, name) for name in ("title", "canonical_url", "post_date"))
        document = Document(f"substack:{item.key}", self.name, text, title, url, date[:10], meta)
        return Outcome(item, KEPT, "", [document])
